"""What is counted: one place for Prometheus and for vLLM's statistics."""

from pd_cache.metrics import CacheMetrics


def test_prometheus_reads_all_that_was_counted_and_vllms_statistics_what_was_added_since_they_last_read():
    metrics = CacheMetrics()
    with metrics.timed("store"):
        metrics.trouble("store", "queue_full", 2)
    added = metrics.take_added()
    assert added.keys() == {
        ("troubles", "store", "queue_full"),
        ("op_seconds_sum", "store"),
        ("op_seconds_count", "store"),
    }
    assert added == {key: value for key, value in metrics.totals().items() if value}
    assert metrics.take_added() == {}
    metrics.trouble("store", "queue_full")
    assert metrics.take_added() == {("troubles", "store", "queue_full"): 1}
    families = {family.name: family for family in metrics.registry.collect()}
    (troubles,) = families["pd_cache_troubles"].samples
    assert (troubles.labels, troubles.value) == ({"op": "store", "reason": "queue_full"}, 3)


def test_durations_are_counted_in_buckets():
    metrics = CacheMetrics()
    for seconds in (0.003, 0.02, 100.0):
        metrics.counts.took("lookup", seconds)
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("op") == "lookup" and "seconds" in sample.name
    }
    buckets = {bound: count for (name, bound), count in found.items() if name == "pd_cache_op_seconds_bucket"}
    assert [buckets[bound] for bound in ("0.001", "0.003", "0.03", "30.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert (found["pd_cache_op_seconds_count", None], found["pd_cache_op_seconds_sum", None]) == (3, 100.023)
