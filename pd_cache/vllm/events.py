"""KV events of chunks that were stored, or that a lookup found evicted, in vLLM's form."""

from __future__ import annotations

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

_LOCALITY = "REMOTE"


class ChunkEvents:
    """Makes the events of a request's chunks."""

    def __init__(self, *, chunk_size: int, block_size: int) -> None:
        """Tokens of a chunk, and of a block that has a hash."""
        self._chunk_size = chunk_size
        self._block_size = block_size
        self._per_chunk = chunk_size // block_size

    def stored(self, request: Request, first: int, last: int) -> list[BlockStored]:
        """Returns the event for each chunk from `first` to before `last`, which the pool has now."""
        per_chunk, size = self._per_chunk, self._chunk_size
        hashes = [maybe_convert_block_hash(value) for value in request.block_hashes[: last * per_chunk]]
        tokens, lora = request.all_token_ids, request.lora_request
        return [
            BlockStored(
                block_hashes=hashes[chunk * per_chunk : (chunk + 1) * per_chunk],
                parent_block_hash=hashes[chunk * per_chunk - 1] if chunk else None,
                token_ids=list(tokens[chunk * size : (chunk + 1) * size]),
                block_size=self._block_size,
                lora_id=lora.adapter_id if lora is not None else None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.name if lora is not None else None,
                group_idx=0,
                locality=_LOCALITY,
            )
            for chunk in range(first, last)
        ]

    def missing(self, request: Request, chunk: int) -> list[BlockRemoved]:
        """Returns the event for a chunk that the pool no longer has; none if the request has no hashes for it."""
        blocks = request.block_hashes[chunk * self._per_chunk : (chunk + 1) * self._per_chunk]
        if len(blocks) < self._per_chunk:
            return []
        hashes = [maybe_convert_block_hash(value) for value in blocks]
        return [BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=0, locality=_LOCALITY)]
