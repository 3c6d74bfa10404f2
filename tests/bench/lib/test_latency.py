"""Latencies in bins: they add up, and quantiles are right to a percent."""

from __future__ import annotations

import random

import pytest

from bench.lib.latency import Latencies


def test_quantiles_of_many_clients_are_those_of_all_their_latencies() -> None:
    rng = random.Random(1)
    clients = [[rng.lognormvariate(-7, 1.5) for _ in range(500)] for _ in range(4)]
    binned = []
    for values in clients:
        binned.append(Latencies())
        for value in values:
            binned[-1].add(value)
    together, everything = Latencies.of(binned), sorted(value for values in clients for value in values)
    assert together.count == 2000
    for part in (0.01, 0.5, 0.99, 1.0):
        assert together.quantile(part) == pytest.approx(everything[int(part * 2000) - 1], rel=0.011)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-7])
def test_what_is_shorter_than_the_shortest_counts_as_that(seconds: float) -> None:
    latencies = Latencies()
    latencies.add(seconds)
    assert latencies.quantile(0.5) == pytest.approx(1e-7, rel=0.011)


def test_without_any_there_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="no latencies"):
        Latencies().quantile(0.5)
