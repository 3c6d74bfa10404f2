"""A model of hashes in place of a transformer, for tests of what vLLM's scheduler and the connector do with
blocks.

As in a transformer, a layer's KV at a place depends on all tokens up to it, and the next token on all KV
before it. So a block with other contents than it should have changes every token behind it, and the tokens
alone determine what it should have.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

LAYERS = 3
VOCABULARY = 997
_STEP = np.uint64(0x9E3779B97F4A7C15)


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


def attended(hidden, all_kv, window=0):
    """Returns a layer's output for its last `len(hidden)` tokens. `all_kv`: that of these and of all tokens
    before them. Each token attends to the last `window` tokens, itself included; to all with 0."""
    places = np.arange(len(all_kv), dtype=np.uint64)
    with np.errstate(over="ignore"):
        sums = np.cumsum(_mixed(all_kv + places * _STEP))
        if window:
            sums[window:] -= sums[:-window].copy()
    return _mixed(hidden ^ sums[len(all_kv) - len(hidden) :])


def token(hidden):
    """Returns the token that follows the one with this output of the last layer."""
    return int(hidden % np.uint64(VOCABULARY))


def computed(tokens, weights=0, windows=(0,) * LAYERS):
    """Returns the KV of a whole sequence, `[layers, tokens]`, and the outputs of the last layer. `windows`
    are those of the layers."""
    hidden, layers = embedded(tokens, 0, weights), []
    for layer in range(LAYERS):
        layers.append(kv(hidden, layer))
        hidden = attended(hidden, layers[-1], windows[layer])
    return np.stack(layers), hidden


def _mixed(words):
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
