"""The server's queue: a pure matter."""

from collections import Counter
from contextlib import closing

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_cache.server.server import Item, WorkQueue
from tests.support.waiting import beside, wait_for

LIMIT = 8
CLIENTS = st.sampled_from("abc")


def queued(client, work):
    nothing = None
    return Item(nothing, client, work)


class QueueModel(RuleBasedStateMachine):
    """Random histories against a list of what waits and a list of what runs."""

    def __init__(self):
        super().__init__()
        self.queue = WorkQueue(LIMIT)
        self.waiting = []
        self.running = []
        self.next = 0

    @rule(client=CLIENTS)
    def put(self, client):
        held = Counter(item.client for item in self.waiting + self.running)
        has_room = held[client] < LIMIT - held.total()
        item = queued(client, self.next)
        self.next += 1
        assert self.queue.put(item) == has_room, "a client may have as many places as it leaves free"
        if has_room:
            self.waiting.append(item)

    @precondition(lambda self: self.waiting)
    @rule(most=st.integers(1, 4))
    def take(self, most):
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        assert self.queue.take(most) == taken, "first come, first served"
        self.running += taken

    @precondition(lambda self: self.running)
    @rule(goes_on=st.booleans())
    def end_turn(self, goes_on):
        item = self.running.pop(0)
        if goes_on:
            assert self.queue.put_back(item)
            self.waiting.append(item)
        else:
            self.queue.finished(item)

    @rule(client=CLIENTS)
    def discard(self, client):
        self.queue.discard(client)
        self.waiting = [item for item in self.waiting if item.client != client]

    @invariant()
    def counts_what_waits_and_what_runs(self):
        held = Counter(item.client for item in self.waiting + self.running)
        assert (self.queue.in_flight, self.queue._held) == (held.total(), held)
        assert len(self.queue._held) == len(held), "a client without items leaves nothing behind"

    def teardown(self):
        assert self.queue.close() == self.waiting
        assert self.queue.take() == []
        assert not self.queue.put(queued("a", 0))
        if self.running:
            assert not self.queue.put_back(self.running[0])


TestQueueModel = QueueModel.TestCase


def test_many_threads_take_everything_that_is_put_and_end_when_the_queue_is_closed():
    queue = WorkQueue(10_000)
    taken = []

    def take():
        while items := queue.take(3):
            for item in items:
                taken.append(item.work)
                queue.finished(item)

    with beside(*[take] * 4), closing(queue):
        for number in range(2000):
            assert queue.put(queued("a", number))
        wait_for(lambda: len(taken) == 2000 and not queue.in_flight)
        assert sorted(taken) == list(range(2000))
