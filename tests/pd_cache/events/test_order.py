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
    read = read_batch(
        msgspec.msgpack.encode((1.5, [stored, RemovedEvent([2], "STORAGE"), ClearedEvent()], 3))
    )
    assert read.ts == 1.5
    assert read.events[:2] == [stored, RemovedEvent([2], "STORAGE")]
    assert isinstance(read.events[2], ClearedEvent)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x93\x01\x02\x03",
        b"\x92\xca\x00\x00\x00\x00\x91\x80",
        msgspec.msgpack.encode((1.5, [{"type": "BlockMoved"}], None)),
    ],
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
