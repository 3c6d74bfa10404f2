"""The model: a Llama with seeded random weights, steps of it over the paged buffer, and the choice of the next token."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch.nn import functional

from launch.engines.reference.attention import (
    ROW_QUANTUM,
    ContextRows,
    PagedKV,
    PagedStep,
    attending,
    cut_segments,
    paged_attention,
    round_up,
)
from pd_cache.cluster import RandomModel, ReferenceEngineConfig


class StepPart(NamedTuple):
    """The tokens of one request in a step."""

    tokens: Sequence[int]
    position: int
    """Position of the first of them; everything before it is in the pages already."""
    blocks: Sequence[int]
    """The blocks that the request owns, in order."""
    wants_logits: bool
    """Whether the last of these tokens predicts a token that is wanted."""


class PagedModel:
    """A model whose attention reads one paged buffer. Not thread-safe: one thread computes.

    `load_model` makes it. `kv` is the buffer, `identity` identifies the weights for the cache's namespace.
    """

    def __init__(self, model: RandomLlama, name: str, identity: str, kv: PagedKV, max_context: int) -> None:
        self.name = name
        self.identity = identity
        self.kv = kv
        self.vocab_size = model.vocab_size
        self._model = model
        self._max_context = max_context

    @torch.inference_mode()
    def step(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Computes the tokens of all parts and leaves their KV in the pages.

        Returns float32 logits `[parts that want some, vocab_size]`, in the order of the parts.
        """
        kv = self.kv
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[ContextRows] = []
        slots: list[torch.Tensor] = []
        wanted: list[int] = []
        for part in parts:
            count = len(part.tokens)
            end = part.position + count
            blocks = part.blocks[: round_up(end, kv.block_size) // kv.block_size]
            segments += cut_segments(len(tokens), part.position, count, blocks, kv.block_size)
            slots.append(kv.slots(blocks, end)[part.position :])
            tokens += part.tokens
            positions += range(part.position, end)
            if part.wants_logits:
                wanted.append(len(tokens) - 1)
        padding = [0] * (round_up(len(tokens), ROW_QUANTUM) - len(tokens))
        rows = wanted + wanted[-1:] * (round_up(len(wanted), ROW_QUANTUM) - len(wanted))
        step = PagedStep(kv, torch.cat(slots), tuple(segments), self._max_context)
        with attending(step):
            logits = self._model.step(
                torch.tensor(tokens + padding), torch.tensor(positions + padding), torch.tensor(rows, dtype=torch.int64)
            )
        return logits[: len(wanted)].float()


def load_model(config: ReferenceEngineConfig) -> PagedModel:
    """Draws the model that `config.model` describes, and allocates its paged buffer."""
    model = RandomLlama(config.model.random, getattr(torch, config.dtype))
    kv = PagedKV(
        layers=model.layers,
        num_blocks=config.num_blocks,
        kv_heads=model.kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=getattr(torch, config.dtype),
    )
    return PagedModel(
        model, config.model.name, _random_identity(config.model.random, config.dtype), kv, config.max_model_len
    )


def _random_identity(random: RandomModel, dtype: str) -> str:
    described = json.dumps({"dtype": dtype, **msgspec.to_builtins(random)}, sort_keys=True)
    return f"random-llama-2:{hashlib.sha256(described.encode()).hexdigest()[:32]}"


_EPSILON = 1e-6
"""The epsilon of the norms, whose weights are all one."""
_ROPE_BASE = 10_000.0
_DEVIATION = 0.02
"""Standard deviation of the weights."""

_Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a layer's number, queries `[1, heads, rows, head_dim]`, and keys and values `[1, kv_heads, rows, head_dim]` to `[1, rows, heads,
head_dim]`."""


class RandomLlama:
    """A causal language model whose layers attend with `attention.paged_attention`. Called in inference mode."""

    def __init__(self, random: RandomModel, dtype: torch.dtype) -> None:
        self.vocab_size = random.vocab_size
        self.layers = random.layers
        self.kv_heads = random.kv_heads
        self.head_dim = random.hidden_size // random.heads
        self._heads = random.heads
        generator = torch.Generator().manual_seed(random.seed)
        # drawn in float32 whatever the dtype, so that a seed is one model
        self.weights = {
            name: (torch.randn(rows, columns, generator=generator) * _DEVIATION).to(dtype)
            for name, rows, columns in _weights(random, self.head_dim)
        }

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Computes tokens, int64 `[count]`, at their positions. Returns the logits `[len(rows), vocab_size]` of the wanted rows."""
        return self._logits(tokens, positions, rows, self._over_pages)

    def own_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits `[vocab_size]` of a text's last token, computed in one go, without pages."""
        last = torch.tensor([len(tokens) - 1])
        return self._logits(tokens, torch.arange(len(tokens)), last, self._over_this_text)[0]

    def _logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: _Attend
    ) -> torch.Tensor:
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        rotation = self._rotation(positions, hidden.dtype)
        for layer in range(self.layers):
            hidden = hidden + self._attention(layer, _norm(hidden), rotation, attend)
            hidden = hidden + self._mlp(layer, _norm(hidden))
        return functional.linear(_norm(hidden)[rows], self.weights["lm_head.weight"])

    def _attention(
        self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: _Attend
    ) -> torch.Tensor:
        def heads_of(name: str, count: int) -> torch.Tensor:
            projected = self._linear(layer, f"self_attn.{name}", hidden)
            return projected.view(1, len(hidden), count, self.head_dim).transpose(1, 2)

        query = _rotate(heads_of("q_proj", self._heads), rotation)
        key = _rotate(heads_of("k_proj", self.kv_heads), rotation)
        value = heads_of("v_proj", self.kv_heads)
        return self._linear(layer, "self_attn.o_proj", attend(layer, query, key, value).reshape(len(hidden), -1))

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self._linear(layer, "mlp.gate_proj", hidden))
        return self._linear(layer, "mlp.down_proj", gate * self._linear(layer, "mlp.up_proj", hidden))

    def _linear(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weights[f"model.layers.{layer}.{name}.weight"])

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines, each `[rows, head_dim]`."""
        dim = self.head_dim
        frequencies = 1.0 / _ROPE_BASE ** (torch.arange(0, dim, 2).float() / dim)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _over_pages(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return paged_attention(layer, query, key, value, scaling=1 / math.sqrt(self.head_dim))

    def _over_this_text(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = self._heads // self.kv_heads
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


_GREEDY_BELOW = 1e-5
"""As in vLLM. If logits are divided by much less, they become infinite, and their softmax is not a distribution."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Raises ValueError for values outside the ranges."""

    temperature: float = 0.0
    """0 to 2. 0 takes the likeliest token, and so does any value below 0.00001, because logits cannot be divided by it."""
    top_p: float = 1.0
    """Above 0, up to 1: tokens are drawn from the smallest set with this much probability."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens; None draws a seed."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")


class Sampler:
    """Draws the tokens of one request, one after the other."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if params.seed is None else params.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Returns the next token's id, from float32 logits `[vocab_size]`."""
        if self._params.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double() / self._params.temperature, dim=-1)
        if self._params.top_p == 1:
            return int(torch.multinomial(probabilities, 1, generator=self._generator))
        ordered, ids = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        kept = ordered.masked_fill(before >= self._params.top_p, 0.0)
        return int(ids[torch.multinomial(kept, 1, generator=self._generator)])
