"""Decides which nodes of the role `both` prefill, and which decode, from what all nodes report. Pure: the
time comes from the caller.

1. The nodes of the role `both` stand in the order of their addresses. Those before the *cut* prefill, the
   others decode. Proxies do not talk to one another, so they may cut at different places. A node in between
   then does both.
2. Work is measured in nodes. A prefill node that computes all the time has the work of one node, and so has a
   decode node that is full. Waiting requests add work. A prompt adds the seconds that it takes to compute,
   divided by `_CATCH_UP_S`. An answer adds the share of a node's room that it needs.
3. The cost of a cut is the work per node of the busier kind. While the present cut costs less than `_FULL`,
   nothing changes. Otherwise the proxy adds up the work that the cheapest cut would have saved, less that of
   `_SLACK` nodes, in seconds of a node's work. Once the sum is `_WORTH_S`, it takes the cheapest cut. After a
   change, it forgets all earlier reports, and changes nothing for `_SETTLE_S`.
4. If too few nodes of a kind are alive, a cut with enough nodes of this kind is taken at once.
5. A node that changes gets nothing new until it has finished its work, for `_DRAIN_S` at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from launch.proxy.routing.node_pool import Hop
from launch.watch.figures import QUEUED, RUNNING, gauge, read_samples, total
from pd_cache.cluster import RolesConfig

_SETTLE_S = 10.0
"""The least time between two changes. Reports that are older than this are forgotten."""
_CATCH_UP_S = 10.0
"""The time in which prefill nodes should have computed the prompts that wait."""
_DRAIN_S = 20.0
"""How long a node that changes gets nothing new."""
_MIXED_S = 120.0
"""How long a node that is never idle after its change counts as one with work of both kinds."""
_FULL = 0.7
"""The cost from which another cut is considered."""
_SLACK, _WORTH_S = 0.5, 10.0
"""A change pays if it saves `_WORTH_S` seconds of a node's work, beyond the work of `_SLACK` nodes."""
_IDLE = 0.02
"""The work of each kind that is assumed of each node, so that single requests decide nothing."""
_METRICS = (
    "vllm:num_requests_", "vllm:kv_cache_usage_perc", "vllm:request_success_total", "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count", "pd_cache_reference_queue_length", "pd_cache_reference_running", "pd_cache_reference_free_blocks",
    "pd_cache_reference_blocks", "pd_cache_reference_requests_total", "pd_cache_reference_token_seconds_sum",
    "pd_cache_reference_token_seconds_count",
)  # fmt: skip


class NodeReport(NamedTuple):
    """A node's report at one moment."""

    queued: float
    """Requests that wait for room."""
    running: float
    """All other requests, including those whose prompts are being loaded."""
    used: float
    """The share of its room that is taken, 0 to 1."""
    ended: float
    """Requests that the node has finished since its start."""
    tokens: float = 0.0
    """The tokens of answers since its start, without each answer's first."""
    token_s: float = 0.0
    """The sum of the seconds between each of these tokens and the token before it."""

    @property
    def busy(self) -> bool:
        return self.queued + self.running > 0


def read_metrics(page: bytes, max_running: int) -> NodeReport | None:
    """Returns the report in the metrics of vLLM or the reference engine; None for another program's metrics.

    `max_running`: how many requests the node computes at a time; 0 if that is not known.
    """
    try:
        samples = read_samples(page.decode(errors="replace"), _METRICS)
    except ValueError:
        return None
    queued, running = gauge(samples, *QUEUED), gauge(samples, *RUNNING)
    if queued is None or running is None:
        return None
    # vLLM counts these requests as waiting, but they have room
    reasons = samples.get("num_requests_waiting_by_reason", ())
    loading = sum(value for labels, value in reasons if labels.get("reason") == "deferred")
    queued, running = max(0.0, queued - loading), running + loading
    blocks = total(samples, "pd_cache_reference_blocks")
    free = total(samples, "pd_cache_reference_free_blocks")
    used = max(
        _mean([value for _, value in samples.get("kv_cache_usage_perc", ())]),  # one of each rank
        1 - free / blocks if blocks else 0.0,
        running / max_running if max_running else 0.0,
    )
    ended, tokens, token_s = (
        total(samples, vllms) + total(samples, f"pd_cache_reference_{own}")
        for vllms, own in (
            ("request_success_total", "requests_total"),
            ("inter_token_latency_seconds_count", "token_seconds_count"),
            ("inter_token_latency_seconds_sum", "token_seconds_sum"),
        )
    )
    return NodeReport(queued, running, used, ended, tokens, token_s)


class RoleNow(NamedTuple):
    """The present work of a node of the role `both`."""

    does: Hop
    since: float
    why: str
    mixed: bool = False
    """Whether it has not been idle since its last change, for `_MIXED_S` at most."""


class Roles:
    """Says what each node of the role `both` does."""

    def __init__(self, config: RolesConfig) -> None:
        self._config = config
        self.now: dict[str, RoleNow] = {}
        self._cut: int | None = None
        self._cut_at = self._saved = 0.0
        self._past: deque[tuple[float, Mapping[str, NodeReport]]] = deque()

    def look(
        self,
        now: float,
        roles: Mapping[str, str],
        ill: Collection[str],
        reports: Mapping[str, NodeReport],
    ) -> None:
        """Decides again what each node does.

        `roles`: the roles of all known nodes, by the nodes' addresses; `ill`: the nodes that cannot be used;
        `reports`: the reports of the nodes that have just reported.
        """
        passed = now - self._past[-1][0] if self._past else 0.0
        self._past.append((now, reports))
        while self._past[0][0] < now - _SETTLE_S:
            self._past.popleft()
        both = sorted(node for node, role in roles.items() if role == "both")
        live = {node: role for node, role in roles.items() if node not in ill}
        work = self._work(live)
        costs = [self._cost(both[:cut], live, work) for cut in range(len(both) + 1)]
        cut = len(both) // 2 if self._cut is None else min(self._cut, len(both))
        best = min(range(len(costs)), key=lambda other: (costs[other], abs(other - cut), other))
        (lack, each), (least_lack, least) = costs[cut], costs[best]
        why = f"prompts were work for {work['prefill']:.1f} nodes, answers for {work['decode']:.1f}"
        saved = (1 - least / max(1e-9, each)) * len(live) - _SLACK
        self._saved = max(0.0, self._saved + saved * passed) if each >= _FULL else 0.0
        if least_lack < lack:
            why = "too few nodes were alive"
        elif now < self._cut_at + _SETTLE_S or self._saved < _WORTH_S:
            best = cut
        if best != cut:
            self._cut_at, self._saved = now, 0.0
            self._past.clear()
        self._cut = best
        before, self.now = self.now, {}
        for place, node in enumerate(both):
            does: Hop = "prefill" if place < best else "decode"
            known = before.get(node)
            if known is None:
                known = RoleNow(does, now, "it is new")
            elif known.does != does:
                known = RoleNow(does, now, why if best != cut else "other nodes came or went", True)
            busy = node in live and (node not in reports or reports[node].busy)
            mixed = known.mixed and busy and now < known.since + _MIXED_S
            self.now[node] = known._replace(mixed=mixed)

    def resting(self, now: float, hop: Hop) -> set[str]:
        """Returns the nodes that get no new requests of this kind."""
        return {
            node
            for node, role in self.now.items()
            if role.does != hop or (role.mixed and now < role.since + _DRAIN_S)
        }

    def describe(self, now: float) -> dict[str, dict[str, Any]]:
        """Returns what each node does, since when and why, for `/health`."""
        return {
            node: {"does": role.does, "for_s": round(now - role.since, 1), "why": role.why}
            for node, role in self.now.items()
        }

    def _work(self, live: Mapping[str, str]) -> dict[Hop, float]:
        """Returns the work of each kind, in nodes. Nodes that report nothing count like the average of the
        others."""
        does = {node: self.now[node].does if node in self.now else role for node, role in live.items()}
        prefilling = sorted(
            (node for node in live if does[node] == "prefill"), key=lambda node: (node in self.now, node)
        )
        mixed = {node for node, role in self.now.items() if role.mixed}
        steady = [node for node in prefilling if node not in mixed] or prefilling
        seen = {
            node: found
            for node in live
            if (found := [(at, reports[node]) for at, reports in self._past if node in reports])
        }
        sample = [node for node in steady if node in seen]
        # those near the cut may have answers from other proxies
        sample = sample[: (len(sample) + 1) // 2]
        busy = seconds = ended = queued = answers = 0.0
        for node, found in seen.items():
            (begin, first), (end, last) = found[0], found[-1]
            if node in sample:
                share = _mean([float(report.queued + report.running > 0) for _, report in found])
                busy += share
                seconds += share * (end - begin)
                ended += max(0.0, last.ended - first.ended)
                queued += last.queued
            if node not in steady:
                answers += _mean([report.used for _, report in found])
                answers += last.used * last.queued / max(1.0, last.running)
        waiting = queued * seconds / max(1.0, ended) / _CATCH_UP_S
        decoding = len(seen.keys() - steady)
        return {
            "prefill": (busy + waiting) * len(prefilling) / max(1, len(sample)),
            "decode": answers * (len(live) - len(steady)) / max(1, decoding),
        }

    def _cost(
        self, before: list[str], live: Mapping[str, str], work: Mapping[Hop, float]
    ) -> tuple[tuple[int, int], float]:
        """Returns how many decode and prefill nodes are too few if the nodes `before` a cut prefill, and the
        work of each node of the busier kind."""
        prefill = sum(role == "prefill" or node in before for node, role in live.items())
        decode = len(live) - prefill
        lack = max(0, self._config.min_decode - decode), max(0, self._config.min_prefill - prefill)
        idle = _IDLE * len(live)
        prompts, answers = work["prefill"] + idle, work["decode"] + idle
        return lack, max(prompts / max(0.1, prefill), answers / max(0.1, decode))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
