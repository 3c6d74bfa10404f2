"""Computes vLLM's block hashes without vLLM, for programs that know a prompt's tokens and look up what vLLM has stored of it.

In vLLM 0.32 (`v1/core/kv_cache_utils.py`) a block's hash is the hash of a pickled tuple: the hash of the block before it, its token ids,
and whatever else its KV depends on (for a plain request, the `cache_salt`, in the first block only). The first block follows the hash of
a seed: PYTHONHASHSEED if that is set, otherwise a fixed string.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterable, Sequence

from pd_cache.errors import PdCacheError

_ALGORITHM = "sha256"
"""vLLM's default."""
_DEFAULT_SEED = "vllm-none-hash"
SEED_VARIABLE = "PYTHONHASHSEED"


class UnknownHashesError(PdCacheError):
    """Block hashes that only the engine itself can compute."""


def describe_hashes(algorithm: str, seed: str, own: str, step: int | None = None) -> str:
    """Returns what vLLM's block hashes depend on besides tokens, for `Namespace.hash_seed`. `own` is the `hash_seed` of the cluster's
    file. `step`: the tokens of each hash, if those are not the tokens of a block.

    The description holds a digest of the seed, so that a node with the same seed can recognise it. The digest keeps no secret:
    PYTHONHASHSEED has 32 bits, so anyone who sees the digest can find it. The seed need not be secret for sha256; for xxhash, vLLM
    expects it to be.
    """
    every = "" if step is None else f"/{step}"
    return f"{algorithm}{every}:{_digest(seed)}:{own}"


class BlockHasher:
    """Hashes blocks as the engines of one namespace do."""

    def __init__(self, block_size: int, described: str, seeds: Iterable[str] = ()) -> None:
        """`block_size` is the namespace's, and `described` what `describe_hashes` returned. `seeds` are further candidates for its seed, besides this process's own and the
        default.

        Raises UnknownHashesError, which says why, if the hashes cannot be computed here.
        """
        named, _, rest = described.partition(":")
        algorithm, _, step = named.partition("/")
        if algorithm != _ALGORITHM:
            known = algorithm or "hashes of its own"
            raise UnknownHashesError(
                f"the engine names its blocks by {known}, and only vLLM's {_ALGORITHM} is known here"
            )
        digest = rest.partition(":")[0]
        candidates = (_DEFAULT_SEED, os.environ.get(SEED_VARIABLE), *seeds)
        seed = next((seed for seed in candidates if seed is not None and _digest(seed) == digest), None)
        if seed is None:
            raise UnknownHashesError(
                f"vLLM's block hashes start from another seed than here: set {SEED_VARIABLE} to what it is there"
            )
        self.block_size = int(step) if step.isdecimal() and int(step) else block_size
        """The tokens of each hash."""
        self._root = _hash(seed)

    def hashes(self, tokens: Sequence[int], cache_salt: str | None = None) -> list[bytes]:
        """Returns the chained hash of each whole block, 32 bytes each."""
        step, previous = self.block_size, self._root
        extra: tuple[tuple[str, str], ...] | None = (("cache_salt", cache_salt),) if cache_salt else None
        hashes = []
        for start in range(0, len(tokens) - step + 1, step):
            previous = _hash((previous, tuple(tokens[start : start + step]), extra))
            hashes.append(previous)
            extra = None
        return hashes


def _hash(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _digest(seed: str) -> str:
    return hashlib.sha256(seed.encode()).hexdigest()[:16]
