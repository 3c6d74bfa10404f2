"""The outcome of a run, as figures, targets and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.lib.report import Check, Report, Table


@dataclass
class SoakOutcome:
    """Everything that the report says."""

    seed: int
    minutes: float
    seconds: float = 0.0
    left_out: str = ""
    """Faults that this machine cannot have, and why."""
    operations: Mapping[str, int] = field(default_factory=dict)
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    completions: Mapping[str, int] = field(default_factory=dict)
    """Requests through the proxy by what became of them."""
    bytes_compared: int = 0
    tokens_loaded: int = 0
    """Tokens that were loaded; each was compared with the KV that its prefix determines."""
    faults: Mapping[str, int] = field(default_factory=dict)
    damaged: Mapping[str, int] = field(default_factory=dict)
    strange_acts: int = 0
    resets: int = 0
    """Changes of weights that the pool has taken."""
    latest_old_s: float = 0.0
    """How long after a reset a load began, at most, that loaded KV of earlier weights."""
    wrong: Sequence[str] = ()
    wrong_slots: int = 0
    late: Sequence[str] = ()
    raised: Sequence[str] = ()
    died: Sequence[str] = ()
    """Processes that ended by themselves."""
    lost: Sequence[str] = ()
    """Prompts that were not found, and requests that were not answered, after the last fault."""
    leaked: Sequence[str] = ()
    recovery_s: float = 0.0
    """From the end of the last fault until all was found and answered again."""
    slowest: Sequence[Mapping[str, Any]] = ()
    ticker_latest_s: float = 0.0
    """How late this program's own ticker was at worst, and in all."""
    ticker_late_s: float = 0.0
    evidence: str = ""

    @property
    def failed(self) -> bool:
        return not all(check.ok for check in checks(self))

    def figures(self) -> dict[str, Any]:
        """Returns everything, for JSON."""
        return asdict(self)


def checks(outcome: SoakOutcome) -> list[Check]:
    """Nothing may be wrong, late, raised, dead, lost or leaked."""
    found = {
        "wrong": max(outcome.wrong_slots, len(outcome.wrong)),
        "late": len(outcome.late),
        "raised": len(outcome.raised),
        "ended by themselves": len(outcome.died),
        "not back after the last fault": len(outcome.lost),
        "leaked": len(outcome.leaked),
    }
    return [Check(name, float(count), 0.0, at_least=False) for name, count in found.items()]


def report(outcome: SoakOutcome, facts: Mapping[str, str]) -> Report:
    """Returns the outcome as tables."""
    counted = [
        *((name, count) for name, count in sorted(outcome.operations.items())),
        *((f"completion: {name}", count) for name, count in sorted(outcome.completions.items())),
        *((f"tokens: {name}", count) for name, count in sorted(outcome.hit_tokens.items())),
        ("bytes compared", outcome.bytes_compared),
        ("loaded tokens compared", outcome.tokens_loaded),
        ("acts of strangers", outcome.strange_acts),
        ("resets", outcome.resets),
        ("the latest load of KV of earlier weights, seconds after a reset", outcome.latest_old_s),
        ("seconds until all was back", round(outcome.recovery_s, 1)),
        ("own ticker late, at worst and in all, seconds", f"{outcome.ticker_latest_s:.2f}, {outcome.ticker_late_s:.2f}"),
    ]  # fmt: skip
    done = [*outcome.faults.items(), *((f"objects {name}", count) for name, count in sorted(outcome.damaged.items()))]
    troubles = [
        (kind, what[:400])
        for kind, all_of_kind in (
            ("wrong", outcome.wrong), ("late", outcome.late), ("raised", outcome.raised), ("ended", outcome.died),
            ("not back", outcome.lost), ("leaked", outcome.leaked),
        )
        for what in all_of_kind[:10]
    ]  # fmt: skip
    note = f"Left out: {outcome.left_out}." if outcome.left_out else ""
    parts = [
        Table("Done and compared", ("what", "count"), counted),
        Table("Faults", ("what", "count"), done, note),
        Table("Slowest answers", ("who", "what", "seconds", "deadline"), [list(one.values()) for one in outcome.slowest]),
    ]  # fmt: skip
    if troubles:
        parts.append(Table("Troubles", ("kind", "what"), troubles, f"The evidence is in {outcome.evidence}."))
    summary = f"Seed {outcome.seed}, {outcome.minutes:g} minutes: --seed {outcome.seed} replays the plan."
    return Report("Soak", summary, list(parts), facts)
