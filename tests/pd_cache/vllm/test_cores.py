"""The cores of threads, in a process whose main thread is bound as that of vLLM's worker on CPUs."""

import os
import sys

import pytest

from tests.support.cli import printed

PROGRAM = """
import os, threading
from pd_cache.vllm.worker_caches import on_all_cores

all_of_them, own, found = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}, []
os.sched_setaffinity(0, own)
with on_all_cores():
    inside = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    inside.start()
    inside.join()
assert os.sched_getaffinity(0) == own
assert found == [all_of_them], found
"""


def test_threads_of_the_cache_run_on_every_core_of_the_process_that_started_the_worker():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    printed(sys.executable, "-c", PROGRAM)
