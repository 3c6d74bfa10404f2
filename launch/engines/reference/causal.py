"""The interface of a causal LM for the engine, wherever its weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class ModelShape:
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]


class CausalLM(Protocol):
    """Both methods are called in inference mode. Texts and logits have no batch dimension."""

    @property
    def shape(self) -> ModelShape: ...

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Computes tokens, int64 `[count]`, at their positions; each layer attends with `attention.paged_attention`.

        Returns the logits `[len(rows), vocab_size]` of the wanted rows.
        """

    def own_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits `[vocab_size]` of a text's last token, computed in one go, without pages."""
