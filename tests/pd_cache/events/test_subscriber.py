"""KV events over real sockets: what a subscriber knows after whatever happened to it or to the publisher."""

import threading
from contextlib import ExitStack, closing

import msgspec
import pytest

from pd_cache.events import (
    ClearedEvent,
    EventEndpoints,
    EventSubscriber,
    Forget,
    RemovedEvent,
    StoredEvent,
)
from pd_cache.events import subscriber as subscriber_module
from tests.support.events import EventPublisher
from tests.support.waiting import wait_for


def endpoints_in(folder, name=""):
    return EventEndpoints(f"ipc://{folder}/{name}stream", f"ipc://{folder}/{name}replay")


@pytest.fixture
def endpoints(tmp_path):
    return endpoints_in(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(subscriber_module, "_REVIVE_S", 0.05)


class Contents:
    """What a receiver makes of events."""

    def __init__(self):
        self.blocks = set()
        self.forgotten = 0

    def apply(self, steps):
        for step in steps:
            for event in [ClearedEvent()] if isinstance(step, Forget) else step.events:
                if isinstance(event, StoredEvent):
                    self.blocks |= set(event.block_hashes)
                elif isinstance(event, RemovedEvent):
                    self.blocks -= set(event.block_hashes)
                else:
                    self.blocks = set()
            self.forgotten += isinstance(step, Forget)

    def wait_for(self, *blocks):
        wait_for(lambda: self.blocks == set(blocks), f"it knows {blocks}")


@pytest.fixture
def subscriber():
    with closing(EventSubscriber(check_s=0.3, quiet_s=0.2)) as made:
        yield made


@pytest.fixture
def heard(subscriber, endpoints):
    contents = Contents()
    subscriber.follow({"it": (endpoints, contents.apply)})
    return contents


def test_a_subscriber_that_comes_later_learns_what_was_said_before_and_follows(subscriber, endpoints):
    heard = Contents()
    with closing(EventPublisher(endpoints)) as publisher:
        publisher.publish([StoredEvent([1, 2, 3])])
        subscriber.follow({"it": (endpoints, heard.apply)})
        heard.wait_for(1, 2, 3)
        publisher.publish([RemovedEvent([2]), StoredEvent([4])])
        heard.wait_for(1, 3, 4)
    assert heard.forgotten == 0


def test_of_a_publisher_that_begins_anew_only_what_it_says_now_is_believed(heard, endpoints):
    for first in (1, 3):
        with closing(EventPublisher(endpoints)) as publisher:
            for block in (first, first + 1):
                publisher.publish([StoredEvent([block])])
            heard.wait_for(first, first + 1)
    with closing(EventPublisher(endpoints)):
        heard.wait_for()


def test_a_replay_without_an_end_is_continued_at_once(endpoints):
    heard = Contents()
    with (
        closing(EventPublisher(endpoints, most_replayed=40)) as publisher,
        closing(EventSubscriber(check_s=600, quiet_s=0.05)) as subscriber,
    ):
        for number in range(300):
            publisher.publish([StoredEvent([number])])
        subscriber.follow({"it": (endpoints, heard.apply)})
        heard.wait_for(*range(300))
    assert heard.forgotten == 0


def test_a_gap_is_asked_for_at_once(endpoints):
    heard = Contents()
    with closing(EventPublisher(endpoints)) as publisher, closing(EventSubscriber(check_s=600)) as subscriber:
        subscriber.follow({"it": (endpoints, heard.apply)})
        publisher.publish([StoredEvent([1])])
        heard.wait_for(1)
        frames = [b"", (7).to_bytes(8, "big"), msgspec.msgpack.encode((9.0, [StoredEvent([7])]))]
        # more than once, because a subscription takes a moment
        wait_for(lambda: publisher.send(frames) or heard.blocks == {7}, "it goes on behind the gap")
    assert heard.forgotten == 1, "the publisher does not have the batches between them"


def test_another_address_or_receiver_begins_with_nothing(subscriber, tmp_path):
    ends, heard, next_one = [endpoints_in(tmp_path, name) for name in "ab"], Contents(), Contents()
    with ExitStack() as stack:
        for number, one in enumerate(ends):
            stack.enter_context(closing(EventPublisher(one))).publish([StoredEvent([number])])
        for number, one in enumerate(ends):
            subscriber.follow({"it": (one, heard.apply)})
            heard.wait_for(number)
        subscriber.follow({"it": (ends[1], next_one.apply)})
        next_one.wait_for(1)
        heard.wait_for()


def test_garbage_on_the_stream_costs_what_is_known_and_no_more(heard, endpoints):
    with closing(EventPublisher(endpoints)) as publisher:
        publisher.publish([StoredEvent([1])])
        heard.wait_for(1)
        for frames in ([b"x"], [b"", b"short", b"x"], [b""] * 5):
            publisher.send(frames)
        publisher.publish_raw(b"\xc1")
        publisher.publish([StoredEvent([9])])
        heard.wait_for(9)


def test_neither_a_receiver_that_raises_nor_an_address_that_is_none_stops_the_others(
    subscriber, tmp_path, endpoints
):
    ends, called, well, heard = endpoints_in(tmp_path, "b"), threading.Event(), threading.Event(), Contents()

    def breaks(steps):
        called.set()
        if not well.is_set():
            raise RuntimeError("it is broken")
        heard.apply(steps)

    other = Contents()
    nowhere = EventEndpoints("tcp://no port", "tcp://no port")
    with closing(EventPublisher(endpoints)) as first, closing(EventPublisher(ends)) as second:
        subscriber.follow({"a": (endpoints, breaks), "b": (ends, other.apply), "c": (nowhere, other.apply)})
        first.publish([StoredEvent([1])])
        wait_for(called.is_set, "it broke")
        second.publish([StoredEvent([2])])
        other.wait_for(2)
        well.set()
        heard.wait_for(1)
        subscriber.follow({})
        wait_for(lambda: not subscriber.describe(), "nobody is followed")
