"""Systems that do the same job, for benches that measure them in the same run, if they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import click


class PeerLookups(NamedTuple):
    """LMCache's `MooncakeLookupClient`: it hashes tokens with Python's built-in `hash` and asks the master once."""

    client: Any

    @classmethod
    def of(cls, master: str, chunk_size: int) -> PeerLookups:
        """Connects to the master (`host:port`). Raises click.UsageError if LMCache is not installed."""
        if importlib.util.find_spec("lmcache") is None:
            raise click.UsageError("LMCache is not installed in this environment: pip install lmcache")
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.lookup_client.mooncake_lookup_client import MooncakeLookupClient
        from lmcache.v1.metadata import LMCacheMetadata

        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(32, 2, chunk_size, 8, 128),
        )
        return cls(MooncakeLookupClient(LMCacheEngineConfig.from_defaults(chunk_size=chunk_size), metadata, master))

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """Returns the keys that it looks for."""
        return [key.to_string() for _, _, key in self.client.token_database.process_tokens(list(tokens))]

    def lookup(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens it finds."""
        return int(self.client.lookup(tokens))
