"""What Mooncake writes into memory after a transfer was given up: a real store node stands still for more
than a minute."""

import signal
import subprocess
import sys

import psutil
import pytest

from launch.run.supervise import spawn_child
from tests.support.pool import ROOT, suspend
from tests.support.waiting import wait_for

READER = """
import sys, time, uuid
from pathlib import Path
from tests.support.waiting import wait_for
from transfer import staging as memory
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import ByteSize, TransferSettings
from transfer.store import MooncakeStore

SIZE = 1 << 20
settings = TransferSettings(staging_size=ByteSize(16 * SIZE), prefault=False)
with MooncakeStore(settings, master=sys.argv[1]) as store:
    staging = store.staging(SIZE)
    store.wait_open(60)
    keys = [uuid.uuid4().hex for _ in range(4)]
    slots = [staging.lease(time.monotonic() + 60) for _ in keys]
    for slot in slots:
        slot.view[:] = bytes([7]) * SIZE
    assert store.start_put(keys, slots, [SIZE] * 4, end_in(60)).results() == [Status.OK] * 4
    for _ in range(2 * (sys.argv[2] == "later read")):  # which does not go through Mooncake's client
        assert all(result.status is Status.OK for result in store.start_get(keys, slots, end_in(60)).results())
    for slot in slots:
        slot.view[:] = bytes(SIZE)
    print("stored", flush=True)
    sys.stdin.readline()  # the store node is stopped
    results = store.start_get(keys, slots, end_in(100)).results()
    assert all(result.status is Status.TRANSFER_FAILED for result in results), results
    for slot in slots:
        slot.release()
    del slots, slot
    assert staging.in_use == 0
    assert staging.forfeited_bytes == 4 * SIZE, staging.forfeited_bytes
    # everything that can be leased belongs to others now
    others = [staging.lease(time.monotonic() + 60) for _ in range(staging.slots)]
    assert len(others) == 16 and None not in others
    for slot in others:
        slot.view[:] = bytes([9]) * SIZE
    print("reused", flush=True)
    # the store node goes on, and with it the transfers
    wait_for(lambda: any(7 in bytes(pages) for pages in memory._forfeited), "the late bytes")
    assert all(bytes(slot.view) == bytes([9]) * SIZE for slot in others), "late bytes in a slot of another"
    for slot in others:
        slot.release()
    staging.check_integrity()
    print("untouched", flush=True)
"""


def reader_of(pool, which):
    # a time-out of TCP's own that lets the other be met first, as it may be met wherever this process stands
    # still
    return spawn_child(
        (
            "env",
            "MC_TCP_PROGRESS_TIMEOUT_SEC=240",
            "MC_TCP_STATUS_TIMEOUT_SEC=240",
            sys.executable,
            "-c",
            READER,
            pool.address,
            which,
        ),
        death_signal=signal.SIGTERM,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_bytes_that_come_after_a_transfer_was_given_up_reach_nobody_elses_slot(make_pool):
    pool = make_pool(segment="64MiB", client_ttl_s=600).start()
    readers = [reader_of(pool, which) for which in ("first read", "later read")]

    def all_say(word):
        assert [reader.stdout.readline() for reader in readers] == [word] * len(readers)

    try:
        all_say(b"stored\n")
        pool.nodes["store-0"].send(signal.SIGSTOP)
        first = psutil.Process(readers[0].pid)
        before = first.cpu_times().user
        for reader in readers:
            reader.stdin.write(b"\n")
            reader.stdin.flush()
        # Mooncake's client turns a processor for a minute of the wall clock, which passes as well while the
        # process stands still
        wait_for(lambda: first.cpu_times().user > before + 0.5, "the first read, which waits")
        suspend(first)
        assert readers[1].stdout.readline() == b"reused\n"
        first.resume()
        assert readers[0].stdout.readline() == b"reused\n"
        pool.nodes["store-0"].send(signal.SIGCONT)
        all_say(b"untouched\n")
        assert [reader.wait(60) for reader in readers] == [0, 0]
    finally:
        pool.nodes["store-0"].send(signal.SIGCONT)
        for reader in readers:
            reader.kill()
            reader.communicate()
