"""All answers of a run, and what was wrong with them. Thread-safe; judges only when asked."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.suites.soak.clients import Reply
from bench.suites.soak.cluster import REQUEST_S
from bench.suites.soak.judge import Span, seconds_late
from bench.suites.soak.kinds import HOSTS
from bench.suites.soak.plan import PlannedCompletion
from pd_cache.epochs import LATE_S

_SHOWN = 40
_SLOWEST = 8
_CONTROL = next(host for host, nodes in HOSTS.items() if "proxy" in nodes)


class TimedCall(NamedTuple):
    """An answered call, as far as lateness is concerned."""

    who: str
    what: str
    answer: Span
    bound: float
    starved: float


class Ledger:
    """The books of a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Operations and requests, by kind."""
        self.outcomes: Counter[str] = Counter()
        """Requests through the proxy, by what became of them."""
        self.hits: Counter[str] = Counter()
        """Tokens found, loaded or stored, by kind; and `cached` of completions."""
        self.compared = 0
        """Bytes."""
        self.tokens = 0
        self.wrong: list[str] = []
        self.wrong_slots = 0
        self.raised: list[str] = []
        self.broken: list[str] = []
        """Failures of this program itself."""
        self.resets: dict[int, float] = {}
        """When the pool had taken each reset, in seconds since 1970, by the number of the weights that it was for."""
        self.latest_old_s = 0.0
        """How long after a reset a load began, at most, that loaded KV of earlier weights."""
        self._calls: list[TimedCall] = []
        self._open: dict[str, dict[str, Any]] = {}
        self._first: dict[str, int] = {}
        self.replies: list[dict[str, Any]] = []
        """Answers of engines to commands, oldest first."""
        self.changed = threading.Condition(self._lock)

    def event(self, node: str, event: dict[str, Any]) -> None:
        """Takes in a line that an engine printed."""
        with self._lock:
            kind = event.get("e")
            if kind == "begin":
                self._open[event["lane"]] = event
                self._first[event["lane"]] = max(event["n"], 0)
            elif kind == "end":
                self._end(event)
            elif kind == "reset":
                if event["taken"]:
                    self.resets[event["number"]] = event["end"]
                if event["complaint"]:
                    self._add(self.raised, f"{node} reset {event['number']}: {event['complaint']}")
                self._reply(node, event)
            elif kind == "broken":
                self.broken.append(f"{event['lane']}: {event['what']}")
            else:
                self._reply(node, event)

    def reply(self, label: str, request: PlannedCompletion, reply: Reply) -> None:
        """Notes that a request through the proxy has ended."""
        with self._lock:
            self.counts["completion"] += 1
            self.outcomes[reply.outcome] += 1
            self.hits["cached"] += reply.cached
            if reply.wrong:
                self._add(self.wrong, f"{label} request {request.number}, prompt {request.prompt}: got {reply.got}")
                self.wrong_slots += 1
            what = f"completion {request.number} ({reply.outcome})"
            self._calls.append(TimedCall(label, what, Span(reply.begin, reply.end), REQUEST_S, 0.0))

    def next_of(self, node: str) -> dict[str, int]:
        """Returns the operation at which each lane of an engine goes on when the engine is started again."""
        with self._lock:
            return {lane: number + 1 for lane, number in self._first.items() if lane.startswith(f"{node}/")}

    def forget(self, node: str) -> None:
        """Notes that an engine's process has ended: nothing waits any more for the operations of its lanes."""
        with self._lock:
            for lane in [lane for lane in self._open if lane.startswith(f"{node}/")]:
                del self._open[lane]
                self.counts["ended with their process"] += 1

    def overdue(self, now: float, seconds: float, stops: Mapping[str, Sequence[Span]]) -> list[str]:
        """Returns the operations that were due more than `seconds` ago and are not answered."""
        with self._lock:
            still = dict(self._open)
        found = []
        for lane, event in still.items():
            late = seconds_late(Span(event["t"], now), event["bound"], stops=stops.get(lane.split("/")[0], ()))
            if late > seconds:
                found.append(f"{lane} {event['kind']} {event['n']}: not answered {late:.1f} s after its deadline")
        return found

    def late(self, stops: Mapping[str, Sequence[Span]], ticks: Sequence[Span]) -> list[str]:
        """Returns the answers that came too late, the worst first."""
        with self._lock:
            calls = list(self._calls)
        found = []
        for call in calls:
            node = call.who.split("/")[0]
            mine = stops.get(node, ()) if node != "client" else [*stops.get("proxy", ()), *stops.get(f"link of {_CONTROL}", ())]  # fmt: skip
            near = [span for span in ticks if span.end > call.answer.begin and span.begin < call.answer.end]
            late = seconds_late(call.answer, call.bound, starved=call.starved, stops=mine, ticks=near)
            if late:
                found.append((late, call))
        return [
            f"{call.who} {call.what}: {late:.2f} s late ({call.answer.end - call.answer.begin:.2f} s for {call.bound:g} s), "
            f"begun at {call.answer.begin:.3f}"
            for late, call in sorted(found, reverse=True)
        ]

    def slowest(self) -> list[dict[str, Any]]:
        """Returns the answers that took longest."""
        with self._lock:
            calls = sorted(self._calls, key=lambda call: call.answer.begin - call.answer.end)[:_SLOWEST]
        return [
            {"who": call.who, "what": call.what, "seconds": round(call.answer.end - call.answer.begin, 2), "bound": call.bound}
            for call in calls
        ]  # fmt: skip

    def wait_reply(self, node: str, kind: str, timeout: float) -> dict[str, Any] | None:
        """Takes out and returns the engine's answer to a command; None if it did not come in time."""
        end = time.monotonic() + timeout
        with self.changed:
            while True:
                for index, reply in enumerate(self.replies):
                    if reply["node"] == node and reply["e"] == kind:
                        return self.replies.pop(index)
                if not self.changed.wait(end - time.monotonic()) and time.monotonic() >= end:
                    return None

    def _reply(self, node: str, event: dict[str, Any]) -> None:
        self.replies.append({**event, "node": node})
        self.changed.notify_all()

    def _judge_weights(self, name: str, begin: float, weights: int) -> None:
        """Counts a load as wrong that began too long after the reset that made its weights outdated."""
        over = min((end for number, end in self.resets.items() if number > weights), default=begin)
        self.latest_old_s = max(self.latest_old_s, begin - over)
        if begin - over >= LATE_S:
            self.wrong_slots += 1
            self._add(
                self.wrong, f"{name} at {begin:.3f}: KV of weights {weights}, {begin - over:.2f} s after their reset"
            )

    def _end(self, event: dict[str, Any]) -> None:
        self._open.pop(event["lane"], None)
        name = f"{event['lane']} {event['kind']} {event['n']}"
        self.counts[event["kind"]] += 1
        self.hits[event["kind"]] += event["hit"]
        self.compared += event["compared"]
        self.tokens += event["tokens"]
        if event["tokens"]:
            self._judge_weights(name, event["begin"], event["weights"])
        if event["wrong"]:
            self.wrong_slots += event["wrong"]
            self._add(self.wrong, f"{name} of {event['prompt']} at {event['end']:.3f}: {event['wrong']} slots: {event['first']}")  # fmt: skip
        if event["raised"]:
            self._add(self.raised, f"{name}: {event['complaint']}")
        elif event["complaint"]:
            self.wrong_slots += 1
            self._add(self.wrong, f"{name} of {event['prompt']}: {event['complaint']}")
        span = Span(event["begin"], event["end"])
        self._calls.append(
            TimedCall(event["lane"], f"{event['kind']} {event['n']}", span, event["bound"], event["starved"])
        )

    @staticmethod
    def _add(where: list[str], what: str) -> None:
        if len(where) < _SHOWN:
            where.append(what)
