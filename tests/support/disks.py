"""A disk tier under test: objects of 100,000 bytes, and the files that they lie in."""

from pd_cache.tiers.disk import digest_of

PAYLOAD = 100_000
OBJECT = 102_400
"""Bytes of a file."""


def value(n):
    return str(n).encode().ljust(PAYLOAD, b".")


def put(subject, *keys):
    """Puts the value of each key."""
    return subject.put({key: value(key) for key in keys})


def files(subject):
    """The objects in the folder, oldest name first."""
    return sorted(subject.backend.folder.root.glob("??/*"))


def file_of(subject, key):
    """Where the object of a key lies. What was in the place of an earlier one, and cannot be deleted, may lie
    beside it."""
    of_key = [file for file in files(subject) if file.name.startswith(digest_of(key))]
    return max(of_key, key=lambda file: int(file.name.partition("-")[2], 16))
