"""A disk tier under test: objects of 100,000 bytes, and the files that they lie in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pd_cache.tiers.disk import LocalDiskBackend, digest_of
from tests.support.backends import Subject

PAYLOAD = 100_000
OBJECT = 102_400
"""Bytes of a file."""

Open = Callable[..., Subject]


def value(n: object) -> bytes:
    return str(n).encode().ljust(PAYLOAD, b".")


def disk_of(subject: Subject) -> LocalDiskBackend:
    assert isinstance(subject.backend, LocalDiskBackend)
    return subject.backend


def files(subject: Subject) -> list[Path]:
    """The objects in the folder, oldest name first."""
    return sorted(disk_of(subject).folder.root.glob("??/*"))


def file_of(subject: Subject, key: str) -> Path:
    """Where the object of a key lies. What was in the place of an earlier one, and cannot be deleted, may lie beside it."""
    of_key = [file for file in files(subject) if file.name.startswith(digest_of(key))]
    return max(of_key, key=lambda file: int(file.name.partition("-")[2], 16))
