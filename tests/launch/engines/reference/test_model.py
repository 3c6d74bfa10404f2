"""A random model over pages: its own logits, whatever the steps, and one model for each seed; and the blocks
of the pages."""

import itertools

import torch
from torch.nn import functional

from launch.engines.reference.model import PagedModel, StepPart
from pd_cache.cluster import ModelConfig, RandomModel

from .conftest import prompt_of, tiny_config


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
