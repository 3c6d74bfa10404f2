"""KV events over ZMQ, in vLLM's way: PUB and SUB for batches as they come, ROUTER and DEALER for replays.

A message of the stream has three frames: a topic, the batch's number (8 bytes, big-endian) and the batch. A request for a replay has two:
an empty one, and the first number that is wanted. Its answer is an empty frame and the three frames of a batch, for each batch that the
publisher still has, and in the end one with the number -1.

Our publisher takes one more message, which vLLM's does not know: an empty frame, an `ownership`, and hashes of blocks that a read did not find
(`report_missing`). It does not answer. If the blocks are gone, it publishes their removal.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import zmq

from pd_cache.decoding import UndecodableError
from pd_cache.kv_events import (
    END_OF_REPLAY,
    ClearedEvent,
    EventBatch,
    Forget,
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
_APPLIED_AT_ONCE = 16 << 20
"""The bytes of a replay that are kept before they are applied."""
_REPLAYS_AT_ONCE = 8
_MOST_SOCKETS = 16_384
"""A publisher that is followed takes three."""
_HEARTBEAT_MS, _DEAD_MS = 5_000, 15_000
"""How often each end asks whether the other one is there, and for how long it waits. Otherwise a subscriber would never notice that a
publisher's host has lost its power, and a publisher would keep what a stopped subscriber does not read."""
_BEAT_S = 0.1
_GOES_ON_S = 0.02
_REVIVE_S = 1.0
"""How long after sockets have failed, or could not be made, it is tried again."""

MOST_REPORTED = 64
"""How many blocks one report of missing blocks may name."""
_MOST_REPORTS = 256

OnMissing = Callable[[str, Sequence[bytes]], None]
"""Gets the `ownership` and the hashes of blocks that a subscriber did not find although they were published."""


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
        on_missing: OnMissing = lambda ownership, hashes: None,
        topic: bytes = b"",
        keep_batches: int = 10_000,
        keep_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Binds both addresses. `contents` returns the events that say everything that is there after the last published batch; it is
        called on another thread, while no batch is being published. `on_missing` is called there, too. `keep_batches` and `keep_bytes` bound
        what is kept for replays.

        Raises OSError if an address cannot be bound.
        """
        self._contents = contents
        self._on_missing = on_missing
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
            self._router = self._bound(zmq.ROUTER, endpoints.replay, keep_batches + 16)
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
        _watch_peers(made)
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
                elif 4 <= len(frames) <= 3 + MOST_REPORTED:
                    self._on_missing(frames[2].decode("ascii", "replace"), frames[3:])
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


def _watch_peers(made: zmq.Socket[bytes]) -> None:
    made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)


OnSteps = Callable[[Sequence[Step]], None]
"""Gets what to apply next, in order, on the subscriber's thread."""


class _Feed:
    """One publisher, as the subscriber knows it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: EventEndpoints, on_steps: OnSteps) -> None:
        self.endpoints = endpoints
        self.on_steps = on_steps
        self.order = StreamOrder()
        self.answers: dict[int, EventBatch] = {}
        self.answers_bytes = 0
        self.asked: float | None = None
        """When the replay under way was asked for, or last brought a batch; None if there is none."""
        self.ended = float("-inf")
        """When the last replay ended."""
        self.fruitless = 0
        """How many replays in a row brought nothing that could be applied."""
        self.cut_off = False
        """Whether the last replay had no end, but brought something: then there may be more."""
        self.batches = 0
        self._context = context
        with ExitStack() as stack:
            self.stream = self._connected(zmq.SUB, endpoints.stream)
            stack.callback(self.stream.close, 0)
            self._monitor = self.stream.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stack.callback(self._monitor.close, 0)
            self.stream.setsockopt(zmq.SUBSCRIBE, b"")
            self.dealer = self._connected(zmq.DEALER, endpoints.replay) if endpoints.replay else None
            stack.pop_all()

    def _connected(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, _HIGH_WATER if kind == zmq.SUB else _MOST_REPLAYED)
        made.setsockopt(zmq.SNDHWM, 16)
        made.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        _watch_peers(made)
        try:
            made.connect(address)
        except zmq.ZMQError:
            made.close(0)
            raise
        return made

    def notice_end(self) -> None:
        """Notes whether the connection was lost since the last call. Must come before each read of the stream: what is read next may be
        another publisher's."""
        lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            lost = True
        if lost:
            self.order.disconnected()
            self.take_answers()
            self.asked, self.ended = None, float("-inf")
            self.renew_dealer()  # a replay under way is the last publisher's

    def ask(self, now: float) -> None:
        self.take_answers()
        self.asked, self.cut_off = now, False
        self.send([b"", self.order.ask_from.to_bytes(8, "big")])

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message to the publisher. It is lost if the publisher has been away for a while."""
        if self.dealer is not None:
            with suppress(zmq.Again):
                self.dealer.send_multipart(frames, zmq.NOBLOCK)

    def take_answers(self) -> list[Numbered]:
        """Returns what the replay has brought, in order, and forgets it."""
        answers = [Numbered(number, self.answers[number]) for number in sorted(self.answers)]
        self.answers, self.answers_bytes = {}, 0
        return answers

    def replaying(self, now: float, quiet_s: float) -> bool:
        """Returns whether a replay is coming in, or is likely to begin at any moment."""
        return self.asked is not None and (bool(self.answers) or now - self.asked < quiet_s)

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
        quiet_s: float = 0.25,
        again_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replay_s`: how long to wait for the first batch of a replay. `quiet_s`: how long no further batch may come before the replay counts as
        ended. vLLM's publisher drops what does not fit into its socket's queue of 1000 messages, the end of the replay included, so a long replay
        takes several. `again_s`: the time between two replays in a row, if the first one brought nothing.
        """
        self._check_s, self._replay_s, self._quiet_s, self._again_s = check_s, replay_s, quiet_s, again_s
        self._clock = clock
        self._wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]] = {}
        self._feeds: dict[Hashable, _Feed] = {}
        self._reports: deque[tuple[Hashable, list[bytes]]] = deque(maxlen=_MOST_REPORTS)
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._change_due = math.inf
        """When to try again to follow publishers for which there was no socket."""
        self._closing = threading.Event()
        self._sparse = SparseLog()
        self._thread: threading.Thread | None = None

    def follow(self, wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]]) -> None:
        """Follows these publishers from now on, and no others. A publisher of the same key and address whose steps go to the same callable is
        followed on as before."""
        with self._lock:
            self._wanted = dict(wanted)
            self._changed.set()
            if self._thread is None and wanted and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
                self._thread.start()

    def report_missing(self, key: Hashable, ownership: str, hashes: Sequence[bytes]) -> None:
        """Reports to the publisher with this key (of `follow`) blocks that a read did not find, the first `MOST_REPORTED` of them. The publisher
        checks whether they are gone. A report that cannot be sent is lost. Only pd-cache's publishers understand it."""
        self._reports.append((key, [b"", ownership.encode(), *hashes[:MOST_REPORTED]]))

    def describe(self) -> dict[Hashable, dict[str, int | bool]]:
        """Returns, for each publisher, how many batches came, how many gaps there were, and how many could not be closed."""
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
        """Stops following. Waits for the thread, which a callback may hold up."""
        self._closing.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            context: zmq.Context[zmq.Socket[bytes]] | None = None
            try:
                context = zmq.Context(io_threads=1)
                context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
                self._follow_all(context)
            except zmq.ZMQError:  # for example, no file descriptor is left
                if self._sparse.admit("anew") is not None:
                    log.exception("the subscriber of KV events begins anew, and forgets what it knows")
                for feed in self._feeds.values():
                    self._guarded(feed, self._forget)
            finally:
                for feed in self._feeds.values():
                    feed.close()
                if context is not None:
                    context.destroy(linger=0)
                self._feeds = {}
            self._changed.set()  # all publishers are new ones
            self._closing.wait(_REVIVE_S)

    def _follow_all(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        while not self._closing.is_set():
            if self._changed.is_set() or self._clock() >= self._change_due:
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
            while self._reports:
                key, frames = self._reports.popleft()
                if (told := self._feeds.get(key)) is not None:
                    told.send(frames)

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
        self._change_due = math.inf
        feeds = {}
        for key, (endpoints, on_steps) in wanted.items():
            feed = self._feeds.pop(key, None)
            if feed is not None and (feed.endpoints, feed.on_steps) != (endpoints, on_steps):
                feed.close()
                self._guarded(feed, self._forget)
                feed = None
            try:
                feeds[key] = feed or _Feed(context, endpoints, on_steps)
            except zmq.ZMQError as error:
                self._change_due = self._clock() + _REVIVE_S
                if self._sparse.admit("not followed") is not None:
                    log.warning("%s: its KV events cannot be followed now: %s", endpoints.stream, error)
        for feed in self._feeds.values():
            feed.close()
        self._feeds = feeds

    def _read_stream(self, feed: _Feed) -> None:
        feed.notice_end()
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
                self._end_replay(feed, whole=True)
                return
            if (one := self._decoded(feed, frames[1:])) is not None:
                feed.answers[one.number] = one.batch
                feed.answers_bytes += len(frames[3])
                if feed.answers_bytes > _APPLIED_AT_ONCE:
                    self._apply_part(feed)

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
        feed.notice_end()
        if feed.dealer is None:
            if not feed.order.in_order:
                self._apply(feed, feed.order.lost())
        elif feed.asked is not None:
            if now - feed.asked > (self._quiet_s if feed.answers else self._replay_s):
                feed.renew_dealer()
                self._end_replay(feed, whole=False)
        elif now >= feed.ended + self._pause(feed):
            under_way = sum(one.replaying(now, self._quiet_s) for one in self._feeds.values())
            if under_way < _REPLAYS_AT_ONCE:
                feed.ask(now)

    def _pause(self, feed: _Feed) -> float:
        """Returns how long to wait from the end of one replay to the next."""
        if feed.cut_off:
            return _GOES_ON_S
        if feed.order.in_order:
            return self._check_s
        return self._again_s if feed.fruitless else min(_GOES_ON_S, self._again_s)

    def _apply_part(self, feed: _Feed) -> None:
        """Applies what has come of a replay, so that a long one need not be kept."""
        answers = feed.take_answers()
        steps = feed.order.replayed(answers)
        if feed.order.ask_from == answers[-1].number:
            feed.answers = {answers[-1].number: answers[-1].batch}  # the rest has to follow this one
        else:  # a batch is missing, or all that is there has to be asked for
            feed.renew_dealer()
            feed.asked, feed.ended, feed.fruitless, feed.cut_off = None, self._clock(), 0, bool(steps)
        self._apply(feed, steps)

    def _end_replay(self, feed: _Feed, whole: bool) -> None:
        """`whole`: the publisher said that this was all."""
        answers = feed.take_answers()
        if not answers and not whole:
            self._fruitless(feed)
            return
        steps = feed.order.replayed(answers)
        if steps or feed.order.in_order:
            feed.fruitless, feed.asked, feed.ended = 0, None, self._clock()
            feed.cut_off = bool(steps) and not whole
        else:
            self._fruitless(feed)
        self._apply(feed, steps)

    def _fruitless(self, feed: _Feed) -> None:
        feed.fruitless += 1
        feed.asked, feed.ended = None, self._clock()
        if feed.fruitless >= 3 and not feed.order.in_order:
            feed.fruitless = 0
            self._apply(feed, feed.order.lost())

    def _apply(self, feed: _Feed, steps: Sequence[Step]) -> None:
        if steps:
            feed.on_steps(steps)

    def _forget(self, feed: _Feed) -> None:
        """Makes the receiver forget what the publisher has said: a later publisher of the same key begins without it."""
        feed.on_steps([Forget.ALL])
