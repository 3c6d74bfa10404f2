"""`pd-cache size`: computes the KV per token of a model, and the pool and the network that it needs.

It reads the model's config.json as vLLM does, and counts a chunk's objects as the connector stores them
(`pd_cache/layout.py`, `pd_cache/vllm/layers.py`). `tests/vllm/test_size.py` compares that with what vLLM's
connector has stored and loaded.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.table import Table

from pd_cache.cluster.machine import shown_bytes
from pd_cache.config import USUAL_CHUNK
from pd_cache.decoding import decode_json
from pd_cache.errors import ConfigError
from pd_cache.layout import KVLayout, PageKind

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_CURVE = ((0.0, 0.0), (0.1235, 0.031), (0.2235, 0.0625), (0.3005, 0.125), (0.3592, 0.25), (0.3734, 1.0))
"""Pairs of a hit rate and the share of all different tokens for which the pool then has room, from the
FAST'25 conversation trace on a real pool (docs/performance.md, "Replay"). `pd-cache bench replay` measures
the curve of another trace."""
_ROUNDED_UP = 9 / 8  # the most that Mooncake's allocator sets aside for an object (docs/mooncake.md)
_FULL, _WINDOW = "full_attention", "sliding_attention"


class Config(msgspec.Struct):
    """The fields of a model's config.json that matter here. Models that take images have these fields in
    `text_config`."""

    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    hidden_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    model_type: str = ""
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = True
    sliding_window_pattern: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    text_config: Config | None = None


class Group(msgspec.Struct):
    """Layers that keep their KV in the same way, with all of their KV heads."""

    keeps: str
    layers: int
    token_bytes: int
    tail_chunks: int
    """The chunks at a prompt's end that a load needs; 0: all of its chunks."""


class Size(msgspec.Struct):
    """All figures: bytes, shares from 0 to 1, and Gbit/s."""

    groups: list[Group]
    chunk_bytes: int
    load_bytes: int  # what a node loads for a prompt that is wholly in the pool
    stored_bytes: int  # what the pool keeps of a prompt; of windows, a chunk more than a load needs
    most_share: float  # the hit rate of an unbounded pool
    pool_share: float  # the share of the different tokens for which the pool has room
    pool_bytes: int
    link_gbit: float
    staging_bytes: int  # the least that each rank needs: eight chunks


def size_of(
    model: Path, *, tokens: int, share: float, prompt: int, ttft_s: float, ranks: int, kv_dtype: str | None
) -> Size:
    """Returns the figures for a model's folder or config.json; `pd-cache size --help` explains the arguments.
    `kv_dtype` is None for the model's own.

    Raises ConfigError for a file that cannot be read, a model whose layers cannot be counted, or ranks among
    which vLLM cannot divide its heads.
    """
    if model.is_dir():
        model /= "config.json"
    try:
        config = decode_json(model.read_bytes(), Config)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{model}: expected a model's config.json: {why}") from None
    config = config.text_config or config
    dtype = kv_dtype or config.dtype or config.torch_dtype or "bfloat16"
    attention, latent = config.num_attention_heads, config.kv_lora_rank is not None
    heads = config.num_key_value_heads or attention
    if not config.num_hidden_layers or not attention or dtype not in _BYTES:
        raise ConfigError(
            f"{model}: expected num_hidden_layers, num_attention_heads and one of {', '.join(_BYTES)}, "
            f"got {config.num_hidden_layers}, {attention} and {dtype}"
        )
    if attention % ranks or (not latent and max(heads, ranks) % min(heads, ranks)):
        shared = "" if latent else f", and a divisor or a multiple of its {heads} KV heads"
        raise ConfigError(
            f"--tp {ranks}: expected a divisor of the model's {attention} attention heads{shared}"
        )
    head = config.head_dim or config.hidden_size // attention
    width = (config.kv_lora_rank or 0) + config.qk_rope_head_dim if latent else 2 * head
    kind, pieces = (PageKind.MLA, 1) if latent else (PageKind.HEADS_FIRST, heads)
    layout = KVLayout(
        kind=kind,
        layers=1,
        blocks=1,
        block_size=16,
        pieces=pieces,
        piece_bytes=width * _BYTES[dtype],
        dtype=dtype,
    )
    groups, chunks, whole, load, stored = [], prompt // USUAL_CHUNK, 0, 0, 0
    for name, layers in sorted(Counter(_layer_types(config, model)).items()):
        window = (config.sliding_window or 0) if name == _WINDOW else 0
        tail = max(1, -(-(window - 1) // USUAL_CHUNK)) if window else 0
        keeps = f"the last {window} tokens" if window else "every token"
        groups.append(Group(keeps, layers, layers * layout.token_bytes, tail))
        whole += (size := layers * layout.chunk_bytes(USUAL_CHUNK))
        load += size * (min(chunks, tail) if tail else chunks)
        stored += size * (min(chunks, tail + 1) if tail else chunks)
    rooms = (
        low + (high - low) * (share - below) / (above - below)
        for (below, low), (above, high) in pairwise(_CURVE)
        if share <= above
    )
    room = next(rooms, 1.0)  # room for all different tokens is enough
    return Size(
        groups=groups,
        chunk_bytes=whole,
        load_bytes=load,
        stored_bytes=stored,
        most_share=_CURVE[-1][0],
        pool_share=room,
        pool_bytes=round(room * tokens / max(prompt, 1) * stored * _ROUNDED_UP),
        link_gbit=load * 8e-9 / ttft_s,
        staging_bytes=8 * whole // (1 if latent else min(ranks, heads)),
    )


def _layer_types(config: Config, model: Path) -> list[str]:
    """Returns the kind of each layer, as vLLM reads it. Raises ConfigError if layers keep a state, because
    vLLM chooses its size."""
    layers = config.num_hidden_layers
    types = config.layer_types
    if types is None and config.sliding_window and config.use_sliding_window:
        every = config.sliding_window_pattern or {"gemma2": 2, "gemma3_text": 6}.get(
            config.model_type, layers + 1
        )
        types = [_WINDOW if (number + 1) % every else _FULL for number in range(layers)]
    if config.layers_block_type or config.hybrid_override_pattern or set(types or ()) - {_FULL, _WINDOW}:
        raise ConfigError(f"{model}: has layers with a state, or without attention, whose size vLLM chooses")
    return types or [_FULL] * layers


def size_text(
    size: Size, *, tokens: int, share: float, prompt: int, ttft_s: float, **_: object
) -> tuple[Table, str]:
    """Returns the table of layer groups, and the conclusions as text."""
    columns = ("layers keep", "layers", "bytes a token", "a load needs")
    table = Table(
        *columns, title=f"KV of a token; a chunk has {USUAL_CHUNK} tokens and {shown_bytes(size.chunk_bytes)}"
    )
    for group in size.groups:
        needs = f"the last {group.tail_chunks} chunks" if group.tail_chunks else "every chunk"
        table.add_row(group.keeps, str(group.layers), f"{group.token_bytes:,}", needs)
    where = f"FAST'25's conversations, where an unbounded pool has {size.most_share:.1%}"
    if share <= size.most_share:
        hits = f"room for {size.pool_share:.0%} of {tokens:,} different tokens: then {share:.1%} of all prompt tokens are hits for {where}"
    else:
        hits = f"room for all of {tokens:,} different tokens: {share:.1%} is impossible for {where}; a larger pool does not help"
    return table, (
        f"pool: {shown_bytes(size.pool_bytes)} in all store nodes together, {hits}\n"
        f"network: {shown_bytes(size.load_bytes)} for a prompt of {prompt:,} tokens; to load it in {ttft_s:g} s, {size.link_gbit:.1f} Gbit/s to its node\n"
        f"transfer.staging_size: at least {shown_bytes(size.staging_bytes)} for each rank"
    )
