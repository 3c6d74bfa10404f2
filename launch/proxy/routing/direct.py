"""Conditional disaggregation: decides which prompts need no prefill node. Pure.

A decode node can compute a prompt itself. That is faster if there is little to compute: the prompt is short,
or the pool holds its prefix.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class DirectRule(NamedTuple):
    direct_tokens: int = 0
    """A prompt needs no prefill node if fewer tokens than this have to be computed; with 0, all need one."""
    stream_tokens: int | None = None
    """If a prefill node has to compute at least this many tokens, the decode node loads them meanwhile. With
    None, it never does."""

    def why(self, tokens: int, found: int = 0) -> Literal["short", "in_pool", ""]:
        """Returns why a prompt of `tokens` tokens needs no prefill node if the pool holds the first `found`;
        empty if it needs one."""
        if tokens < self.direct_tokens:
            return "short"
        return "in_pool" if tokens - found < self.direct_tokens else ""

    def streams(self, tokens: int, found: int) -> bool:
        """Returns whether the decode node should load a prompt while a prefill node computes it."""
        return self.stream_tokens is not None and tokens - found >= self.stream_tokens
