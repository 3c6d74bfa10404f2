"""Weights versions: what the authority and its clients promise each other, over lost, late and repeated messages, and over HTTP."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from launch.discovery.etcd import EtcdValues, prefix_of
from launch.health_server import serving
from launch.versions import (
    CHANGE_S,
    KNOWN_S,
    MARGIN_S,
    Authority,
    EtcdHistories,
    Histories,
    MemoryHistories,
    known_versions,
    versions_handler,
)
from pd_cache.cluster import EtcdDiscovery
from pd_cache.deadline import Deadline
from pd_cache.versions import (
    FIRST,
    LEASE_S,
    HttpChannel,
    Question,
    RefusedError,
    Reply,
    UnavailableError,
    Version,
    WeightsVersion,
)
from tests.support.etcd import Etcd
from tests.support.waiting import wait_for

MODEL = "llama"


class Clock:
    """Time that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def authority(clock: Clock, histories: Histories | None = None) -> Authority:
    """Returns an authority that has learned what there is to learn."""
    made = Authority(histories or MemoryHistories(), clock=clock, wall=clock)
    clock.now += LEASE_S + MARGIN_S
    return made


@dataclass
class Wire:
    """Carries questions to an authority, or loses them."""

    authority: Authority
    question: bool = True
    """Whether the next questions arrive."""
    answer: bool = True
    """Whether the next answers arrive."""
    asked: list[Question] = field(default_factory=list)

    def ask(self, question: Question, timeout: float) -> Reply:
        if not self.question:
            raise UnavailableError("lost")
        self.asked.append(question)
        reply = self.authority.answer(question)
        if not self.answer:
            raise UnavailableError("lost on the way back")
        return reply

    def close(self) -> None:
        pass


class Engine:
    """An engine with weights, over a wire."""

    def __init__(self, clock: Clock, wire: Wire, weights: int = 0) -> None:
        self.wire = wire
        self.weights = weights
        self.version = WeightsVersion("http://a:1", MODEL, channel=lambda _: wire, clock=clock)

    def poll(self) -> None:
        self.version.poll(self.wire)

    def uses(self) -> str | None:
        return self.version.current(Deadline(0.0))


def polled(*engines: Engine) -> None:
    for engine in engines:
        engine.poll()


@pytest.fixture(params=["memory", "etcd"])
def histories(request: pytest.FixtureRequest, etcd: Etcd) -> Iterator[Histories]:
    if request.param == "memory":
        yield MemoryHistories()
        return
    with contextlib.closing(EtcdValues(EtcdDiscovery(endpoints=(etcd.endpoint,)))) as values:
        yield EtcdHistories(values, prefix_of(f"versions-{time.monotonic_ns()}", "versions"), elected=False)


# --- the authority, wherever its histories lie ---------------------------------------------------------------------------


def test_engines_that_change_together_get_one_version(histories: Histories) -> None:
    clock = Clock()
    wire = Wire(authority(clock, histories))
    a, b = Engine(clock, wire), Engine(clock, wire)
    polled(a, b)
    assert (a.uses(), b.uses()) == (FIRST, FIRST)
    first = a.version.reset()
    assert first
    polled(a, b)
    assert (a.uses(), b.uses()) == (first, None), "the weights of b have not changed yet"
    assert b.version.reset() == first
    polled(b)
    assert (a.uses(), b.uses()) == (first, first)
    second = b.version.reset()
    assert second not in (first, None)


def test_an_engine_that_is_a_change_behind_is_not_believed_to_have_the_last_one() -> None:
    clock = Clock()
    wire = Wire(authority(clock))
    a, b = Engine(clock, wire), Engine(clock, wire)
    polled(a, b)
    first, second = a.version.reset(), a.version.reset()
    assert b.version.reset() == first
    polled(a, b)
    assert (a.uses(), b.uses()) == (second, None)


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_after_a_change_without_an_answer_only_a_label_or_a_command_says_what_an_engine_has(lost: str) -> None:
    """Its next call may mean the next change: it must not join what others have called the last one."""
    clock = Clock()
    judge = authority(clock)
    a, e = Engine(clock, Wire(judge)), Engine(clock, Wire(judge))
    polled(a, e)
    assert a.version.reset()
    setattr(e.wire, lost, False)
    assert e.version.reset(timeout=0.0) is None
    setattr(e.wire, lost, True)
    assert e.version.reset(timeout=0.0) is None, "it may have the weights after those of a"
    polled(a, e)
    assert (e.version.own, e.uses()) == (None, None)
    assert a.version.reset("w2") == e.version.reset("w2") == "w2"
    polled(a, e)
    assert (a.uses(), e.uses()) == ("w2", "w2")


@pytest.mark.parametrize("answered", [False, True])
def test_a_command_in_the_middle_of_an_engines_change_counts_once_that_has_ended_well(answered: bool) -> None:
    clock = Clock()
    judge = authority(clock)
    e = Engine(clock, Wire(judge))
    polled(e)

    class Interrupted:
        def ask(self, question: Question, timeout: float) -> Reply:
            reply = judge.answer(question)
            judge.answer(Question(do="reset", model=MODEL, label="all"))
            e.poll()
            assert e.uses() is None, "its own call has not ended"
            if not answered:
                raise UnavailableError("lost")
            return reply

        def close(self) -> None:
            pass

    e.version._channel = lambda _: Interrupted()
    assert (e.version.reset(timeout=0.0) is not None) is answered
    polled(e)
    assert e.uses() == ("all" if answered else None)


def test_an_engine_that_comes_late_to_a_change_is_refused() -> None:
    clock = Clock()
    wire = Wire(authority(clock))
    a, b = Engine(clock, wire), Engine(clock, wire)
    polled(a, b)
    label = a.version.reset()
    clock.now += CHANGE_S + 1
    assert b.version.reset() is None
    polled(a, b)
    assert (a.uses(), b.uses()) == (label, None)
    assert b.version.reset(label) == label
    polled(b)
    assert b.uses() == label


def test_an_engine_that_starts_after_a_change_uses_nothing_until_a_reset_says_what_it_has(histories: Histories) -> None:
    clock = Clock()
    wire = Wire(authority(clock, histories))
    a = Engine(clock, wire)
    polled(a)
    label = a.version.reset()
    late = Engine(clock, wire)
    polled(a, late)
    assert (a.uses(), late.uses(), late.version.own) == (label, None, None)
    again = wire.authority.answer(Question(do="reset", model=MODEL, label=label))
    assert again.version is not None
    assert again.version.label == label
    polled(a, late)
    assert (a.uses(), late.uses()) == (label, label)
    assert late.version.reset() not in (None, label)


def test_a_late_engine_cannot_say_by_itself_that_it_has_changed() -> None:
    clock = Clock()
    wire = Wire(authority(clock))
    a = Engine(clock, wire)
    polled(a)
    label = a.version.reset()
    late = Engine(clock, wire)
    polled(a, late)
    assert late.version.reset() is None
    polled(late)
    assert late.uses() is None
    assert wire.authority.models()[MODEL].current == label


def test_equal_labels_are_one_version() -> None:
    clock = Clock()
    wire = Wire(authority(clock))
    a, b = Engine(clock, wire), Engine(clock, wire)
    polled(a, b)
    assert a.version.reset("step-7") == "step-7"
    assert b.version.reset("step-7") == "step-7"
    polled(a, b)
    assert (a.uses(), b.uses()) == ("step-7", "step-7")


@pytest.mark.parametrize("label", ["", "a b", "a/b", "x" * 65, "ä", "a\n"])
def test_a_label_that_cannot_be_one_is_a_value_error(label: str) -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="1 to 64"):
        Engine(clock, Wire(authority(clock))).version.reset(label)


def test_a_reset_of_all_nodes_names_those_that_it_does_not_reach(histories: Histories) -> None:
    clock = Clock()
    judge = authority(clock, histories)
    near, far = Engine(clock, Wire(judge)), Engine(clock, Wire(judge))
    polled(near, far)
    far.wire.question = False
    reply = judge.answer(Question(do="reset", model=MODEL, label="new"))
    assert reply.version is not None
    begun, number = clock.now, reply.version.number
    polled(near, far)
    assert judge.pending(MODEL, number, begun), "near has not confirmed"
    polled(near)
    assert judge.pending(MODEL, number, begun), "far may rely on its last answer"
    assert far.uses() == FIRST
    clock.now += LEASE_S + MARGIN_S
    assert not judge.pending(MODEL, number, begun)
    told, untold = judge.reached(MODEL, number)
    assert (len(told), len(untold)) == (1, 1)
    assert far.uses() is None
    polled(near)
    assert near.uses() == "new"
    far.wire.question = True
    polled(far)
    assert far.uses() == "new", "it learns of the reset with its next question"


def test_an_engine_that_a_reset_did_not_reach_does_not_join_it_by_a_change_of_its_own() -> None:
    clock = Clock()
    judge = authority(clock)
    far = Engine(clock, Wire(judge))
    polled(far)
    reply = judge.answer(Question(do="reset", model=MODEL, label="new"))
    assert reply.version is not None
    judge.reached(MODEL, reply.version.number)
    assert far.version.reset() is None
    polled(far)
    assert far.uses() is None, "its weights have changed since the reset"


def test_an_engine_and_a_command_that_mean_the_same_change_agree() -> None:
    clock = Clock()
    judge = authority(clock)
    a, b = Engine(clock, Wire(judge)), Engine(clock, Wire(judge))
    polled(a, b)
    judge.answer(Question(do="reset", model=MODEL, label="new"))
    assert a.version.reset() == "new"
    polled(a, b)
    assert (a.uses(), b.uses()) == ("new", "new")


def test_a_command_after_an_engines_change_reaches_that_engine_too() -> None:
    clock = Clock()
    judge = authority(clock)
    a, b = Engine(clock, Wire(judge)), Engine(clock, Wire(judge))
    polled(a, b)
    assert a.version.reset()
    judge.answer(Question(do="reset", model=MODEL, label="new"))
    polled(a, b)
    assert (a.uses(), b.uses()) == ("new", "new")


def test_a_command_that_comes_late_does_not_undo_a_newer_change() -> None:
    clock = Clock()
    judge = authority(clock)
    e = Engine(clock, Wire(judge))
    polled(e)
    late = Question(do="reset", model=MODEL, label="w1", after=0)
    assert e.version.reset("w2") == "w2"
    with pytest.raises(RefusedError, match="w2 has begun meanwhile"):
        judge.answer(late)
    polled(e)
    assert e.uses() == "w2"


def test_two_masters_that_a_command_asks_one_after_the_other_make_one_version() -> None:
    clock, histories = Clock(), MemoryHistories()
    first, second = authority(clock, histories), authority(clock, histories)
    a, b = Engine(clock, Wire(first)), Engine(clock, Wire(second))
    polled(a, b)
    made = first.answer(Question(do="reset", model=MODEL, label="v", after=0)).version
    assert b.version.reset("w2") == "w2", "b has changed since"
    assert second.answer(Question(do="reset", model=MODEL, label="v", made=made)).version == made
    polled(a, b)
    assert (a.version.own, b.version.own, a.uses(), b.uses()) == ("v", "w2", None, "w2")


def test_an_engine_that_starts_while_a_command_goes_from_master_to_master_is_not_meant() -> None:
    clock, histories = Clock(), MemoryHistories()
    first, second = authority(clock, histories), authority(clock, histories)
    made = first.answer(Question(do="reset", model=MODEL, label="v", after=0)).version
    clock.now += 1.0
    late = Engine(clock, Wire(second))
    polled(late)
    clock.now += 1.0
    second.answer(Question(do="reset", model=MODEL, label="v", made=made, age=2.0))
    polled(late)
    assert (late.version.own, late.uses()) == (None, None)


def test_a_name_of_any_letters_and_a_model_of_any_length_are_answered() -> None:
    clock = Clock()
    judge = authority(clock)
    version = WeightsVersion(
        "http://a:1", "m" * 5000, name="Knoten-ä\n" * 99, channel=lambda _: Wire(judge), clock=clock
    )
    asked = version._question("poll")
    assert msgspec.convert(msgspec.to_builtins(asked), Question) == asked


def test_no_answer_for_a_lease_means_that_nothing_is_known() -> None:
    clock = Clock()
    engine = Engine(clock, Wire(authority(clock)))
    polled(engine)
    clock.now += LEASE_S - 0.01
    assert engine.uses() == FIRST
    assert engine.version.why_not(FIRST) == ""
    clock.now += 0.01
    assert engine.uses() is None
    assert engine.version.why_not(FIRST) == "epoch_unknown"
    polled(engine)
    assert engine.uses() == FIRST


def test_an_answer_counts_from_when_it_was_asked_for() -> None:
    clock = Clock()

    class SlowWire(Wire):
        def ask(self, question: Question, timeout: float) -> Reply:
            reply = super().ask(question, timeout)
            clock.now += LEASE_S
            return reply

    engine = Engine(clock, SlowWire(authority(clock)))
    polled(engine)
    assert engine.uses() is None


def test_a_restarted_authority_learns_before_it_answers() -> None:
    clock = Clock()
    a, b = (Engine(clock, Wire(authority(clock))) for _ in range(2))
    b.wire = a.wire
    polled(a, b)
    label = a.version.reset()
    restarted = Authority(MemoryHistories(), clock=clock, wall=clock)
    a.wire.authority = restarted
    with pytest.raises(UnavailableError):
        restarted.answer(Question(do="reset", model=MODEL, label="x"))
    polled(a, b)
    clock.now += LEASE_S + MARGIN_S
    polled(a, b)
    assert (a.uses(), b.uses()) == (label, None)
    assert b.version.reset() == label, "it has not forgotten which change comes next"


def test_what_lies_in_etcd_survives_the_authority(etcd: Etcd) -> None:
    clock = Clock()
    with contextlib.closing(EtcdValues(EtcdDiscovery(endpoints=(etcd.endpoint,)))) as values:
        prefix = prefix_of(f"versions-{time.monotonic_ns()}", "versions")
        shared = [EtcdHistories(values, prefix, elected=True) for _ in range(2)]
        one, other = (authority(clock, each) for each in shared)
        a, b = Engine(clock, Wire(one)), Engine(clock, Wire(other))
        polled(a, b)
        label = a.version.reset()
        assert b.version.reset() == label, "two masters make one version"
        assert one.pending(MODEL, 1, clock.now), "the other master may have answered somebody"
        polled(a, b)
        assert (a.uses(), b.uses()) == (label, label)


def test_what_etcd_loses_is_put_back_and_its_outage_stops_no_engine(make_etcd: Callable[..., Etcd]) -> None:
    etcd, clock = make_etcd().start(), Clock()
    with contextlib.closing(EtcdValues(EtcdDiscovery(endpoints=(etcd.endpoint,), timeout_s=1))) as values:
        prefix = prefix_of("wiped", "versions")
        wire = Wire(authority(clock, EtcdHistories(values, prefix, elected=False)))
        a = Engine(clock, wire)
        polled(a)
        first = a.version.reset()
        etcd.stop()
        clock.now += LEASE_S
        polled(a)
        assert a.uses() == first
        assert a.version.reset(timeout=0.0) is None, "what is not written down is not promised"
        etcd.wipe()
        etcd.start()
        wait_for(lambda: a.version.reset("w2", timeout=0.0), what="a change that etcd takes")
        assert wire.authority.models()[MODEL].current == "w2"
        assert len(EtcdHistories(values, prefix, elected=True).read(MODEL)) == 3


@pytest.mark.parametrize("damaged", [b"junk", b"[]", b'[[0,""],[1,"w1",0.0,false,"of a later version"]]'])
def test_a_value_in_etcd_that_is_damaged_or_spelled_otherwise_stops_no_change(etcd: Etcd, damaged: bytes) -> None:
    clock = Clock()
    with contextlib.closing(EtcdValues(EtcdDiscovery(endpoints=(etcd.endpoint,)))) as values:
        prefix = prefix_of(f"damaged-{time.monotonic_ns()}", "versions")
        a = Engine(clock, Wire(authority(clock, EtcdHistories(values, prefix, elected=True))))
        polled(a)
        assert a.version.reset("w1") == "w1"
        histories = EtcdHistories(values, prefix, elected=True)
        key = histories._key(MODEL)
        assert values.replace(key, values.get(key), damaged)
        a.wire.authority = Authority(histories, clock=clock, wall=clock)
        clock.now += LEASE_S + MARGIN_S
        polled(a)
        assert a.uses() == "w1"
        assert a.version.reset("w2") == "w2"
        assert [one.label for one in histories.read(MODEL)] == [FIRST, "w1", "w2"]


def test_a_master_that_was_replaced_and_comes_back_says_what_its_replacement_wrote(etcd: Etcd) -> None:
    clock = Clock()
    with contextlib.closing(EtcdValues(EtcdDiscovery(endpoints=(etcd.endpoint,)))) as values:
        prefix = prefix_of(f"replaced-{time.monotonic_ns()}", "versions")
        old, new = (authority(clock, EtcdHistories(values, prefix, elected=False, clock=clock)) for _ in range(2))
        b = Engine(clock, Wire(old))
        polled(b)
        assert b.uses() == FIRST
        made = new.answer(Question(do="reset", model=MODEL, label="v")).version
        assert made is not None
        assert new.pending(MODEL, made.number, clock.now), "engines may have been answered by another master"
        clock.now += LEASE_S + MARGIN_S
        polled(b)
        assert b.uses() is None
        assert b.version.reset("w") == "w"
        assert new.models() == {} or new.answer(Question(do="poll", model=MODEL)).history[-1].label == "w"


def test_a_number_that_no_model_can_have_reached_is_not_believed() -> None:
    clock = Clock()
    judge = authority(clock)
    e = Engine(clock, Wire(judge))
    polled(e)
    judge.answer(Question(do="poll", model=MODEL, process="s", known=(Version((1 << 53) - 2, "evil"),)))
    assert e.version.reset("w1") == "w1"
    polled(e)
    assert e.uses() == "w1"


def test_a_process_that_knows_of_forgotten_versions_does_not_undo_a_reset() -> None:
    clock = Clock()
    a, b = (Engine(clock, Wire(authority(clock))) for _ in range(2))
    b.wire = a.wire
    polled(a, b)
    assert a.version.reset()
    assert a.version.reset()
    a.wire.authority = authority(clock)
    polled(b)
    told = a.wire.authority.answer(Question(do="reset", model=MODEL, label="new")).version
    assert told is not None
    polled(a, b)
    assert (a.uses(), b.uses()) == (None, "new")
    assert a.wire.authority.answer(Question(do="reset", model=MODEL, label="new")).version
    polled(a, b)
    polled(a, b)
    assert (a.uses(), b.uses()) == ("new", "new")


def test_an_engine_without_an_authority_has_versions_of_its_own() -> None:
    engine = WeightsVersion("", MODEL)
    assert engine.current() == FIRST
    assert engine.reset() is None
    assert engine.current() is None, "its weights have changed, and nobody can say to what"
    assert engine.reset("v2") == "v2"
    assert (engine.current(), engine.why_not("v2"), engine.why_not(FIRST)) == ("v2", "", "reset")
    lonely = WeightsVersion("", MODEL, alone=True)
    assert lonely.reset() == lonely.current() != FIRST


# --- over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[str]:
    judge = Authority(MemoryHistories())
    with serving("127.0.0.1", 0, versions_handler(judge), 64) as (host, port):
        wait_for(lambda: _learned(judge), what="an authority that has learned")
        yield f"http://{host}:{port}"


def _learned(judge: Authority) -> bool:
    try:
        judge.answer(Question(do="poll", model="none"))
    except UnavailableError:
        return False
    return True


@pytest.fixture
def opened() -> Iterator[Callable[..., WeightsVersion]]:
    made: list[WeightsVersion] = []

    def open_version(url: str, model: str = MODEL) -> WeightsVersion:
        made.append(WeightsVersion(url, model, name="here"))
        return made[-1]

    yield open_version
    for one in made:
        one.close()


def test_over_http_all_engines_follow(service: str, opened: Callable[..., WeightsVersion]) -> None:
    a, b = opened(service), opened(f"http://127.0.0.1:1,{service}")
    assert a.current() == FIRST
    wait_for(lambda: b.current() == FIRST, what="the second authority's answer")
    label = a.reset()
    assert label
    assert b.current() is None, "a reset that is done is known everywhere"
    assert b.reset() == label
    wait_for(lambda: (a.current(), b.current()) == (label, label), what="both engines with the new version")
    wait_for(
        lambda: [one for _, one in known_versions([service, "http://127.0.0.1:1"])[MODEL].processes] == [label] * 2,
        what="an authority that has heard of it",
    )
    assert known_versions([service])[MODEL].current == label


def test_over_http_a_command_reaches_all(service: str, opened: Callable[..., WeightsVersion]) -> None:
    engines = [opened(service) for _ in range(3)]
    assert all(engine.current() == FIRST for engine in engines)
    with contextlib.closing(HttpChannel(service)) as channel:
        reply = channel.ask(Question(do="reset", model=MODEL, label="v2"), 10)
    assert reply.untold == ()
    assert [engine.current() for engine in engines] == ["v2"] * 3


def test_over_http_a_refusal_says_what_to_do(service: str) -> None:
    channel = HttpChannel(service)
    channel.ask(Question(do="reset", model=MODEL, label="v2"), 10)
    with pytest.raises(RefusedError, match="pd-cache reset"):
        channel.ask(Question(do="change", model=MODEL, own=Version(7, "other")), 10)
    with pytest.raises(UnavailableError):
        HttpChannel("http://127.0.0.1:1").ask(Question(do="poll", model=MODEL), 1)
    channel.close()


def test_over_http_many_resets_at_once_end_in_one_version(service: str, opened: Callable[..., WeightsVersion]) -> None:
    engines = [opened(service) for _ in range(6)]
    assert all(engine.current() == FIRST for engine in engines)
    labels: list[str | None] = []
    threads = [threading.Thread(target=lambda one=one: labels.append(one.reset())) for one in engines]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(labels)) == 1
    wait_for(lambda: {one.current() for one in engines} == set(labels), what="all engines with the new version")


# --- what holds in all orders --------------------------------------------------------------------------------------------


class Versions(RuleBasedStateMachine):
    """Engines whose weights are numbers. A label that two engines use must stand for equal weights, whatever was lost.

    Each engine says once for each change that its weights have changed, whether it is believed or not; a command says it of all of them.
    """

    engines = Bundle("engines")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.wire = Wire(authority(self.clock))
        self.all: list[Engine] = []
        self.stands_for: dict[str, int] = {FIRST: 0}
        self.reset: tuple[Version, float] | None = None
        """A command under way, and when it began."""
        self.floor = 0
        """The number of the last version that was reported as done."""
        self.highest = 0

    @rule(target=engines)
    def start(self) -> Engine:
        engine = Engine(self.clock, self.wire)
        if self.reset is not None:
            engine.weights = (
                -len(self.all) - 1
            )  # started with other weights than the command says: of no use to anybody
            engine.weights = 0
        self.all.append(engine)
        return engine

    @rule(engine=consumes(engines))
    def kill(self, engine: Engine) -> None:
        self.all.remove(engine)

    @rule(engine=engines, question=st.booleans(), answer=st.booleans())
    def poll(self, engine: Engine, question: bool, answer: bool) -> None:
        self.wire.question, self.wire.answer = question, answer
        engine.poll()
        self.wire.question = self.wire.answer = True

    @rule(engine=engines, seconds=st.sampled_from([0.1, 1.0, LEASE_S]))
    def poll_late(self, engine: Engine, seconds: float) -> None:
        wire, clock = self.wire, self.clock

        class LateWire:
            def ask(self, question: Question, timeout: float) -> Reply:
                reply = wire.ask(question, timeout)
                clock.now += seconds
                return reply

            def close(self) -> None:
                pass

        engine.version.poll(LateWire())

    @rule(seconds=st.sampled_from([0.1, 0.5, LEASE_S, CHANGE_S, KNOWN_S + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.reset is None)
    @rule(engine=engines, question=st.booleans(), answer=st.booleans(), named=st.booleans())
    def change(self, engine: Engine, question: bool, answer: bool, named: bool) -> None:
        engine.weights += 1
        self.highest = max(self.highest, engine.weights)
        self.wire.question, self.wire.answer = question, answer
        engine.version.reset(f"w{engine.weights}" if named else None, timeout=0.0)
        self.wire.question = self.wire.answer = True

    @precondition(lambda self: self.reset is None)
    @rule()
    def begin_command(self) -> None:
        try:
            # before the weights change, as the authority may refuse
            reply = self.wire.authority.answer(Question(do="reset", model=MODEL, label=f"w{self.highest + 1}"))
        except UnavailableError:
            return
        assert reply.version is not None
        self.highest += 1
        for engine in self.all:
            engine.weights = self.highest
        self.reset = reply.version, self.clock.now

    @precondition(lambda self: self.reset is not None)
    @rule(engine=engines)
    def change_of_the_command(self, engine: Engine) -> None:
        """An engine says by itself what the command says of it."""
        if engine.weights == self.highest:
            engine.version.reset(timeout=0.0)

    @precondition(lambda self: self.reset is not None)
    @rule()
    def end_command(self) -> None:
        assert self.reset is not None
        version, begun = self.reset
        if self.wire.authority.pending(MODEL, version.number, begun):
            return
        self.wire.authority.reached(MODEL, version.number)
        self.reset = None
        self.floor = version.number

    @precondition(lambda self: self.reset is None)
    @rule()
    def restart_authority(self) -> None:
        newest = max(self.all, key=lambda one: one.version._known[-1].number, default=None)
        if newest is None or newest.version._known[-1].number < self.floor:
            return  # nobody is left that knows
        self.wire.authority = Authority(MemoryHistories(), clock=self.clock, wall=self.clock)
        newest.poll()
        self.clock.now += LEASE_S + MARGIN_S

    @invariant()
    def labels_stand_for_weights(self) -> None:
        if self.reset is not None:
            return  # the weights change now: what is used is not reported as the new ones
        for engine in self.all:
            label = engine.uses()
            if label is not None:
                assert self.stands_for.setdefault(label, engine.weights) == engine.weights, label
                assert engine.version._known[-1].number >= self.floor, "what was stored before a reset that is done"


TestAllOrders = Versions.TestCase
TestAllOrders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
