"""The disk tier: what survives a restart, what is ignored, and what a full or failing disk does."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cache.tiers.disk_files import DiskState, ObjectFolder, digest_of
from tests.support.backends import TIMEOUTS, count
from tests.support.disks import OBJECT, PAYLOAD, Open, disk_of, files, value
from tests.support.waiting import wait_for
from transfer.errors import Status


def test_what_was_stored_is_there_after_a_restart(open_disk: Open) -> None:
    first = open_disk()
    first.put({f"k{n}": value(n) for n in range(5)})
    first.backend.close()
    second = open_disk()
    assert second.get([f"k{n}" for n in range(6)]) == [*(value(n) for n in range(5)), "missing"]
    assert second.count("pd_cache_tier_bytes", tier="disk") == sum(file.stat().st_size for file in files(second))


def test_after_a_restart_the_oldest_go_first_where_the_budget_shrank(open_disk: Open) -> None:
    first = open_disk()
    for n in range(6):
        first.put({f"k{n}": value(n)})
        os.utime(next(f for f in files(first) if digest_of(f"k{n}") in f.name), ns=(n, n))
    first.backend.close()
    second = open_disk(objects=3)
    assert second.get([f"k{n}" for n in range(6)]) == ["missing"] * 3 + [value(n) for n in range(3, 6)]
    wait_for(lambda: len(files(second)) == 3)


def test_a_killed_process_loses_nothing_that_was_published(open_disk: Open, tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from tests.support.backends import Subject, make_disk, make_memory
from pd_cache.metrics import CacheMetrics
disk = make_disk(make_memory({PAYLOAD}, 8), Path({str(tmp_path / "cache")!r}), 8)
disk.wait_available(60)
one = Subject(disk, {{}}, CacheMetrics())
one.put({{"k": b"x" * {PAYLOAD}}})
(disk.folder.root / "tmp" / "7f").write_bytes(b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], timeout=180)
    assert done.returncode == -signal.SIGKILL
    subject = open_disk()
    assert subject.get(["k"]) == [b"x" * PAYLOAD]
    assert subject.count("pd_cache_tier_ignored_files_total", kind="torn") == 1
    assert list((disk_of(subject).folder.root / "tmp").iterdir()) == []


def test_foreign_files_are_left_alone_and_counted_and_torn_ones_are_cleared_away(open_disk: Open) -> None:
    first = open_disk()
    first.put({"good": value("good"), "torn": value("torn")})
    root = disk_of(first).folder.root
    torn = next(file for file in files(first) if digest_of("torn") in file.name)
    os.truncate(torn, 4096)
    foreign = [root / "notes.txt", torn.parent / "thumbs.db", root / "zz" / f"{'0' * 32}-1"]
    foreign[2].parent.mkdir()
    for file in foreign:
        file.write_text("not ours")
    first.backend.close()
    second = open_disk()
    assert second.get(["good", "torn"]) == [value("good"), "missing"]
    assert second.count("pd_cache_tier_ignored_files_total", kind="foreign") == 3
    assert second.count("pd_cache_tier_ignored_files_total", kind="torn") == 1
    assert all(file.read_text() == "not ours" for file in foreign)
    assert not torn.exists()


def test_of_two_files_of_one_key_the_newer_is_kept(open_disk: Open) -> None:
    first = open_disk()
    first.put({"k": value("k")})
    (newer,) = files(first)
    older = newer.with_name(f"{digest_of('k')}-999")
    older.write_bytes(bytes(newer.stat().st_size))
    os.utime(older, (1, 1))
    first.backend.close()
    second = open_disk()
    assert second.get(["k"]) == [value("k")]
    assert files(second) == [newer]
    second.put({"other": value("other")})
    assert all(int(file.name.split("-")[1], 16) != 0x999 for file in files(second)), "serials are not used twice"


def test_a_file_of_the_right_size_with_wrong_bytes_is_a_miss_once_and_is_written_again(open_disk: Open) -> None:
    subject = open_disk()
    subject.put({"k": value("k")})
    (file,) = files(subject)
    file.write_bytes(bytes(file.stat().st_size))
    assert subject.get(["k"]) == ["foreign"]
    assert not subject.has("k")
    wait_for(lambda: files(subject) == [], what="the bad file deleted")
    assert subject.put({"k": value("k")}) == [Status.OK]
    assert subject.get(["k"]) == [value("k")]


def test_files_that_somebody_deleted_are_misses_and_no_failure(open_disk: Open) -> None:
    subject = open_disk()
    subject.put({"k": value("k"), "l": value("l")})
    next(file for file in files(subject) if digest_of("k") in file.name).unlink()
    assert subject.get(["k", "l"]) == ["missing", value("l")]
    assert subject.backend.available


def test_processes_that_share_a_path_have_folders_of_their_own(open_disk: Open) -> None:
    one, other = open_disk(), open_disk()
    one.put({"k": value("k")})
    assert disk_of(one).folder.root != disk_of(other).folder.root
    assert not other.has("k")
    root = disk_of(one).folder.root
    one.backend.close()
    again = open_disk()
    assert disk_of(again).folder.root == root
    assert again.has("k")


@pytest.mark.parametrize("options", [{"direct": False}, {"sync": True}, {"threads": 1}, {"policy": "s3fifo"}])
def test_every_option_stores_and_reads(open_disk: Open, options: dict[str, Any]) -> None:
    subject = open_disk(**options)
    assert subject.put({f"k{n}": value(n) for n in range(8)}) == [Status.OK] * 8
    assert subject.get([f"k{n}" for n in range(8)]) == [value(n) for n in range(8)]


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    subject = open_disk()
    assert subject.put({"k": value("k")}) == [Status.OK]
    assert subject.get(["k"]) == [value("k")]


def test_the_folder_never_holds_more_than_its_budget(open_disk: Open) -> None:
    subject = open_disk(objects=8, threads=4)
    most = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, len(files(subject)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(0, 60, 6):
        subject.put({f"k{i}": value(i) for i in range(n, n + 6)})
    stop.set()
    watcher.join(60)
    assert most <= 8
    assert subject.count("pd_cache_tier_evictions_total") == 52


# --- troubles --------------------------------------------------------------------------------------------------------


def leave_room_for(objects: int, folder: Path, ballast: Path) -> None:
    """Fill a file system up to so many objects, and half a one."""
    status = os.statvfs(folder)
    size = OBJECT * objects + OBJECT // 2
    ballast.write_bytes(bytes(status.f_bavail * status.f_frsize - size))


def test_on_a_full_disk_the_oldest_make_room_and_the_budget_grows_again_with_the_room(
    open_disk: Open, small_disk: Path
) -> None:
    subject = open_disk(small_disk, objects=50)
    subject.put({"early": value("early")})
    leave_room_for(3, small_disk, small_disk / "somebody-elses")
    for n in range(8):
        assert subject.put({f"k{n}": value(n)}) == [Status.OK]
    assert subject.get([f"k{n}" for n in range(8)]) == ["missing"] * 4 + [value(n) for n in range(4, 8)]
    assert not subject.has("early"), "the oldest went first"
    assert subject.count("pd_cache_tier_evictions_total") == 5
    assert subject.count("pd_cache_tier_off", tier="disk") == 0, "it was never off"
    assert subject.count("pd_cache_tier_failures_total") == 0
    (small_disk / "somebody-elses").unlink()
    wait_for(lambda: disk_of(subject).index.capacity > 5, what="more places")
    assert subject.put({"a": value("a"), "b": value("b")}) == [Status.OK] * 2
    assert subject.get(["k4", "k5", "k6", "k7", "a", "b"]) == [*(value(n) for n in range(4, 8)), value("a"), value("b")]
    assert list((disk_of(subject).folder.root / "tmp").iterdir()) == []
    subject.check_integrity()


def test_a_disk_that_others_filled_when_it_was_opened_makes_room_too(open_disk: Open, small_disk: Path) -> None:
    first = open_disk(small_disk, objects=50)
    for n in range(4):
        first.put({f"k{n}": value(n)})
        os.utime(next(f for f in files(first) if digest_of(f"k{n}") in f.name), ns=(n, n))
    first.backend.close()
    leave_room_for(0, small_disk, small_disk / "somebody-elses")
    second = open_disk(small_disk, objects=50)
    assert second.put({"new": value("new")}) == [Status.OK]
    assert second.get(["k0", "k3", "new"]) == ["missing", value(3), value("new")]


def test_a_full_disk_with_nothing_to_evict_refuses_writes_is_read_and_comes_back(
    open_disk: Open, small_disk: Path
) -> None:
    subject = open_disk(small_disk, objects=50)
    subject.put({"early": value("early")})
    disk = disk_of(subject)
    reader = disk.index.pin(digest_of("early"))
    assert reader is not None
    leave_room_for(0, small_disk, small_disk / "somebody-elses")
    assert subject.put({"refused": value("refused")}) == [Status.NO_SPACE]
    assert subject.count("pd_cache_tier_off", tier="disk") == 1
    assert subject.count("pd_cache_tier_failures_total", tier="disk", reason="enospc") == 1
    assert subject.put({"refused": value("refused")}) == [Status.NO_SPACE]
    assert subject.get(["early"]) == [value("early")]
    (small_disk / "somebody-elses").unlink()
    wait_for(lambda: subject.count("pd_cache_tier_off", tier="disk") == 0, what="the tier in use again")
    disk.index.unpin(reader)
    assert subject.put({"late": value("late")}) == [Status.OK]
    assert subject.get(["late", "early"]) == [value("late"), value("early")]
    assert list((disk.folder.root / "tmp").iterdir()) == []


def test_a_budget_that_grows_as_the_disk_comes_back_is_shown(open_disk: Open) -> None:
    subject = open_disk(objects=8)
    disk = disk_of(subject)
    disk.index.shrink(2)
    disk._metrics.shrunk(2 * disk.folder.file_bytes, "")
    disk.health.settle(DiskState.FULL, "the file system is full", "enospc")
    wait_for(lambda: subject.count("pd_cache_tier_off", tier="disk") == 0, what="the tier in use again")
    whole = 8 * disk.folder.file_bytes
    wait_for(lambda: subject.count("pd_cache_tier_budget_bytes", tier="disk") == whole, what="its whole budget")


def test_a_limit_of_the_process_counts_as_a_full_disk(open_disk: Open) -> None:
    subject = open_disk()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12 * 4096, hard))
        assert subject.put({"k": value("k")}) == [Status.NO_SPACE]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert subject.count("pd_cache_tier_failures_total", reason="efbig") == 1
    wait_for(lambda: subject.put({"k": value("k")}) == [Status.OK], what="writes accepted again")


def test_a_write_that_does_not_get_its_turn_displaces_nothing(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_disk(objects=2, threads=1, timeouts=msgspec.structs.replace(TIMEOUTS, put_ms=100), retry_s=60.0)
    subject.put({"a": value("a")})
    subject.put({"b": value("b")})
    go_on = threading.Event()
    write = ObjectFolder.write

    def hang(self: ObjectFolder, digest: str, pages: memoryview) -> str:
        go_on.wait(60)
        return write(self, digest, pages)

    monkeypatch.setattr(ObjectFolder, "write", hang)
    try:
        assert subject.put({"c": value("c"), "d": value("d")}) == [Status.TIMEOUT] * 2
    finally:
        go_on.set()
    expected = {digest_of("b"), digest_of("c")}
    wait_for(lambda: {file.name[:32] for file in files(subject)} == expected, what="only what was written")
    subject.check_integrity()


def test_a_failing_disk_is_switched_off_and_tried_again(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = open_disk()
    subject.put({"k": value("k")})
    broken = threading.Event()
    broken.set()
    read, write = ObjectFolder._read_whole, ObjectFolder._write_temporary

    def fail(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if broken.is_set():
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments)

        return call

    monkeypatch.setattr(ObjectFolder, "_read_whole", fail(read))
    monkeypatch.setattr(ObjectFolder, "_write_temporary", fail(write))
    assert subject.get(["k"]) == ["tier_off"]
    assert not subject.backend.available
    assert subject.backend.batched_contains(["k"]) == [Status.TIER_OFF]
    assert subject.put({"l": value("l")}) == [Status.TIER_OFF]
    assert subject.get(["k"]) == ["tier_off"]
    assert subject.count("pd_cache_tier_failures_total", reason="eio") == 1, "once, however many calls it meets"
    assert sum("the tier is not used until its folder works again" in line for line in caplog.messages) == 1
    broken.clear()
    wait_for(lambda: subject.backend.available, what="the tier in use again")
    assert subject.get(["k"]) == [value("k")]


def test_a_path_that_cannot_be_used_is_switched_off_until_it_can(open_disk: Open, tmp_path: Path) -> None:
    path = tmp_path / "in-the-way"
    path.write_text("a file where the folder should be")
    subject = open_disk(path, wait=False)
    wait_for(lambda: subject.count("pd_cache_tier_off", tier="disk") == 1)
    assert subject.put({"k": value("k")}) == [Status.TIER_OFF]
    path.unlink()
    wait_for(lambda: subject.backend.available)
    assert subject.put({"k": value("k")}) == [Status.OK]


def test_a_disk_that_hangs_costs_one_deadline_and_its_memory_stays_quarantined(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the disk is blamed only for calls that a thread has begun two seconds before their deadline
    subject = open_disk(timeouts=msgspec.structs.replace(TIMEOUTS, get_ms=4000), retry_s=60.0)
    subject.put({"k": value("k"), "l": value("l")})
    begun, go_on = threading.Event(), threading.Event()
    read = ObjectFolder.read

    def hang(self: ObjectFolder, name: str, pages: memoryview) -> int:
        begun.set()
        go_on.wait(60)
        return read(self, name, pages)

    monkeypatch.setattr(ObjectFolder, "read", hang)
    try:
        while not begun.is_set():
            (impatient,) = subject.backend.batched_get(["k"], timeout=0.05)
            assert impatient.reason == "timeout"
        assert subject.backend.available, "an impatient caller says nothing about the disk"
        assert subject.get(["k", "l"]) == ["timeout", "timeout"]
        assert subject.backend.memory.pool.in_use == 2, "the two calls that run may still write there"
        assert subject.get(["k"]) == ["tier_off"]
        assert subject.count("pd_cache_tier_failures_total", reason="timeout") == 1
    finally:
        go_on.set()
    wait_for(lambda: subject.backend.memory.pool.in_use == 0, what="the memory back")


def test_a_write_that_is_removed_under_way_is_not_published(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_disk()
    inside, go_on = threading.Event(), threading.Event()
    write = ObjectFolder.write

    def slow(self: ObjectFolder, digest: str, pages: memoryview) -> str:
        inside.set()
        go_on.wait(60)
        return write(self, digest, pages)

    monkeypatch.setattr(ObjectFolder, "write", slow)
    staged = subject.backend.stage(timeout=60)
    assert staged is not None
    staged.payload[:] = value("k")
    outcome = subject.backend.batched_put(["k"], [staged])
    assert inside.wait(60)
    assert not subject.has("k"), "not there before it is whole"
    assert subject.backend.batched_remove(["k"]) == [Status.OK]
    go_on.set()
    assert outcome.results() == [Status.OK]
    assert not subject.has("k")
    wait_for(lambda: files(subject) == [])
    assert subject.put({"k": value("k")}) == [Status.OK]
    assert subject.get(["k"]) == [value("k")]


def test_close_flushes_the_writes_that_were_accepted(open_disk: Open) -> None:
    first = open_disk(threads=1)
    outcomes = []
    for n in range(8):
        staged = first.backend.stage(timeout=60)
        assert staged is not None
        staged.payload[:] = value(n)
        outcomes.append(first.backend.batched_put([f"k{n}"], [staged]))
    first.backend.close()
    assert [outcome.results() for outcome in outcomes] == [[Status.OK]] * 8
    assert open_disk().get([f"k{n}" for n in range(8)]) == [value(n) for n in range(8)]


def test_the_manifest_lies_in_the_folder_for_people_to_read(open_disk: Open) -> None:
    subject = open_disk()
    assert subject.backend.annotate("pdc1/x/manifest", b"{}") is Status.OK
    wait_for(lambda: list(disk_of(subject).folder.root.glob("note-*")))
    (note,) = disk_of(subject).folder.root.glob("note-*")
    assert note.read_bytes() == b"{}"
    assert count(subject.metrics, "pd_cache_tier_ignored_files_total") == 0


def test_no_file_descriptor_is_left_open(open_disk: Open) -> None:
    before = len(os.listdir("/proc/self/fd"))
    subject = open_disk()
    subject.put({f"k{n}": value(n) for n in range(8)})
    subject.get([f"k{n}" for n in range(9)])
    subject.backend.close()
    assert len(os.listdir("/proc/self/fd")) == before
