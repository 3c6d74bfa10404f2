"""Histogram in bins: they add up, and quantiles are right to a percent."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.stats import Histogram, quantile


def test_quantiles_of_many_clients_are_those_of_all_their_latencies() -> None:
    rng = random.Random(1)
    clients = [[rng.lognormvariate(-7, 1.5) for _ in range(500)] for _ in range(4)]
    binned = []
    for values in clients:
        binned.append(Histogram())
        for value in values:
            binned[-1].add(value)
    together, everything = Histogram.of(binned), sorted(value for values in clients for value in values)
    assert together.count == 2000
    for part in (0.01, 0.5, 0.99, 1.0):
        assert together.quantile(part) == pytest.approx(everything[int(part * 2000) - 1], rel=0.011)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-7])
def test_what_is_shorter_than_the_shortest_counts_as_that(seconds: float) -> None:
    latencies = Histogram()
    latencies.add(seconds)
    assert latencies.quantile(0.5) == pytest.approx(1e-7, rel=0.011)


def test_without_any_there_is_no_quantile() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert math.isnan(quantile([], 0.5))


def test_a_quantile_is_a_value_that_was_there() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], part) for part in (0.25, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert [quantile(range(1, 101), part / 100) for part in range(1, 101)] == list(range(1, 101))


@given(st.lists(st.floats(1e-5, 100), min_size=1), st.floats(0.01, 1))
def test_values_are_counted_to_a_percent(values: list[float], part: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.quantile(part) == pytest.approx(quantile(values, part), rel=0.0101)
