"""KV events over ZMQ, in vLLM's way: PUB and SUB for batches as they come, ROUTER and DEALER for replays.

A message of the stream has three frames: a topic, the batch's number (8 bytes, big-endian) and the batch. A request for a replay has two:
an empty one, and the first number that is wanted. Its answer is an empty frame and the three frames of a batch, for each batch that the
publisher still has, and in the end one with the number -1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import zmq

from pd_cache.decoding import UndecodableError
from pd_cache.kv_events import (
    END_OF_REPLAY,
    ClearedEvent,
    EventBatch,
    KvEvent,
    Numbered,
    Step,
    StreamOrder,
    encode_batch,
    read_batch,
)
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

_LARGEST = 64 << 20
"""The most bytes of a message; ZMQ ends a connection that brings a larger one."""
_HIGH_WATER = 16_384
"""How many batches may wait in a socket."""
_MOST_REPLAYED = 65_536
_BEAT_S = 0.1


class EventEndpoints(NamedTuple):
    """Where a publisher's events are: addresses of ZMQ, such as `tcp://10.0.0.1:5557`."""

    stream: str
    replay: str = ""
    """Empty if it has none. A subscriber that comes late then knows less."""


class EventPublisher:
    """Publishes batches, and sends the last ones again to subscribers that ask. Thread-safe.

    A subscriber that was away for so long that its batches are gone gets one batch that says everything: that all blocks were cleared, and
    then which blocks are there.
    """

    def __init__(
        self,
        endpoints: EventEndpoints,
        contents: Callable[[], Sequence[KvEvent]],
        *,
        topic: bytes = b"",
        keep_batches: int = 10_000,
        keep_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Binds both addresses. `contents` returns the events that say everything that is there after the last published batch; it is
        called on another thread, while no batch is being published. `keep_batches` and `keep_bytes` bound what is kept for replays.

        Raises OSError if an address cannot be bound.
        """
        self._contents = contents
        self._topic = topic
        self._clock = clock
        self._keep_batches, self._keep_bytes = keep_batches, keep_bytes
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._last_ts = 0.0
        self._lock = threading.Lock()
        self._context = zmq.Context(io_threads=1)
        self._closing = threading.Event()
        try:
            self._stream = self._bound(zmq.PUB, endpoints.stream, _HIGH_WATER)
            self._router = self._bound(zmq.ROUTER, endpoints.replay, 2 * keep_batches)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"{endpoints.stream}, {endpoints.replay}: {error}") from None
        self._thread = threading.Thread(target=self._serve, name="kv-event-replays", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, address: str, high_water: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, high_water)
        made.setsockopt(zmq.RCVHWM, 64)
        made.setsockopt(zmq.MAXMSGSIZE, 1 << 10 if kind == zmq.ROUTER else _LARGEST)
        made.bind(address)
        return made

    @property
    def published(self) -> int:
        """How many batches were published."""
        return self._next

    def publish(self, events: Sequence[KvEvent], change: Callable[[], object] = lambda: None) -> None:
        """Publishes a batch. Calls `change` in the same moment: what `contents` returns differs from then on. Nothing else calls both."""
        with self._lock:
            change()
            self._last_ts = max(self._clock(), self._last_ts + 1e-6)  # no two batches have one time
            number, raw = self._next.to_bytes(8, "big"), encode_batch(EventBatch(self._last_ts, list(events)))
            self._next += 1
            self._kept.append((number, raw))
            self._kept_bytes += len(raw)
            while len(self._kept) > self._keep_batches or (self._kept_bytes > self._keep_bytes and len(self._kept) > 1):
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._stream.send_multipart([self._topic, number, raw])

    def close(self) -> None:
        """Stops publishing. Subscribers keep what they know."""
        self._closing.set()
        self._thread.join()
        with self._lock:
            self._stream.close(0)
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                if not self._router.poll(int(_BEAT_S * 1000)):
                    continue
                frames = self._router.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == 8:
                    self._answer(frames[0], int.from_bytes(frames[2], "big"))
        except zmq.ZMQError:
            log.exception("replays of KV events have ended")
        finally:
            self._router.close(0)

    def _answer(self, subscriber: bytes, first: int) -> None:
        for number, raw in [*self._from(first), (END_OF_REPLAY, b"")]:
            self._router.send_multipart([subscriber, b"", self._topic if raw else b"", number, raw])

    def _from(self, first: int) -> list[tuple[bytes, bytes]]:
        with self._lock:
            oldest = self._next - len(self._kept)
            if first >= oldest:
                return list(self._kept)[first - oldest :]
            everything = EventBatch(self._last_ts, [ClearedEvent(), *self._contents()])
            return [((self._next - 1).to_bytes(8, "big"), encode_batch(everything))]


OnSteps = Callable[[Sequence[Step]], None]
"""Gets what to apply next, in order, on the subscriber's thread."""


class _Feed:
    """One publisher, as the subscriber knows it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: EventEndpoints, on_steps: OnSteps) -> None:
        self.endpoints = endpoints
        self.on_steps = on_steps
        self.order = StreamOrder()
        self.answers: dict[int, EventBatch] = {}
        self.asked: float | None = None
        """When the replay under way was asked for, or last brought a batch; None if there is none."""
        self.ask_at = 0.0
        self.fruitless = 0
        """How many replays in a row brought nothing that could be applied."""
        self.batches = 0
        self._context = context
        self.stream = self._connected(zmq.SUB, endpoints.stream)
        self._monitor = self.stream.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.stream.setsockopt(zmq.SUBSCRIBE, b"")
        self.dealer = self._connected(zmq.DEALER, endpoints.replay) if endpoints.replay else None

    def _connected(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, _HIGH_WATER if kind == zmq.SUB else _MOST_REPLAYED)
        made.setsockopt(zmq.SNDHWM, 16)
        made.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        made.connect(address)
        return made

    def notice_end(self, now: float) -> None:
        """Notes if the connection was lost since the last call: before it is there again, so before another publisher's batches come."""
        lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            lost = True
        if lost:
            self.order.disconnected()
            self.answers, self.asked, self.ask_at = {}, None, now
            self.renew_dealer()  # a replay under way is the last publisher's

    def ask(self, now: float) -> None:
        assert self.dealer is not None
        self.answers, self.asked = {}, now
        try:
            self.dealer.send_multipart([b"", self.order.ask_from.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.Again:
            pass  # nobody has been there for a while; the deadline ends this replay

    def renew_dealer(self) -> None:
        """Forgets a replay that did not end: answers that come late would be taken for those of the next one."""
        if self.dealer is not None:
            self.dealer.close(0)
            self.dealer = self._connected(zmq.DEALER, self.endpoints.replay)

    def close(self) -> None:
        self.stream.disable_monitor()
        self._monitor.close(0)
        self.stream.close(0)
        if self.dealer is not None:
            self.dealer.close(0)


class EventSubscriber:
    """Follows the events of several publishers, on one thread. Thread-safe.

    It asks for a replay when it joins, when batches are missing, and every `check_s` to notice that a quiet publisher lost a batch on the
    way or began anew.
    """

    def __init__(
        self,
        *,
        check_s: float = 5.0,
        replay_s: float = 2.0,
        again_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replay_s`: how long a replay may bring nothing before it counts as ended. `again_s`: the time between two replays in a row."""
        self._check_s, self._replay_s, self._again_s = check_s, replay_s, again_s
        self._clock = clock
        self._wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]] = {}
        self._feeds: dict[Hashable, _Feed] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._sparse = SparseLog()
        self._thread: threading.Thread | None = None

    def follow(self, wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]]) -> None:
        """Follows these publishers from now on, and no others. A publisher of the same key and address is followed on as before."""
        with self._lock:
            self._wanted = dict(wanted)
            self._changed.set()
            if self._thread is None and wanted and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
                self._thread.start()

    def describe(self) -> dict[Hashable, dict[str, int | bool]]:
        """Returns, for each publisher, what has come of it."""
        feeds = dict(self._feeds)
        return {
            key: {
                "batches": feed.batches,
                "gaps": feed.order.gaps,
                "losses": feed.order.losses,
                "in_order": feed.order.in_order,
            }
            for key, feed in feeds.items()
        }

    def close(self) -> None:
        """Follows nobody any more. Waits for the thread, which a callback may hold up."""
        self._closing.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            while not self._closing.is_set():
                if self._changed.is_set():
                    self._change(context)
                poller = zmq.Poller()
                by_socket = {}
                for feed in self._feeds.values():
                    for made in (feed.stream, feed.dealer):
                        if made is not None:
                            poller.register(made, zmq.POLLIN)
                            by_socket[made] = feed
                for made, _ in poller.poll(int(_BEAT_S * 1000)) if by_socket else ():
                    feed = by_socket[made]
                    self._guarded(feed, self._read_stream if made is feed.stream else self._read_replay)
                if not by_socket:
                    self._changed.wait(_BEAT_S)
                for feed in self._feeds.values():
                    self._guarded(feed, self._keep_order)
        except zmq.ZMQError:
            log.exception("the subscriber of KV events has ended")
        finally:
            for feed in self._feeds.values():
                feed.close()
            context.destroy(linger=0)

    def _guarded(self, feed: _Feed, work: Callable[[_Feed], None]) -> None:
        try:
            work(feed)
        except zmq.ZMQError:
            raise
        except Exception:
            log.exception("%s: its events could not be applied", feed.endpoints.stream)

    def _change(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with self._lock:
            self._changed.clear()
            wanted = self._wanted
        feeds = {}
        for key, (endpoints, on_steps) in wanted.items():
            feed = self._feeds.pop(key, None)
            if feed is not None and feed.endpoints != endpoints:
                feed.close()
                feed = None
            try:
                feeds[key] = feed or _Feed(context, endpoints, on_steps)
            except zmq.ZMQError as error:
                log.warning("%s: no address of KV events: %s", endpoints.stream, error)
        for feed in self._feeds.values():
            feed.close()
        self._feeds = feeds

    def _read_stream(self, feed: _Feed) -> None:
        feed.notice_end(self._clock())
        for _ in range(256):  # then the others' turn
            try:
                frames = feed.stream.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (one := self._decoded(feed, frames)) is not None:
                feed.batches += 1
                self._apply(feed, feed.order.live(one.number, one.batch))

    def _read_replay(self, feed: _Feed) -> None:
        assert feed.dealer is not None
        for _ in range(256):
            try:
                frames = feed.dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if feed.asked is None:
                continue
            feed.asked = self._clock()
            if len(frames) == 4 and frames[2] == END_OF_REPLAY:
                self._end_replay(feed)
                return
            if (one := self._decoded(feed, frames[1:])) is not None and len(feed.answers) < _MOST_REPLAYED:
                feed.answers[one.number] = one.batch

    def _decoded(self, feed: _Feed, frames: Sequence[bytes]) -> Numbered | None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return None
        number = int.from_bytes(frames[1], "big")
        try:
            return Numbered(number, read_batch(frames[2]))
        except UndecodableError as error:
            # it may have been about any block
            if (count := self._sparse.admit()) is not None:
                log.warning("%s: %d batches of KV events cannot be read: %s", feed.endpoints.stream, count, error)
            return Numbered(number, EventBatch(time.time(), [ClearedEvent()]))

    def _keep_order(self, feed: _Feed) -> None:
        now = self._clock()
        feed.notice_end(now)
        if feed.dealer is None:
            if not feed.order.in_order:
                self._apply(feed, feed.order.lost())
        elif feed.asked is not None:
            if now - feed.asked > self._replay_s:
                answered = bool(feed.answers)
                feed.renew_dealer()
                if answered:
                    self._end_replay(feed)
                else:
                    self._fruitless(feed)
        elif now >= feed.ask_at - (0.0 if feed.order.in_order else self._check_s - self._again_s):
            feed.ask(now)

    def _end_replay(self, feed: _Feed) -> None:
        answers = [Numbered(number, feed.answers[number]) for number in sorted(feed.answers)]
        feed.answers = {}
        steps = feed.order.replayed(answers)
        if steps or feed.order.in_order:
            feed.fruitless, feed.asked, feed.ask_at = 0, None, self._clock() + self._check_s
        else:
            self._fruitless(feed)
        self._apply(feed, steps)

    def _fruitless(self, feed: _Feed) -> None:
        feed.fruitless += 1
        feed.asked, feed.ask_at = None, self._clock() + self._check_s
        if feed.fruitless >= 3 and not feed.order.in_order:
            feed.fruitless = 0
            self._apply(feed, feed.order.lost())

    def _apply(self, feed: _Feed, steps: Sequence[Step]) -> None:
        if steps:
            feed.on_steps(steps)
