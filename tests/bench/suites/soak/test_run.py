"""A soak itself: a short one, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.pool import ROOT
from tests.support.waiting import wait_for


def _command(evidence: Path, minutes: float, *more: str) -> list[str]:
    return [sys.executable, "-m", "bench.suites.soak", "--minutes", str(minutes), "--seed", "11", "--evidence", str(evidence), *more]  # fmt: skip


def _dump(evidence: Path) -> str:
    return "".join(f"\n--- {file.name}\n{file.read_text()[-2000:]}" for file in sorted(evidence.glob("*.log")))


@pytest.mark.slow
def test_a_short_run_with_every_quick_fault_ends_with_nothing_wrong_late_raised_or_left(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    done = subprocess.run(_command(evidence, 0.25, "--json"), cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + _dump(evidence)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["ok"], json.dumps({key: outcome[key] for key in ("checks", "wrong", "late", "raised", "died", "lost", "leaked")}, indent=1)  # fmt: skip
    assert outcome["operations"]["retrieve"] > 0
    assert outcome["completions"]["answered"] > 0
    assert outcome["tokens_loaded"] > 0
    assert sum(outcome["faults"].values()) >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_run_that_is_ended_leaves_no_process_mount_or_file(tmp_path: Path, number: signal.Signals) -> None:
    evidence = tmp_path / "evidence"
    with subprocess.Popen(_command(evidence, 1), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        try:
            wait_for(lambda: (evidence / "proxy.log").exists() or run.poll() is not None, 120, "the nodes")
            assert run.poll() is None, run.stderr and run.stderr.read()
            children = psutil.Process(run.pid).children(recursive=True)
            assert len(children) > 5
            run.send_signal(number)
            run.wait(90)
        finally:
            run.kill()
    _, alive = psutil.wait_procs(children, 20)
    assert not alive
    # of the soak's own: hosts of other tests are mounts, too, and come and go meanwhile
    assert "pd-cache-soak" not in Path("/proc/mounts").read_text()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("pd-cache-soak")]
