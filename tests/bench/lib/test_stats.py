"""Quantiles."""

import math

from bench.lib.stats import quantile


def test_a_quantile_is_a_value_that_was_there():
    assert [quantile([3.0, 1.0, 2.0, 4.0], part) for part in (0.25, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert [quantile(range(1, 101), part / 100) for part in range(1, 101)] == list(range(1, 101))
    assert math.isnan(quantile([], 0.5))
