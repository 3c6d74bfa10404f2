"""Namespaces and names of chunks, without any engine."""

import msgspec

from pd_cache.chunks import ChunkedTokenDatabase, Namespace

NAMESPACE = Namespace(
    model="m@1", kv_dtype="bfloat16", layout="heads_first.2x4x32", layers=2, block_size=4, page_bytes=256, chunk_size=8, shards=1, hash_mode="tokens"
)  # fmt: skip


def database(**changes):
    """Of `NAMESPACE`, but for these fields."""
    return ChunkedTokenDatabase(msgspec.structs.replace(NAMESPACE, **changes))


def group(tail, *, layers="0", **changes):
    """Of a group of layers, of which a prefix needs the last `tail` chunks, or all if that is 0; None: of a
    model without groups."""
    return database(
        **({} if tail is None else {"group": layers, "keeps": "something", "tail": tail}), **changes
    )
