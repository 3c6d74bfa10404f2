"""Loads a causal LM and computes steps of it over the paged buffer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from launch.engines.reference.attention import (
    ROW_QUANTUM,
    ContextRows,
    PagedKV,
    PagedStep,
    attending,
    cut_segments,
    round_up,
)
from launch.engines.reference.causal import CausalLM
from launch.engines.reference.llama import RandomLlama
from pd_cache.cluster import ModelConfig, RandomModel, ReferenceEngineConfig
from pd_cache.errors import UnsupportedModelError
from pd_cache.weights import weights_digest

_PROBE_TOKENS = 20
_PROBE_SPLIT = 7
_PROBE_BLOCK = 8


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
    """A causal LM whose attention reads one paged buffer. Not thread-safe: one thread computes.

    `load_model` makes it. `kv` is the buffer, `identity` identifies the weights for the cache's namespace.
    """

    def __init__(self, model: CausalLM, name: str, identity: str, kv: PagedKV, max_context: int) -> None:
        self.name = name
        self.identity = identity
        self.kv = kv
        self.vocab_size = model.shape.vocab_size
        self.eos_token_ids = model.shape.eos_token_ids
        self._model = model
        self._max_context = max_context

    def step(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Computes the tokens of all parts and leaves their KV in the pages.

        Returns float32 logits `[parts that want some, vocab_size]`, in the order of the parts.
        """
        return self._step(self.kv, parts)[0]

    @torch.inference_mode()
    def _step(self, kv: PagedKV, parts: Sequence[StepPart]) -> tuple[torch.Tensor, set[int]]:
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
        return logits[: len(wanted)].float(), step.layers_seen

    def probe(self) -> None:
        """Checks that this model computes the same over pages, in two steps, as with its own attention in one.

        Raises UnsupportedModelError, with the reason, if it does not.
        """
        layers = self._model.shape.layers
        kv = PagedKV(
            layers=layers,
            num_blocks=_PROBE_TOKENS // _PROBE_BLOCK + 1,
            kv_heads=self.kv.kv_heads,
            block_size=_PROBE_BLOCK,
            head_dim=self.kv.head_dim,
            dtype=self.kv.buffer.dtype,
        )
        tokens = [(7 + 13 * index) % self.vocab_size for index in range(_PROBE_TOKENS)]
        blocks = list(reversed(range(kv.num_blocks)))
        _, seen = self._step(kv, [StepPart(tokens[:_PROBE_SPLIT], 0, blocks, False)])
        if seen != set(range(layers)):
            missing = sorted(set(range(layers)) - seen)
            raise UnsupportedModelError(
                f"layers {missing} of {layers} do not attend through transformers' attention interface "
                "(state-space, convolution or their own attention)"
            )
        paged, _ = self._step(kv, [StepPart(tokens[_PROBE_SPLIT:], _PROBE_SPLIT, blocks, True)])
        with torch.inference_mode():
            own = self._model.own_logits(torch.tensor(tokens)).float()
        tolerance = 1e-3 if kv.buffer.dtype == torch.float32 else 0.1
        error = float((paged[0] - own).abs().max() / own.abs().max().clamp(min=1e-6))
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"its logits over pages differ from its own by {error:.2g} of their size (allowed: {tolerance})"
            )


def load_model(config: ReferenceEngineConfig) -> PagedModel:
    """Loads what `config.model` describes, allocates its paged buffer and checks that the two fit.

    Nothing is downloaded, and no code of a model's folder is run. Raises UnsupportedModelError, with the model's name and the reason, if
    it cannot be served.
    """
    source = config.model
    try:
        model, identity = _model_of(config)
        kv = PagedKV(
            layers=model.shape.layers,
            num_blocks=config.num_blocks,
            kv_heads=model.shape.kv_heads,
            block_size=config.block_size,
            head_dim=model.shape.head_dim,
            dtype=getattr(torch, config.dtype),
        )
        paged = PagedModel(model, source.name, identity, kv, config.max_model_len)
        paged.probe()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {_describe(source)} cannot be served: {error}") from None
    except Exception as error:  # transformers' exceptions for a folder that is not a model have no common root
        raise UnsupportedModelError(
            f"model {_describe(source)} cannot be served: {type(error).__name__}: {error}"
        ) from error
    return paged


def _describe(source: ModelConfig) -> str:
    return f"{source.name!r} ({source.path})" if source.path else f"{source.name!r} (random)"


def _model_of(config: ReferenceEngineConfig) -> tuple[CausalLM, str]:
    """Returns the model, and a name that identifies its weights."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    source = config.model
    if source.random is not None:
        return RandomLlama(source.random, dtype), _random_identity(source.random, config.dtype)
    from launch.engines.reference.huggingface import FolderModel  # imports transformers, which takes seconds

    assert source.path is not None
    folder = Path(source.path)
    model = FolderModel(folder, dtype, config.max_model_len)
    return model, f"folder:{config.dtype}:{weights_digest(folder)}"


def _random_identity(random: RandomModel, dtype: str) -> str:
    described = json.dumps({"dtype": dtype, **msgspec.to_builtins(random)}, sort_keys=True)
    return f"random-llama-2:{hashlib.sha256(described.encode()).hexdigest()[:32]}"
