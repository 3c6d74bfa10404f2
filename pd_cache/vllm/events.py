"""KV events of chunks that were stored, in vLLM's form."""

from __future__ import annotations

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request


def describe_chunks(request: Request, first: int, last: int, *, chunk_size: int, block_size: int) -> list[BlockStored]:
    """Returns the event for each of a request's chunks from `first` to before `last`."""
    per_chunk = chunk_size // block_size
    hashes = [maybe_convert_block_hash(value) for value in request.block_hashes[: last * per_chunk]]
    tokens, lora = request.all_token_ids, request.lora_request
    return [
        BlockStored(
            block_hashes=hashes[chunk * per_chunk : (chunk + 1) * per_chunk],
            parent_block_hash=hashes[chunk * per_chunk - 1] if chunk else None,
            token_ids=list(tokens[chunk * chunk_size : (chunk + 1) * chunk_size]),
            block_size=block_size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora is not None else None,
            group_idx=0,
            locality="REMOTE",
        )
        for chunk in range(first, last)
    ]
