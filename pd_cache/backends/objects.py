"""The format of a chunk object: its payload, then a 32-byte trailer. Only this module knows it.

    offset  size
    0       4     magic "PDC1"
    4       2     format version (1)
    6       2     zero
    8       8     payload length
    16      8     XXH3-64 of the payload
    24      8     XXH3-64 of the key, so that an object under a wrong key is recognised

All fields are little-endian. An object with any wrong field is never used.
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
    """The disk could not read the object: a bad block, or something other than a file is in its place."""


def seal(key: str, buffer: memoryview, payload_bytes: int) -> int:
    """Writes the trailer behind the payload in `buffer`. Returns the object's size in bytes."""
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
    """Returns what is wrong with the object of `key` in `data`, or None if nothing is. Its payload should have `payload_bytes`."""
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
