"""Asks the nodes for their metrics while somebody follows, with connections and a thread of its own: no request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from launch.discovery import View
from launch.figures import NodeHistory, NodeReading, Rates, read_node, read_samples
from launch.masters import Segment, read_segments
from launch.proxy.hops import HopError, new_session, read_all, send
from pd_cache.cluster import NodeRecord
from pd_cache.decoding import one_line

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
TIMEOUT_S = 2.0
_CONNECT_S = 1.0
_LARGEST = 1 << 20
_AT_A_TIME = 16
_SILENT_AT_A_TIME = 8
_LONGEST_PAUSE_S = 15.0
_MOST_NODES = 500
_ENGINES = ("prefill", "decode")


class SeenNode(msgspec.Struct):
    """A node as the watch knows it."""

    record: NodeRecord
    history: NodeHistory
    why: str = ""
    """Why it did not answer; empty if it did, or if it was not asked yet."""
    answered: float | None = None
    due: float = 0.0
    failures: int = 0

    @property
    def url(self) -> str:
        """Where its metrics are; empty if this proxy cannot ask for them."""
        if self.record.role in _ENGINES:
            return self.record.address
        return self.record.metrics or "" if self.record.role in ("master", "cache-server") else ""

    def reading(self) -> NodeReading | None:
        """Returns its last metrics; None if it is silent."""
        return None if self.why or self.answered is None else self.history.last

    def rates(self, now: float) -> Rates | None:
        """Returns what it has done of late; None if it is silent."""
        return None if self.why or self.answered is None else self.history.rates(now)


class NodeWatch:
    """Asks each node every two seconds, silent ones less often. Each has its own deadline, no more than sixteen are asked at a time,
    and silent ones wait for one another only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.nodes: dict[str, SeenNode] = {}
        self.segments: list[Segment] = []
        """The pool's memory, as the master said last."""
        self.left_out = 0
        """How many nodes are too many to be watched."""
        self._clock = clock

    def update(self, view: View) -> None:
        """Uses the view's nodes from now on."""
        listed = view.nodes[:_MOST_NODES]
        self.left_out = len(view.nodes) - len(listed)
        self.nodes = {record.name: self.nodes.get(record.name) or SeenNode(record, NodeHistory()) for record in listed}
        for record in listed:
            self.nodes[record.name].record = record

    async def run(self) -> None:
        """Asks until it is cancelled. Histories begin anew: a pause would look like one long interval."""
        for node in self.nodes.values():
            node.history, node.answered, node.why, node.due = NodeHistory(), None, "", 0.0
        asking: dict[str, asyncio.Task[None]] = {}
        session = new_session(2 * _AT_A_TIME, _CONNECT_S)
        well, silent = asyncio.Semaphore(_AT_A_TIME), asyncio.Semaphore(_SILENT_AT_A_TIME)
        reader = ThreadPoolExecutor(1, "pd-cache-ui")
        loop = asyncio.get_running_loop()

        async def get(url: str) -> bytes:
            answer = await send(session, "GET", url, {"Accept-Encoding": "identity"}, None)
            try:
                if answer.status != 200:
                    raise ValueError(f"it answers {answer.status}")
                return await read_all(answer, _LARGEST)
            finally:
                answer.close()

        async def ask(node: SeenNode) -> None:
            async with silent if node.failures else well:
                try:
                    raw = await asyncio.wait_for(get(node.url + "/metrics"), TIMEOUT_S)
                    at = self._clock()
                    reading = await loop.run_in_executor(
                        reader, lambda: read_node(read_samples(raw.decode(errors="replace")), at)
                    )
                    if node.record.role == "master":
                        with contextlib.suppress(HopError, ValueError, TimeoutError):
                            self.segments = read_segments(
                                await asyncio.wait_for(get(node.url + "/get_segments_detail"), TIMEOUT_S)
                            )
                except TimeoutError:
                    self._failed(node, f"no whole answer within {TIMEOUT_S:g} s")
                except (HopError, ValueError) as error:
                    self._failed(node, str(error))
                except Exception as error:
                    log.exception("node %s: it could not be watched", node.record.name)
                    self._failed(node, repr(error))
                else:
                    node.history.add(reading)
                    node.answered, node.why, node.failures = at, "", 0

        try:
            while True:
                now = self._clock()
                for name, node in self.nodes.items():
                    if node.url and node.due <= now and name not in asking:
                        node.due = now + INTERVAL_S
                        task = asking[name] = asyncio.create_task(ask(node))
                        task.add_done_callback(lambda _, name=name: asking.pop(name, None))  # type: ignore[misc]
                await asyncio.sleep(INTERVAL_S / 8)
        finally:
            tasks = list(asking.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await session.close()
            reader.shutdown(wait=False, cancel_futures=True)

    def _failed(self, node: SeenNode, why: str) -> None:
        node.failures += 1
        node.due = self._clock() + min(_LONGEST_PAUSE_S, INTERVAL_S * 2 ** min(node.failures, 8))
        node.why = one_line(why)
        node.history.silent()
