"""Greedy and seeded sampling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.engines.reference.model import Sampler, SamplingParams

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def drawn(count: int = 200, **params) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest():
    assert set(drawn(temperature=0)) == {0}


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-45, 9e-6, -0.0])
def test_a_temperature_that_is_hardly_more_than_zero_takes_the_likeliest(temperature):
    assert set(drawn(temperature=temperature)) == {0}


@given(
    st.floats(0, 2),
    st.floats(0, 1, exclude_min=True),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
)
def test_all_parameters_in_range_draw_a_token(temperature, top_p, seed, logits):
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=top_p, seed=seed))
    assert 0 <= sampler.choose(torch.tensor(logits)) < len(logits)


def test_a_seed_gives_the_same_draws_and_another_others():
    assert drawn(temperature=1, seed=7) == drawn(temperature=1, seed=7)
    assert drawn(temperature=1, seed=7) != drawn(temperature=1, seed=8)
    assert set(drawn(temperature=1, seed=7)) == {0, 1, 2, 3}


def test_without_a_seed_draws_differ():
    assert drawn(temperature=1) != drawn(temperature=1)


def test_top_p_keeps_the_smallest_set_with_that_much_probability():
    assert set(drawn(temperature=1, seed=1, top_p=0.79)) == {0, 1}
    assert set(drawn(temperature=1, seed=1, top_p=0.81)) == {0, 1, 2}
    assert set(drawn(temperature=1, seed=1, top_p=0.01)) == {0}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": 2**63},
    ],
)
def test_values_out_of_range_are_refused(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)
