"""What the text of metrics says, and rates, shares and quantiles from it; the clock is the reading's own."""

import math
import time

import pytest

from launch.watch.figures import NodeHistory, quantile, read_node, read_samples

RECORDED = """
# TYPE pd_cache_bytes_total counter
pd_cache_bytes_total{op="retrieve"} %(load)s
pd_cache_bytes_total{op="store"} %(store)s
pd_cache_op_seconds_bucket{le="0.001",op="lookup"} %(quick)s
pd_cache_op_seconds_bucket{le="0.01",op="lookup"} %(lookups)s
pd_cache_op_seconds_bucket{le="+Inf",op="lookup"} %(lookups)s
pd_cache_op_seconds_count{op="lookup"} %(lookups)s
pd_cache_prompt_tokens_total{source="at_hand"} %(at_hand)s
pd_cache_prompt_tokens_total{source="loaded"} %(loaded)s
pd_cache_prompt_tokens_total{source="computed"} %(computed)s
pd_cache_missed_tokens_total{reason="never_stored"} %(computed)s
pd_cache_missed_tokens_total{reason="none"} 1000
pd_cache_tier_evictions_total{tier="local"} %(evicted)s
pd_cache_staging_bytes 1000
pd_cache_staging_used_bytes 250
pd_cache_pool_up 1
process_start_time_seconds %(started)s
"""
NOTHING = dict.fromkeys(("load", "store", "quick", "lookups", "at_hand", "loaded", "computed", "evicted"), 0)


def text(**counted):
    return RECORDED % {**NOTHING, "started": 1000, **counted}


def history(*readings):
    found = NodeHistory()
    for at, shown in readings:
        found.add(read_node(read_samples(shown), at))
    return found


def rates(*readings):
    return history(*readings).rates(readings[-1][0])


def test_since_its_start_one_reading_says_what_a_node_found_and_how_long_it_took():
    found = NodeHistory(since_start=True)
    begun = time.time() - 100
    for at in (5.0, 7.0):
        found.add(
            read_node(read_samples(text(loaded=30, computed=70, lookups=9, quick=9, started=begun)), at)
        )
    rates = found.rates(7.0)
    assert (rates.hit, rates.load, rates.lookups) == (0.3, 0.0, 0.0)
    assert rates.quantiles["lookup"][1] <= 0.001
    assert [reason for reason, _ in rates.missed] == ["never_stored"]


def test_rates_are_increments_a_second():
    nodes = history((5.0, text(load=100, lookups=1)), (7.0, text(load=300, store=50, lookups=9, evicted=4)))
    found, last = nodes.rates(7.0), nodes.last
    assert (found.load, found.store, found.lookups, found.evictions) == (100.0, 25.0, 4.0, 2.0)
    assert (last.staging, last.staging_used, last.pool_up, last.queued) == (1000, 250, True, None)


@pytest.mark.parametrize(
    "before, after",
    [(text(load=1000), text(load=40)), ("", text(load=40))],
    ids=["lower than before", "not there before"],
)
def test_a_counter_that_has_begun_at_zero_again_is_all_new(before, after):
    assert rates((5.0, before), (7.0, after)).load == 20.0


def test_shares_are_of_the_last_minute_only():
    found = rates((0.0, text()), (2.0, text(computed=90)), (70.0, text(computed=90, loaded=10)))
    assert found.hit == 1.0
    assert rates((0.0, text()), (2.0, text(loaded=90)), (70.0, text(loaded=90))).hit is None


def test_quantiles_are_those_of_the_increments():
    found = rates((0.0, text(quick=1000, lookups=1000)), (2.0, text(quick=1050, lookups=1100)))
    assert found.quantiles["lookup"] == (pytest.approx(0.001), pytest.approx(0.00982))


@pytest.mark.parametrize(
    "counted, expected",
    [
        ({}, math.nan),
        ({1.0: 0.0}, math.nan),
        ({1.0: 0.0, math.inf: 5.0}, math.inf),
    ],
    ids=["no buckets", "nothing observed", "beyond the last bound"],
)
def test_quantiles_of_odd_histograms(counted, expected):
    assert quantile(counted, 0.5) == pytest.approx(expected, nan_ok=True)


def test_the_reason_of_most_tokens_is_the_first_and_a_whole_hit_is_none():
    evicted = 'pd_cache_missed_tokens_total{reason="evicted"} 7\n'
    found = rates((0.0, text()), (2.0, text(computed=5)), (6.0, evicted + text(computed=5)))
    assert found.missed == (("evicted", 7.0), ("never_stored", 5.0))


def test_a_skipped_node_of_the_role_both_counts_once():
    metrics = "".join(
        f'pd_cache_proxy_node_up{{hop="{hop}",node="http://{node}"}} {up}\n'
        for hop in ("prefill", "decode")
        for node, up in (("dead", 0), ("alive", 1))
    )
    assert read_node(read_samples(metrics), 0.0).nodes_down == 1


def test_labels_are_printable():
    reading = read_node(read_samples('pd_cache_missed_tokens_total{reason="\\n<script>"} 1\n'), 0.0)
    assert all(label.isprintable() for _, label in reading.counts)


VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} %(first)s
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} %(first)s
vllm:pd_cache_ops_total{engine="0",model_name="m",op="lookup"} %(lookups)s
vllm:pd_cache_bytes_total{engine="0",model_name="m",op="retrieve"} %(load)s
vllm:pd_cache_prompt_tokens_total{engine="0",model_name="m",source="at_hand"} %(at_hand)s
vllm:pd_cache_prompt_tokens_total{engine="0",model_name="m",source="loaded"} %(loaded)s
vllm:pd_cache_missed_tokens_total{engine="0",model_name="m",reason="evicted"} %(first)s
"""


def test_the_metrics_of_vllm_are_read_under_their_own_names():
    after = {"first": 10, "lookups": 8, "load": 400, "at_hand": 30, "loaded": 10}
    nodes = history((0.0, VLLM % dict.fromkeys(after, 0)), (2.0, VLLM % after))
    found = nodes.rates(2.0)
    assert (nodes.last.queued, nodes.last.running) == (2, 3)
    assert (found.lookups, found.load, found.missed[0][0]) == (4.0, 200.0, "evicted")
    assert found.quantiles["first token"] == (pytest.approx(0.05), pytest.approx(0.099))
    assert found.hit == 0.25


# --- text ---


def test_families_of_others_are_left_out_and_the_prefix_of_vllm_with_them():
    text = 'python_gc_total{a="}"} 1\nvllm:pd_cache_tokens_total{op="lookup"} 3.0 1700000000\nnode_load 2\n'
    assert read_samples(text) == {"pd_cache_tokens_total": [({"op": "lookup"}, 3.0)]}


def test_what_is_no_count_is_left_out():
    assert read_samples("".join(f"pd_cache_x {value}\n" for value in ("NaN", "-1", "+Inf", "1e400"))) == {}


@pytest.mark.parametrize(
    "text",
    [
        "<html><body>no metrics</body></html>",
        "pd_cache_x one",
        'pd_cache_x{a="1 2',
    ],
    ids=["a page", "no number", "no end"],
)
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a line"):
        read_samples(text)
