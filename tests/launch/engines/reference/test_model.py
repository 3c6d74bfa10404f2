"""A random model over pages: its own logits, whatever the steps, and one model for each seed; and the blocks
of the pages."""

import itertools
from contextlib import closing

import pytest
import torch
from torch.nn import functional

from launch.engines.reference.engine import ReferenceEngine
from launch.engines.reference.model import PagedModel, StepPart
from launch.engines.reference.prefix_cache import BlockPool
from pd_cache.cluster import ModelConfig, RandomModel
from pd_cache.layout import PageKind

from .conftest import prompt_of, request_of, tiny_config, tokens_of


def over_this_text(layer, query, key, value):
    """Attention without pages."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def test_contexts_beyond_a_padding_quantum_are_right():
    paged = PagedModel(tiny_config(max_model_len=512))
    prompt, blocks = prompt_of(300), list(range(64))
    with torch.inference_mode():
        own = paged.logits(torch.tensor(prompt), torch.arange(300), torch.tensor([299]), over_this_text)
    for cut in (299, 256, 100):
        paged.step([StepPart(prompt[:cut], 0, blocks, False)])
        torch.testing.assert_close(
            paged.step([StepPart(prompt[cut:], cut, blocks, True)]), own, rtol=1e-4, atol=1e-5
        )


def test_neither_how_a_prompt_is_cut_nor_what_runs_beside_it_nor_what_blocks_held_changes_anything():
    paged = PagedModel(tiny_config(max_model_len=512, num_blocks=128))
    prompt, blocks, other = prompt_of(290), list(range(40)), list(range(50, 90))

    def computed(cuts, beside):
        paged.kv.buffer.fill_(float("nan"))
        for start, end in itertools.pairwise(cuts):
            parts = [StepPart(prompt[start:end], start, blocks, True)]
            if beside:
                parts.insert(0, StepPart(prompt[:7], 0, other, True))
            logits = paged.step(parts)[-1]
        return torch.cat([logits, paged.kv.buffer[:, :36].flatten()])

    whole = computed([0, 290], beside=False)
    for cuts in ([0, 289, 290], [0, 16, 32, 256, 290], [0, 1, 77, 260, 288, 290]):
        for beside in (False, True):
            # Bit for bit on the machines it was tried on; a CPU with other kernels may round differently.
            torch.testing.assert_close(computed(cuts, beside), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_served(dtype):
    with closing(ReferenceEngine.open(tiny_config(dtype=dtype))) as engine:
        assert len(tokens_of(engine.submit(request_of(20)))) == 6


def test_all_layers_lie_in_one_allocation_of_heads_first_pages():
    kv = PagedModel(tiny_config()).kv
    tensors = list(kv.kv_caches.values())
    assert [tuple(tensor.shape) for tensor in tensors] == [(64, 2, 8, 32)] * 2
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert kv.layout.kind is PageKind.HEADS_FIRST
    assert not tensors[0].is_inference()


def test_a_seed_is_one_model_and_one_identity_and_nobody_elses_random_numbers():
    torch.manual_seed(5)
    base, then = PagedModel(tiny_config()), torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), then)
    again = PagedModel(tiny_config(num_blocks=50, step_tokens=64))
    other = PagedModel(tiny_config(model=ModelConfig(name="tiny", random=RandomModel(seed=1, layers=1))))
    half = PagedModel(tiny_config(dtype="bfloat16"))
    assert base.identity == again.identity
    assert len({base.identity, other.identity, half.identity}) == 3
    part = StepPart(prompt_of(20), 0, (0, 1, 2), True)
    assert torch.equal(base.step([part]), again.step([part]))


def test_blocks_return_only_when_the_last_holder_lets_go_and_are_not_given_in_part():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks == (0, 1, 2)
    assert pool.allocate(2) is None
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.free == 1
    pool.release(blocks)
    assert pool.free == 4
    pool.check_integrity()
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="given back"):
        pool.hold(blocks)
