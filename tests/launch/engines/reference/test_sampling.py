"""Greedy and seeded sampling."""

from __future__ import annotations

import pytest
import torch

from launch.engines.reference.sampling import Sampler, SamplingParams

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def drawn(count: int = 200, **params) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest():
    assert set(drawn(temperature=0)) == {0}


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
    "params", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"seed": 2**63}]
)
def test_values_out_of_range_are_refused(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)
