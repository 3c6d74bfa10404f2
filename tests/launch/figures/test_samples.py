"""Reading of Prometheus' text: as prometheus_client's own parser reads it, and nothing that a node sends takes long or raises anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from launch.figures import read_samples


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20), st.floats(0, 1e15)), max_size=5))
def test_samples_are_those_that_prometheus_client_reads(rows: list[tuple[str, str, float]]) -> None:
    registry = CollectorRegistry()
    counter = Counter("pd_cache_things", 'What has a "label"\nor two', ["one", "two"], registry=registry)
    for one, two, value in rows:
        counter.labels(one, two).inc(value)
    text = generate_latest(registry).decode()
    expected: dict[str, list[object]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            expected.setdefault(sample.name, []).append((sample.labels, sample.value))
    assert read_samples(text) == expected


def test_families_of_others_are_left_out_and_the_prefix_of_vllm_with_them() -> None:
    text = 'python_gc_total{a="}"} 1\nvllm:pd_cache_tokens_total{op="lookup"} 3.0 1700000000\nnode_load 2\n'
    assert read_samples(text) == {"pd_cache_tokens_total": [({"op": "lookup"}, 3.0)]}


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e400"])
def test_what_is_no_count_is_left_out(value: str) -> None:
    assert read_samples(f"pd_cache_x {value}\n") == {}


@pytest.mark.parametrize(
    "text",
    [
        "<html><body>no metrics</body></html>",
        "pd_cache_x",
        "pd_cache_x one",
        'pd_cache_x{a="1 2',
        'pd_cache_x{a="1"' + " " * 100_000 + "!",
        "pd_cache_x{" + 'a="1",' * 1300 + "!",
        "pd_cache_x" + " " * 8000 + "{",
        "pd_cache_x 1\n" * 20_001,
    ],
    ids=[
        "a page",
        "no value",
        "no number",
        "no end",
        "spaces without end",
        "labels without end",
        "spaces before labels",
        "too many",
    ],
)
def test_anything_else_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a line|not a number|more than"):
        read_samples(text)
