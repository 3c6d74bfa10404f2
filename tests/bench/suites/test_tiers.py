"""The bench of the tiers, on sizes that say nothing: that it runs and checks."""

from __future__ import annotations

import json
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.suites import tiers


@pytest.fixture(scope="module", autouse=True)
def helper_of_multiprocessing() -> None:
    """A process that the standard library starts once, with the first child, and keeps."""
    resource_tracker.ensure_running()


def test_the_bench_reports_every_target(tmp_path: Path) -> None:
    arguments = ["--chunk", "64KiB", "--objects", "4", "--rounds", "3", "--threads", "2", "--tokens", "512"]
    arguments += ["--path", str(tmp_path), "--entries", "2000", "--json"]
    done = CliRunner().invoke(tiers.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(done.stdout.splitlines()[-1])
    targets = {check["name"].split(",")[0] for check in report["checks"]}
    assert targets >= {
        "local_get / memcpy", "disk_get / raw read", "disk_put / raw write", "pipelined / plain retrieve",
        "hybrid_get / local_get", "local_contains_us", "disk_contains_us", "eviction lru",
    }  # fmt: skip
    assert not list(tmp_path.glob("pd-cache-bench-*")), "the measured folders are gone"


def test_without_fio_the_disk_is_compared_with_plain_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers.shutil, "which", lambda name: None)
    figures = tiers.measure_disk(4000, objects=4, rounds=3, folder=tmp_path, threads=2)
    assert figures["raw_read_gbps"] == figures["loop_read_gbps"]
    assert "fio_read_gbps" not in figures
