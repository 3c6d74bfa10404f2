"""Adapters for serving engines, with the API of LMCache's multi-process adapters in vLLM.

`SchedulerAdapter` and `WorkerAdapter` add little to a `RemoteCache`. Only their constructors and
`register_kv_caches` wait, because a scheduler may make thousands of calls a second. LMCache's API does not
say what happens after a failure. Here, a failed store is counted, and a failed retrieve reports the blocks
that the engine has to compute. The engine gets a block back only when the server cannot touch it any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pd_cache.chunks import ExtraKey
from pd_cache.layout import PageKind
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found
from pd_cache.server.client import RemoteCache, UnderWay
from pd_cache.server.link import Context
from pd_cache.server.protocol import EngineIdentity
from pd_cache.versions import PRESENT

_REMEMBERED = 65_536
"""How many finished requests a worker remembers, so that it does not report them again."""


class _Adapter:
    """The common part of both adapters."""

    def __init__(self, cache: RemoteCache) -> None:
        self._cache = cache
        self.metrics = cache.metrics
        self.chunk_size = cache.chunk_size

    @property
    def available(self) -> bool:
        """Whether the server is connected, and has the KV tensors if any were registered."""
        return self._cache.available

    def num_blocks_per_chunk(self) -> int:
        """Returns the number of the engine's blocks in a chunk."""
        return self._cache.blocks_per_chunk

    def reset(self, version: str | None = None) -> None:
        """Notes that the engine's weights have changed; see `LookupClient.reset`. Call it on the scheduler's
        adapter and on each worker's, before their next op. An op with another label moves nothing."""
        self._cache.reset(version)

    def shutdown(self) -> None:
        """Takes the KV cache back from the server and disconnects. Idempotent."""
        self._cache.close()


class SchedulerAdapter(_Adapter):
    """Lookups for an engine. Every failure is a miss, counted by its reason."""

    def __init__(
        self,
        server_url: str,
        context: Context[Any] | None,
        identity: EngineIdentity,
        *,
        connect_timeout_s: float = 10.0,
        lookup_timeout_s: float = 1.0,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Arguments and errors are those of `RemoteCache`. A lookup without an answer after
        `lookup_timeout_s` is a miss."""
        super().__init__(
            RemoteCache(
                server_url,
                identity,
                kind="scheduler",
                context=context,
                connect_timeout_s=connect_timeout_s,
                lookup_timeout_s=lookup_timeout_s,
                metrics=metrics,
            )
        )
        self._lookups: dict[str, UnderWay[Found]] = {}
        """The lookups, by request."""

    @property
    def label(self) -> str | None:
        """The label of the engine's weights, for `LoadStoreOp.label`; None while the engine is out."""
        return self._cache.label

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: list[bytes] | None = None,
        token_ids: list[int] | None = None,
        *,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> None:
        """Begins a lookup for a request, unless one has already begun.

        Needs either `block_hashes` (hash mode, one per block) or `token_ids` (token mode). Raises ValueError
        for both or neither. The server protects the found chunks from eviction until they are retrieved,
        until `end_session`, or until the session's deadline. `extra_keys` is the request's isolation (cache
        salt, LoRA name, ...), in token mode.
        """
        if request_id not in self._lookups:
            names = self._cache.name_chunks(token_ids, block_hashes, extra_keys)
            self._lookups[request_id] = self._cache.begin_lookup(names, session=request_id)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Returns how many tokens of the request's prefix the cache holds; None while the lookup is under
        way.

        Raises ValueError for a request without a submitted lookup.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            raise ValueError(f"no lookup was submitted for request {request_id!r}")
        return lookup.wait().chunks * self.chunk_size if lookup.query() else None

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forgets a request's lookup, so that a later lookup with the same id is new. Does nothing if there
        is none."""
        self._lookups.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        """Informs the server that a request has ended. The server then stops protecting the found chunks."""
        self._cache.end(request_id)


@dataclass
class LoadStoreOp:
    """Tokens to load or store, and the blocks for their KV.

    In hash mode, `block_hashes` has one hash for each of `block_ids`. In token mode, `token_ids` is the whole
    prompt, because a chunk's name depends on everything before it, and `block_ids` are those of the tokens
    from `start` to `end`.
    """

    block_ids: list[int]
    token_ids: list[int] | None = None
    block_hashes: list[bytes] | None = None
    start: int = 0
    """Token mode: a whole number of chunks."""
    end: int = 0
    """Token mode: tokens after the last whole chunk are left out."""
    extra_keys: tuple[ExtraKey, ...] = ()
    """Token mode: the request's isolation."""
    label: str | None = PRESENT
    """The label of the weights (`SchedulerAdapter.label`). For a store, read the label before the first of
    these tokens is computed."""

    def __len__(self) -> int:
        return len(self.block_ids)


class _Submitted(NamedTuple):
    """A store or retrieve under way."""

    request_id: str
    pending: UnderWay[Any]
    blocks: Sequence[int]


class WorkerAdapter(_Adapter):
    """Stores and retrieves for a rank of an engine. For use by one thread."""

    def __init__(
        self,
        server_url: str,
        context: Context[Any] | None,
        identity: EngineIdentity,
        *,
        connect_timeout_s: float = 10.0,
        move_timeout_s: float = 15.0,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Arguments and errors are those of `RemoteCache`. A store or retrieve is given up after
        `move_timeout_s`."""
        super().__init__(
            RemoteCache(
                server_url,
                identity,
                context=context,
                connect_timeout_s=connect_timeout_s,
                move_timeout_s=move_timeout_s,
                metrics=metrics,
            )
        )
        self._stores: list[_Submitted] = []
        self._retrieves: list[_Submitted] = []
        self._waiting: set[str] = set()
        """Requests that the engine has finished while their stores still run."""
        self._reported: OrderedDict[str, None] = OrderedDict()
        """Requests whose stores were reported as finished, the latest last."""
        self._bad_blocks: set[int] = set()

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor], layout_kind: PageKind | None = None
    ) -> None:
        """Lends the paged KV cache to the server: layer names to tensors, in layer order.

        CPU tensors move to shared memory, in place. `layout_kind` is needed only if shapes fit two kinds
        (`KVLayout`). Raises ServerRefusedError, with the server's reason, if the server does not take the
        tensors, and SharingError if they cannot be shared.
        """
        self._cache.register_kv_caches(kv_caches, layout_kind)

    def submit_store_request(self, request_id: str, op: LoadStoreOp, event: Any = None) -> None:
        """Begins to store. The blocks must stay as they are until `get_finished` reports the request.

        event: the CUDA event, made with `interprocess=True`, that was recorded after the blocks were
        computed; None on a CPU. Raises ValueError, before anything moves, for an op that does not fit.
        """
        self.batched_submit_store_requests([request_id], [op], event)

    def submit_retrieve_request(self, request_id: str, op: LoadStoreOp, event: Any = None) -> None:
        """Begins to load. The server may write to the blocks until `get_finished` reports the request.

        Arguments as for `submit_store_request`. `get_block_ids_with_load_errors` returns the blocks that were
        not loaded.
        """
        self.batched_submit_retrieve_requests([request_id], [op], event)

    def batched_submit_store_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], event: Any = None
    ) -> None:
        """Begins a store for each request, as `submit_store_request` does; each ends by itself. Raises
        ValueError for an op that does not fit, before any store begins."""
        for request_id, op, names, blocks in self._checked(request_ids, ops):
            pending = self._cache.begin_store(names, blocks, session=request_id, after=event, label=op.label)
            self._stores.append(_Submitted(request_id, pending, ()))
            self._reported.pop(request_id, None)

    def batched_submit_retrieve_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], event: Any = None
    ) -> None:
        """Begins a retrieve for each request, as `submit_retrieve_request` does; each ends by itself. Raises
        ValueError for an op that does not fit, before any retrieve begins."""
        for request_id, op, names, blocks in self._checked(request_ids, ops):
            pending = self._cache.begin_retrieve(
                names, blocks, session=request_id, after=event, label=op.label
            )
            self._retrieves.append(_Submitted(request_id, pending, list(op.block_ids)))

    def get_finished(self, finished_req_ids_from_engine: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose stores have ended since the last call, and those whose retrieves have
        ended. Cheap, never waits.

        The first set holds only requests that the engine has passed to this method as finished, now or
        before. Each request is returned once, even if the engine passes it again (as vLLM does with
        asynchronous scheduling). A request without a store is returned immediately. Failed stores and
        retrieves are included: see `get_block_ids_with_load_errors`.
        """
        self._stores = [op for op in self._stores if not op.pending.query()]
        ended = [op for op in self._retrieves if op.pending.query()]
        self._retrieves = [op for op in self._retrieves if op not in ended]
        for op in ended:
            self._bad_blocks.update(op.blocks[op.pending.wait().chunks * self._cache.blocks_per_chunk :])
        retrieved = {op.request_id for op in ended} - {op.request_id for op in self._retrieves}
        self._waiting |= {
            request_id for request_id in finished_req_ids_from_engine if request_id not in self._reported
        }
        stored = self._waiting - {op.request_id for op in self._stores}
        self._waiting -= stored
        self._reported.update(dict.fromkeys(stored))
        while len(self._reported) > _REMEMBERED:
            self._reported.popitem(last=False)
        return stored, retrieved

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of ended retrieves that hold no loaded KV, so that the engine must compute them.
        Each block is returned once."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # --- inside ---------------------------------------------------------------------------------------------

    def _checked(
        self, request_ids: Sequence[str], ops: Sequence[LoadStoreOp]
    ) -> list[tuple[str, LoadStoreOp, list[bytes], list[int]]]:
        """Returns each request with its op, the names of the op's chunks, and their blocks. Raises ValueError
        for an op that does not fit."""
        if len(request_ids) != len(ops):
            raise ValueError(
                f"got {len(request_ids)} request ids and {len(ops)} ops; expected one op for each request"
            )
        size = self._cache.blocks_per_chunk
        return [
            (request_id, op, names := self._names(op), op.block_ids[: len(names) * size])
            for request_id, op in zip(request_ids, ops, strict=True)
        ]

    def _names(self, op: LoadStoreOp) -> list[bytes]:
        if op.block_hashes is not None and op.token_ids is None:
            if len(op.block_hashes) != len(op.block_ids):
                raise ValueError(
                    f"{len(op.block_hashes)} block hashes for {len(op.block_ids)} blocks: one each"
                )
            return self._cache.name_chunks(None, op.block_hashes)
        if op.token_ids is None or op.block_hashes is not None:
            raise ValueError("exactly one of token_ids and block_hashes must be given")
        start, end = op.start, op.end
        if not 0 <= start <= end <= len(op.token_ids) or start % self.chunk_size:
            raise ValueError(
                f"start {start} and end {end} must lie in order within the {len(op.token_ids)} tokens, and start be a "
                f"multiple of {self.chunk_size}"
            )
        names = self._cache.name_chunks(op.token_ids[:end], None, op.extra_keys)[start // self.chunk_size :]
        if len(op.block_ids) < len(names) * self._cache.blocks_per_chunk:
            raise ValueError(
                f"the {len(names)} chunks from token {start} to {end} lie in {len(names) * self._cache.blocks_per_chunk} blocks, "
                f"got {len(op.block_ids)}"
            )
        return names
