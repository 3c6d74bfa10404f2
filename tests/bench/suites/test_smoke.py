"""Each bench of one machine runs, at sizes that say nothing, and has the figures that others read from its
JSON."""

from functools import partial

import pytest

from bench.lib.kv import Shape
from bench.suites.bandwidth import checks_of
from bench.suites.proxy import StreamLoad
from pd_cache.cluster.machine import find_program
from tests.support.cli import cli_json

RUNS = {
    "engine": (
        ("--rounds", "5"),
        "store_gbps retrieve_gbps raw_put_gbps raw_get_gbps store_ratio retrieve_ratio bytes_equal",
    ),
    "server": (
        (),
        "empty_lookup_p50_us lookup_p50_ms memory_ratio store_ratio retrieve_ratio",
    ),
    "proxy": ((), "proxy_adds_first_ms proxy_adds_total_ms processor"),
    "tiers": (
        (),
        "local_get_ratio disk_get_ratio disk_put_ratio hybrid_get_ratio",
    ),
    "bandwidth": (("--size", "64KiB", "--rounds", "1", "--at-once"), "about results at_once"),
    "lookup": (("--clients", "2", "--clients", "1"), "about results clients"),
}  # fmt: skip


QUICKLY = {
    "engine.Shape": partial(Shape, 512, 2),
    "server.Shape": partial(Shape, 512, 2),
    "server._ROUNDS": 3,
    "server.CLIENTS": 1,
    "server._QUESTIONS": 200,
    "server._SECONDS": 0.2,
    "tiers.CHUNK_BYTES": 65536,
    "tiers.ROUNDS": 3,
    "lookup._ROUNDS": 3,
    "lookup._SECONDS": 0.1,
    "proxy._ROUNDS": 2,
    "proxy.PACED": StreamLoad(4, 4, 40, 3),
    "proxy.OPEN": StreamLoad(10, 5, 100),
    "proxy.MANY": StreamLoad(4, 8, 20, 5),
    "proxy.FEW": StreamLoad(4, 4, 40, 5),
    "proxy.SHORT": StreamLoad(4, 1, 0, 5),
    "proxy.LONG": StreamLoad(4, 1, 0, 5, 1024),
}
"""What else says how long they take."""


@pytest.mark.slow(seconds=90)
def test_limits_are_compared_on_nodes_that_sleep(monkeypatch):
    sizes = {"_PROMPTS": (300, 600), "_AT_ONCE": 2, "_WARM_S": 0.0, "_COUNTED_S": 1.0, "_LOADS": (1.0, 3.0)}
    for constant, value in sizes.items():
        monkeypatch.setattr(f"bench.lib.overload.{constant}", value)
    report = cli_json("bench", "proxy", "--limits")
    assert report["capacity"] > 0
    assert [set(row) for row in report["results"]] == [{"load", "rate", "without", "limits"}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("bench", RUNS)
def test_a_bench_runs_and_has_its_figures(bench, tmp_path, monkeypatch):
    arguments, figures = RUNS[bench]
    for constant, value in QUICKLY.items():
        monkeypatch.setattr(f"bench.suites.{constant}", value)
    folder = ("--path", tmp_path) if bench == "tiers" else ()
    report = cli_json("bench", bench, *arguments, *folder)
    assert set(report) >= {*figures.split(), "checks", "ok"}
    assert all(check["name"] for check in report["checks"])
    assert not list(tmp_path.iterdir()), "what was measured is gone"
    if bench == "bandwidth":
        nodes = [(row["from"], row["to"]) for row in report["results"]]
        assert nodes == [(begin, end) for begin in ("node-0", "node-1") for end in ("node-0", "node-1")]
        assert all(
            row["bytes_equal"] and row["put_gbps"] > 0 for row in report["results"] + report["at_once"]
        )
    if bench == "proxy":
        programs = [row["program"] for row in report["processor"]]
        envoy = ["envoy", "picker", "picker's envoy"] if find_program("envoy") else []
        assert programs == ["one-hop", "two-hops", *envoy]
    if bench == "lookup":
        asked = [(row["clients"], row["tokens"]) for row in report["clients"]]
        assert asked == [(1, 4096), (1, 32768), (2, 4096), (2, 32768)]


def test_put_and_get_are_checked_against_raw_and_bytes_against_what_was_put():
    def row(begin, end, equal):
        ratios = (None, None) if begin == end else (0.8, 1.0)
        return {
            "from": begin,
            "to": end,
            "put_ratio": ratios[0],
            "get_ratio": ratios[1],
            "bytes_equal": equal,
        }

    for equal in (True, False):
        rows = [row(begin, end, equal) for begin in "ab" for end in "ab"]
        checks = checks_of({"results": rows, "at_once": rows[1:3]})
        met = [(6 * equal, equal), (0.8, False), (1.0, True), (0.8, False), (1.0, True)]
        assert [(check.value, check.ok) for check in checks] == met
