"""The checksum of a chunk's payload: XXH3-64. Whoever copies a payload takes it of the bytes that the engine has; see `pd_cache.paged.base`."""

from __future__ import annotations

import xxhash

Digest = xxhash.xxh3_64
"""Takes a payload piece by piece, in order."""
checksum = xxhash.xxh3_64_intdigest
"""Takes a whole payload at once."""
