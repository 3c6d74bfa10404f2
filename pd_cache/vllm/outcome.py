"""PromptOutcome: what the scheduler learns, bit by bit, of what became of one prompt."""

from __future__ import annotations

from pd_cache.blocks import Restored
from pd_cache.misses import MissReason
from pd_cache.reports import RequestReport

_NOT_THERE: tuple[MissReason, ...] = ("missing", "never_stored")


class PromptOutcome:
    """One request's. All numbers are tokens unless stated otherwise. If vLLM preempts the request, its first way counts."""

    def __init__(self) -> None:
        self._at_hand: int | None = None
        self._found = 0
        """The end of the prefix that the last lookup found."""
        self._reason: MissReason = "not_asked"
        self._begun = 0
        self._keeps_part = False
        self._restored: Restored | None = None

    def asked(self, at_hand: int) -> None:
        """Notes that vLLM asked what can be loaded. `at_hand`: tokens that vLLM's own cache has."""
        if self._at_hand is None:
            self._at_hand = at_hand

    def looked_up(self, end: int, reason: MissReason, awaited: int, *, serves: bool) -> None:
        """Notes the answer to a lookup. `awaited`: the end of the prefix that a prefill node has announced, and `serves`: whether it does so
        in namespaces that this node reads."""
        if not self._begun:
            self._found = end
            self._reason = reason
            if end < awaited and reason in _NOT_THERE:
                self._reason = "deadline" if serves else "other_namespace"

    def refused(self, reason: MissReason) -> None:
        """Notes that what was found is not loaded."""
        if not self._begun:
            self._reason = reason

    def began_load(self, tokens: int, *, keeps_part: bool) -> None:
        """Notes that a load of so many tokens has begun. `keeps_part`: whether vLLM uses what a load that failed has brought."""
        if not self._begun:
            self._begun, self._keeps_part = tokens, keeps_part

    def loaded(self, restored: Restored) -> None:
        """Notes how the load has ended, on all ranks together."""
        if self._restored is None:
            self._restored = restored

    def report(self, prompt: int, chunk_size: int) -> RequestReport | None:
        """Returns the report on a prompt of `prompt` tokens; None if vLLM has never asked about it."""
        if self._at_hand is None:
            return None
        loaded, reason, ended = self._begun, self._reason, self._restored or Restored(0)
        if ended.reason != "none":
            reason = ended.reason
            loaded = min(loaded, ended.chunks * chunk_size) if self._keeps_part else 0
        return RequestReport.of(
            prompt,
            chunk_size,
            at_hand=self._at_hand,
            found=max(0, self._found - self._at_hand // chunk_size * chunk_size),
            loaded=loaded,
            tiers=ended.tiers,
            reason=reason,
        )
