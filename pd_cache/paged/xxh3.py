"""Computes XXH3-64 on a GPU: the same checksum as `pd_cache.layout.checksum` on the host, where a core
reads 7 GB/s from memory.

XXH3 adds up 1024 bytes at a time in eight lanes, and then mixes the lanes. The sums do not depend on what
came before, so one kernel computes all sums at once. A second kernel mixes them in order; it reads a
sixteenth of the bytes. The host merges the lanes.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

_MASK = (1 << 64) - 1
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_LANES = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
"""The first values of the lanes."""
_AVALANCHE = 0x165667919E3779F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPE, _BLOCK = 64, 1024
"""Bytes of a stripe, which is a word for each lane, and of a block."""
_LAST, _MERGE = 121, 11
"""The places in the secret at which the words for the last stripe, and the words for the end, begin."""
_ROWS = 16
"""Blocks that one program of the first kernel adds up."""
_AHEAD = 64
"""Blocks that the second kernel mixes in a turn of its loop."""
_SHORTEST = 241
"""The fewest bytes: for shorter payloads, XXH3 is a different function."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(
    words: tl.tensor,
    secret: tl.tensor,
    sums: tl.tensor,
    blocks: tl.int32,
    stripes: tl.int32,
    last: tl.int64,
    ROWS: tl.constexpr,
) -> None:
    """Adds up each block.

    words: the bytes, as int64. secret: int64 [32]; first the words for all stripes, then the words for the
    last stripe. sums: int64 [blocks + 2, 8]; the sums of `blocks` whole blocks, the sums of a block of
    `stripes` stripes, and the sums of the stripe at word `last`, which may overlap with that block."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, 8)[None, :]
    is_last = row == blocks + 1
    first = tl.where(is_last, last, row.to(tl.int64) * 128)
    count = tl.where(row < blocks, 16, tl.where(row == blocks, stripes, tl.where(is_last, 1, 0)))
    total = tl.full((ROWS, 8), 0, tl.uint64)
    for stripe in tl.static_range(16):
        inside = stripe < count
        place = words + first + stripe * 8
        word = tl.load(place + lane, mask=inside, other=0).to(tl.uint64, bitcast=True)
        other = tl.load(place + (lane ^ 1), mask=inside, other=0).to(tl.uint64, bitcast=True)
        key = word ^ tl.load(secret + tl.where(is_last, 24, stripe) + lane).to(tl.uint64, bitcast=True)
        total += tl.where(inside, (key & 0xFFFFFFFF) * (key >> 32) + other, 0)
    tl.store(sums + row * 8 + lane, total.to(tl.int64, bitcast=True), mask=row < blocks + 2)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(sums: tl.tensor, secret: tl.tensor, lanes: tl.tensor, blocks: tl.int32, AHEAD: tl.constexpr) -> None:
    """Mixes the sums into `lanes`, int64 [8]."""
    lane = tl.arange(0, 8)
    key = tl.load(secret + 16 + lane).to(tl.uint64, bitcast=True)
    value = tl.load(lanes + lane).to(tl.uint64, bitcast=True)
    # so that sums are read while others are mixed
    for block in tl.range(0, blocks, loop_unroll_factor=AHEAD):
        value += tl.load(sums + block * 8 + lane).to(tl.uint64, bitcast=True)
        value = (value ^ (value >> 47) ^ key) * 0x9E3779B1
    value += tl.load(sums + blocks * 8 + lane).to(tl.uint64, bitcast=True)
    value += tl.load(sums + (blocks + 1) * 8 + lane).to(tl.uint64, bitcast=True)
    tl.store(lanes + lane, value.to(tl.int64, bitcast=True))


class Xxh3:
    """Hashes payloads of one length on one device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`takes` says which sizes are allowed."""
        assert self.takes(nbytes)
        self.nbytes = nbytes
        self._blocks, rest = divmod(nbytes - 1, _BLOCK)
        self._stripes = rest // _STRIPE
        self._secret = _to_tensor(_SECRET + _SECRET[_LAST : _LAST + _STRIPE], device)
        self._start = _to_tensor(struct.pack("<8Q", *_LANES), device)

    @staticmethod
    def takes(nbytes: int) -> bool:
        """Returns whether payloads of this size can be hashed: those of whole words, and long enough for
        XXH3's long form."""
        return nbytes >= _SHORTEST and nbytes % 8 == 0

    def add_up(self, payload: Tensor) -> Tensor:
        """Reads `payload`, uint8 on the device, on the current stream. Returns what `mix` needs of it."""
        rows = self._blocks + 2
        sums = torch.empty((rows, 8), dtype=torch.int64, device=payload.device)
        last = (self.nbytes - _STRIPE) // 8
        _add_up[(-(-rows // _ROWS),)](
            payload.view(torch.int64), self._secret, sums, self._blocks, self._stripes, last, ROWS=_ROWS
        )
        return sums

    def mix(self, sums: Tensor) -> Tensor:
        """Returns, on the device and by the current stream, the lanes that `merge` takes."""
        lanes = self._start.clone()
        _mix[(1,)](sums, self._secret, lanes, self._blocks, AHEAD=_AHEAD, num_warps=1)
        return lanes

    def merge(self, lanes: Tensor) -> int:
        """Returns the hash. `lanes` are on the host."""
        value = self.nbytes * _PRIME64_1
        keys = struct.unpack_from("<8Q", _SECRET, _MERGE)
        keyed = [lane & _MASK ^ key for lane, key in zip(lanes.tolist(), keys, strict=True)]
        for even, odd in zip(keyed[::2], keyed[1::2], strict=True):
            product = even * odd
            value += product & _MASK ^ product >> 64
        value &= _MASK
        value = (value ^ value >> 37) * _AVALANCHE & _MASK
        return value ^ value >> 32


def _to_tensor(words: bytes, device: torch.device) -> Tensor:
    """Returns 64-bit words as int64, because torch lacks operations for unsigned integers."""
    return torch.frombuffer(bytearray(words), dtype=torch.int64).to(device)
