"""A model of hashes in place of a transformer, for tests of what vLLM's scheduler and the connector do with
blocks.

As in a transformer, a layer's KV at a place depends on all tokens up to it, and the next token on all KV
before it. So a block with other contents than it should have changes every token behind it, and the tokens
alone determine what it should have. A layer with a state keeps the sum of what other layers keep.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch

BLOCK = 16
VOCABULARY = 997
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Layer(NamedTuple):
    """What a layer keeps."""

    window: int = 0
    """The tokens that a token attends to; 0 for all."""
    block: int = BLOCK
    heads: int = 1
    latent: bool = False
    local: int = 0
    """A token attends only to those of its own part of the prompt. Each part has so many tokens."""
    state: Literal["", "at steps' ends", "anywhere"] = ""
    """Where the layer can hand over its state; empty for a layer of attention."""
    source: int | None = None
    """The layer whose KV this one reads, instead of KV of its own."""
    retained: int = 0
    """How many tokens before the window vLLM keeps, because MTP modules may compute the last ones again."""

    @property
    def words(self):
        """What a block has to hold."""
        return 1 if self.state else self.block

    def spec(self, page=None, drafts=0):
        """Returns vLLM's spec of it. `page`: the bytes of a page with a state. `drafts`: the most tokens that
        are drafted in a step."""
        from vllm.v1 import kv_cache_interface as vllm

        if self.state:
            exported = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
            return vllm.MambaSpec(
                block_size=self.block,
                shapes=((3, 5), (9,)),
                dtypes=(torch.float32, torch.bfloat16),
                page_size_padded=page,
                mamba_cache_mode="align",
                num_speculative_blocks=drafts,
                **(exported if self.state == "anywhere" else {}),
            )
        kept = {"block_size": self.block, "num_kv_heads": self.heads, "head_size": 8}
        kept["dtype"] = torch.float32
        if self.window:
            kind = vllm.SlidingWindowMLASpec if self.latent else vllm.SlidingWindowSpec
            return kind(**kept, sliding_window=self.window, extra_retained_tokens=self.retained)
        if self.local:
            return vllm.ChunkedLocalAttentionSpec(**kept, attention_chunk_size=self.local)
        return (vllm.MLAAttentionSpec if self.latent else vllm.FullAttentionSpec)(**kept)


def embedded(tokens, start, weights=0):
    """Returns the first layer's input for tokens, the first of which has the place `start`. Each number of
    `weights` is another model."""
    places = np.arange(start, start + len(tokens), dtype=np.uint64)
    with np.errstate(over="ignore"):
        return _mixed(np.array(tokens, dtype=np.uint64) + places * _STEP + np.uint64(weights << 32))


def kv(hidden, layer):
    """Returns the KV of the tokens that have these inputs of a layer."""
    with np.errstate(over="ignore"):
        return _mixed(hidden + np.uint64(layer + 7))


def attended(hidden, all_kv, layer):
    """Returns the output of a layer of attention for its last `len(hidden)` tokens. `all_kv`: that of these
    and of all tokens before them."""
    places = np.arange(len(all_kv))
    sums = np.concatenate([[np.uint64(0)], _sums(all_kv, 0)])
    first = np.maximum(0, places + 1 - layer.window) if layer.window else 0 * places
    if layer.local:
        first = places // layer.local * layer.local
    return _mixed(hidden ^ (sums[1:] - sums[first])[len(all_kv) - len(hidden) :])


def advanced(hidden, own_kv, start, state):
    """Returns the output of a layer with a state for its tokens, the first of which has the place `start`,
    and the state behind each of them. `state` is the one before them."""
    with np.errstate(over="ignore"):
        states = _sums(own_kv, start) + state
    return _mixed(hidden ^ states), states


def token(hidden):
    """Returns the token that follows the one with this output of the last layer."""
    return int(hidden % np.uint64(VOCABULARY))


def computed(tokens, weights, layers):
    """Returns what the layers keep of each token of a sequence, `[layers, tokens]`, and the outputs of the
    last layer."""
    hidden, kept = embedded(tokens, 0, weights), []
    for number, layer in enumerate(layers):
        kept.append(kv(hidden, number) if layer.source is None else kept[layer.source])
        if layer.state:
            hidden, kept[-1] = advanced(hidden, kept[-1], 0, np.uint64(0))
        else:
            hidden = attended(hidden, kept[-1], layer)
    return np.stack(kept), hidden


def _sums(some_kv, start):
    places = np.arange(start, start + len(some_kv), dtype=np.uint64)
    with np.errstate(over="ignore"):
        return np.cumsum(_mixed(some_kv + places * _STEP), dtype=np.uint64)


def _mixed(words):
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
