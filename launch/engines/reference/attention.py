"""Attention over pages: the only place where the engine's KV lies, and the function that makes a model read it.

A model calls `paged_attention` in each layer. It writes the step's new keys and values into the pages and then reads the keys and values
of each request's whole context back from them, through the request's block table. Nothing else keeps KV, so the model attends to whatever
the cache loads into a page.

The same token must come out whether its prefix was computed here or loaded, so a token's numbers must not depend on how many others were
computed beside it. CPU matrix kernels give different results only for a few rows (a vector, or less than 8 rows), and reductions only for
different lengths. Therefore rows are padded to `ROW_QUANTUM`, and a token at position p always attends to a context of p + 1 tokens
rounded up to `CONTEXT_QUANTUM`, with the surplus masked. Measured in float32 and bfloat16 on x86: a token's keys, values and logits are
then the same bits however its prompt was cut into steps and whatever ran beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from pd_cache.layout import KVLayout, PageKind

ROW_QUANTUM = 16
CONTEXT_QUANTUM = 256


def round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


class PagedKV:
    """The paged buffer: per layer `[num_blocks, kv_heads, block_size, 2 * head_dim]`, keys first, then values.

    All layers are views of one allocation. The tensors are normal ones, not inference tensors, so that any thread may write them.
    """

    def __init__(
        self, *, layers: int, num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.num_blocks = num_blocks
        with torch.inference_mode(False):
            self.buffer = torch.zeros(layers, num_blocks, kv_heads, block_size, 2 * head_dim, dtype=dtype)
            self.kv_caches = {f"layers.{index}": pages for index, pages in enumerate(self.buffer.unbind())}
        self.layout = KVLayout.from_tensors(self.kv_caches, PageKind.HEADS_FIRST)

    def slots(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """Returns the slot mapping, int64 `[tokens]`, of the first `tokens` tokens of a request that owns `blocks`."""
        table = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * self.block_size
        return (table + torch.arange(self.block_size)).flatten()[:tokens]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts `keys` and `values`, `[tokens, kv_heads, head_dim]`, into the pages of one layer."""
        pages = self.buffer[layer]
        block, offset = slots // self.block_size, slots % self.block_size
        pages[block, :, offset] = torch.cat((keys, values), dim=-1)

    def read(self, layer: int, blocks: torch.Tensor, tokens: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of the first `tokens` tokens, each `[kv_heads, padded, head_dim]`, zero beyond `tokens`.

        They are a temporary copy. The masked part is zeroed, not left as the block's last tenant wrote it, because 0 * NaN is NaN.
        """
        gathered = torch.zeros(self.kv_heads, padded, 2 * self.head_dim, dtype=self.buffer.dtype)
        pages = self.buffer[layer].index_select(0, blocks).transpose(0, 1)
        gathered[:, :tokens] = pages.reshape(self.kv_heads, -1, 2 * self.head_dim)[:, :tokens]
        return gathered[..., : self.head_dim], gathered[..., self.head_dim :]


@dataclass(frozen=True)
class ContextRows:
    """Rows of one request in a step. They never cross a multiple of `CONTEXT_QUANTUM`."""

    start: int
    """The request's first row in the step."""
    rows: int
    position: int
    """Position of the first row's token in its request."""
    blocks: torch.Tensor
    """int64: the blocks that hold the context up to the last row."""

    @property
    def context(self) -> int:
        """Tokens that the last row attends to, itself included."""
        return self.position + self.rows


def cut_segments(start: int, position: int, rows: int, blocks: Sequence[int], block_size: int) -> Iterator[ContextRows]:
    """Yields the segments of `rows` tokens from `position` on, of a request that owns `blocks`; the first is row `start`."""
    end = position + rows
    while position < end:
        stop = min(end, round_up(position + 1, CONTEXT_QUANTUM))
        table = torch.tensor(blocks[: round_up(stop, block_size) // block_size], dtype=torch.int64)
        yield ContextRows(start, stop - position, position, table)
        start += stop - position
        position = stop


@dataclass(frozen=True)
class PagedStep:
    """What the attention of every layer needs to know about the step that is being computed."""

    kv: PagedKV
    slots: torch.Tensor
    """int64 `[rows]`: where each real row's KV goes. Rows beyond are padding."""
    segments: tuple[ContextRows, ...]
    max_context: int
    """Longest context of the engine, in tokens: a sliding window of at least this width has no effect."""
    masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)


_current_step: ContextVar[PagedStep | None] = ContextVar("pd_cache_paged_step", default=None)


@contextmanager
def attending(step: PagedStep) -> Iterator[None]:
    """Makes `step` what `paged_attention` works on in this thread."""
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


def current_step() -> PagedStep:
    """Returns the step that `attending` began in this thread."""
    step = _current_step.get()
    if step is None:
        raise RuntimeError("paged attention was called outside of a step")
    return step


def paged_attention(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Returns the attention of one layer in the current step, `[1, rows, heads, head_dim]`.

    Shapes: `query [1, heads, rows, head_dim]`, `key` and `value` `[1, kv_heads, rows, head_dim]`.
    """
    step = current_step()
    kv = step.kv
    rows = step.slots.numel()
    kv.write(layer, step.slots, key[0, :, :rows].transpose(0, 1), value[0, :, :rows].transpose(0, 1))
    heads, padded_rows = query.shape[1], query.shape[2]
    out = torch.zeros(1, padded_rows, heads, kv.head_dim, dtype=query.dtype)
    for index, segment in enumerate(step.segments):
        stop = segment.start + segment.rows
        out[0, segment.start : stop] = _attend(step, index, query[0, :, segment.start : stop], layer, scaling)
    return out


def _attend(step: PagedStep, index: int, query: torch.Tensor, layer: int, scaling: float | None) -> torch.Tensor:
    """Returns the attention of one request's `query [heads, rows, head_dim]` to its context in the pages, as `[rows, heads, head_dim]`."""
    segment, kv = step.segments[index], step.kv
    context = round_up(segment.context, CONTEXT_QUANTUM)
    keys, values = kv.read(layer, segment.blocks, segment.context, context)
    heads, rows, head_dim = query.shape
    padded = round_up(rows, ROW_QUANTUM)
    # Query heads that share a KV head become further rows of it: [kv_heads, group * rows, head_dim].
    group = heads // kv.kv_heads
    folded = functional.pad(query, (0, 0, 0, padded - rows)).reshape(kv.kv_heads, group * padded, head_dim)
    mask = step.masks.get((index, query.dtype))
    if mask is None:
        mask = _causal_mask(segment, padded, context, query.dtype).repeat(group, 1)
        step.masks[(index, query.dtype)] = mask
    attended = functional.scaled_dot_product_attention(
        folded.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scaling
    )
    return attended.view(heads, padded, head_dim)[:, :rows].transpose(0, 1)


def _causal_mask(segment: ContextRows, rows: int, context: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[rows, context]`, 0 where a row may look and -inf elsewhere; padding rows look where the last real one does."""
    positions = (segment.position + torch.arange(rows)).clamp(max=segment.context - 1)
    mask = torch.zeros(rows, context, dtype=dtype)
    return mask.masked_fill_(torch.arange(context) > positions.unsqueeze(1), float("-inf"))
