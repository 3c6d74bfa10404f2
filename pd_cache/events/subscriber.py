"""Follows KV events over ZMQ, as vLLM publishes them: PUB and SUB for batches as they come, ROUTER and DEALER for replays.

A publisher numbers its batches from 0, and keeps the last ones. A message of the stream has three frames: a topic, the batch's number (8 bytes,
big-endian) and the batch. A request for a replay has two: an empty one, and the first number that is wanted. Its answer is an empty frame and
the three frames of a batch, for each batch that the publisher still has, and in the end one with the number -1.

`StreamOrder` (pure) decides which batches to believe, and when to ask again. `EventSubscriber` does what it says, for many publishers on
one thread.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import zmq

from pd_cache.decoding import UndecodableError
from pd_cache.events.format import ClearedEvent, EventBatch, read_batch
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number after the last batch of a replay."""
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
"""How often the subscriber asks whether the publisher is there, and for how long it waits. Otherwise it would never notice that the
publisher's host has lost its power."""
_BEAT_S = 0.1
_GOES_ON_S = 0.02
_REVIVE_S = 1.0
"""How long after sockets have failed, or could not be made, it is tried again."""


class Forget(enum.Enum):
    """Takes the place of a batch where events are lost: what the subscriber knows of the publisher is no longer true."""

    ALL = "all"


class Numbered(NamedTuple):
    """A batch and its number."""

    number: int
    batch: EventBatch


Step = EventBatch | Forget


class StreamOrder:
    """Puts the batches of one publisher in order: finds gaps, asks for replays, and notices that the publisher began anew.

    Batches come from a live stream, in order but with gaps, and from replays. `live` and `replayed` return what to apply now, each batch
    once and in order, with `Forget.ALL` wherever batches are lost for good. A publisher begins anew only behind a lost connection.
    """

    def __init__(self, most_waiting: int = 4096) -> None:
        """`most_waiting`: how many batches may wait for a replay. If there are more, the oldest go, and the replay has to bring them."""
        self._next = 0
        self._last_ts = float("-inf")
        self._waiting: dict[int, EventBatch] = {}
        self._most_waiting = most_waiting
        self._joined = False
        self._last_live, self._last_live_ts = -1, float("-inf")
        """The number and the time of the last batch of the live stream."""
        self.gaps = 0
        """How often batches were missing."""
        self.losses = 0
        """How often missing batches were lost for good."""

    @property
    def in_order(self) -> bool:
        """Whether no batch is known to be missing."""
        return self._joined and not self._waiting

    @property
    def ask_from(self) -> int:
        """The number from which to ask for a replay. It is one that is known already, if there is one: if the publisher has another batch of that number, or
        none, it began anew."""
        return max(0, self._next - 1)

    def live(self, number: int, batch: EventBatch) -> list[Step]:
        """Takes in a batch of the live stream. If it does not follow the last one, it waits for `replayed`."""
        if (
            number <= self._last_live and batch.ts > self._last_live_ts
        ):  # the stream of one publisher has no number twice
            steps = self._begin_anew() if self._next else []
            self._joined, self._waiting, self._last_live = False, {}, -1
            return [*steps, *self.live(number, batch)]
        self._last_live, self._last_live_ts = max(number, self._last_live), max(batch.ts, self._last_live_ts)
        if number < self._next:
            if batch.ts <= self._last_ts:
                return []  # a replay has brought it
            steps = self._begin_anew()
            self._last_live = -1
            return [*steps, *self.live(number, batch)]
        if self._joined and number == self._next and not self._waiting:
            return [self._apply(number, batch)]
        if not self._waiting and self._joined:
            self.gaps += 1
        self._waiting[number] = batch
        while len(self._waiting) > self._most_waiting:
            del self._waiting[min(self._waiting)]
        return []

    def replayed(self, answers: Sequence[Numbered]) -> list[Step]:
        """Takes in the answer to a replay from `ask_from` on. The answer may lack batches at its end or in its middle: as long as the stream is not
        `in_order` then, ask again."""
        if answers:
            # what waits is of the same publisher only if it is younger where its number is higher
            last = answers[-1]
            self._waiting = {
                number: batch
                for number, batch in self._waiting.items()
                if number > last.number and batch.ts > last.batch.ts
            }
        elif not self._next:
            self._waiting = {}  # a publisher that has nothing has not sent these
        if self._next and not self._is_known(answers):
            # the batches in between are gone, or another publisher has this address now: everything that it still has is wanted
            waiting = self._waiting if answers else {}
            steps = self._begin_anew()
            self._waiting = waiting
            return steps
        steps = []
        numbered = {one.number: one.batch for one in answers}
        merged, self._waiting, self._joined = {**self._waiting, **numbered}, {}, True
        if not self._next and answers and answers[0].number > 0:  # what came before is gone
            self._next = answers[0].number
            self.losses += 1
        for number in sorted(merged):
            if number > self._next:
                self._waiting = {later: batch for later, batch in merged.items() if later >= number}
                break
            if number >= self._next:
                steps.append(self._apply(number, merged[number]))
        return steps

    def disconnected(self) -> None:
        """Notes that the connection was lost. Its other end may be another publisher from now on, whose numbers may happen to go on where
        those of the last one ended. So batches wait until a replay has told."""
        self._joined = False

    def lost(self) -> list[Step]:
        """Gives up on missing batches, because the publisher does not answer replays. Returns what to apply instead."""
        if self._joined and not self._waiting:
            return []
        waiting = self._waiting
        steps: list[Step] = self._begin_anew() if self._next else []
        self._joined, self._waiting = True, {}
        self.losses += 1
        # what waits may have holes of its own: each of them makes everything before it useless
        for number in sorted(waiting):
            if self._next and number > self._next:
                steps.append(Forget.ALL)
            steps.append(self._apply(number, waiting[number]))
        return steps

    def _is_known(self, answers: Sequence[Numbered]) -> bool:
        """Returns whether an answer begins with the batch that was applied last."""
        first = answers[0] if answers else None
        return first is not None and first.number == self._next - 1 and first.batch.ts == self._last_ts

    def _apply(self, number: int, batch: EventBatch) -> EventBatch:
        self._next = number + 1
        self._last_ts = batch.ts
        return batch

    def _begin_anew(self) -> list[Step]:
        self._next, self._last_ts, self._joined, self._waiting = 0, float("-inf"), False, {}
        return [Forget.ALL]


# --- sockets -----------------------------------------------------------------------------------------------------------


class EventEndpoints(NamedTuple):
    """Where a publisher's events are: addresses of ZMQ, such as `tcp://10.0.0.1:5557`."""

    stream: str
    replay: str = ""
    """Empty if it has none. A subscriber that comes late then knows less."""


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
        self.skipped = 0
        """How many events of stored blocks could not be read."""
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
        if self.dealer is not None:
            with suppress(zmq.Again):  # it is lost if the publisher has been away for a while
                self.dealer.send_multipart([b"", self.order.ask_from.to_bytes(8, "big")], zmq.NOBLOCK)

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

    def describe(self) -> dict[Hashable, dict[str, int | bool]]:
        """Returns, for each publisher, how many batches came, how many gaps there were, how many could not be closed, and how many
        events were skipped because they cannot be read."""
        feeds = dict(self._feeds)
        return {
            key: {
                "batches": feed.batches,
                "gaps": feed.order.gaps,
                "losses": feed.order.losses,
                "skipped": feed.skipped,
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
            if len(frames) == 4 and frames[2] == _END_OF_REPLAY:
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
            batch, skipped = read_batch(frames[2])
            feed.skipped += skipped
            return Numbered(number, batch)
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
