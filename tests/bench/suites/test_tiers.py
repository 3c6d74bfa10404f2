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
