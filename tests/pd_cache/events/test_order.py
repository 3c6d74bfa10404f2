"""KV events: their form, and the order in which they are believed."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cache.decoding import UndecodableError
from pd_cache.events import (
    ClearedEvent,
    EventBatch,
    Forget,
    RemovedEvent,
    StoredEvent,
    read_batch,
)
from pd_cache.events.subscriber import StreamOrder


def batch(ts, *hashes):
    return EventBatch(ts, [StoredEvent(list(hashes))])


def numbers(steps):
    return ["forget" if isinstance(step, Forget) else step.ts for step in steps]


class Publisher:
    """Numbers batches, and keeps the last few."""

    def __init__(self, keeps):
        self.sent = []
        self._keeps = keeps

    def publish(self):
        number = len(self.sent)
        self.sent.append(batch(number, number))
        return number, self.sent[-1]

    def heal(self, order, lacks=range(0)):
        """Answers a replay, but for some of its batches; without the last one, there is no end."""
        kept = [
            (number, one) for number, one in enumerate(self.sent) if number >= len(self.sent) - self._keeps
        ]
        answers = [one for one in kept if one[0] >= order.ask_from]
        steps = [
            step for place, one in enumerate(answers) if place not in lacks for step in order.replayed(*one)
        ]
        return steps + order.replay_ended(whole=len(answers) not in lacks)


def test_a_batch_reads_as_it_was_written():
    stored = StoredEvent([1, b"x" * 32], block_size=16, medium="GPU", group_idx=0)
    read, skipped = read_batch(
        msgspec.msgpack.encode((1.5, [stored, RemovedEvent([2], "STORAGE"), ClearedEvent()], 3))
    )
    assert (read.ts, skipped) == (1.5, 0)
    assert read.events[:2] == [stored, RemovedEvent([2], "STORAGE")]
    assert isinstance(read.events[2], ClearedEvent)


def test_an_event_that_cannot_be_read_is_skipped_unless_it_may_say_that_blocks_are_gone():
    unknown = {
        "type": "BlockStored",
        "block_hashes": [],
        "token_ids": [],
        "block_size": None,
        "object_key": "k",
    }
    known = {"type": "BlockStored", "block_hashes": [1], "block_size": 16}
    gone = {"type": "BlockRemoved", "block_hashes": None}
    read, skipped = read_batch(msgspec.msgpack.encode((1.5, [known, unknown, gone], None)))
    assert (read.events[0].block_hashes, read.events[1:], skipped) == ([1], [ClearedEvent()], 1)


MASTERS = bytes.fromhex(
    "93cf000001a214f3322991de0015a86576656e745f696401a974696d657374616d70cf000001a214f33229aa6576656e745f74797065a673746f726564a474797065"
    "ab426c6f636b53746f726564aa6d6f64656c5f6e616d65c0aa626c6f636b5f73697a65c0af6164646974696f6e616c5f73616c74c0a96c6f72615f6e616d65c0a974"
    "656e616e745f6964a764656661756c74aa6261636b656e645f6964a4706f6f6ca66d656469756da3637075a764705f72616e6b00a867726f75705f6964c0aa6f626a"
    "6563745f6b6579a9706463312f61622f30aa7365715f68617368657390ac626c6f636b5f68617368657390aa73657373696f6e5f6964c0ae626173655f626c6f636b"
    "5f696478c0ab706172656e745f68617368c0a9746f6b656e5f696473c0b1706172656e745f626c6f636b5f68617368c000"
)
"""What Mooncake 0.3.14's master published for a put of `pdc1/ab/0`."""


def test_events_of_mooncakes_master_are_counted_and_what_it_removed_or_cleared_is_read():
    ts, (stored,), rank = msgspec.msgpack.decode(MASTERS)
    assert (stored["object_key"], stored["block_hashes"], stored["block_size"]) == ("pdc1/ab/0", [], None)
    assert read_batch(MASTERS) == (EventBatch(float(ts), []), 1)
    removed = {**stored, "event_type": "removed", "type": "BlockRemoved"}
    cleared = {**stored, "event_type": "cleared", "type": "AllBlocksCleared", "medium": None}
    read, skipped = read_batch(msgspec.msgpack.encode((ts, [stored, removed, cleared], rank)))
    assert (read.events, skipped) == ([RemovedEvent([], "cpu"), ClearedEvent()], 1)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x90", b"\x93\x01\x02\x03", b"\x92\xca\x00\x00\x00\x00\x91\x80"]
)
def test_what_is_no_batch_is_refused(raw):
    with pytest.raises(UndecodableError):
        read_batch(raw)


def test_what_a_publisher_does_not_keep_is_lost_with_all_before_it():
    publisher, order = Publisher(0), StreamOrder()
    assert numbers(order.live(*publisher.publish())) == [0]
    publisher.publish()
    order.live(*publisher.publish())
    assert numbers(publisher.heal(order)) == ["forget", 2]
    assert numbers(order.live(*publisher.publish())) == [3]
    assert order.losses == 1


def test_what_waits_for_a_replay_is_bounded():
    publisher, order = Publisher(1000), StreamOrder(most_waiting=4)
    publisher.publish()
    for _ in range(50):
        order.live(*publisher.publish())
    assert len(order._waiting) == 4
    assert numbers(publisher.heal(order)) == list(range(51))


@settings(max_examples=400)
@given(
    keeps=st.integers(0, 12),
    actions=st.lists(
        st.sampled_from(("publish", "publish", "publish", "lose", "heal", "in part", "cut")), max_size=60
    ),
)
def test_after_any_history_a_healed_subscriber_knows_what_the_publisher_has_said(keeps, actions):
    """The model: everything since the last `Forget.ALL` is a run of consecutive batches, up to the last
    one."""
    publisher, order = Publisher(keeps), StreamOrder()
    known = []

    def apply(steps):
        for one in numbers(steps):
            if one == "forget":
                known.clear()
            else:
                known.append(one)

    lacks = {"heal": range(0), "in part": range(1, 3), "cut": range(2, 1000)}
    for action in actions:
        if action == "publish":
            apply(order.live(*publisher.publish()))
        elif action == "lose":
            publisher.publish()
        else:
            apply(publisher.heal(order, lacks[action]))
        assert not known or known == list(range(int(known[0]), int(known[-1]) + 1)), (
            "each batch once, in order"
        )
    for _ in range(len(actions) + 1):
        apply(publisher.heal(order))
    assert order.in_order
    if keeps:
        assert known == list(range(len(publisher.sent) - len(known), len(publisher.sent)))
        assert len(known) >= min(keeps, len(publisher.sent)), "nothing is given up that could be had"
