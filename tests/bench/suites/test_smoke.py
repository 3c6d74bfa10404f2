"""Each bench that has no file of its own here runs, at sizes that say nothing, and has the figures that others read from its JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.pool import ROOT

SMALL = ("--tokens", "512", "--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--staging", "64MiB")


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(
    ("bench", "arguments", "figures"),
    [
        (
            "engine",
            (*SMALL, "--rounds", "5"),
            "store_gbps retrieve_gbps raw_put_gbps raw_get_gbps store_ratio retrieve_ratio bytes_equal",
        ),
        (
            "server",
            (*SMALL, "--rounds", "3", "--questions", "100", "--seconds", "1", "--requests", "1000"),
            "empty_lookup_p50_us lookup_p50_ms memory_ratio store_ratio retrieve_ratio mib_after",
        ),
        (
            "proxy",
            ("--streams", "4", "--tokens", "4", "--rounds", "3", "--open", "10", "--prompt", "512"),
            "proxy_adds_first_ms proxy_adds_total_ms decision_ms body_ms",
        ),
    ],
)
def test_a_bench_runs_and_has_its_figures(bench: str, arguments: tuple[str, ...], figures: str) -> None:
    command = [sys.executable, "-m", "launch", "bench", bench, *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) >= {*figures.split(), "checks", "ok"}
    assert all(check["name"] for check in report["checks"])
