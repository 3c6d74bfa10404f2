"""A Llama with seeded random weights: the same numbers on every node, without transformers.

Importing transformers takes more CPU time than everything else that an engine does until it is ready, and its way of drawing weights may
change between versions. Here, a seed is one model whichever version is installed. The weights have the names and the arithmetic of
transformers' `LlamaForCausalLM`, so that one can be checked against the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from launch.engines.reference.attention import paged_attention
from launch.engines.reference.causal import ModelShape
from pd_cache.cluster import RandomModel

_EPSILON = 1e-6
"""The epsilon of the norms, whose weights are all one."""
_ROPE_BASE = 10_000.0
_DEVIATION = 0.02
"""Standard deviation of the weights."""

_Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a layer's number, queries `[1, heads, rows, head_dim]`, and keys and values `[1, kv_heads, rows, head_dim]` to `[1, rows, heads,
head_dim]`."""


class RandomLlama:
    """A `CausalLM`, see there."""

    def __init__(self, random: RandomModel, dtype: torch.dtype) -> None:
        self.shape = ModelShape(
            vocab_size=random.vocab_size,
            layers=random.layers,
            kv_heads=random.kv_heads,
            head_dim=random.hidden_size // random.heads,
            eos_token_ids=frozenset(),
        )
        self._heads = random.heads
        generator = torch.Generator().manual_seed(random.seed)
        # drawn in float32 whatever the dtype, so that a seed is one model
        self.weights = {
            name: (torch.randn(rows, columns, generator=generator) * _DEVIATION).to(dtype)
            for name, rows, columns in _weights(random, self.shape.head_dim)
        }

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._logits(tokens, positions, rows, self._over_pages)

    def own_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        last = torch.tensor([len(tokens) - 1])
        return self._logits(tokens, torch.arange(len(tokens)), last, self._over_this_text)[0]

    def _logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: _Attend
    ) -> torch.Tensor:
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        rotation = self._rotation(positions, hidden.dtype)
        for layer in range(self.shape.layers):
            hidden = hidden + self._attention(layer, _norm(hidden), rotation, attend)
            hidden = hidden + self._mlp(layer, _norm(hidden))
        return functional.linear(_norm(hidden)[rows], self.weights["lm_head.weight"])

    def _attention(
        self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: _Attend
    ) -> torch.Tensor:
        def heads_of(name: str, count: int) -> torch.Tensor:
            projected = self._linear(layer, f"self_attn.{name}", hidden)
            return projected.view(1, len(hidden), count, self.shape.head_dim).transpose(1, 2)

        query = _rotate(heads_of("q_proj", self._heads), rotation)
        key = _rotate(heads_of("k_proj", self.shape.kv_heads), rotation)
        value = heads_of("v_proj", self.shape.kv_heads)
        return self._linear(layer, "self_attn.o_proj", attend(layer, query, key, value).reshape(len(hidden), -1))

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self._linear(layer, "mlp.gate_proj", hidden))
        return self._linear(layer, "mlp.down_proj", gate * self._linear(layer, "mlp.up_proj", hidden))

    def _linear(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weights[f"model.layers.{layer}.{name}.weight"])

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines, each `[rows, head_dim]`."""
        dim = self.shape.head_dim
        frequencies = 1.0 / _ROPE_BASE ** (torch.arange(0, dim, 2).float() / dim)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _over_pages(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return paged_attention(layer, query, key, value, scaling=1 / math.sqrt(self.shape.head_dim))

    def _over_this_text(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = self._heads // self.shape.kv_heads
        attended = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=True
        )
        return attended.transpose(1, 2)


def _weights(random: RandomModel, head_dim: int) -> Iterator[tuple[str, int, int]]:
    """Yields name, rows and columns of each matrix, in the order in which they are drawn."""
    hidden, inner = random.hidden_size, random.intermediate_size
    yield "model.embed_tokens.weight", random.vocab_size, hidden
    for layer in range(random.layers):
        for name, rows, columns in (
            ("self_attn.q_proj", random.heads * head_dim, hidden),
            ("self_attn.k_proj", random.kv_heads * head_dim, hidden),
            ("self_attn.v_proj", random.kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, random.heads * head_dim),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"model.layers.{layer}.{name}.weight", rows, columns
    yield "lm_head.weight", random.vocab_size, hidden


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    exact = hidden.float()
    return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + _EPSILON)).to(hidden.dtype)


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosines, sines = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
