"""A random model over pages: its own logits, whatever the steps, and one model for each seed."""

from __future__ import annotations

import itertools

import pytest
import torch

from launch.engines.reference import ReferenceEngine, load_model
from launch.engines.reference.model import StepPart
from pd_cache.cluster import ModelConfig, RandomModel
from pd_cache.layout import PageKind

from .conftest import paged_greedy, prompt_of, request_of, tiny_config, tokens_of


def test_contexts_beyond_a_padding_quantum_are_right():
    paged = load_model(tiny_config(max_model_len=512))
    prompt = prompt_of(300)
    with torch.inference_mode():
        own = paged._model.own_logits(torch.tensor(prompt))
    blocks = list(range(64))
    for cut in (299, 256, 100):
        paged.step([StepPart(prompt[:cut], 0, blocks, False)])
        logits = paged.step([StepPart(prompt[cut:], cut, blocks, True)])
        torch.testing.assert_close(logits[0], own, rtol=1e-4, atol=1e-5)


def test_how_a_prompt_is_cut_into_steps_and_what_runs_beside_it_changes_nothing():
    paged = load_model(tiny_config(max_model_len=512, num_blocks=128))
    prompt, blocks, other = prompt_of(290), list(range(40)), list(range(50, 90))

    def computed(cuts, beside):
        paged.kv.buffer.zero_()
        for start, end in itertools.pairwise(cuts):
            parts = [StepPart(prompt[start:end], start, blocks, True)]
            if beside:
                parts.insert(0, StepPart(prompt[:7], 0, other, True))
            logits = paged.step(parts)[-1]
        return torch.cat([logits, paged.kv.buffer[:, :37].flatten()])

    whole = computed([0, 290], beside=False)
    for cuts in ([0, 289, 290], [0, 16, 32, 256, 290], [0, 1, 77, 260, 288, 290]):
        for beside in (False, True):
            # Bit for bit on the machines it was tried on; a CPU with other kernels may round differently.
            torch.testing.assert_close(computed(cuts, beside), whole, rtol=0, atol=1e-6)


def test_what_a_block_held_before_does_not_leak_into_its_next_tenant():
    paged = load_model(tiny_config())
    fresh = paged_greedy(paged, prompt_of(20), 3)
    paged.kv.buffer.fill_(float("nan"))
    assert paged_greedy(paged, prompt_of(20), 3)[1] == fresh[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_served(dtype):
    engine = ReferenceEngine.open(tiny_config(dtype=dtype))
    try:
        assert len(tokens_of(engine.submit(request_of(20)))) == 6
    finally:
        engine.close()


def test_all_layers_lie_in_one_allocation_of_heads_first_pages():
    kv = load_model(tiny_config()).kv
    tensors = list(kv.kv_caches.values())
    assert [tuple(tensor.shape) for tensor in tensors] == [(64, 2, 8, 32)] * 2
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert kv.layout.kind is PageKind.HEADS_FIRST
    assert not tensors[0].is_inference()


def test_a_seed_is_one_model_and_one_identity():
    base = load_model(tiny_config())
    again = load_model(tiny_config(num_blocks=50, step_tokens=64))
    other = load_model(tiny_config(model=ModelConfig(name="tiny", random=RandomModel(seed=1, layers=1))))
    half = load_model(tiny_config(dtype="bfloat16"))
    assert base.identity == again.identity
    assert len({base.identity, other.identity, half.identity}) == 3
    assert paged_greedy(base, prompt_of(20), 4)[1] == paged_greedy(again, prompt_of(20), 4)[1]


def test_loading_does_not_touch_the_callers_random_numbers():
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    load_model(tiny_config())
    assert torch.equal(torch.rand(1), first)
