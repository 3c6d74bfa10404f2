"""The cores of threads, in processes whose threads are bound as those of vLLM's worker on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool import ROOT

PROGRAM = """
import multiprocessing, os, threading

def found():
    from pd_cache.vllm.cache import on_all_cores

    mine, cores = os.sched_getaffinity(0), []
    with on_all_cores():
        inside = threading.Thread(target=lambda: cores.append(os.sched_getaffinity(0)))
        inside.start()
        inside.join()
    assert os.sched_getaffinity(0) == mine
    return cores[0]

def bind_all(core):
    for thread in os.listdir("/proc/self/task"):  # one core for each thread that was there before
        os.sched_setaffinity(int(thread), {core})

def worker(cores):
    bind_all(min(cores))
    assert found() == cores, "those of the process that started it"

def engine(cores):
    bind_all(min(cores))
    done, computes = threading.Event(), threading.Thread(target=lambda: done.wait())
    computes.start()
    os.sched_setaffinity(computes.native_id, {max(cores)})
    assert found() == {min(cores), max(cores)}, "those on which its threads compute"
    done.set()

if __name__ == "__main__":
    cores = os.sched_getaffinity(0)
    started = multiprocessing.get_context("spawn").Process(target=worker, args=(cores,))
    started.start()
    started.join(60)
    assert started.exitcode == 0, started.exitcode
    engine(cores)
"""


def test_threads_of_the_cache_may_run_on_every_core_on_which_vllm_computes(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    program = tmp_path / "engine.py"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, str(program)], check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
