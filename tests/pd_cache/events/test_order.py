"""KV events: their form, and the order in which they are believed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_cache.decoding import UndecodableError
from pd_cache.events import (
    ClearedEvent,
    EventBatch,
    Forget,
    RemovedEvent,
    Step,
    StoredEvent,
    read_batch,
    short_hash,
)
from pd_cache.events.subscriber import Numbered, StreamOrder


def batch(ts: float, *hashes: int) -> EventBatch:
    return EventBatch(ts, [StoredEvent(list(hashes))])


def numbers(steps: list[Step]) -> list[float | str]:
    return ["forget" if isinstance(step, Forget) else step.ts for step in steps]


class Publisher:
    """Numbers batches, keeps the last few, and may begin anew. Its times are unique."""

    def __init__(self, keeps: int) -> None:
        self.keeps = keeps
        self.time = 0
        self.sent: list[Numbered] = []

    def publish(self) -> Numbered:
        self.time += 1
        self.sent.append(Numbered(len(self.sent), batch(self.time, self.time)))
        return self.sent[-1]

    def begin_anew(self) -> None:
        self.sent = []

    def replay(self, first: int) -> list[Numbered]:
        return [one for one in self.sent[-self.keeps :] if one.number >= first]


def heal(order: StreamOrder, publisher: Publisher, cut: int | None = None) -> list[Step]:
    steps = order.replayed(publisher.replay(order.ask_from)[:cut])
    for _ in range(3):
        if order.in_order:
            break
        steps += order.replayed(publisher.replay(order.ask_from))
    return steps


def test_a_batch_reads_as_it_was_written() -> None:
    events = [
        StoredEvent([1, b"x" * 32], parent_block_hash=7, block_size=16, medium="GPU", group_idx=0),
        RemovedEvent([2], "STORAGE"),
        ClearedEvent(),
    ]
    read, skipped = read_batch(msgspec.msgpack.encode((1.5, events, 3)))
    assert (read.ts, read.data_parallel_rank) == (1.5, 3)
    assert skipped == 0
    assert [type(event) for event in read.events] == [StoredEvent, RemovedEvent, ClearedEvent]
    assert read.events[:2] == events[:2]


def test_an_event_that_cannot_be_read_is_skipped_unless_it_may_say_that_blocks_are_gone() -> None:
    unknown: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [],
        "token_ids": [],
        "block_size": None,
        "object_key": "k",
    }
    known = {"type": "BlockStored", "block_hashes": [1], "block_size": 16}
    gone = {"type": "BlockRemoved", "block_hashes": None}
    read, skipped = read_batch(msgspec.msgpack.encode((1.5, [known, unknown, gone], None)))
    assert (read.events[0].block_hashes, read.events[1:], skipped) == ([1], [ClearedEvent()], 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x90", b"\x93\x01\x02\x03", b"\x92\xca\x00\x00\x00\x00\x91\x80"])
def test_what_is_no_batch_is_refused(raw: bytes) -> None:
    with pytest.raises(UndecodableError):
        read_batch(raw)


def test_the_two_forms_of_a_vllm_block_hash_are_one_block() -> None:
    digest = bytes(range(32))
    assert short_hash(digest) == short_hash(int.from_bytes(digest, "big") & (1 << 64) - 1)


def test_a_gap_is_healed_by_a_replay_and_no_batch_comes_twice() -> None:
    publisher, order = Publisher(100), StreamOrder()
    heal(order, publisher)
    assert numbers(order.live(*publisher.publish())) == [1]
    publisher.publish()
    late = publisher.publish()
    assert order.live(*late) == []
    assert numbers(heal(order, publisher)) == [2, 3]
    assert order.live(*late) == [], "a replay brought it before the stream did"
    assert (order.gaps, order.losses) == (1, 0)


def test_without_replays_a_gap_forgets_all() -> None:
    publisher, order = Publisher(0), StreamOrder()
    assert order.lost() == []
    assert numbers(order.live(*publisher.publish())) == [1]
    publisher.publish()
    order.live(*publisher.publish())
    assert numbers(order.lost()) == ["forget", 3]
    assert numbers(order.live(*publisher.publish())) == [4]


def test_what_waits_for_a_replay_is_bounded() -> None:
    publisher, order = Publisher(1000), StreamOrder(most_waiting=4)
    for _ in range(50):
        order.live(*publisher.publish())
    assert numbers(heal(order, publisher)) == list(range(1, 51))


@settings(max_examples=400)
@example(keeps=1, actions=["publish", "publish", "restart", "publish", "heal"])
@example(keeps=1, actions=["publish", "publish", "restart", "lose", "lose", "publish", "heal"])
@example(keeps=1, actions=["publish", "heal", "restart", "lose", "publish"])
@given(
    keeps=st.integers(1, 12),
    actions=st.lists(
        st.sampled_from(("publish", "publish", "publish", "lose", "heal", "heal half", "restart")), max_size=60
    ),
)
def test_after_any_history_a_healed_subscriber_knows_what_the_publisher_has_said(
    keeps: int, actions: list[str]
) -> None:
    """The model: everything since the last `Forget.ALL` is a run of consecutive batches of the present publisher, up to its last one."""
    publisher, order, known = Publisher(keeps), StreamOrder(), []

    def apply(steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Forget):
                known.clear()
            else:
                known.append(step.ts)

    for action in actions:
        if action == "publish":
            apply(order.live(*publisher.publish()))
        elif action == "lose":
            publisher.publish()
        elif action == "restart":
            publisher.begin_anew()
            order.disconnected()
        else:
            apply(heal(order, publisher, cut=2 if action == "heal half" else None))
        assert known == sorted(set(known)), "each batch once, in order"
    apply(heal(order, publisher))
    apply(heal(order, publisher))
    assert order.in_order
    said = [one.batch.ts for one in publisher.sent]
    assert known == said[len(said) - len(known) :]
    assert len(known) >= min(keeps, len(said)), "nothing is given up that could be had"
