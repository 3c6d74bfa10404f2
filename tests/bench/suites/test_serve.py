"""`bench serve` against a small cluster, and what it can do without one."""

import json

import pytest

from bench.suites.serve import own_cluster
from tests.support.cli import cli

pytestmark = pytest.mark.slow


def report(*arguments):
    """The figures of each pass."""
    shown = cli("bench", "serve", "--json", *arguments).stdout.splitlines()[-1]
    return {row["pass"]: row for row in json.loads(shown)["results"]}


def test_a_small_cluster_reuses_what_is_shared_and_nothing_where_requests_are_isolated():
    load = "--rate 8 --requests 24 --prompt-tokens 640 --output-tokens 4"
    with own_cluster(None) as server:
        rows = report("--url", server.url, "--vocabulary", server.vocabulary, *load.split())
    assert rows["recompute"]["hit_rate"] == rows["recompute"]["ideal_hit_rate"] == 0
    assert rows["reuse"]["ideal_hit_rate"] == pytest.approx(0.75 * 16 / 24)
    assert 0 < rows["reuse"]["hit_rate"] <= 0.75 * 16 / 24  # each of eight prefixes is computed at least once
    for row in rows.values():
        assert row["answered"] == 24
        assert row["errors"] == {}
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((), "say how fast requests come"),
        (("--rate", "1", "--url", "http://127.0.0.1:9"), "--url needs --vocabulary"),
        (("--rate", "1", "--url", "http://127.0.0.1:9", "--vocabulary", "100"), "does not list its models"),
        (("--trace", "no-such.jsonl"), "cannot be read on"),
        (("--rate", "1", "-c", "no-such.yaml"), "no-such.yaml"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, told):
    result = cli("bench", "serve", *arguments, code=None)
    assert result.exit_code in (1, 2), result.output
    assert told in " ".join(result.output.split())
