"""PromptChunks: which chunks a request has, how they are named, and how many of them a lookup may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ChunkedTokenDatabase, ExtraKey, fold_names, root, stride_hashes
from pd_cache.vllm.layers import KeptLayers, own_hit
from pd_cache.vllm.requests import TrackedRequest
from pd_cache.vllm.settings import Settings

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.request import Request


class PromptChunks:
    """One per engine, for all layer groups. Chunks cannot be named before `database` is set."""

    def __init__(
        self, settings: Settings, layers: Sequence[KeptLayers], hash_block_size: int, metrics: CacheMetrics
    ) -> None:
        """`hash_block_size` is the number of tokens of each of a request's block hashes."""
        self.size = settings.node.cache.chunk_tokens
        """Tokens per chunk."""
        self.layers = tuple(layers)
        self.tails = [group.tail(self.size) for group in layers]
        """For each layer group, how many of the last chunks a load needs; 0 for all."""
        self.ahead = max(group.ahead for group in layers)
        """1 if a layer group is ahead, so that a load leaves the last whole chunk to compute; otherwise 0."""
        self.database: ChunkedTokenDatabase | None = None
        self._divisible = all(group.divisible for group in layers)
        self._whole_blocks = settings.connector.recompute == "block"
        self._by_tokens = settings.node.cache.hash_mode == "tokens"
        self._hash_block_size = hash_block_size
        self._metrics = metrics

    @property
    def plain(self) -> bool:
        """Whether there is one layer group, of which a load needs every chunk."""
        return len(self.layers) == 1 and not self.tails[0]

    def nameable(self, tracked: TrackedRequest) -> bool:
        """Returns whether the request's chunks can be named. A prompt of embeddings has no tokens to hash, and without its digest an adapter
        could be taken for another. Counts a request without a digest once."""
        adapter = tracked.adapter
        if adapter is not None and not (digest := adapter.digest):
            if not tracked.refused:
                tracked.refused = True
                detail = f"adapter {adapter.name!r}: {adapter.detail or 'its files are still being read'}"
                self._metrics.trouble("lookup", adapter.why, detail=detail)
            return False
        if adapter is not None:
            tracked.identity = digest
        return not self._by_tokens or tracked.request.prompt_embeds is None

    def adapter_tag(self, tracked: TrackedRequest) -> str:
        """Returns what distinguishes the names of chunks of the request's adapter from those of others; empty without an adapter."""
        adapter = tracked.adapter
        if adapter is None or not tracked.identity:
            return ""
        named = () if self._by_tokens else (adapter.name, adapter.path)  # vLLM's hashes take these in
        return root((tracked.identity, *named)).hex()

    def most(self, request: Request) -> int:
        """Returns how many chunks are looked up. vLLM has to compute the last token, and some layers can be loaded only up to a chunk's
        end. If a group is ahead, a load leaves the last of these chunks to compute."""
        length: int = request.num_tokens
        if self._whole_blocks:
            return min(length // self.size, -(-self.loadable(request) // self.size) + self.ahead)
        return (length if self._divisible or self.ahead else length - 1) // self.size

    def loadable(self, request: Request) -> int:
        """Returns how many of a request's tokens may be loaded at most. vLLM has to compute the last one: its logits are needed."""
        length: int = request.num_tokens
        if not self._whole_blocks:
            return length - 1
        end = own_hit(length, self.layers)
        # a window or a state can be restored only at a chunk's end
        return end // self.size * self.size if any(self.tails) else end

    def names(self, tracked: TrackedRequest, count: int) -> list[bytes]:
        """Returns the names of the request's first `count` chunks, or of fewer if it has fewer whole chunks."""
        assert self.database is not None
        names, request = tracked.names, tracked.request
        if len(names) < count:
            if self._by_tokens:
                tracked.names = names = self.database.hash_tokens(list(request.all_token_ids), _isolation(tracked))
            else:
                stride = self.size // self._hash_block_size
                new = request.block_hashes[len(names) * stride : count * stride]
                further = stride_hashes(new, stride)
                # vLLM's hashes take in the adapter's name and path, and not its weights
                names += fold_names(further, tracked.identity) if tracked.identity else further
        return names[:count]

    def names_of(self, tracked: TrackedRequest, group: KeptLayers, first: int, last: int) -> list[bytes]:
        """Returns the names under which the pool has a group's chunks from `first` to before `last`."""
        return self.names(tracked, last + group.ahead)[first + group.ahead :]


def _isolation(tracked: TrackedRequest) -> tuple[ExtraKey, ...]:
    """Returns, for token mode, what keeps a request's chunks apart from those of other requests with the same tokens."""
    parts: list[ExtraKey] = []
    request = tracked.request
    if request.cache_salt:
        parts += ["salt", request.cache_salt]
    if tracked.identity:
        parts += ["lora", tracked.identity]
    for feature in request.mm_features:
        parts += ["mm", feature.identifier, feature.mm_position.offset]
    return tuple(parts)
