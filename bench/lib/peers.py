"""Systems that do the same job, for benches that measure them in the same run, if they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import click


class PeerLookups(NamedTuple):
    """LMCache's `MooncakeLookupClient`: it hashes tokens with Python's built-in `hash` and asks the master once.

    It gets a Mooncake client that is open. Its own would not find the master: LMCache 0.5.6 names it `master_server_address` in the
    settings, where Mooncake 0.3.13 reads `master_server_addr` and otherwise asks 127.0.0.1:50051.
    """

    client: Any

    @classmethod
    def of(cls, store: Any, chunk_size: int) -> PeerLookups:
        """`store` is an open Mooncake client. Raises click.UsageError if LMCache is not installed."""
        if importlib.util.find_spec("lmcache") is None:
            raise click.UsageError("LMCache is not installed in this environment: pip install lmcache")
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.lookup_client.mooncake_lookup_client import MooncakeLookupClient
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.token_database import ChunkedTokenDatabase

        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(32, 2, chunk_size, 8, 128),
        )
        client = MooncakeLookupClient.__new__(MooncakeLookupClient)
        client.store = store
        client.token_database = ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(chunk_size=chunk_size), metadata)
        return cls(client)

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """Returns the keys that it looks for."""
        return [key.to_string() for _, _, key in self.client.token_database.process_tokens(list(tokens))]

    def lookup(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens it finds."""
        return int(self.client.lookup(tokens))
