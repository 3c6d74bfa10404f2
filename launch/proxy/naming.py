"""By which hashes nodes and the pool know a prompt. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from launch.proxy.block_index import NamedPrompt
from pd_cache.block_hashes import BlockHasher
from pd_cache.tokens import ChunkedTokenDatabase, Namespace, salt_keys, stride_hashes


class Naming(NamedTuple):
    """A prompt's hashes, for the index and for a lookup in the pool."""

    prompt: NamedPrompt
    names: list[bytes]
    """Those of its whole chunks."""


class PromptNamer:
    """Hashes prompts as the nodes of one namespace do."""

    def __init__(self, namespace: Namespace, seeds: Collection[str] = ()) -> None:
        """`seeds`: others, besides this process's own, from which vLLM's block hashes may start.

        Raises UnknownHashesError or ValueError, which say why, if the hashes cannot be computed here.
        """
        self.fingerprint = namespace.fingerprint()
        self.chunk_size = namespace.chunk_size
        self._hasher = (
            BlockHasher(namespace.block_size, namespace.hash_seed, seeds) if namespace.hash_mode == "blocks" else None
        )
        self._database = ChunkedTokenDatabase(namespace)

    def name(self, tokens: list[int], salt: str | None) -> Naming:
        """Returns the hashes of a prompt. Raises ValueError if a token is none. Takes 0.3 µs a token."""
        if self._hasher is None:
            hashes, step = [], 1
            names = self._database.hash_tokens(tokens, salt_keys(salt))
        else:
            step = self._hasher.block_size
            hashes = self._hasher.hashes(tokens, salt)
            names = stride_hashes(hashes, self.chunk_size // step)
        return Naming(NamedPrompt.of(self.fingerprint, len(tokens), hashes, step, names, self.chunk_size), names)
