"""The disk tier: what survives a restart, what a full, failing or hanging disk does, and that it comes
back."""

import errno
import math
import os
import shutil
import subprocess
import threading

import msgspec
import pytest

from pd_cache.tiers.disk import ObjectFolder, digest_of
from tests.support.backends import TIMEOUTS
from tests.support.disks import OBJECT, file_of, files, put, value
from tests.support.waiting import beside, together, wait_for
from transfer.deadlines import end_in
from transfer.errors import Status

OK = Status.OK

KEYS = [f"k{n}" for n in range(8)]
IMPATIENT = msgspec.structs.replace(TIMEOUTS, put_ms=300, get_ms=300)


def expected(**otherwise):
    return [otherwise.get(key, value(key)) for key in KEYS]


def put_one(subject, key, timeout=None):
    staged = subject.backend.stage(end=end_in(60))
    staged.payload[:] = value(key)
    return subject.backend.batched_put([key], [staged], end=end_in(timeout))


def put_with_ages(subject, count):
    """Puts objects whose files are as old as their order says."""
    for n in range(count):
        put(subject, f"k{n}")
        os.utime(file_of(subject, f"k{n}"), ns=(n, n))


def temporaries(subject):
    return list((subject.backend.folder.root / "tmp").iterdir())


# --- files --------------------------------------------------------------------------------------------------


def test_after_a_restart_the_oldest_go_first_where_the_budget_shrank(open_disk):
    first = open_disk()
    put_with_ages(first, 6)
    first.backend.close()
    second = open_disk(objects=3)
    assert second.get(KEYS[:6]) == ["missing"] * 3 + [value(key) for key in KEYS[3:6]]
    wait_for(lambda: len(files(second)) == 3)


def test_a_tier_that_is_closed_while_it_looks_through_its_folder_leaves_the_files_to_the_next(
    open_disk, monkeypatch
):
    first = open_disk()
    put(first, *KEYS)
    first.backend.close()
    scan, go_on = ObjectFolder._scan, threading.Event()
    monkeypatch.setattr(ObjectFolder, "_scan", lambda folder: (go_on.wait(60), scan(folder))[1])
    second = open_disk(wait=False, timeouts=msgspec.structs.replace(TIMEOUTS, close_ms=1))
    second.backend.close()
    go_on.set()
    disk = second.backend
    disk._keeper.join(60)
    disk.folder.close()
    assert len(files(first)) == 8


def test_foreign_files_are_left_alone_and_torn_ones_are_cleared_away(open_disk):
    first = open_disk()
    put(first, "good", "torn")
    root, torn = first.backend.folder.root, file_of(first, "torn")
    os.truncate(torn, 4096)
    foreign = [root / "notes.txt", torn.parent / "thumbs.db", root / "zz" / f"{'0' * 32}-1"]
    foreign[2].parent.mkdir()
    for file in foreign:
        file.write_text("not ours")
    (root / "tmp" / "7f").write_bytes(b"half")
    first.backend.close()
    second = open_disk()
    assert second.get(["good", "torn"]) == [value("good"), "missing"]
    assert all(file.read_text() == "not ours" for file in foreign)
    assert not torn.exists()
    assert temporaries(second) == []


def test_of_two_files_of_one_key_the_newer_is_kept_and_no_serial_is_used_twice(open_disk):
    first = open_disk()
    put(first, "k")
    newer = file_of(first, "k")
    older = newer.with_name(f"{digest_of('k')}-999")
    older.write_bytes(bytes(newer.stat().st_size))
    os.utime(older, (1, 1))
    first.backend.close()
    second = open_disk()
    assert second.get(["k"]) == [value("k")]
    assert files(second) == [newer]
    put(second, "other")
    assert int(file_of(second, "other").name.split("-")[1], 16) > 0x999


def test_processes_that_share_a_path_have_folders_of_their_own(open_disk):
    one, other = open_disk(), open_disk()
    put(one, "k")
    root = one.backend.folder.root
    assert other.backend.folder.root != root
    assert not other.has("k")
    one.backend.close()
    again = open_disk()
    assert again.backend.folder.root == root
    assert again.has("k")


@pytest.mark.parametrize("options", [{"direct": False}, {"threads": 1}])
def test_every_option_stores_and_reads_also_for_a_caller_that_would_wait_for_ever(open_disk, options):
    subject = open_disk(**options)
    assert put(subject, *KEYS) == [OK] * 8
    assert subject.get(KEYS) == expected()
    assert put_one(subject, "k", math.inf).results() == [OK]
    (fetched,) = subject.backend.batched_get(["k"], end=end_in(math.inf))
    assert subject.backend.check(fetched) == ""
    fetched.release()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(open_disk, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    subject = open_disk()
    assert put(subject, "k") == [OK]
    assert subject.get(["k"]) == [value("k")]


def test_no_file_descriptor_is_left_open(open_disk):
    before = len(os.listdir("/proc/self/fd"))
    subject = open_disk()
    put(subject, *KEYS)
    subject.get([*KEYS, "none"])
    subject.backend.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- writes -------------------------------------------------------------------------------------------------


def test_a_write_that_is_removed_under_way_is_not_published(open_disk, faults):
    subject = open_disk()
    faults.go_on.clear()
    outcome = put_one(subject, "k")
    wait_for(lambda: "write" in faults.begun or "sweep" in faults.begun)
    assert not subject.has("k"), "not there before it is whole"
    assert put_one(subject, "k", 0.05).results() == [Status.BUSY], "it would wait for less long"
    joined = put_one(subject, "k")
    assert subject.backend.memory.pool.in_use == 1
    assert subject.backend.batched_remove(["k"]) == [OK]
    faults.go_on.set()
    assert outcome.results() == joined.results() == [OK]
    assert not subject.has("k")
    wait_for(lambda: files(subject) == [])
    assert put(subject, "k") == [OK]
    assert subject.get(["k"]) == [value("k")]


def test_a_write_that_does_not_get_its_turn_displaces_nothing(open_disk, faults):
    subject = open_disk(
        objects=2, threads=1, timeouts=msgspec.structs.replace(TIMEOUTS, put_ms=100), retry_s=60.0
    )
    put(subject, "a")
    put(subject, "b")
    faults.go_on.clear()
    assert put(subject, "c", "d") == [Status.TIMEOUT] * 2
    faults.go_on.set()
    remaining = {digest_of("b"), digest_of("c")}
    wait_for(lambda: {file.name[:32] for file in files(subject)} == remaining, "only what was written")
    subject.check_integrity()


def test_close_flushes_the_writes_that_were_accepted(open_disk):
    first = open_disk(threads=1)
    outcomes = [put_one(first, key) for key in KEYS]
    first.backend.close()
    assert [outcome.results() for outcome in outcomes] == [[OK]] * 8
    assert open_disk().get(KEYS) == expected()


# --- a file system without room -----------------------------------------------------------------------------


def leave_room_for(objects, folder):
    """Fills a file system up to so many objects, and half a one, with a file of somebody else."""
    status = os.statvfs(folder)
    ballast = folder / "somebody-elses"
    ballast.write_bytes(bytes(status.f_bavail * status.f_frsize - OBJECT * objects - OBJECT // 2))
    return ballast


def test_a_full_disk_refuses_writes_is_read_and_comes_back(open_disk, small_disk, caplog):
    open_disk(objects=50)
    assert "less room than `capacity`" not in caplog.text
    subject = open_disk(small_disk, objects=50)
    assert "less room than `capacity`" in caplog.text
    put(subject, "early")
    ballast = leave_room_for(0, small_disk)
    for _ in range(2):
        assert put(subject, "refused") == [Status.NO_SPACE]
    assert subject.count("pd_cache_tier_off", tier="disk") == 1
    assert subject.count("pd_cache_tier_failures_total", tier="disk", reason="enospc") == 1
    assert subject.get(["early"]) == [value("early")]
    ballast.unlink()
    wait_for(lambda: subject.count("pd_cache_tier_off", tier="disk") == 0, "the tier in use again")
    assert put(subject, "late") == [OK]
    assert subject.get(["late", "early"]) == [value("late"), value("early")]
    assert temporaries(subject) == []


# --- a disk that fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, written",
    [
        *((number, ["internal", "internal", "tier_off", "tier_off"]) for number in (errno.EIO, errno.ENODEV)),
        *((number, ["read_only"] * 4) for number in (errno.EROFS, errno.EACCES)),
        (errno.EFBIG, ["no_space"] * 4),
    ],
    ids=lambda given: errno.errorcode[given] if isinstance(given, int) else "",
)
def test_what_an_error_says_is_told_by_its_number_and_by_how_many_there_are_in_a_row(
    open_disk, faults, number, written
):
    subject = open_disk(objects=16, threads=1)
    put(subject, *KEYS)
    faults.fail(number, "write", "probe")
    assert [subject.put({f"new{n}": value(n)})[0].value for n in range(4)] == written
    readable = written[-1] != "tier_off"
    assert subject.get(KEYS) == (expected() if readable else ["tier_off"] * 8)
    assert subject.count("pd_cache_tier_failures_total") == 1
    faults.fail(0)
    wait_for(lambda: put(subject, "new") == [OK], "writes accepted again")
    faults.fail(number, "read", "probe")
    assert subject.get(KEYS)[:3] == ["unreadable", "unreadable", "tier_off"]
    faults.fail(0)
    wait_for(lambda: subject.backend.available, "the tier in use again")
    assert subject.get(KEYS) == expected(k0="missing", k1="missing"), "what was not read is not given up"
    assert subject.count("pd_cache_tier_healed_total") == 2
    subject.check_integrity()


def test_errors_that_do_not_follow_one_another_cost_one_object_each(open_disk, faults):
    subject = open_disk()
    put(subject, *KEYS)
    for key in KEYS[:4]:
        faults.fail(errno.EIO, "read")
        assert subject.get([key]) == ["unreadable"]
        faults.fail(0)
        assert subject.get(["k7"]) == [value("k7")]
    assert subject.get(KEYS) == expected(**dict.fromkeys(KEYS[:4], "missing"))
    assert subject.count("pd_cache_tier_file_errors_total", error="eio") == 4
    assert subject.count("pd_cache_tier_failures_total") == 0


def test_a_failing_disk_is_switched_off_once_and_tried_again(open_disk, faults, caplog):
    subject = open_disk()
    put(subject, *KEYS)
    faults.fail(errno.EIO, "read", "write", "probe", "sweep")
    assert subject.get(KEYS)[-1] == "tier_off"
    assert not subject.backend.available
    assert subject.backend.batched_contains(["k7"]) == [Status.TIER_OFF]
    assert put(subject, "l") == [Status.TIER_OFF]
    assert subject.backend.batched_remove(["k7"]) == [Status.TIER_OFF]
    probes = faults.begun.count("probe")
    wait_for(lambda: faults.begun.count("sweep") + faults.begun.count("probe") > probes + 4)
    assert subject.count("pd_cache_tier_failures_total", reason="eio") == 1, "once, however often it is tried"
    assert sum("the tier is not used until its folder works again" in line for line in caplog.messages) == 1
    faults.fail(0)
    wait_for(lambda: subject.backend.available, "the tier in use again")
    assert subject.get(["k7"]) == [value("k7")]


def test_a_file_that_cannot_be_deleted_stops_writes_until_it_can_be_and_the_budget_holds(open_disk, faults):
    subject = open_disk(objects=8)
    put(subject, *KEYS)
    faults.fail(errno.EPERM, "sweep")
    assert put(subject, "new") == [Status.READ_ONLY]
    assert subject.get(KEYS).count("missing") == 1, "all others are read"
    assert subject.count("pd_cache_tier_failures_total", reason="eperm") == 1
    assert len(files(subject)) == 8
    faults.fail(0)
    wait_for(lambda: put(subject, "new") == [OK], "writes accepted again")
    assert len(files(subject)) == len(subject.backend.index) == 8
    subject.check_integrity()


def test_a_file_system_that_becomes_read_only_is_still_read(open_disk, freezable_disk):
    subject = open_disk(freezable_disk, objects=9)
    put(subject, *KEYS)
    file_of(subject, "k3").write_bytes(bytes(OBJECT))
    subprocess.run(
        ["mount", "-o", "remount,abort", freezable_disk], check=True
    )  # as the kernel does where it meets damage
    assert put(subject, "new") == [Status.READ_ONLY]
    assert subject.backend.batched_remove(["k0"]) == [Status.READ_ONLY]
    assert subject.get(KEYS) == expected(k3="foreign")
    assert subject.get(KEYS) == expected(k3="missing")
    assert subject.count("pd_cache_tier_failures_total", reason="erofs") == 1


def test_a_path_that_cannot_be_used_is_off_until_it_can(open_disk, tmp_path):
    path = tmp_path / "in-the-way"
    path.write_text("a file where the folder should be")
    subject = open_disk(path, wait=False)
    wait_for(lambda: subject.count("pd_cache_tier_off", tier="disk") == 1)
    assert put(subject, "k") == [Status.TIER_OFF]
    path.unlink()
    wait_for(lambda: subject.backend.available)
    assert put(subject, "k") == [OK]


def test_a_folder_that_was_deleted_is_made_again_and_no_other_process_gets_it(open_disk):
    subject = open_disk()
    put(subject, *KEYS)
    root = subject.backend.folder.root
    shutil.rmtree(root)
    assert set(subject.get(KEYS)) == {"tier_off"}, "the first read finds out"
    wait_for(lambda: subject.backend.available, "the tier in use again")
    assert subject.backend.batched_contains(KEYS) == [Status.MISSING] * 8
    assert put(subject, *KEYS) == [OK] * 8
    assert subject.get(KEYS) == expected()
    assert subject.backend.folder.root == root
    assert open_disk().backend.folder.root != root
    subject.check_integrity()


# --- a disk that hangs --------------------------------------------------------------------------------------


def test_a_disk_that_hangs_costs_one_deadline_and_its_memory_stays_quarantined(open_disk, faults):
    # the disk is blamed only for calls that a thread has begun two seconds before their deadline
    subject = open_disk(timeouts=msgspec.structs.replace(TIMEOUTS, get_ms=4000), retry_s=60.0)
    put(subject, "k", "l")
    faults.go_on.clear()
    while "read" not in faults.begun:
        (impatient,) = subject.backend.batched_get(["k"], end=end_in(0.05))
        assert impatient.reason == "timeout"
    assert subject.backend.available, "an impatient caller says nothing about the disk"
    assert subject.get(["k", "l"]) == ["timeout", "timeout"]
    assert subject.backend.memory.pool.in_use == 2, "the two calls that run may still write there"
    assert subject.get(["k"]) == ["tier_off"]
    assert subject.count("pd_cache_tier_failures_total", reason="timeout") == 1
    faults.go_on.set()
    wait_for(lambda: subject.backend.memory.pool.in_use == 0, "the memory back")


def test_nobody_waits_for_a_deletion_of_a_disk_that_hangs(open_disk, faults):
    subject = open_disk(threads=1)
    put(subject, *KEYS)
    faults.go_on.clear()
    together(lambda: subject.backend.batched_remove(KEYS))
    assert subject.backend.batched_contains(KEYS) == [Status.MISSING] * 8
    faults.go_on.set()
    wait_for(lambda: files(subject) == [], "all files deleted")


def test_writes_to_a_disk_that_hangs_hold_half_of_the_memory_at_most(open_disk, faults):
    subject = open_disk(objects=40)
    memory = subject.backend.memory
    faults.go_on.clear()
    outcomes = []
    for n in range(30):
        staged = memory.stage(1.0)
        assert staged is not None, "there is memory for others"
        outcomes.append(subject.backend.batched_put([f"k{n}"], [staged]))
    assert memory.pool.in_use == 12
    assert subject.backend.stage(end=0.0) is None, (
        "a caller that would wait for the disk waits before it takes memory"
    )
    faults.go_on.set()
    statuses = [status for outcome in outcomes for status in outcome.results()]
    assert statuses == [OK] * 12 + [Status.OVERLOADED] * 18
    staged = subject.backend.stage(end=end_in(5.0))
    staged.release()


def test_reads_from_a_disk_that_hangs_hold_a_quarter_of_the_memory_at_most(open_disk, faults):
    subject = open_disk(objects=8, threads=4)
    put(subject, *KEYS)
    held = list(subject.backend.batched_get(KEYS, end=end_in(5.0)))
    assert [fetched.reason for fetched in held] == [""] * 8, (
        "what was read does not wait for the disk any more"
    )
    for fetched in held:
        fetched.release()
    faults.go_on.clear()
    memory = subject.backend.memory
    outcomes = []
    with beside(*[lambda: outcomes.append(subject.get(KEYS))] * 6):
        wait_for(lambda: memory.pool.in_use == 6, "a quarter taken")
        other = memory.stage(1.0)
        assert memory.pool.in_use == 7, "what others lease does not count, and readers took no more meanwhile"
        other.release()
        faults.go_on.set()
    assert outcomes == [expected()] * 6, "those that waited for their turn got all"
    assert memory.pool.in_use == 0


def test_a_frozen_disk_keeps_the_slots_of_the_calls_that_it_holds_and_no_others(open_disk, freezable_disk):
    subject = open_disk(freezable_disk, objects=40, retry_s=60.0, timeouts=IMPATIENT)
    put(subject, *KEYS)
    memory = subject.backend.memory
    subprocess.run(["fsfreeze", "-f", freezable_disk], check=True)
    try:
        assert subject.put({f"new{n}": value(n) for n in range(10)}) == [Status.TIMEOUT] * 10
        assert memory.pool.in_use == 2, "one for each thread"
        assert not subject.backend.available
        assert put(subject, "late") == [Status.TIER_OFF]
    finally:
        subprocess.run(["fsfreeze", "-u", freezable_disk], check=True)
    wait_for(lambda: memory.pool.in_use == 0, "the memory back")
    subject.check_integrity()


def test_a_damaged_file_goes_although_others_are_reading_it(open_disk):
    """If they held it up, readers that always overlap would find it for ever, and never ask the tier
    behind."""
    subject = open_disk()
    put(subject, "k")
    file, index = file_of(subject, "k"), subject.backend.index
    with file.open("r+b") as opened:
        opened.write(b"!")
    other = index.pin(digest_of("k"))
    assert subject.get(["k"]) == ["corrupt"]
    assert not subject.has("k")
    assert put(subject, "k") == [OK]
    assert file.exists()
    subject.backend._unpin(other)
    wait_for(lambda: not file.exists(), "the damaged file gone")
    assert subject.get(["k"]) == [value("k")]
    subject.check_integrity()


def test_queued_reads_of_a_disk_that_hangs_let_go_at_their_deadline_and_when_nobody_waits_any_more(
    open_disk, faults
):
    subject = open_disk(threads=1, retry_s=60.0)
    put(subject, *KEYS)
    memory = subject.backend.memory
    faults.go_on.clear()
    with beside(lambda: subject.get(["k7"])):
        wait_for(lambda: "read" in faults.begun, "a read that the disk holds")
        fetches = subject.backend.batched_get(["k0", "k1"], end=end_in(0.2))
        assert next(fetches).reason == "timeout"
        assert memory.pool.in_use == 2, "the first let go; the second is still asked for"
        fetches.close()
        assert memory.pool.in_use == 1
        faults.go_on.set()
    wait_for(lambda: memory.pool.in_use == 0, "the memory back")
    subject.check_integrity()
    assert subject.get(KEYS) == expected()
