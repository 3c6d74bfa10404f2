"""The format of a chunk object: its payload, then a 32-byte trailer. Only this module knows it.

    offset  size
    0       4     magic "PDC1"
    4       2     format version (1)
    6       2     zero
    8       8     payload length
    16      8     XXH3-64 of the payload, see `pd_cache.checksum`
    24      8     XXH3-64 of the key, so that an object under a wrong key is recognised

All fields are little-endian. An object with any wrong field is never used.
"""

from __future__ import annotations

import enum
import struct

from pd_cache.checksum import checksum

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


def seal(key: str, buffer: memoryview, payload_bytes: int, payload_checksum: int | None = None) -> int:
    """Writes the trailer behind the payload in `buffer`. Returns the object's size in bytes.

    `payload_checksum` is that of the bytes that the payload should be; by default, of those in `buffer`.
    """
    trailer = _TRAILER.pack(
        _MAGIC,
        VERSION,
        0,
        payload_bytes,
        checksum(buffer[:payload_bytes]) if payload_checksum is None else payload_checksum,
        checksum(key.encode()),
    )
    size = payload_bytes + TRAILER_BYTES
    buffer[payload_bytes:size] = trailer
    return size


def inspect(key: str, data: memoryview, payload_bytes: int) -> Damage | int:
    """Returns what is wrong with the object of `key` in `data`, or the checksum that its payload must have.

    Only the trailer is looked at. The payload should have `payload_bytes`.
    """
    if len(data) != payload_bytes + TRAILER_BYTES:
        return Damage.TRUNCATED
    return inspect_trailer(key, data[payload_bytes:], payload_bytes)


def inspect_trailer(key: str, trailer: memoryview, payload_bytes: int) -> Damage | int:
    """Does what `inspect` does, for a trailer of `TRAILER_BYTES` that lies behind a payload of `payload_bytes`."""
    magic, version, zero, length, payload_checksum, key_hash = _TRAILER.unpack(trailer)
    if magic != _MAGIC:
        return Damage.FOREIGN
    if version != VERSION or zero:
        return Damage.VERSION
    if length != payload_bytes:
        return Damage.TRUNCATED
    if key_hash != checksum(key.encode()):
        return Damage.FOREIGN
    return int(payload_checksum)
