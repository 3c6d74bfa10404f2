"""The bytes of a chunk object: its payload, then a 32-byte trailer. The one home of that format.

    offset  size
    0       4     magic "PDC1"
    4       2     format version (1)
    6       2     zero
    8       8     payload length
    16      8     XXH3-64 of the payload
    24      8     XXH3-64 of the key: an object that appears under another key is not that key's

All little-endian. An object for which any of these is wrong is never used.
"""

from __future__ import annotations

import enum
import struct

import xxhash

_TRAILER = struct.Struct("<4sHHQQQ")
_MAGIC = b"PDC1"
VERSION = 1
TRAILER_BYTES = _TRAILER.size


class Damage(enum.Enum):
    """The reason why the bytes under a key are not its chunk."""

    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    VERSION = "other_version"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """The disk could not read them: a bad block, or something else in the place of the file."""


def seal(key: str, buffer: memoryview, payload_bytes: int) -> int:
    """Write the trailer behind the payload in `buffer`; returns the object's size in bytes."""
    trailer = _TRAILER.pack(
        _MAGIC,
        VERSION,
        0,
        payload_bytes,
        xxhash.xxh3_64_intdigest(buffer[:payload_bytes]),
        xxhash.xxh3_64_intdigest(key.encode()),
    )
    size = payload_bytes + TRAILER_BYTES
    buffer[payload_bytes:size] = trailer
    return size


def inspect(key: str, data: memoryview, payload_bytes: int) -> Damage | None:
    """Returns what is wrong with an object of `key`, whose payload should have `payload_bytes`; None if nothing is."""
    if len(data) != payload_bytes + TRAILER_BYTES:
        return Damage.TRUNCATED
    magic, version, zero, length, payload_hash, key_hash = _TRAILER.unpack(data[payload_bytes:])
    if magic != _MAGIC:
        return Damage.FOREIGN
    if version != VERSION or zero:
        return Damage.VERSION
    if length != payload_bytes:
        return Damage.TRUNCATED
    if key_hash != xxhash.xxh3_64_intdigest(key.encode()):
        return Damage.FOREIGN
    if payload_hash != xxhash.xxh3_64_intdigest(data[:payload_bytes]):
        return Damage.CORRUPT
    return None
