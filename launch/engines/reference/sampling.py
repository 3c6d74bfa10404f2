"""Chooses the next token."""

from __future__ import annotations

import secrets

import msgspec
import torch

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
