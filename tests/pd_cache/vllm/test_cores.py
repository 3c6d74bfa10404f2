"""The cores of threads, in a process whose threads are bound as those of vLLM's worker on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool import ROOT

PROGRAM = """
import os, threading
from pd_cache.vllm.cache import on_all_cores

cores = sorted(os.sched_getaffinity(0))
bound, done = threading.Barrier(3), threading.Event()

def compute(core):
    os.sched_setaffinity(0, {core})
    bound.wait()
    done.wait()

threads = [threading.Thread(target=compute, args=(core,)) for core in cores[:2]]
for thread in threads:
    thread.start()
os.sched_setaffinity(0, {cores[0]})
bound.wait()
found = []
with on_all_cores():
    inside = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    inside.start()
    inside.join()
assert found == [set(cores[:2])], found
assert os.sched_getaffinity(0) == {cores[0]}
done.set()
"""


WORKER = """
import multiprocessing, os, threading

def work(ours):
    from pd_cache.vllm.cache import on_all_cores

    for thread in os.listdir("/proc/self/task"):  # one core for each thread that was there before
        os.sched_setaffinity(int(thread), {min(ours)})
    found = []
    with on_all_cores():
        inside = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inside.start()
        inside.join()
    assert found == [ours], found
    assert os.sched_getaffinity(0) == {min(ours)}

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(os.sched_getaffinity(0),))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0, worker.exitcode
"""


def test_threads_of_a_worker_whose_every_thread_is_bound_may_run_on_the_cores_of_the_process_that_started_it(
    tmp_path: Path,
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    program = tmp_path / "engine.py"
    program.write_text(WORKER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(program)], check=True, timeout=120, env=env)


def test_threads_of_the_cache_may_run_on_every_core_on_which_vllm_computes() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
