"""The model: a Llama with seeded random weights, whose attention reads and writes the engine's pages.

Each layer writes the step's new keys and values into the pages and then reads the keys and values of each
request's whole context back from them, through the request's block table. Nothing else keeps KV, so the model
attends to whatever the cache loads into a page.

The same token must come out whether its prefix was computed here or loaded, so a token's numbers must not
depend on how many others were computed beside it. CPU matrix kernels give different results only for a few
rows (a vector, or less than 8 rows), and reductions only for different lengths. Therefore rows are padded to
`ROW_QUANTUM`, and a token at position p always attends to a context of p + 1 tokens rounded up to
`CONTEXT_QUANTUM`, with the surplus masked. Measured in float32 and bfloat16 on x86: a token's keys, values
and logits are then the same bits however its prompt was cut into steps and whatever ran beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch.nn import functional

from pd_cache.cluster import RandomModel, ReferenceEngineConfig
from pd_cache.layout import KVLayout, PageKind

ROW_QUANTUM = 16
CONTEXT_QUANTUM = 256


def _round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


# --- pages --------------------------------------------------------------------------------------------------


class PagedKV:
    """The paged buffer: per layer `[num_blocks, kv_heads, block_size, 2 * head_dim]`, keys first, then
    values.

    All layers are views of one allocation. The tensors are normal ones, not inference tensors, so that any
    thread may write them.
    """

    def __init__(self, config: ReferenceEngineConfig) -> None:
        random = config.model.random
        self.kv_heads, self.head_dim = random.kv_heads, random.hidden_size // random.heads
        self.block_size, self.num_blocks = config.block_size, config.num_blocks
        shape = (random.layers, self.num_blocks, self.kv_heads, self.block_size, 2 * self.head_dim)
        with torch.inference_mode(False):
            self.buffer = torch.zeros(shape, dtype=getattr(torch, config.dtype))
            self.kv_caches = {f"layers.{index}": pages for index, pages in enumerate(self.buffer.unbind())}
        self.layout = KVLayout.from_tensors(self.kv_caches, PageKind.HEADS_FIRST)

    def slots(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """Returns the slot mapping, int64 `[tokens]`, of the first `tokens` tokens of a request that owns
        `blocks`."""
        table = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * self.block_size
        return (table + torch.arange(self.block_size)).flatten()[:tokens]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts `keys` and `values`, `[tokens, kv_heads, head_dim]`, into the pages of one layer."""
        block, offset = slots // self.block_size, slots % self.block_size
        self.buffer[layer][block, :, offset] = torch.cat((keys, values), dim=-1)

    def read(
        self, layer: int, blocks: torch.Tensor, tokens: int, padded: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of the first `tokens` tokens, each `[kv_heads, padded, head_dim]`, zero
        beyond `tokens`.

        They are a temporary copy. The masked part is zeroed, not left as the block's last tenant wrote it,
        because 0 * NaN is NaN.
        """
        gathered = torch.zeros(self.kv_heads, padded, 2 * self.head_dim, dtype=self.buffer.dtype)
        pages = self.buffer[layer].index_select(0, blocks).transpose(0, 1)
        gathered[:, :tokens] = pages.reshape(self.kv_heads, -1, 2 * self.head_dim)[:, :tokens]
        return gathered[..., : self.head_dim], gathered[..., self.head_dim :]


class _Segment(NamedTuple):
    """Rows of one request in a step. They never cross a multiple of `CONTEXT_QUANTUM`."""

    start: int
    """The request's first row in the step."""
    rows: int
    context: int
    """The number of tokens that the last row attends to, its own included."""
    blocks: torch.Tensor
    """int64: the blocks that hold the context up to the last row."""
    mask: torch.Tensor
    """`[query heads for each KV head * padded rows, padded context]`: 0 at the places that a row may attend
    to, -inf at all others."""


class StepPart(NamedTuple):
    """The tokens of one request in a step."""

    tokens: Sequence[int]
    position: int
    """Position of the first token; all tokens before it are in the pages already."""
    blocks: Sequence[int]
    """The blocks that the request owns, in order."""
    wants_logits: bool
    """Whether the caller wants the logits after the last token."""


class _Step:
    """The step that is being computed, as every layer's attention needs it."""

    def __init__(self, kv: PagedKV, group: int, parts: Sequence[StepPart]) -> None:
        """`group`: query heads that share a KV head."""
        self._kv, self._group = kv, group
        slots, self._segments, row = [], list[_Segment](), 0
        for part in parts:
            end = part.position + len(part.tokens)
            slots.append(
                kv.slots(part.blocks[: _round_up(end, kv.block_size) // kv.block_size], end)[part.position :]
            )
            position = part.position
            while position < end:
                stop = min(end, _round_up(position + 1, CONTEXT_QUANTUM))
                self._segments.append(self._segment(row, position, stop, part.blocks))
                row += stop - position
                position = stop
        self._slots = torch.cat(slots)

    def _segment(self, row: int, position: int, stop: int, blocks: Sequence[int]) -> _Segment:
        kv, rows = self._kv, stop - position
        table = torch.tensor(blocks[: _round_up(stop, kv.block_size) // kv.block_size], dtype=torch.int64)
        padded, context = _round_up(rows, ROW_QUANTUM), _round_up(stop, CONTEXT_QUANTUM)
        # padding rows look at the same places as the last real row
        positions = (position + torch.arange(padded)).clamp(max=stop - 1)
        mask = torch.zeros(padded, context, dtype=kv.buffer.dtype)
        mask.masked_fill_(torch.arange(context) > positions.unsqueeze(1), float("-inf"))
        return _Segment(row, rows, stop, table, mask.repeat(self._group, 1))

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """An `Attend` over the pages, which it writes to first."""
        kv, rows = self._kv, self._slots.numel()
        kv.write(layer, self._slots, key[0, :, :rows].transpose(0, 1), value[0, :, :rows].transpose(0, 1))
        out = torch.zeros(1, query.shape[2], query.shape[1], kv.head_dim, dtype=query.dtype)
        for segment in self._segments:
            stop = segment.start + segment.rows
            out[0, segment.start : stop] = self._attended(segment, query[0, :, segment.start : stop], layer)
        return out

    def _attended(self, segment: _Segment, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns the attention of one request's `query [heads, rows, head_dim]` to its context, as `[rows,
        heads, head_dim]`."""
        kv = self._kv
        keys, values = kv.read(layer, segment.blocks, segment.context, segment.mask.shape[1])
        heads, rows, head_dim = query.shape
        padded = segment.mask.shape[0] // self._group
        # query heads that share a KV head become further rows of it: [kv_heads, group * rows, head_dim]
        folded = functional.pad(query, (0, 0, 0, padded - rows)).reshape(kv.kv_heads, -1, head_dim)
        attended = functional.scaled_dot_product_attention(
            folded.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=segment.mask
        )
        return attended.view(heads, padded, head_dim)[:, :rows].transpose(0, 1)


# --- the model ----------------------------------------------------------------------------------------------


_EPSILON = 1e-6
"""The epsilon of the norms, whose weights are all one."""
_ROPE_BASE = 10_000.0
_DEVIATION = 0.02
"""The standard deviation of the weights."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a layer's number, queries `[1, heads, rows, head_dim]`, and keys and values `[1, kv_heads, rows,
head_dim]` to `[1, rows, heads, head_dim]`."""


class PagedModel:
    """A model whose attention reads one paged buffer, `kv`. Not thread-safe: one thread computes."""

    def __init__(self, config: ReferenceEngineConfig) -> None:
        """Draws the model that `config.model` describes, and allocates its paged buffer."""
        random = config.model.random
        self.kv = PagedKV(config)
        self.vocab_size = random.vocab_size
        self._layers, self._heads = random.layers, random.heads
        generator = torch.Generator().manual_seed(random.seed)
        # drawn in float32 whatever the dtype, so that a seed always gives the same model
        self._weights = {
            name: (torch.randn(rows, columns, generator=generator) * _DEVIATION).to(self.kv.buffer.dtype)
            for name, rows, columns in _weights(random, self.kv.head_dim)
        }
        described = json.dumps({"dtype": config.dtype, **msgspec.to_builtins(random)}, sort_keys=True)
        self.identity = f"random-llama-2:{hashlib.sha256(described.encode()).hexdigest()[:32]}"
        """Identifies the weights for the cache's namespace."""

    @torch.inference_mode()
    def step(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Computes the tokens of all parts and leaves their KV in the pages.

        Returns float32 logits `[parts that want some, vocab_size]`, in the order of the parts.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for part in parts:
            tokens += part.tokens
            positions += range(part.position, part.position + len(part.tokens))
            if part.wants_logits:
                wanted.append(len(tokens) - 1)
        padding = [0] * (_round_up(len(tokens), ROW_QUANTUM) - len(tokens))
        rows = wanted + wanted[-1:] * (_round_up(len(wanted), ROW_QUANTUM) - len(wanted))
        logits = self.logits(
            torch.tensor(tokens + padding),
            torch.tensor(positions + padding),
            torch.tensor(rows, dtype=torch.int64),
            _Step(self.kv, self._heads // self.kv.kv_heads, parts).attend,
        )
        return logits[: len(wanted)].float()

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Computes tokens, int64 `[count]`, at their positions. Returns the logits `[len(rows), vocab_size]`
        of the wanted rows."""
        hidden = self._weights["model.embed_tokens.weight"][tokens]
        rotation = self._rotation(positions, hidden.dtype)
        for layer in range(self._layers):
            hidden = hidden + self._attention(layer, _norm(hidden), rotation, attend)
            inner = _norm(hidden)
            gate = functional.silu(self._linear(layer, "mlp.gate_proj", inner))
            inner = gate * self._linear(layer, "mlp.up_proj", inner)
            hidden = hidden + self._linear(layer, "mlp.down_proj", inner)
        return functional.linear(_norm(hidden)[rows], self._weights["lm_head.weight"])

    def _attention(
        self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        query, key, value = (
            self._linear(layer, f"self_attn.{name}_proj", hidden)
            .view(1, len(hidden), -1, self.kv.head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        return self._linear(
            layer, "self_attn.o_proj", attend(layer, query, key, value).reshape(len(hidden), -1)
        )

    def _linear(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self._weights[f"model.layers.{layer}.{name}.weight"])

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines, each `[rows, head_dim]`."""
        dim = self.kv.head_dim
        frequencies = 1.0 / _ROPE_BASE ** (torch.arange(0, dim, 2).float() / dim)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


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
