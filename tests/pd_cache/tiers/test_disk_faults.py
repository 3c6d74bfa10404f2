"""Errors of one file stay that file's; a folder in trouble is switched off, or read only, and comes back."""

from __future__ import annotations

import errno
import math
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cache.tiers.base import PutOutcome
from pd_cache.tiers.disk_files import PAGE, DiskFault, DiskState, ObjectFolder, digest_of, fault_of
from tests.support.backends import TIMEOUTS
from tests.support.disks import OBJECT, Open, disk_of, file_of, files, value
from tests.support.waiting import wait_for
from transfer.errors import PoolUnavailableError, Status

KEYS = [f"k{n}" for n in range(8)]
IMPATIENT = msgspec.structs.replace(TIMEOUTS, put_ms=300, get_ms=300)


def all_values() -> dict[str, bytes]:
    return {key: value(key) for key in KEYS}


def expected(**otherwise: str) -> list[bytes | str]:
    return [otherwise.get(key, value(key)) for key in KEYS]


# --- what may stand in an object's place -----------------------------------------------------------------------------


def a_folder(path: Path) -> None:
    path.mkdir()


def a_folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("not ours")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_link_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def a_link_to_a_copy(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(bytes(OBJECT))
    path.symlink_to(copy)


def a_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's address is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


ODDITIES: tuple[Callable[[Path], None], ...] = (
    a_folder, a_folder_with_a_file, a_pipe, a_loop, a_link_nowhere, a_link_to_a_copy, a_socket,
)  # fmt: skip


@pytest.mark.parametrize("oddity", ODDITIES)
def test_something_else_in_an_objects_place_costs_that_object_and_the_next_put_heals_it(
    open_disk: Open, oddity: Callable[[Path], None]
) -> None:
    subject = open_disk()
    subject.put(all_values())
    path = file_of(subject, "k3")
    path.unlink()
    oddity(path)
    assert subject.get(KEYS) == expected(k3="unreadable")
    assert subject.backend.available
    assert subject.backend.batched_contains(KEYS) == [Status.OK if key != "k3" else Status.MISSING for key in KEYS]
    assert subject.count("pd_cache_tier_file_errors_total", tier="disk") >= 1
    assert subject.count("pd_cache_tier_healed_total", tier="disk") == 1
    assert subject.count("pd_cache_tier_failures_total") == 0
    if oddity is a_folder_with_a_file:
        assert (path / "thesis.txt").read_text() == "not ours"
    assert subject.put({"k3": value("k3")}) == [Status.OK]
    assert subject.get(KEYS) == expected()
    subject.check_integrity()
    subject.backend.close()
    again = open_disk()
    assert again.get(KEYS) == expected()


def test_an_object_that_cannot_be_deleted_is_left_behind_and_hurts_nobody(open_disk: Open) -> None:
    subject = open_disk(objects=9)
    subject.put(all_values())
    path = file_of(subject, "k3")
    os.truncate(path, 4096)
    if subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
        pytest.skip("immutable files take root, and a file system that has them")
    try:
        assert subject.get(KEYS) == expected(k3="truncated")
        assert subject.put({"k3": value("k3")}) == [Status.OK]
        wait_for(lambda: subject.count("pd_cache_tier_file_errors_total", error="eperm") == 1)
        assert subject.get(KEYS) == expected()
        subject.backend.close()
        again = open_disk()
        assert again.get(KEYS) == expected()
        assert again.count("pd_cache_tier_ignored_files_total", kind="torn") == 1
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def test_files_that_cannot_be_deleted_keep_their_places_until_they_can(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = open_disk(objects=8)
    subject.put(all_values())
    places = 8
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name != "tmp":
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for n in range(20):
        subject.put({f"new{n}": value(f"new{n}")})
        assert len(files(subject)) <= places, "more bytes than the tier may hold"
    monkeypatch.setattr(Path, "unlink", unlink)
    wait_for(lambda: disk_of(subject).index.capacity == places, what="all places back")
    subject.put({f"late{n}": value(f"late{n}") for n in range(places)})
    assert subject.get([f"late{n}" for n in range(places)]) == [value(f"late{n}") for n in range(places)]
    assert len(files(subject)) <= places
    subject.check_integrity()


def test_a_write_that_could_neither_be_published_nor_deleted_is_deleted_once_the_folder_takes_writes_again(
    tmp_path: Path,
) -> None:
    folder = ObjectFolder(tmp_path, PAGE, direct=False, sync=False)
    with closing(folder):
        folder.open()
        folder.probe()

        def refuse(path: Path, *_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", refuse)
            patch.setattr(Path, "unlink", refuse)
            with pytest.raises(PermissionError):
                folder.write(digest_of("k"), memoryview(bytearray(PAGE)))
        temporary = folder.root / "tmp"
        assert len(list(temporary.iterdir())) == 1
        folder.probe()
        assert not list(temporary.iterdir())


def test_files_whose_folder_cannot_be_flushed_leave_nothing_behind(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = open_disk(objects=8, sync=True)
    subject.put(all_values())
    flush, fails = os.fsync, True

    def refuse(descriptor: int) -> None:
        if fails and os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    for n in range(12):
        subject.put({f"new{n}": value(n)})
    fails = False
    wait_for(lambda: disk_of(subject).index.capacity == 8 and disk_of(subject).health.writable, what="all places back")
    subject.put({f"late{n}": value(n) for n in range(20)})
    wait_for(lambda: len(files(subject)) == len(disk_of(subject).index) <= 8, what="no file that no index knows")


def test_one_failed_look_at_the_lock_loses_no_object(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_disk()
    subject.put(all_values())
    disk, look = disk_of(subject), os.stat
    looks: list[Path] = []

    def refuse_once(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if isinstance(path, Path) and path.name == "lock":
            looks.append(path)
            if len(looks) == 1:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse_once)
    disk.health.settle(DiskState.OFF, "in trouble", "eio")
    wait_for(lambda: disk.health.writable, what="the tier in use again")
    assert looks
    assert subject.get(KEYS) == expected()
    assert len(files(subject)) == len(disk.index) == 8


def test_a_put_may_wait_for_ever(open_disk: Open) -> None:
    subject = open_disk()
    staged = subject.backend.stage(timeout=math.inf)
    assert staged is not None
    staged.payload[:] = value("k")
    assert subject.backend.batched_put(["k"], [staged], timeout=math.inf).results() == [Status.OK]
    (fetched,) = subject.backend.batched_get(["k"], timeout=math.inf)
    assert fetched.check() == ""
    fetched.release()


def test_one_bad_block_among_many_reads_costs_one_object(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_disk(objects=8)
    subject.put(all_values())
    bad = file_of(subject, "k3")
    read = ObjectFolder._read_whole

    def fail(self: ObjectFolder, path: Path, pages: memoryview) -> int:
        if path == bad:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(self, path, pages)

    monkeypatch.setattr(ObjectFolder, "_read_whole", fail)
    outcomes = [outcome for _ in range(20) for outcome in subject.get(KEYS)]
    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == ["unreadable"] + ["missing"] * 19
    assert subject.count("pd_cache_tier_file_errors_total", error="eio") == 1
    assert subject.put({"k3": value("k3")}) == [Status.OK]
    assert subject.get(KEYS) == expected()
    assert subject.count("pd_cache_tier_failures_total") == 0


def test_a_file_that_cannot_be_deleted_for_a_bad_block_keeps_its_place_and_no_other_from_being_written(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = open_disk(objects=8)
    subject.put(all_values())
    bad = file_of(subject, "k0")
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path == bad:
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    for n in range(20):
        assert subject.put({f"new{n}": value(n)}) == [Status.OK]
        assert len(files(subject)) <= 8, "more bytes than the tier may hold"
    assert bad in files(subject)
    assert subject.count("pd_cache_tier_file_errors_total", error="eio") == 1
    assert subject.count("pd_cache_tier_failures_total") == 0
    subject.check_integrity()
    monkeypatch.setattr(Path, "unlink", unlink)
    wait_for(lambda: disk_of(subject).index.capacity == 8, what="its place back")
    assert not bad.exists()


def test_a_caller_that_joins_a_write_waits_no_longer_than_its_own_deadline(
    open_disk: Open, hung: threading.Event
) -> None:
    subject = open_disk()

    def put(timeout: float) -> PutOutcome:
        staged = subject.backend.stage(timeout=60)
        assert staged is not None
        staged.payload[:] = value("k")
        return subject.backend.batched_put(["k"], [staged], timeout=timeout)

    hung.clear()
    patient = put(3600.0)
    assert put(0.05).results() == [Status.TIMEOUT], "the first one has an hour"
    assert subject.backend.available, "an impatient caller says nothing about the disk"
    joined = put(3600.0)
    assert subject.backend.memory.pool.in_use == 1
    hung.set()
    assert patient.results() == joined.results() == [Status.OK]
    assert subject.get(["k"]) == [value("k")]


def test_a_disk_whose_files_fail_one_after_another_is_switched_off(
    open_disk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = open_disk(threads=1, retry_s=60.0)
    subject.put(all_values())
    objects = set(files(subject))
    read = ObjectFolder._read_whole

    def fail(self: ObjectFolder, path: Path, pages: memoryview) -> int:
        if path in objects:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(self, path, pages)

    monkeypatch.setattr(ObjectFolder, "_read_whole", fail)
    assert subject.get(KEYS) == ["unreadable"] * 2 + ["tier_off"] * 6
    assert subject.count("pd_cache_tier_failures_total", reason="eio") == 1
    assert len(disk_of(subject).index) == 6, "what was not read is not given up"


def test_a_process_without_descriptors_loses_no_object(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_disk()
    subject.put(all_values())
    with monkeypatch.context() as patch:

        def none_left(self: ObjectFolder, path: Path, pages: memoryview) -> int:
            raise OSError(errno.EMFILE, "Too many open files", str(path))

        patch.setattr(ObjectFolder, "_read_whole", none_left)
        assert subject.get(KEYS) == ["overloaded"] * 8
    assert subject.get(KEYS) == expected()
    assert subject.count("pd_cache_tier_failures_total") == 0


def test_errors_are_told_apart_by_their_numbers() -> None:
    found = {number: fault_of(OSError(number, "")) for number in errno.errorcode}
    assert found[errno.ENOSPC] is found[errno.EDQUOT] is DiskFault.NO_ROOM
    assert found[errno.EROFS] is DiskFault.READ_ONLY
    assert found[errno.EMFILE] is DiskFault.PROCESS
    assert found[errno.EACCES] is found[errno.ELOOP] is found[errno.ENOTDIR] is DiskFault.OBJECT
    for number in (errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.ENOENT):
        assert found[number] is DiskFault.UNCLEAR
    assert fault_of(OSError("no number")) is DiskFault.UNCLEAR


# --- what may stand in a folder's place ------------------------------------------------------------------------------


def test_something_else_where_a_folder_belongs_costs_the_objects_in_it(open_disk: Open) -> None:
    subject = open_disk()
    path = disk_of(subject).folder.root / digest_of("k3")[:2]
    path.write_text("not ours")
    lost = [key for key in KEYS if digest_of(key)[:2] == path.name]
    assert subject.put(all_values()) == [Status.INTERNAL if key in lost else Status.OK for key in KEYS]
    assert subject.get(KEYS) == expected(**dict.fromkeys(lost, "missing"))
    assert subject.count("pd_cache_tier_failures_total") == 0
    assert path.read_text() == "not ours"
    subject.check_integrity()


def test_a_folder_that_cannot_be_one_is_passed_over(open_disk: Open, tmp_path: Path) -> None:
    base = tmp_path / "cache" / str(OBJECT)
    (base / "0" / "lock").mkdir(parents=True)
    (base / "1").write_text("not ours")
    subject = open_disk()
    assert disk_of(subject).folder.root == base / "2"
    assert subject.put(all_values()) == [Status.OK] * 8
    assert subject.get(KEYS) == expected()


def test_what_cannot_be_cleared_from_the_temporary_folder_keeps_no_tier_from_opening(open_disk: Open) -> None:
    first = open_disk()
    first.put(all_values())
    temporary = disk_of(first).folder.root / "tmp"
    first.backend.close()
    for n in range(40):
        (temporary / f"{n:x}").mkdir()
    second = open_disk()
    assert second.get(KEYS) == expected()
    second.backend.batched_remove(KEYS)
    assert second.put(all_values()) == [Status.OK] * 8
    assert second.get(KEYS) == expected()


def test_the_largest_serial_in_a_planted_name_does_not_spoil_those_that_follow(open_disk: Open) -> None:
    first = open_disk()
    first.put({"k0": value("k0")})
    file = file_of(first, "k0")
    first.backend.close()
    file.rename(file.with_name(f"{digest_of('k0')}-{'f' * 16}"))
    second = open_disk()
    assert second.put(all_values()) == [Status.OK] * 8
    second.backend.close()
    assert open_disk().get(KEYS) == expected()


# --- a folder in trouble ---------------------------------------------------------------------------------------------


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def test_a_read_only_file_system_is_read_and_written_when_it_can_be_again(open_disk: Open, small_disk: Path) -> None:
    first = open_disk(small_disk)
    first.put(all_values())
    file_of(first, "k3").write_bytes(bytes(OBJECT))
    (disk_of(first).folder.root / "tmp" / "77").write_bytes(b"half")
    first.backend.close()
    remount(small_disk, "ro")
    second = open_disk(small_disk)
    assert second.get(KEYS) == expected(k3="foreign")
    assert second.put({"new": value("new"), "k0": value("k0")}) == [Status.READ_ONLY] * 2
    assert second.backend.batched_remove(["k0"]) == [Status.READ_ONLY]
    assert second.backend.batched_contains(["k0", "k3"]) == [Status.OK, Status.MISSING]
    assert second.count("pd_cache_tier_off", tier="disk") == 1
    assert second.count("pd_cache_tier_failures_total", reason="erofs") == 1, "once, however often it is tried"
    other = open_disk(small_disk, wait=False)
    with pytest.raises(PoolUnavailableError, match="Read-only file system"):
        other.backend.wait_available(10)
    remount(small_disk, "rw")
    wait_for(lambda: second.count("pd_cache_tier_off", tier="disk") == 0, what="written again")
    assert second.put({"k3": value("k3")}) == [Status.OK]
    assert second.get(KEYS) == expected()
    wait_for(lambda: list((disk_of(second).folder.root / "tmp").iterdir()) == [], what="torn writes cleared away")


def test_a_file_system_that_becomes_read_only_is_still_read(open_disk: Open, freezable_disk: Path) -> None:
    subject = open_disk(freezable_disk, objects=9)
    subject.put(all_values())
    file_of(subject, "k3").write_bytes(bytes(OBJECT))
    remount(freezable_disk, "abort")  # as the kernel does where it meets damage
    assert subject.put({"new": value("new")}) == [Status.READ_ONLY]
    assert subject.get(KEYS) == expected(k3="foreign")
    assert subject.get(KEYS) == expected(k3="missing")
    assert subject.count("pd_cache_tier_failures_total", reason="erofs") == 1
    assert subject.count("pd_cache_tier_failures_total") == 1


def test_a_folder_that_was_deleted_is_made_again_and_no_other_process_gets_it(open_disk: Open) -> None:
    subject = open_disk()
    subject.put(all_values())
    root = disk_of(subject).folder.root
    shutil.rmtree(root)
    assert set(subject.get(KEYS)) == {"tier_off"}, "the first read finds out"
    wait_for(lambda: subject.backend.available, what="the tier in use again")
    assert subject.backend.batched_contains(KEYS) == [Status.MISSING] * 8
    assert subject.put(all_values()) == [Status.OK] * 8
    assert subject.get(KEYS) == expected()
    assert disk_of(subject).folder.root == root
    assert disk_of(open_disk()).folder.root != root
    subject.check_integrity()


@pytest.mark.parametrize("error", [ValueError("an odd name"), MemoryError(), OSError("no number")])
def test_nothing_but_close_ends_the_keeper(open_disk: Open, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failures = iter([error] * 3)
    real = ObjectFolder.open

    def fail(self: ObjectFolder) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return real(self)

    monkeypatch.setattr(ObjectFolder, "open", fail)
    subject = open_disk(wait=False)
    wait_for(lambda: subject.backend.available, what="the tier in use")
    assert subject.put(all_values()) == [Status.OK] * 8


# --- a disk that hangs -----------------------------------------------------------------------------------------------


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every read, write and deletion waits for an event, which is set in the end in any case."""
    go_on = threading.Event()

    def wait_first(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            go_on.wait(30)
            return real(*arguments)

        return call

    go_on.set()
    for name in ("_read_whole", "_write_temporary", "unlink"):
        monkeypatch.setattr(ObjectFolder, name, wait_first(getattr(ObjectFolder, name)))
    try:
        yield go_on
    finally:
        go_on.set()


def test_nobody_waits_for_a_deletion_of_a_disk_that_hangs(open_disk: Open, hung: threading.Event) -> None:
    subject = open_disk(threads=1)
    subject.put(all_values())
    hung.clear()
    removers = [threading.Thread(target=subject.backend.batched_remove, args=([key],)) for key in KEYS]
    for remover in removers:
        remover.start()
    for remover in removers:
        remover.join(10)
    assert not any(remover.is_alive() for remover in removers)
    assert subject.backend.batched_contains(KEYS) == [Status.MISSING] * 8
    hung.set()
    wait_for(lambda: files(subject) == [], what="all files deleted")


def test_writes_to_a_disk_that_hangs_hold_half_of_the_memory_at_most(open_disk: Open, hung: threading.Event) -> None:
    subject = open_disk(objects=40)
    memory = subject.backend.memory
    hung.clear()
    outcomes = []
    for n in range(30):
        staged = memory.stage(1.0)
        assert staged is not None, "there is memory for others"
        outcomes.append(subject.backend.batched_put([f"k{n}"], [staged]))
    assert memory.pool.in_use == 12
    assert subject.backend.stage(timeout=0.0) is None, "who would wait for the disk waits before it takes memory"
    hung.set()
    statuses = [status for outcome in outcomes for status in outcome.results()]
    assert statuses == [Status.OK] * 12 + [Status.OVERLOADED] * 18
    staged = subject.backend.stage(timeout=5.0)
    assert staged is not None
    staged.release()


def test_reads_from_a_disk_that_hangs_hold_a_quarter_of_the_memory_at_most(
    open_disk: Open, hung: threading.Event
) -> None:
    subject = open_disk(objects=8, threads=4)
    subject.put(all_values())
    hung.clear()
    memory = subject.backend.memory
    outcomes: list[list[bytes | str]] = []
    readers = [threading.Thread(target=lambda: outcomes.append(subject.get(KEYS))) for _ in range(6)]
    for reader in readers:
        reader.start()
    wait_for(lambda: memory.pool.in_use == 6, what="a quarter taken")
    assert disk_of(subject)._read_slots.taken == 6
    hung.set()
    for reader in readers:
        reader.join(20)
    assert outcomes == [expected()] * 6, "those that waited for their turn got all"
    assert memory.pool.in_use == 0


def test_a_frozen_disk_keeps_the_slots_of_the_calls_that_it_holds_and_no_others(
    open_disk: Open, freezable_disk: Path
) -> None:
    subject = open_disk(freezable_disk, objects=40, retry_s=60.0, timeouts=IMPATIENT)
    subject.put(all_values())
    memory, disk = subject.backend.memory, disk_of(subject)
    subprocess.run(["fsfreeze", "-f", freezable_disk], check=True)
    try:
        assert subject.put({f"new{n}": value(n) for n in range(10)}) == [Status.TIMEOUT] * 10
        assert memory.pool.in_use == 2, "one for each thread"
        assert disk._write_slots.taken == 2
        assert not subject.backend.available
        assert subject.put({"late": value("late")}) == [Status.TIER_OFF]
    finally:
        subprocess.run(["fsfreeze", "-u", freezable_disk], check=True)
    wait_for(lambda: memory.pool.in_use == 0, what="the memory back")
    disk.index.check_integrity()


def test_queued_reads_of_a_disk_that_hangs_let_go_at_their_deadline_and_when_nobody_waits_any_more(
    open_disk: Open, hung: threading.Event
) -> None:
    subject = open_disk(threads=1, retry_s=60.0)
    subject.put(all_values())
    memory, disk = subject.backend.memory, disk_of(subject)
    hung.clear()
    patient = threading.Thread(target=lambda: subject.get(["k7"]))
    patient.start()
    wait_for(lambda: memory.pool.in_use == 1, what="a read that the disk holds")
    fetches = subject.backend.batched_get(["k0", "k1"], timeout=0.2)
    assert next(fetches).reason == "timeout"
    assert memory.pool.in_use == 2, "the first let go; the second is still asked for"
    fetches.close()
    assert memory.pool.in_use == 1
    assert disk._read_slots.taken == 1
    hung.set()
    patient.join(10)
    wait_for(lambda: memory.pool.in_use == 0, what="the memory back")
    disk.index.check_integrity()
    assert subject.get(KEYS) == expected()


def test_a_read_that_raises_leaves_nothing_pinned(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_disk()
    subject.put(all_values())
    disk = disk_of(subject)

    def fail(seconds: float, **options: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(disk.memory, "stage", fail)
        with pytest.raises(RuntimeError):
            subject.get(KEYS)
    disk.index.check_integrity()
    assert disk.index.held == 0
    assert disk._read_slots.taken == 0
    assert subject.get(KEYS) == expected()
