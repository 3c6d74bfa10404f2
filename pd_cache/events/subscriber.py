"""Follows KV events over ZMQ, as vLLM publishes them: PUB and SUB for batches as they come, ROUTER and DEALER
for replays.

A publisher numbers its batches from 0, and keeps the last batches. A message of the stream has three frames:
a topic, the batch's number (8 bytes, big-endian) and the batch. A request for a replay has two frames: an
empty frame, and the first number that is wanted. The answer has, for each batch that the publisher still has,
an empty frame and the three frames of the batch. Its last batch has the number -1.

`StreamOrder` (pure) puts the batches of a connection in order. `EventSubscriber` feeds it, for many
publishers on one thread. After a connection was lost, another publisher may answer at the same address, and
its numbers may happen to continue those of the old publisher. So after any failure, the subscriber forgets
everything about a publisher, and begins again with new sockets.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import zmq

from pd_cache.decoding import UndecodableError
from pd_cache.events.format import ClearedEvent, EventBatch, read_batch
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number after the last batch of a replay."""
_HIGH_WATER = 16_384
"""How many batches of the stream may wait in a socket. For a replay it is ZMQ's 1000; the rest of a longer
replay is requested again."""
_MOST_SOCKETS = 16_384
"""The most sockets. Following a publisher takes three."""
_HEARTBEAT_MS, _DEAD_MS = 5_000, 15_000
"""How often ZMQ checks that the publisher is there, and for how long it waits for the answer. Otherwise the
subscriber would never notice that the publisher's host has lost its power."""
_BEAT_S = 0.1
_REVIVE_S = 1.0
"""The pause after a connection was lost, or after sockets have failed."""


class Forget(enum.Enum):
    """Takes the place of a batch where events are lost: what the subscriber knows of the publisher is no
    longer true."""

    ALL = "all"


Step = EventBatch | Forget


class StreamOrder:
    """Puts the batches of a publisher in order.

    Batches come from a live stream, in order but with gaps, and from replays, which begin at `ask_from` and
    may lack batches. All methods return the steps to apply now: each batch once and in order, with
    `Forget.ALL` wherever batches are lost for good.
    """

    def __init__(self, most_waiting: int = 4096) -> None:
        """`most_waiting`: how many batches may wait for a replay. Beyond that the oldest go, and the replay
        has to bring them."""
        self._next = 0
        self._waiting: dict[int, EventBatch] = {}
        self._most_waiting = most_waiting
        self._brought = False
        """Whether the replay under way has brought a batch."""
        self.losses = 0
        """How often missing batches were lost for good."""

    @property
    def in_order(self) -> bool:
        """Whether no batch is known to be missing."""
        return not self._waiting

    @property
    def ask_from(self) -> int:
        """The number from which to ask for a replay."""
        return self._next

    def live(self, number: int, batch: EventBatch) -> list[Step]:
        """Takes in a batch of the live stream. If it does not follow the last one, it waits for a replay."""
        if number == self._next and not self._waiting:
            self._next += 1
            return [batch]
        if number >= self._next:
            self._waiting[number] = batch
            if len(self._waiting) > self._most_waiting:
                del self._waiting[min(self._waiting)]
        return []

    def replayed(self, number: int, batch: EventBatch) -> list[Step]:
        """Takes in a batch of a replay."""
        first, self._brought = not self._brought, True
        # a replay begins with the batch that was asked for, unless the publisher has it no more
        steps = self._give_up(number) if first and number > self._next else []
        if number != self._next:
            return []  # known already, or after a gap that the next replay fills
        self._next += 1
        return [*steps, batch]

    def replay_ended(self, whole: bool) -> list[Step]:
        """Notes the end of a replay. `whole`: the publisher has sent the replay's end. If it has not, or if
        the stream is not `in_order` afterwards, ask again."""
        steps: list[Step] = []
        if whole and not self._brought and self._waiting:  # the publisher does not keep what is missing
            steps = self._give_up(min(self._waiting))
        self._brought = False
        while (batch := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            steps.append(batch)
        self._waiting = {number: batch for number, batch in self._waiting.items() if number > self._next}
        return steps

    def _give_up(self, number: int) -> list[Step]:
        """Continues at `number`, without the batches before it."""
        known, self._next = self._next > 0, number
        self.losses += 1
        return [Forget.ALL] if known else []


# --- sockets ------------------------------------------------------------------------------------------------


class EventEndpoints(NamedTuple):
    """A publisher's ZMQ addresses, such as `tcp://10.0.0.1:5557`."""

    stream: str
    replay: str


OnSteps = Callable[[Sequence[Step]], None]
"""Gets the steps to apply next, in order, on the subscriber's thread."""


class _Feed:
    """A connection to a publisher."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: EventEndpoints, on_steps: OnSteps
    ) -> None:
        self.endpoints = endpoints
        self.on_steps = on_steps
        self.order = StreamOrder()
        self.asked: float | None = None
        """When the replay under way was requested, or last brought a batch; None if there is none."""
        self.due = 0.0
        """When to ask for the next replay, if no batch is known to be missing."""
        self.batches = 0
        self._context = context
        with ExitStack() as stack:
            self.stream = self._connected(zmq.SUB, endpoints.stream)
            stack.callback(self.stream.close)
            self._monitor = self.stream.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stack.callback(self._monitor.close)
            self.stream.setsockopt(zmq.SUBSCRIBE, b"")
            self.dealer = self._connected(zmq.DEALER, endpoints.replay)
            stack.pop_all()

    def _connected(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        options = {zmq.LINGER: 0, zmq.RECONNECT_IVL_MAX: 2000}
        options |= {zmq.HEARTBEAT_IVL: _HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: _DEAD_MS}
        if kind == zmq.SUB:
            options[zmq.RCVHWM] = _HIGH_WATER
        try:
            for option, value in options.items():
                made.setsockopt(option, value)
            made.connect(address)
        except zmq.ZMQError:
            made.close(0)
            raise
        return made

    @property
    def lost(self) -> bool:
        """Whether the connection was lost."""
        return bool(self._monitor.poll(0))

    def ask(self, now: float) -> None:
        self.asked = now
        with suppress(zmq.Again):  # the request is lost if the publisher has been away for a while
            self.dealer.send_multipart([b"", self.order.ask_from.to_bytes(8, "big")], zmq.NOBLOCK)

    def end_replay(self, due: float, *, whole: bool) -> None:
        if not whole:  # late answers would be taken for answers to the next replay
            self.dealer.close(0)
            self.dealer = self._connected(zmq.DEALER, self.endpoints.replay)
        self.asked = None
        self.apply(self.order.replay_ended(whole))
        self.due = due

    def apply(self, steps: Sequence[Step]) -> None:
        if steps:
            self.on_steps(steps)

    def close(self) -> None:
        self.stream.disable_monitor()
        self._monitor.close(0)
        self.stream.close(0)
        self.dealer.close(0)


def _received(made: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(256):  # then it is the turn of the other publishers
        try:
            yield made.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class EventSubscriber:
    """Follows the events of several publishers, on one thread. Thread-safe.

    It asks for a replay when it joins, when batches are missing, and every `check_s` seconds, to notice that
    the last batch of a quiet publisher was lost.
    """

    def __init__(self, *, check_s: float = 5.0, quiet_s: float = 0.5) -> None:
        """`quiet_s`: a replay that brings nothing for this time is requested again. vLLM's publisher drops
        messages beyond its socket's queue of 1000, even the end of the replay, so a long replay takes several
        requests.
        """
        self._check_s, self._quiet_s = check_s, quiet_s
        self._wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]] = {}
        self._feeds: dict[Hashable, _Feed] = {}
        self._open_after = 0.0
        """When to try publishers again that are wanted and not followed."""
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._sparse = SparseLog()
        self._thread: threading.Thread | None = None

    def follow(self, wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]]) -> None:
        """Follows these publishers from now on, and no others. Keeps the connection to a publisher whose key,
        address and callable stay the same. Call it on one thread."""
        self._wanted = dict(wanted)
        self._changed.set()
        if self._thread is None and wanted and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
            self._thread.start()

    def describe(self) -> dict[Hashable, dict[str, int | bool]]:
        """Returns, for each publisher, how many batches came, how many gaps could not be closed, and
        whether no batch is missing."""
        return {
            key: {
                "batches": feed.batches,
                "losses": feed.order.losses,
                "in_order": feed.order.in_order,
            }
            for key, feed in self._feeds.copy().items()
        }

    def close(self) -> None:
        """Stops following. Waits for the thread, which a callback may hold up."""
        self._closing.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    # --- on the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        try:
            while not self._closing.is_set():
                self._open_and_close(context)
                self._wait()
                for key, feed in list(self._feeds.items()):
                    try:
                        self._turn(feed)
                    except Exception as error:  # noqa: BLE001 - neither a publisher nor a receiver may end the others
                        self._failed(feed.endpoints, error)
                        self._end(key, feed)
        finally:
            for feed in self._feeds.values():
                feed.close()
            context.destroy(linger=0)
            self._feeds = {}

    def _open_and_close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        if self._changed.is_set():
            self._changed.clear()
            self._open_after = 0.0
        wanted = self._wanted
        for key, feed in list(self._feeds.items()):
            if wanted.get(key) != (feed.endpoints, feed.on_steps):
                self._end(key, feed)
        if time.monotonic() < self._open_after:
            return
        for key, (endpoints, on_steps) in wanted.items():
            if key not in self._feeds:
                try:
                    self._feeds[key] = _Feed(context, endpoints, on_steps)
                except zmq.ZMQError as error:  # for example, no file descriptor is left
                    self._failed(endpoints, error)

    def _end(self, key: Hashable, feed: _Feed) -> None:
        """Closes a connection. The receiver forgets what came over it."""
        del self._feeds[key]
        feed.close()
        try:
            feed.on_steps([Forget.ALL])
        except Exception:
            log.exception("%s: what it said could not be forgotten", feed.endpoints.stream)

    def _failed(self, endpoints: EventEndpoints, error: Exception) -> None:
        self._open_after = time.monotonic() + _REVIVE_S
        if self._sparse.admit("failed") is not None:
            known = isinstance(error, (zmq.ZMQError, ConnectionError))
            log.warning(
                "%s: its KV events cannot be followed now: %s", endpoints.stream, error, exc_info=not known
            )

    def _wait(self) -> None:
        """Waits until a message comes, or for a beat."""
        poller = zmq.Poller()
        for feed in self._feeds.values():
            poller.register(feed.stream, zmq.POLLIN)
            poller.register(feed.dealer, zmq.POLLIN)
        if self._feeds:
            poller.poll(int(_BEAT_S * 1000))
        else:
            self._changed.wait(_BEAT_S)

    def _turn(self, feed: _Feed) -> None:
        """Reads the messages that have come, and asks for missing batches."""
        if feed.lost:  # before the stream, because what is read next may be another publisher's
            raise ConnectionError("the connection was lost")
        for frames in _received(feed.stream):
            if (numbered := self._decoded(feed, frames)) is not None:
                feed.batches += 1
                feed.apply(feed.order.live(*numbered))
        now = time.monotonic()
        for _, *frames in _received(feed.dealer):
            feed.asked = now
            if len(frames) == 3 and frames[1] == _END_OF_REPLAY:
                feed.end_replay(now + self._check_s, whole=True)
            elif (numbered := self._decoded(feed, frames)) is not None:
                feed.apply(feed.order.replayed(*numbered))
        if feed.asked is not None:
            if now - feed.asked > self._quiet_s:
                feed.end_replay(now, whole=False)
        elif now >= feed.due or not feed.order.in_order:
            feed.ask(now)

    def _decoded(self, feed: _Feed, frames: Sequence[bytes]) -> tuple[int, EventBatch] | None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return None
        number = int.from_bytes(frames[1], "big")
        try:
            return number, read_batch(frames[2])
        except UndecodableError as error:
            # the batch may be about any block, so the node's cache counts as empty
            if (count := self._sparse.admit()) is not None:
                log.warning(
                    "%s: %d batches of KV events cannot be read: %s", feed.endpoints.stream, count, error
                )
            return number, EventBatch(time.time(), [ClearedEvent()])
