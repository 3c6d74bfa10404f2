"""The cores of threads, in a process whose threads are bound as those of vLLM's worker on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
from pd_cache.vllm.cores import on_all_cores

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


def test_threads_of_the_cache_may_run_on_every_core_on_which_vllm_computes() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
