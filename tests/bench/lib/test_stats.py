"""Quantiles: of values, and of many clients' values counted in bins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.stats import Histogram, quantile

values = st.lists(st.floats(1e-5, 100), min_size=1)


def counted(seconds: list[float]) -> Histogram:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    return histogram


@given(st.lists(values, min_size=1, max_size=4), st.floats(0.01, 1))
def test_quantiles_of_many_clients_are_those_of_all_their_values_to_a_percent(clients: list[list[float]], part: float) -> None:  # fmt: skip
    everything = [value for one in clients for value in one]
    together = Histogram.of(map(counted, clients))
    assert together.count == len(everything)
    assert together.quantile(part) == pytest.approx(quantile(everything, part), rel=0.0101)


def test_what_is_shorter_than_the_shortest_counts_as_that_and_nothing_has_no_quantile() -> None:
    assert counted([0.0, 1e-9, 1e-7]).quantile(1.0) == pytest.approx(1e-7, rel=0.011)
    assert math.isnan(Histogram().quantile(0.5))
    assert math.isnan(quantile([], 0.5))


def test_a_quantile_is_a_value_that_was_there() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], part) for part in (0.25, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert [quantile(range(1, 101), part / 100) for part in range(1, 101)] == list(range(1, 101))
