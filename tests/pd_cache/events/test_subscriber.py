"""KV events over real sockets: what a subscriber knows after whatever happened to it or to the publisher."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import zmq

from pd_cache.events import (
    EventBatch,
    EventEndpoints,
    EventSubscriber,
    Forget,
    KvEvent,
    RemovedEvent,
    Step,
    StoredEvent,
)
from pd_cache.events import subscriber as event_streams
from tests.support.events import EventPublisher
from tests.support.waiting import wait_for


@pytest.fixture
def endpoints(tmp_path: Path) -> EventEndpoints:
    return EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")


class Contents:
    """What a publisher has, and what a subscriber makes of its events."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.calls: list[int] = []
        self.forgotten = 0

    def apply(self, steps: Sequence[Step]) -> None:
        self.calls.append(len(steps))
        for step in steps:
            for event in [] if isinstance(step, Forget) else step.events:
                if isinstance(event, StoredEvent):
                    self.blocks |= set(event.block_hashes)  # type: ignore[arg-type]
                elif isinstance(event, RemovedEvent):
                    self.blocks -= set(event.block_hashes)  # type: ignore[arg-type]
                else:
                    self.blocks = set()
            if isinstance(step, Forget):
                self.blocks, self.forgotten = set(), self.forgotten + 1


class Talker:
    """A publisher whose content is known."""

    def __init__(self, endpoints: EventEndpoints, **options: int) -> None:
        self.contents = Contents()
        self.publisher = EventPublisher(endpoints, **options)

    def say(self, *events: KvEvent) -> None:
        self.contents.apply([EventBatch(0, list(events))])
        self.publisher.publish(list(events))

    def close(self) -> None:
        self.publisher.close()


@pytest.fixture
def talkers(endpoints: EventEndpoints) -> Iterator[Callable[..., Talker]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Talker(endpoints, **options)))


@pytest.fixture
def listener(endpoints: EventEndpoints) -> Iterator[Callable[[], Contents]]:
    with ExitStack() as stack:

        def listen() -> Contents:
            subscriber = stack.enter_context(closing(EventSubscriber(check_s=0.3, replay_s=1.0, again_s=0.02)))
            contents = Contents()
            subscriber.follow({"it": (endpoints, contents.apply)})
            return contents

        yield listen


Talkers = Callable[..., Talker]
Listener = Callable[[], Contents]


def test_who_comes_later_learns_what_was_said_before_and_follows(talkers: Talkers, listener: Listener) -> None:
    talker = talkers()
    talker.say(StoredEvent([1, 2, 3]))
    heard = listener()
    wait_for(lambda: heard.blocks == {1, 2, 3}, what="the replay came")
    talker.say(RemovedEvent([2]), StoredEvent([4]))
    wait_for(lambda: heard.blocks == {1, 3, 4}, what="the stream came")
    assert heard.forgotten == 0


def test_a_publisher_that_begins_anew_is_believed_from_its_new_beginning(
    endpoints: EventEndpoints, listener: Listener
) -> None:
    heard = listener()
    with closing(Talker(endpoints)) as talker:
        talker.say(StoredEvent([1]))
        talker.say(StoredEvent([2]))
        wait_for(lambda: heard.blocks == {1, 2}, what="the first one is heard")
    with closing(Talker(endpoints)) as talker:
        talker.say(StoredEvent([3]))
        wait_for(lambda: heard.blocks == {3}, what="what the first one said is forgotten")


def test_a_publisher_that_begins_anew_and_says_nothing_is_noticed(
    endpoints: EventEndpoints, listener: Listener
) -> None:
    heard = listener()
    with closing(Talker(endpoints)) as talker:
        talker.say(StoredEvent([1]))
        wait_for(lambda: heard.blocks == {1}, what="the first one is heard")
    with closing(Talker(endpoints)):
        wait_for(lambda: heard.blocks == set(), what="it asked and heard that nothing was said")


class Forgetful:
    """A publisher whose answers to replays end after 40 batches without a word, as vLLM's do if its socket's queue is full."""

    def __init__(self, endpoints: EventEndpoints, batches: int) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoints.replay)
        self._batches = [msgspec.msgpack.encode((float(number), [StoredEvent([number])])) for number in range(batches)]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            identity, _, first, *_ = self._router.recv_multipart()
            if identity == b"end":
                return
            start = int.from_bytes(first, "big")
            for number, raw in list(enumerate(self._batches))[start : start + 40]:
                self._router.send_multipart([identity, b"", b"", number.to_bytes(8, "big"), raw])

    def close(self) -> None:
        with self._context.socket(zmq.DEALER) as end:
            end.setsockopt(zmq.IDENTITY, b"end")
            end.connect(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
            end.send_multipart([b"", b""])
            self._thread.join()
        self._router.close(0)
        self._context.destroy(linger=0)


def test_a_replay_without_an_end_is_continued_at_once(endpoints: EventEndpoints) -> None:
    heard = Contents()
    with closing(Forgetful(endpoints, 300)), closing(EventSubscriber(check_s=600, replay_s=600, quiet_s=0.05)) as it:
        it.follow({"it": (endpoints, heard.apply)})
        wait_for(lambda: heard.blocks == set(range(300)), what="all parts came")
    assert heard.forgotten == 0


def test_a_long_replay_is_applied_in_parts(
    talkers: Talkers, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "_APPLIED_AT_ONCE", 1000)
    talker = talkers()
    for number in range(3000):
        talker.say(StoredEvent([number]), *([RemovedEvent([number - 7])] if number > 7 else []))
    heard = listener()
    wait_for(lambda: heard.blocks == talker.contents.blocks, what="every batch was replayed")
    assert (heard.forgotten, len(heard.calls) > 10) == (0, True)


def test_a_subscriber_whose_sockets_fail_forgets_and_begins_anew(
    talkers: Talkers, endpoints: EventEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that has no file descriptor left for a moment."""
    monkeypatch.setattr(event_streams, "_REVIVE_S", 0.05)
    talker, heard, failing = talkers(), Contents(), threading.Event()
    ask = event_streams._Feed.ask

    def fails(feed: event_streams._Feed, now: float) -> None:
        if failing.is_set():
            failing.clear()
            raise zmq.ZMQError(errno.EMFILE)
        ask(feed, now)

    monkeypatch.setattr(event_streams._Feed, "ask", fails)
    talker.say(StoredEvent([1, 2]))
    with closing(EventSubscriber(check_s=0.1, again_s=0.02)) as subscriber:
        subscriber.follow({"it": (endpoints, heard.apply)})
        wait_for(lambda: heard.blocks == {1, 2}, what="it is heard")
        failing.set()
        wait_for(lambda: heard.forgotten == 1 and heard.blocks == {1, 2}, what="it was forgotten, and is heard again")
        talker.say(RemovedEvent([2]))
        wait_for(lambda: heard.blocks == {1}, what="the stream goes on")


def test_another_address_of_a_publisher_begins_with_nothing(tmp_path: Path) -> None:
    ends = [EventEndpoints(f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}.replay") for name in "ab"]
    heard = Contents()
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(Talker(one))) for one in ends)
        first.say(StoredEvent([1]))
        second.say(StoredEvent([2]))
        subscriber = stack.enter_context(closing(EventSubscriber(check_s=0.3, again_s=0.02)))
        for one, blocks in zip(ends, ({1}, {2}), strict=True):
            subscriber.follow({"it": (one, heard.apply)})
            wait_for(lambda blocks=blocks: heard.blocks == blocks, what="it is followed")


def test_a_publisher_that_was_gone_for_a_moment_is_followed_anew_for_who_follows_it_now(
    talkers: Talkers, endpoints: EventEndpoints
) -> None:
    """The subscriber's thread was busy meanwhile, and has not seen it gone."""
    talker, before, heard = talkers(), Contents(), Contents()
    busy, free = threading.Event(), threading.Event()

    def apply(steps: Sequence[Step]) -> None:
        before.apply(steps)
        busy.set()
        assert free.wait(60)

    talker.say(StoredEvent([1]))
    with closing(EventSubscriber(check_s=0.1, again_s=0.02)) as subscriber:
        subscriber.follow({"it": (endpoints, apply)})
        wait_for(busy.is_set, what="the thread is busy")
        subscriber.follow({})
        subscriber.follow({"it": (endpoints, heard.apply)})
        free.set()
        wait_for(lambda: heard.blocks == {1}, what="it is heard by the one that follows now")
        assert before.forgotten == 1


def test_garbage_on_the_stream_costs_what_is_known_and_no_more(endpoints: EventEndpoints, listener: Listener) -> None:
    heard = listener()
    with closing(Talker(endpoints)) as talker:
        talker.say(StoredEvent([1]))
        wait_for(lambda: heard.blocks == {1}, what="it is heard")
        for frames in ([b"x"], [b"", b"short", b"x"], [b""] * 5):
            talker.publisher.send(frames)
        talker.publisher.publish_raw(b"\xc1")
        talker.say(StoredEvent([9]))
        wait_for(lambda: heard.blocks == {9}, what="it goes on")


def test_one_whose_events_cannot_be_applied_does_not_stop_the_others(tmp_path: Path) -> None:
    ends = [EventEndpoints(f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}.replay") for name in "ab"]
    called = threading.Event()

    def breaks(steps: Sequence[Step]) -> None:
        called.set()
        raise RuntimeError("it is broken")

    heard = Contents()
    with ExitStack() as stack:
        talkers = [stack.enter_context(closing(Talker(one))) for one in ends]
        subscriber = stack.enter_context(closing(EventSubscriber(check_s=0.3, again_s=0.02)))
        subscriber.follow({"a": (ends[0], breaks), "b": (ends[1], heard.apply)})
        for talker in talkers:
            talker.say(StoredEvent([1]))
        wait_for(called.is_set, what="it broke")
        talkers[1].say(StoredEvent([2]))
        wait_for(lambda: heard.blocks == {1, 2}, what="the other one is heard")
        subscriber.follow({})
        wait_for(lambda: not subscriber.describe(), what="nobody is followed")
