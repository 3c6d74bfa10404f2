"""KV events over real sockets: what a subscriber knows after whatever happened to it or to the publisher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from pd_cache.kv_events import EventBatch, Forget, KvEvent, RemovedEvent, Step, StoredEvent
from pd_cache.wire.event_streams import EventEndpoints, EventPublisher, EventSubscriber
from tests.support.waiting import wait_for


@pytest.fixture
def endpoints(tmp_path: Path) -> EventEndpoints:
    return EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")


class Contents:
    """What a publisher has, and what a subscriber makes of its events."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.forgotten = 0

    def everything(self) -> list[KvEvent]:
        return [StoredEvent(sorted(self.blocks))]

    def apply(self, steps: Sequence[Step]) -> None:
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
        self.publisher = EventPublisher(endpoints, self.contents.everything, **options)

    def say(self, *events: KvEvent) -> None:
        batch = EventBatch(0, list(events))
        self.publisher.publish(events, lambda: self.contents.apply([batch]))

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


def test_who_was_away_for_thousands_of_batches_catches_up_by_replay(talkers: Talkers, listener: Listener) -> None:
    talker = talkers()
    for number in range(5000):
        talker.say(StoredEvent([number]), *([RemovedEvent([number - 7])] if number > 7 else []))
    heard = listener()
    wait_for(lambda: heard.blocks == talker.contents.blocks, what="every batch was replayed")
    assert heard.forgotten == 0


def test_who_was_away_for_longer_than_batches_are_kept_gets_everything_at_once(
    talkers: Talkers, listener: Listener
) -> None:
    talker = talkers(keep_batches=10)
    for number in range(100):
        talker.say(StoredEvent([number]), RemovedEvent([number - 5]))
    heard = listener()
    wait_for(lambda: heard.blocks == talker.contents.blocks == {95, 96, 97, 98, 99}, what="all of it came")
    talker.say(StoredEvent([100]))
    wait_for(lambda: 100 in heard.blocks, what="the stream goes on")


def test_what_is_kept_for_replays_is_bounded_in_bytes_too(talkers: Talkers, listener: Listener) -> None:
    talker = talkers(keep_bytes=10_000)
    for number in range(100):
        talker.say(StoredEvent(list(range(number * 100, number * 100 + 100))))
    assert talker.publisher._kept_bytes <= 10_000
    heard = listener()
    wait_for(lambda: len(heard.blocks) == 10_000, what="a late one still learns everything")


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


def test_garbage_on_the_stream_costs_what_is_known_and_no_more(endpoints: EventEndpoints, listener: Listener) -> None:
    heard = listener()
    with closing(Talker(endpoints)) as talker:
        talker.say(StoredEvent([1]))
        wait_for(lambda: heard.blocks == {1}, what="it is heard")
        with talker.publisher._lock:
            for frames in ([b"x"], [b"", b"short", b"x"], [b""] * 5, [b"", (1).to_bytes(8, "big"), b"\xc1"]):
                talker.publisher._stream.send_multipart(frames)
            talker.publisher._next = 2
            talker.publisher._kept.append(((1).to_bytes(8, "big"), b"\xc1"))
        talker.say(StoredEvent([9]))
        wait_for(lambda: heard.blocks == {9}, what="it goes on")


def test_garbage_to_the_replays_is_left_without_an_answer(endpoints: EventEndpoints, talkers: Talkers) -> None:
    talker = talkers()
    talker.say(StoredEvent([1]))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoints.replay)
        for frames in ([b""], [b"", b""], [b"", b"\xff" * 8], [b"", b"", b"", b""], [b"", (0).to_bytes(8, "big")]):
            dealer.send_multipart(frames)
        numbers = []
        while len(numbers) < 3 and dealer.poll(10_000):
            numbers.append(int.from_bytes(dealer.recv_multipart()[2], "big", signed=True))
    assert numbers == [-1, 0, -1], "of a number that is to come there is nothing yet"


def test_an_address_that_is_taken_is_an_error_and_leaves_nothing(endpoints: EventEndpoints, tmp_path: Path) -> None:
    with (
        closing(Talker(EventEndpoints("tcp://127.0.0.1:*", endpoints.replay))),
        pytest.raises(OSError, match="No such"),
    ):
        EventPublisher(EventEndpoints(f"ipc://{tmp_path}/no/such/folder", endpoints.replay), list)


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
