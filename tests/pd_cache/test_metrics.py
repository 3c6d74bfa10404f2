"""What the cache counts."""

from __future__ import annotations

from pd_cache.metrics import _MOST_GROUPS, CacheMetrics


def test_engines_that_make_up_ever_new_groups_of_layers_do_not_make_ever_more_counters() -> None:
    metrics = CacheMetrics()
    for number in range(_MOST_GROUPS + 10):
        metrics.moved("store", 1, f"group {number}")
        metrics.moved("retrieve", 1, "group 0")
    counted = {key: value for key, value in metrics.totals().items() if key[0] == "group_bytes"}
    assert counted["group_bytes", "store", "group 0"] == 1
    assert counted["group_bytes", "store", "others"] == 10
    assert counted["group_bytes", "retrieve", "group 0"] == _MOST_GROUPS + 10
    assert len(counted) == _MOST_GROUPS + 2
