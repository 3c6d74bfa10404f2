"""SchedulerAdapter: what a serving engine's scheduler asks a cache server. Nothing here waits, but the constructor.

The API is that of `LMCacheMPSchedulerAdapter` in vLLM. A scheduler may call it thousands of times a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pd_cache.metrics import CacheMetrics
from pd_cache.server.channel import Context, Future
from pd_cache.server.client import CacheClient, failure_of
from pd_cache.server.messages import Found
from pd_cache.tokens import ExtraKey


class SchedulerAdapter:
    """Lookups for one engine. Whatever goes wrong is a miss, with a counter that tells the reason."""

    def __init__(
        self,
        server_url: str,
        context: Context[Any] | None,
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
        *,
        chunk_size: int | None = None,
        held: int = 1,
        hash_mode: Literal["", "tokens", "blocks"] = "",
        hash_seed: str = "",
        connect_timeout_s: float = 10.0,
        lookup_timeout_s: float = 1.0,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Connect to the server at `server_url`, e.g. `ipc:///run/pd-cache.sock`.

        context: a ZMQ context to use, None for one of our own. model_name: what identifies the weights. world_size: ranks
        that hold a part of each chunk, each `held` shards of it. kv_rank: this one's. vllm_block_size: tokens a block of the engine's paged cache.

        hash_mode, hash_seed: whether this engine names chunks by `tokens` or by its own `blocks`' hashes, and what those depend
        on besides tokens, where the server's file leaves it open (`cache.hash_mode: auto`); empty for what the file says.

        Waits up to `connect_timeout_s` for the server to tell its chunk size, unless `chunk_size` is given. A lookup without an
        answer after `lookup_timeout_s` is a miss. CacheServerError if the server is not there or does not take this engine,
        ValueError for a chunk size that is no multiple of the block size.
        """
        self.metrics = metrics or CacheMetrics()
        self._timeout_s = lookup_timeout_s
        self._lookups: dict[str, Future | int] = {}
        """By request: the answer to come, or the tokens found."""
        self._client = CacheClient(
            server_url,
            context,
            kind="scheduler",
            model=model_name,
            world_size=world_size,
            rank=kv_rank,
            block_size=vllm_block_size,
            chunk_size=chunk_size,
            held=held,
            hash_mode=hash_mode,
            hash_seed=hash_seed,
            connect_timeout_s=connect_timeout_s,
        )
        self.chunk_size = self._client.chunk_size
        self._blocks_per_chunk = self._client.blocks_per_chunk

    @property
    def available(self) -> bool:
        """Whether the server is there."""
        return self._client.ready

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: list[bytes] | None = None,
        token_ids: list[int] | None = None,
        *,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> None:
        """Begin a lookup for a request, unless one was begun already.

        Exactly one of `block_hashes` (one per block; hash mode) and `token_ids` (token mode); ValueError otherwise. What is
        found is kept from eviction until it is retrieved, `end_session`, or the session's deadline at the server.
        `extra_keys` is the request's isolation (cache salt, LoRA name, ...), in token mode.
        """
        if request_id in self._lookups:
            return
        names = self._client.name_chunks(token_ids, block_hashes, extra_keys)
        self._lookups[request_id] = self._client.lookup(request_id, names, timeout=self._timeout_s) if names else 0

    def check_lookup_result(self, request_id: str) -> int | None:
        """How many tokens of the request's prefix the cache holds; None while the lookup is under way.

        ValueError for a request that no lookup was submitted for.
        """
        result = self._lookups.get(request_id)
        if result is None:
            raise ValueError(f"no lookup was submitted for request {request_id!r}")
        if isinstance(result, Future):
            if not result.query():
                return None
            result = self._lookups[request_id] = self._tokens(result)
        return result

    def num_blocks_per_chunk(self) -> int:
        """The engine's blocks in a chunk."""
        return self._blocks_per_chunk

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a request's lookup; nothing happens if there is none. A later lookup of that name is a new one."""
        self._lookups.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        """Tell the server that a request has ended: what its lookup found needs to be kept no longer."""
        self._client.end_session(request_id)

    def shutdown(self) -> None:
        """Disconnect. Idempotent."""
        self._client.close()

    def _tokens(self, future: Future) -> int:
        reason = failure_of(future)
        answer = None if reason else future.result()
        if isinstance(answer, Found):
            return answer.chunks * self.chunk_size
        self.metrics.trouble("lookup", reason or "nonsense")
        return 0
