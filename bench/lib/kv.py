"""The bytes that benches move: a prompt's KV in a paged cache, and as many bytes in the memory of a raw
Mooncake client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import click
import numpy as np
import torch

from bench.lib.report import option
from pd_cache.cache import BlockCache, PromptCache
from pd_cache.layout import KVLayout
from pd_cache.tiers.memory import TRAILER_BYTES
from transfer.settings import TransferSettings
from transfer.staging import StagingPool

_ALL = slice(None)
_COPIED_TOGETHER = 64 << 20
"""Bytes of a batch of `CopiedPool`, the same as in the engine."""


CHUNK, BLOCK = 256, 16
"""Tokens of a chunk, and of a block of the paged cache."""
_KV_HEADS, _HEAD_DIM = 8, 128
Device = Literal["cpu", "cuda"]


def _device(context: click.Context, parameter: click.Parameter, value: Device) -> Device:
    if value == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter(f"torch {torch.__version__} finds no CUDA device here", context, parameter)
    return value


device_option = option(
    "--device",
    callback=_device,
    default="cpu",
    type=click.Choice(get_args(Device)),
    help="The device of the paged cache.",
)


class Shape(NamedTuple):
    """A prompt's KV cache; by default Llama-3.1-8B's, 128 KiB a token."""

    tokens: int = 4096
    """The prompt's tokens, a whole number of chunks."""
    layers: int = 32

    @property
    def chunks(self) -> int:
        return self.tokens // CHUNK

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens. Each number of K and V takes two bytes."""
        return self.tokens * self.layers * _KV_HEADS * 2 * _HEAD_DIM * 2

    @property
    def object_bytes(self) -> int:
        """The bytes of a chunk in the pool."""
        return self.nbytes // self.tokens * CHUNK + TRAILER_BYTES

    @property
    def pool_bytes(self) -> int:
        """The bytes of a pool that has room for the raw objects and for ours, so that the master evicts
        nothing."""
        return int(2.5 * self.chunks * self.object_bytes) + (256 << 20)

    @property
    def staging(self) -> TransferSettings:
        """Settings with staging memory for the prompt."""
        return TransferSettings(staging_size=max(self.nbytes, 64 << 20))


class RawPool:
    """Mooncake's batch calls from and into one registered buffer that holds all objects of a prompt."""

    def __init__(self, client: Any, memory: StagingPool, keys: list[str], object_bytes: int) -> None:
        """`memory` has a slot for each object."""
        self._client = client
        self._memory = memory
        assert client.register_buffer(memory.address, memory.nbytes) == 0
        self.slots = [slot for _ in keys if (slot := memory.lease(0.0)) is not None]
        self._addresses = [slot.address for slot in self.slots]
        self._sizes = [object_bytes] * len(keys)
        self.keys = keys
        self.object_bytes = object_bytes

    def put(self, part: slice = _ALL) -> None:
        """Puts all objects, or those of this part, with one call."""
        codes = self._client.batch_put_from(self.keys[part], self._addresses[part], self._sizes[part])
        assert not any(codes), codes

    def get(self, part: slice = _ALL) -> None:
        """Gets all objects, or those of this part, with one call."""
        sizes = self._sizes[part]
        assert self._client.batch_get_into(self.keys[part], self._addresses[part], sizes) == sizes

    def remove(self, keys: list[str]) -> None:
        assert not any(self._client.batch_remove(keys, True))


class FlatCopy:
    """One copy between pieces of host memory and as many contiguous bytes on the device: the least copy that
    a paged cache needs."""

    def __init__(self, pieces: Sequence[memoryview], device: torch.Tensor) -> None:
        """`device` is uint8 `[pieces, bytes of each]`. If it is on a GPU, the pieces have to be
        page-locked."""
        self._host = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces]
        self._device = device

    @classmethod
    def new(cls, pieces: Sequence[memoryview], device: Device) -> FlatCopy:
        """Takes new memory of the device."""
        return cls(pieces, torch.ones((len(pieces), len(pieces[0])), dtype=torch.uint8, device=device))

    def to_host(self, part: slice = _ALL) -> None:
        self._copy(self._host[part], self._device[part])

    def to_device(self, part: slice = _ALL) -> None:
        self._copy(self._device[part], self._host[part])

    def _copy(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            if self._device.device.type == "cpu":
                np.copyto(target.numpy(), source.numpy())  # torch's copy would use several threads
            else:
                target.copy_(source, non_blocking=True)
        settle(self._device)


def settle(tensor: torch.Tensor) -> None:
    """Waits for the tensor's device."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


class CopiedPool:
    """A `RawPool` for bytes in ordinary memory. Each batch is copied to or from registered memory while the
    previous call runs."""

    def __init__(self, raw: RawPool, device: Device) -> None:
        count = max(1, _COPIED_TOGETHER // raw.object_bytes)
        self._raw = raw
        self._caller = ThreadPoolExecutor(1)
        self._copy = FlatCopy.new([slot.view for slot in raw.slots], device)
        self._batches = [slice(first, first + count) for first in range(0, len(raw.keys), count)]

    def put(self) -> None:
        calls = []
        for batch in self._batches:
            self._copy.to_host(batch)
            calls.append(self._caller.submit(self._raw.put, batch))
        for call in calls:
            call.result()

    def get(self) -> None:
        calls = [self._caller.submit(self._raw.get, batch) for batch in self._batches]
        for batch, call in zip(self._batches, calls, strict=True):
            call.result()
            self._copy.to_device(batch)

    def close(self) -> None:
        self._caller.shutdown()


class PagedPrompt:
    """A prompt's KV in random blocks of a paged cache, and other random blocks into which it is loaded."""

    def __init__(self, shape: Shape, device: Device) -> None:
        blocks = shape.tokens // BLOCK
        size = (shape.layers, 2 * blocks, _KV_HEADS, BLOCK, 2 * _HEAD_DIM)
        self._bits = torch.randint(-(2**15), 2**15, size, dtype=torch.int16).to(device)
        self.tensors = {
            str(layer): tensor for layer, tensor in enumerate(self._bits.view(torch.bfloat16).unbind())
        }
        self.layout = KVLayout.from_tensors(self.tensors)
        self.device = device
        self.tokens, self.nbytes = list(range(shape.tokens)), shape.nbytes
        orders = (torch.randperm(blocks), blocks + torch.randperm(blocks))
        self._orders = [order.to(device) for order in orders]
        self.source, self.target = (
            (blocks_of.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten() for blocks_of in orders
        )

    def store(self, cache: BlockCache) -> None:
        """Stores the prompt. The cache's pool must hold none of it."""
        stored = PromptCache(cache).store(self.tokens, kv_caches=self.tensors, slot_mapping=self.source)
        assert stored == len(self.tokens), f"only {stored} tokens were stored"

    def retrieve(self, cache: BlockCache) -> None:
        """Loads the prompt into the target."""
        mask = PromptCache(cache).retrieve(self.tokens, kv_caches=self.tensors, slot_mapping=self.target)
        assert int(mask.sum()) == len(self.tokens), f"only {int(mask.sum())} tokens were loaded"

    def scramble(self) -> None:
        """Makes the target differ from the source everywhere."""
        source, target = self._orders
        self._bits[:, target] = self._bits[:, source] ^ 1
        settle(self._bits)

    def arrived(self) -> bool:
        """Returns whether source and target hold the same bytes."""
        source, target = self._orders
        return torch.equal(self._bits[:, source], self._bits[:, target])
