"""Decides from the settings and the model how much of a prompt is looked up, loaded and stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pd_cache.vllm.layers import KeptLayers, own_hit
from pd_cache.vllm.settings import Settings

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.request import Request


@dataclass(frozen=True)
class ChunkPlan:
    """The properties of the settings and the model that decide what is loaded and stored. The same for all
    requests."""

    settings: Settings
    layers: Sequence[KeptLayers]
    """The layer groups, as `kept_layers` returns them."""
    hash_block_size: int
    """Tokens of each block hash of a request."""
    stores: bool = True
    """Whether the engine stores chunks. A consumer does not."""
    ranks: int = 1
    """The number of ranks of all pipeline stages together."""
    dense: bool = False
    """Whether to store all chunks of layers with a window, because vLLM, too, keeps more of them than the
    ends of prompts (`prefix_cache_retention_interval`)."""
    drafted_up_to: int | None = None
    """The draft model runs in a step if no request of the step has more tokens than this; None without a
    draft model."""
    hashes_media: bool = False
    """Whether vLLM names images by a hash of their content, unless the client names them. Otherwise vLLM
    numbers images."""

    @cached_property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return self.settings.node.cache.chunk_tokens

    @cached_property
    def tails(self) -> list[int]:
        """For each layer group, how many of the last chunks a load needs; 0 for all."""
        return [group.tail(self.chunk) for group in self.layers]

    @cached_property
    def ahead(self) -> int:
        """1 if a layer group is ahead, so that vLLM must compute the last whole chunk; otherwise 0."""
        return max(group.ahead for group in self.layers)

    @cached_property
    def plain(self) -> bool:
        """Whether there is a single layer group, and a load needs all of its chunks."""
        return len(self.layers) == 1 and not self.tails[0]

    @cached_property
    def _divisible(self) -> bool:
        return all(group.divisible for group in self.layers)

    def most(self, request: Request) -> int:
        """Returns how many chunks to look up. vLLM has to compute the last token, and some layers can be
        loaded only up to a chunk's end. If a group is ahead, vLLM computes the last of these chunks."""
        length: int = request.num_tokens
        if self.settings.connector.recompute == "block":
            return min(length // self.chunk, -(-self.loadable(request) // self.chunk) + self.ahead)
        return (length if self._divisible or self.ahead else length - 1) // self.chunk

    def loadable(self, request: Request) -> int:
        """Returns the most tokens that may be loaded. vLLM has to compute the last token, because it needs
        its logits."""
        length: int = request.num_tokens
        if self.settings.connector.recompute == "token":
            return length - 1
        end = own_hit(length, self.layers)
        # a window or a state can be restored only at a chunk's end
        return end // self.chunk * self.chunk if any(self.tails) else end

    def needed_blocks(self, request: Request, end: int) -> int:
        """Returns the most blocks that the request holds until all of its tokens are computed, if the tokens
        before `end` are loaded."""
        total = 0
        # counted by vLLM's number, because a draft model's group may use the same blocks as another group
        for group in {group.number: group for group in self.layers}.values():
            blocks = -(-request.num_tokens // group.block_size)
            if group.kind == "window":
                blocks -= max(0, end - group.window + 1) // group.block_size
            elif group.kind == "state":
                # one block for the state that was loaded, one for the state that is computed, and one for a
                # boundary between them
                blocks = min(blocks, 3)
            total += blocks
        return total
