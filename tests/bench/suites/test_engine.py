"""What `bench engine` measures the copier with is what its check of bytes compares afterwards."""

import pytest
import torch

from bench.lib.kv import PagedPrompt, Shape
from bench.suites.engine import measure_copier
from tests.support.cli import cli
from transfer.staging import StagingPool


def test_the_copier_is_measured_without_changing_the_prompt():
    shape = Shape(tokens=512, layers=1)
    prompt = PagedPrompt(shape, "cpu")
    before = {name: tensor.clone() for name, tensor in prompt.tensors.items()}
    memory = StagingPool(shape.chunks * (shape.object_bytes + 4096), shape.object_bytes)
    measure_copier(prompt, memory, 1)
    memory.close()
    for name, tensor in prompt.tensors.items():
        assert tensor.view(torch.int16).equal(before[name].view(torch.int16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_torch_does_not_find_is_refused():
    assert "finds no CUDA device here" in cli("bench", "engine", "--device", "cuda", code=2).output
