"""Disk tiers, file systems of their own for them, and errors and delays of a disk on demand."""

import os
import subprocess
import threading

import pytest

from pd_cache.metrics import CacheMetrics
from pd_cache.tiers.disk import ObjectFolder
from tests.support.backends import Subject, make_disk, make_memory
from tests.support.disks import PAYLOAD
from tests.support.made import made
from tests.support.needs import NO_ROOT
from tests.support.waiting import wait_for


@pytest.fixture
def open_disk(tmp_path):
    """Opens disk tiers over one path, for 8 objects if not told otherwise."""

    def make(path=tmp_path / "cache", objects=8, *, wait=True, **options):
        metrics = CacheMetrics()
        disk = make_disk(make_memory(PAYLOAD, 24), path, objects, metrics=metrics, **options)
        if wait:
            disk.wait_available(60)
        return Subject(disk, {"disk": disk}, metrics)

    def end(subject):
        subject.backend.close()
        wait_for(lambda: subject.backend.memory.pool.in_use == 0, "all memory free")

    yield from made(make, end)


class Faults:
    """What a folder's operations do, by name: `errors` are raised, and while `go_on` is not set, every
    operation hangs."""

    def __init__(self):
        self.errors = {}
        self.go_on = threading.Event()
        self.go_on.set()
        self.begun = []

    def fail(self, number, *operations):
        """Has operations fail with this number, or all succeed if none is given."""
        self.errors = dict.fromkeys(operations, OSError(number, os.strerror(number)))


@pytest.fixture
def faults(monkeypatch):
    made = Faults()

    def instead(operation, real):
        def call(*arguments):
            made.begun.append(operation)
            made.go_on.wait(60)
            if (error := made.errors.get(operation)) is not None:
                raise error
            return real(*arguments)

        return call

    for operation in ("open", "probe", "read", "write", "sweep"):
        monkeypatch.setattr(ObjectFolder, operation, instead(operation, getattr(ObjectFolder, operation)))
    try:
        yield made
    finally:
        made.go_on.set()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB: ten objects do not fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
        pytest.skip(NO_ROOT)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def freezable_disk(tmp_path):
    """An ext4 file system of its own, which `fsfreeze` can stop; thawed in the end in any case."""
    image, folder = tmp_path / "image", tmp_path / "freezable"
    folder.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 32 << 20)
    made = not os.geteuid() and not subprocess.run(["mkfs.ext4", "-q", image], capture_output=True).returncode
    if not made or subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip(NO_ROOT)
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "-u", folder], capture_output=True)
        subprocess.run(["umount", "-l", folder], check=True)
