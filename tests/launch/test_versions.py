"""Weights versions: what the authority and its clients promise each other, over lost, late and repeated messages, and over HTTP."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from launch.discovery.etcd import EtcdValues, prefix_of
from launch.health_server import Response, serving
from launch.operate.reset import reset_models
from launch.status import ClusterStatus, NodeStatus
from launch.versions import KNOWN_S, Authority, FileValues, Told, answering, known_versions, serving_versions, tell_all
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import ClusterConfig, MasterNode, NodeRecord
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.versions import (
    BEGINNING,
    CHANGE_S,
    FIRST,
    LEASE_S,
    OVER_S,
    Channel,
    Question,
    Reply,
    UnavailableError,
    Version,
    WeightsVersion,
    begin_version,
)
from tests.support.cluster import cluster_file
from tests.support.etcd import Etcd
from tests.support.kv import make_cache
from tests.support.pool import Node, free_port
from tests.support.waiting import Clock, wait_for

MODEL = "llama"


class SleepingClock(Clock):
    """Time that passes only when somebody sleeps."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Wire(Channel):
    """Carries questions to an authority, or loses them."""

    def __init__(self, authority: Authority) -> None:
        super().__init__([])
        self.authority = authority
        self.question = self.answer = True
        """Whether the next questions and answers arrive."""
        self.meanwhile: list[Callable[[], object]] = []
        """What happens while the next answers are on their way."""
        self.plan: list[str] = []
        """What is lost of the next calls: the `question`, the `answer`, or nothing."""
        self.sent: list[Question] = []
        """Changes that were sent, whether they arrived or not."""

    def ask(self, question: Question, timeout: float) -> Reply:
        lost = self.plan.pop(0) if self.plan else ""
        self.sent += [question] if question.new is not None else []
        if not self.question or lost == "question":
            raise UnavailableError("lost")
        reply = self.authority.answer(question)
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if not self.answer or lost == "answer":
            raise UnavailableError("lost on the way back")
        return reply


class Engine:
    """An engine with weights, over a wire."""

    def __init__(self, clock: SleepingClock, wire: Wire) -> None:
        self.wire = wire
        self.weights = 0
        self.version = WeightsVersion("http://a:1", MODEL, channel=lambda _: wire, clock=clock, sleep=clock.sleep)

    def poll(self) -> None:
        self.version.poll(self.wire)

    def uses(self) -> str | None:
        return self.version.current(0.0)


class World:
    """An authority that has learned what there is to learn, and its engines."""

    def __init__(self, values: FileValues | EtcdValues | None = None, prefix: str = "") -> None:
        self.clock = SleepingClock(1000.0)
        self.values = values or FileValues()
        self.prefix = prefix
        self.authority = self.another()

    def another(self, values: FileValues | EtcdValues | None = None) -> Authority:
        made = Authority(values or self.values, self.prefix, clock=self.clock, wall=self.clock)
        self.clock.now += OVER_S
        return made

    def engine(self, authority: Authority | None = None, *, asks: bool = True) -> Engine:
        made = Engine(self.clock, Wire(authority or self.authority))
        if asks:
            made.poll()
        return made

    def current(self) -> Version:
        return self.authority.answer(Question(model=MODEL)).current

    def begin(self, wire: Wire, label: str) -> tuple[Version, float]:
        """A command over a wire, until it is done."""
        question, clock = Question(model=MODEL), self.clock
        return begin_version(wire, question, label, 30.0, for_all=True, clock=clock, sleep=clock.sleep)

    def command(self, label: str, known: Version | None = None) -> Version:
        """A command begins; by default it has seen what is current."""
        now = self.authority.answer(Question(model=MODEL))
        known = known or now.current
        new = Version(0, label, known.number, said=now.latest)
        return self.authority.answer(Question(model=MODEL, known=known, new=new)).current


def polled(*engines: Engine) -> list[str | None]:
    """What each engine uses after it has asked."""
    for engine in engines:
        engine.poll()
    return [engine.uses() for engine in engines]


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest, etcd: Etcd) -> Iterator[World]:
    if request.param == "memory":
        yield World()
        return
    with contextlib.closing(EtcdValues(etcd.settings())) as values:
        yield World(values, prefix_of(f"versions-{time.monotonic_ns()}", "versions"))


# --- an engine that says that its weights have changed ---------------------------------------------------------------------


def test_engines_that_change_together_get_one_version(world: World) -> None:
    a, b = world.engine(), world.engine()
    assert (a.uses(), b.uses()) == (FIRST, FIRST)
    first = a.version.reset()
    assert first
    assert polled(a, b) == [first, None], "the weights of b have not changed yet"
    assert b.version.reset() == first
    assert polled(a, b) == [first, first]
    assert b.version.reset() not in (first, None)


def test_a_change_is_done_when_no_older_answer_is_relied_on(world: World) -> None:
    a, b, deaf = world.engine(), world.engine(), world.engine()
    begun = world.clock.now
    a.version.reset()
    assert world.clock.now >= begun + OVER_S
    assert deaf.uses() is None, "it has not heard of the change, and stopped all the same"
    begun = world.clock.now
    b.poll()
    b.version.reset()
    assert world.clock.now == begun, "who joins waits for nothing again"


@pytest.mark.parametrize("why", ["a change behind", "late", "started after", "the change has a label"])
def test_an_engine_of_which_nobody_knows_the_weights_is_refused_until_it_gives_a_label(why, caplog):
    """A labelled change may be one that was given up and comes late: it says nothing of which change the next call means."""
    world = World()
    a, b = world.engine(), world.engine()
    label = a.version.reset("w1" if why == "the change has a label" else None)
    if why == "a change behind":
        label = a.version.reset()
    elif why == "late":
        world.clock.now += CHANGE_S + 1
    elif why == "started after":
        b = world.engine()
    with caplog.at_level("WARNING"):
        assert b.version.reset() is None
    assert "give the version, or run `pd-cache reset`" in caplog.text
    assert not [one for one in b.wire.sent if one.new], "a refused change changes nothing"
    assert polled(a, b) == [label, None]
    assert b.version.reset(label) == label
    assert polled(a, b) == [label, label]


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_after_a_change_without_an_answer_only_a_label_or_a_command_says_what_an_engine_has(lost: str) -> None:
    """Its next call may mean the next change: it must not join what others have called the last one."""
    world = World()
    a, e = world.engine(), world.engine()
    assert a.version.reset()
    setattr(e.wire, lost, False)
    assert e.version.reset() is None
    setattr(e.wire, lost, True)
    assert e.version.reset() is None, "it may have the weights after those of a"
    assert polled(a, e)[1] is None
    assert a.version.reset("w2") == e.version.reset("w2") == "w2"
    assert polled(a, e) == ["w2", "w2"]


def test_a_change_whose_first_answer_is_lost_is_the_same_change_when_it_is_asked_again() -> None:
    world = World()
    a, b = world.engine(), world.engine()
    a.wire.plan = ["question", "", "question", "answer"]
    label = a.version.reset()
    assert label
    assert b.version.reset() == label
    assert polled(a, b) == [label, label]


@pytest.mark.parametrize("label", ["", "a b", "a/b", "x" * 65, "ä", "a\n"])
def test_a_label_that_cannot_be_one_is_a_value_error(label: str) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        World().engine().version.reset(label)


# --- a command that says it of all nodes -----------------------------------------------------------------------------------


def test_a_command_reaches_all_who_were_there_and_nobody_who_starts_later(world: World) -> None:
    near, far = world.engine(), world.engine()
    far.wire.question = False
    world.command("new")
    late = world.engine()
    assert far.uses() == FIRST, "it relies on its last answer: the command is not done yet"
    assert polled(near, late) == ["new", None]
    world.clock.now += LEASE_S
    assert polled(near, far) == ["new", None]
    far.wire.question = True
    assert polled(far) == ["new"], "its next question is answered with the command"
    world.command("new")
    assert polled(near, far, late) == ["new", "new", "new"], "the command again, which means the late one, too"
    world.clock.now += OVER_S
    assert late.version.reset() not in (None, "new")


def test_a_command_says_nothing_of_an_engine_that_starts_before_it_has_arrived() -> None:
    """All nodes had the new weights when the command began. This one was started again then, with those of its files."""
    world = World()
    a, wire, late = world.engine(), Wire(world.authority), []

    def restart() -> None:
        world.clock.now += 1
        late.append(world.engine())

    wire.meanwhile = [restart]
    world.begin(wire, "new")
    assert polled(a, *late) == ["new", None]
    world.command("new")
    assert polled(a, *late) == ["new", "new"]


@pytest.mark.parametrize("heard", [False, True])
def test_an_engine_that_speaks_while_a_command_is_under_way_means_the_same_change(heard: bool) -> None:
    """If it has heard of it, too: else it would make a version of its own, which an engine joins whose weights change next."""
    world = World()
    a, b = world.engine(), world.engine()
    world.command("new")
    assert not heard or polled(a, b) == ["new", "new"]
    assert a.version.reset() == "new"
    assert polled(a, b) == ["new", "new"]
    world.clock.now += OVER_S
    assert b.version.reset() not in ("new", None)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("questions", [1, 2])
def test_a_command_in_the_middle_of_an_engines_change_counts_once_that_has_ended_well(questions, answered):
    """After one question, the engine has only looked which version is current; after two, it has begun one of its own."""
    world = World()
    e = world.engine()

    def its_own_call_has_not_ended() -> None:
        assert e.uses() is None

    def command() -> None:
        e.wire.answer = answered
        world.command("all")
        its_own_call_has_not_ended()

    e.wire.meanwhile = [*[its_own_call_has_not_ended] * (questions - 1), command]
    assert (e.version.reset() is not None) is answered
    e.wire.answer = True
    assert polled(e) == ["all" if answered else None]


def test_a_command_in_the_middle_of_a_change_to_a_label_leaves_it_unknown_which_of_the_two_an_engine_has() -> None:
    world = World()
    e = world.engine()
    e.wire.meanwhile = [lambda: world.command("all")]
    assert e.version.reset("w1") is None
    assert polled(e) == [None]
    assert world.current().label == "all"
    assert e.version.reset("w1") == "w1"


def test_a_command_that_comes_late_does_not_undo_a_newer_change() -> None:
    world = World()
    e = world.engine()
    assert e.version.reset("w2") == "w2"
    assert world.command("w1", known=BEGINNING).label == "w2"
    assert polled(e) == ["w2"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_label_that_is_used_again_says_nothing_of_an_engine_that_missed_what_came_between(goes_on: bool) -> None:
    """A command has said of it that it has other weights. So it has not those of the label, although that is its own."""
    world = World()
    a, far = world.engine(), world.engine()
    world.command("w1")
    assert polled(a, far) == ["w1", "w1"]
    far.wire.question = False
    world.command("w2")
    assert a.version.reset("w1") == "w1"
    label = a.version.reset() if goes_on else "w1"
    far.wire.question = True
    assert polled(a, far) == [label, None]
    assert far.version.why_not("w1") == "reset", "nor does a load count that began before"
    assert far.version.reset() is None, "its weights were those of w2 before, from which no change leads"
    assert far.version.reset(label) == label
    assert polled(a, far) == [label, label]


def test_an_engine_with_a_label_from_before_is_not_told_by_the_command_that_uses_it_again() -> None:
    world = World()
    a, far = world.engine(), world.engine()
    world.command("w1")
    polled(a, far, a, far)
    for label in ("w2", "w1"):
        world.command(label)
        polled(a, a)
    assert [own for _, own in world.authority.models()[MODEL].processes.values()] == ["w1", None]


def test_a_rank_that_was_not_told_is_named_though_others_of_its_node_were_and_one_that_was_started_again_is_not():
    world = World()
    one, other = world.engine(), world.engine()
    other.wire.question = False
    world.command("new")
    polled(one, one)
    found = world.authority.models()[MODEL]
    assert (found.following(), len(found.lagging())) == ([], 1)
    world.clock.now += 1
    again = world.engine()
    world.command("newer")
    polled(one, again, one, again)
    found = world.authority.models()[MODEL]
    assert (len(found.following()), found.lagging()) == (1, [])


def test_a_command_is_done_when_an_authority_that_was_started_meanwhile_knows_of_it() -> None:
    world = World()
    wire = Wire(world.authority)
    anew = Authority(FileValues(), clock=world.clock, wall=world.clock)
    wire.meanwhile = [lambda: None, lambda: setattr(wire, "authority", anew)]
    made, _ = world.begin(wire, "new")
    assert world.current().label == "new", "the other one has heard of it"
    assert made == anew.answer(Question(model=MODEL)).current
    assert world.engine(anew).uses() is None


# --- answers that are late, and authorities that forget ----------------------------------------------------------------------


def test_no_answer_for_a_lease_means_that_nothing_is_known() -> None:
    world = World()
    engine = world.engine()
    world.clock.now += LEASE_S - 0.01
    assert (engine.uses(), engine.version.why_not(FIRST)) == (FIRST, "")
    world.clock.now += 0.01
    assert (engine.uses(), engine.version.why_not(FIRST)) == (None, "epoch_unknown")
    assert polled(engine) == [FIRST]


def test_an_answer_counts_from_when_it_was_asked_for() -> None:
    world = World()
    engine = world.engine(asks=False)
    engine.wire.meanwhile = [lambda: world.clock.sleep(LEASE_S)]
    assert polled(engine) == [None]


def test_a_restarted_authority_learns_before_it_answers() -> None:
    world = World()
    a, b = world.engine(), world.engine()
    label = a.version.reset()
    restarted = Authority(FileValues(), clock=world.clock, wall=world.clock)
    a.wire.authority = b.wire.authority = restarted
    with pytest.raises(UnavailableError, match="just started"):
        restarted.answer(Question(model=MODEL, new=Version(0, "x")))
    polled(a, b)
    world.clock.now += OVER_S
    assert polled(a, b) == [label, None]
    assert b.version.reset() == label, "it has not forgotten which change comes next"


def test_what_an_authority_makes_after_it_has_forgotten_is_newer_than_what_others_remember() -> None:
    world = World()
    a, b = world.engine(), world.engine()
    assert a.version.reset()
    assert a.version.reset()
    world.authority = a.wire.authority = b.wire.authority = world.another(FileValues())
    b.version = world.engine().version
    world.command("new")
    assert polled(a, b) == ["new", "new"], "a was there before the command"


def test_a_command_of_which_an_authority_hears_late_says_nothing_of_engines_that_started_after_it() -> None:
    world = World()
    a = world.engine()
    world.command("new")
    polled(a)
    world.clock.now += LEASE_S
    a.wire.authority = world.another(FileValues())
    late = world.engine(a.wire.authority)
    assert late.uses() == FIRST, "nobody who knows better has asked yet"
    assert polled(a) == [None], "others may know better still"
    world.clock.now += OVER_S
    assert polled(a, late) == ["new", None]


def test_a_command_that_reached_nobody_outlives_the_master(tmp_path: Path) -> None:
    file = tmp_path / "versions"
    world = World(FileValues(file))
    far = world.engine()
    far.wire.question = False
    world.command("new")
    far.wire.authority = world.another(FileValues(file))
    far.wire.question = True
    assert world.engine(far.wire.authority).uses() is None, "it started with the weights of its files"
    assert polled(far) == ["new"]


def test_a_version_that_cannot_be_written_down_does_not_begin(tmp_path: Path) -> None:
    file = tmp_path / "versions"
    world = World(FileValues(file))
    engine = world.engine()
    file.with_suffix(".new").mkdir()
    with pytest.raises(UnavailableError, match=r"cannot be written: .*Is a directory.*versions\.new"):
        world.command("new")
    assert polled(engine) == [FIRST]
    file.with_suffix(".new").rmdir()
    world.command("newer")
    assert polled(engine) == ["newer"]


def test_without_a_folder_of_its_own_a_master_starts_but_takes_no_version(tmp_path, caplog):
    tmp_path.chmod(0o755)
    world = World(FileValues(tmp_path / "versions"))
    assert "its mode is 0755" in caplog.text
    assert world.engine().uses() == FIRST
    with pytest.raises(UnavailableError, match=r"cannot be written: .*its mode is 0755"):
        world.command("new")


@pytest.mark.parametrize("damaged", [b"", b'{"x": [1', b'{"x": [1]}', b"[]"])
def test_a_file_of_versions_that_is_damaged_counts_as_lost(tmp_path, damaged, caplog):
    file = tmp_path / "versions"
    file.write_bytes(damaged)
    engine = World(FileValues(file)).engine()
    assert "versions: the versions of the weights cannot be read" in caplog.text
    assert (engine.uses(), engine.version.reset("w1")) == (FIRST, "w1")
    assert World(FileValues(file)).current().label == "w1"


def test_elected_masters_make_one_version_and_put_back_what_etcd_has_lost(make_etcd: Callable[..., Etcd]) -> None:
    etcd = make_etcd().start()
    with contextlib.closing(EtcdValues(etcd.settings())) as values:
        world = World(values, prefix_of("wiped", "versions"))
        other = world.another()
        a, b = world.engine(), world.engine(other)
        label = a.version.reset()
        assert b.version.reset() == label
        assert polled(a, b) == [label, label]
        etcd.stop()
        world.clock.now += LEASE_S
        assert a.version.reset("w2", timeout=0.1) is None, "what is not written down is not promised"
        etcd.wipe()
        etcd.start()
        polled(b)
        world.clock.now += OVER_S
        wait_for(lambda: polled(b) == [label], what="etcd with what the masters and engines remember")
        assert world.engine(world.another()).uses() is None
        assert a.version.reset("w3") == "w3"


def test_a_master_that_has_missed_a_version_answers_nothing_when_the_stored_one_is_lost() -> None:
    world = World(FileValues())
    other = world.another()
    a, far = world.engine(), world.engine(other)
    world.command("w1")
    assert polled(a, far) == ["w1", "w1"]
    far.wire.question = False
    world.command("w2")
    assert polled(a) == ["w2"]
    world.clock.now += OVER_S
    world.values._values.clear()
    far.wire.question = True
    assert polled(far) == [None], "a command has said that it has w2"
    polled(a)
    world.clock.now += OVER_S
    assert polled(a, far) == ["w2", "w2"]


@pytest.mark.parametrize("damaged", [b"junk", b"[]", b'[1,"w1",null,false,"of a later version"]'])
def test_a_value_in_etcd_that_is_damaged_or_spelled_otherwise_stops_no_change(etcd: Etcd, damaged: bytes) -> None:
    with contextlib.closing(EtcdValues(etcd.settings())) as values, contextlib.closing(etcd.client()) as client:
        world = World(values, prefix_of(f"damaged-{time.monotonic_ns()}", "versions"))
        a = world.engine()
        assert a.version.reset("w1") == "w1"
        ((_, stored),) = client.get_prefix(world.prefix)
        client.put(stored.key, damaged)
        a.wire.authority = Authority(values, world.prefix, clock=world.clock, wall=world.clock)
        polled(a)
        world.clock.now += OVER_S
        assert polled(a) == ["w1"]
        assert a.version.reset("w2") == "w2"
        assert world.another().answer(Question(model=MODEL)).current.label == "w2"


def test_an_engine_without_an_authority_has_versions_of_its_own() -> None:
    engine = WeightsVersion("", MODEL)
    assert engine.current() == FIRST
    assert engine.reset() is None
    assert engine.current() is None, "its weights have changed, and nobody can say to what"
    assert engine.reset("v2") == "v2"
    assert (engine.current(), engine.why_not("v2"), engine.why_not(FIRST)) == ("v2", "", "reset")
    lonely = WeightsVersion("", MODEL, alone=True)
    assert lonely.reset() == lonely.current() != FIRST
    assert WeightsVersion("", MODEL, watches=True).why_not("v2") == "", "another process decides"


# --- over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def judge() -> Authority:
    """One that has learned what there is to learn, without the seconds that this takes."""
    ahead = [0.0]
    authority = Authority(FileValues(), clock=lambda: time.monotonic() + ahead[0])
    ahead[0] = OVER_S
    return authority


@contextlib.contextmanager
def served(respond: Callable[[str, bytes | None], Response]) -> Iterator[str]:
    with serving("127.0.0.1", 0, respond, 64) as (host, port):
        yield f"http://{host}:{port}"


@pytest.fixture
def service(judge: Authority) -> Iterator[str]:
    with served(answering(judge)) as url:
        yield url


def _learned(judge: Authority) -> bool:
    try:
        judge.answer(Question(model="none"))
    except UnavailableError:
        return False
    return True


@pytest.fixture
def opened() -> Iterator[Callable[..., WeightsVersion]]:
    with contextlib.ExitStack() as stack:

        def opens(url: str, model: str = MODEL, name: str = "here") -> WeightsVersion:
            return stack.enter_context(contextlib.closing(WeightsVersion(url, model, name=name)))

        yield opens


def test_over_http_all_engines_follow(service: str, opened: Callable[..., WeightsVersion]) -> None:
    a, b = opened(service), opened(f"http://127.0.0.1:1,{service}")
    assert a.current() == FIRST
    wait_for(lambda: b.current() == FIRST, what="the second authority's answer")
    with ThreadPoolExecutor(2) as threads:
        labels = list(threads.map(WeightsVersion.reset, (a, b)))
    assert len(set(labels)) == 1
    assert labels[0]
    wait_for(lambda: {a.current(), b.current()} == set(labels), what="both engines with the new version")

    def heard() -> bool:
        return [own for _, own in known_versions([service, "http://127.0.0.1:1"])[MODEL].processes.values()] == labels

    wait_for(heard, what="an authority that has heard of it")


def test_over_http_a_command_reaches_all_and_names_those_that_it_does_not_reach(service, opened):
    odd = "m" * 5000 + "ä\n"
    engines = [opened(service, odd, name) for name in ("a", "b", "Knoten-ä\n")]
    assert all(engine.current() == FIRST for engine in engines)
    gone = opened(service, odd, "gone")
    assert gone.current() == FIRST
    gone.close()
    done = tell_all([service, "http://127.0.0.1:1"], odd, "v2")
    assert done.told == sorted(["a", "b", "Knoten-ä\n"])
    assert done.untold == ["gone", "the processes that ask http://127.0.0.1:1"]
    assert [engine.current() for engine in engines] == ["v2"] * 3
    assert gone.current() is None
    nobody = contextlib.closing(Channel(["http://127.0.0.1:1"]))
    with nobody as channel, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        begin_version(channel, Question(model=odd), "v3", 0.5, for_all=True)


def test_over_http_a_command_names_a_node_of_which_the_authority_has_never_heard(service, opened, monkeypatch):
    """It serves the model, but could not ask since the authority was started."""
    space = CacheMetadata.of(MODEL, KVLayout.from_tensors(make_cache())).namespace(CacheConfig(chunk_size=8))
    engine = functools.partial(NodeRecord, role="decode", address="http://h:1", **space.described())
    records = [engine(name="near"), engine(name="far"), engine(name="other", namespace=None)]
    records.append(NodeRecord(name="m", role="master", address="h:2", versions=service))
    status = ClusterStatus("file", True, [NodeStatus(record=record) for record in records])
    monkeypatch.setattr("launch.operate.reset.cluster_status", lambda _: status)
    near = opened(service, name="near")
    assert near.current() == FIRST
    done = list(reset_models(ClusterConfig(nodes=(MasterNode(name="m"),)), None, "w1"))
    assert [(one.label, one.processes) for one in done] == [("w1", Told(["near"], ["far"]))]


def test_over_http_a_version_outlives_its_master() -> None:
    ports = {key: free_port() for key in ("port", "metrics_port", "versions_port")}
    config = ClusterConfig(nodes=(MasterNode(name="m", **ports),))
    url = f"http://127.0.0.1:{ports['versions_port']}"

    def label() -> str:
        wait_for(lambda: _learned(authority), what="an authority that has learned")
        return authority.answer(Question(model=MODEL)).current.label

    with serving_versions(config, config.master) as authority:
        assert label() == FIRST
        tell_all([url], MODEL, "w1")
    with serving_versions(config, config.master) as authority:
        assert label() == "w1"


def test_over_http_the_list_of_masters_is_followed(judge: Authority) -> None:
    others = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    with served(answering(judge, others)) as url, contextlib.closing(Channel(urls := [url])) as channel:
        channel.ask(Question(model=MODEL), 10)
        assert urls == others


def test_over_http_an_answer_that_comes_again_is_not_the_next_one(judge: Authority) -> None:
    answers: list[Response] = []

    def late(path: str, body: bytes | None) -> Response:
        answers.append(answering(judge)(path, body))
        return answers[max(0, len(answers) - 2)]

    with served(late) as url, contextlib.closing(Channel([url])) as channel:
        channel.ask(Question(model=MODEL), 10)
        with pytest.raises(UnavailableError, match="another question"):
            channel.ask(Question(model=MODEL), 10)


def test_over_http_the_newest_of_what_several_masters_say_is_current(judge: Authority, service: str) -> None:
    newer = Version(7, "v7")
    with pytest.raises(UnavailableError):  # others may know of a newer one still
        judge.answer(Question(model=MODEL, process="1", name="moved", known=newer, own="v7", since=7))
    behind = Authority(FileValues())
    with served(answering(behind)) as url:
        for process, name in (("1", "moved"), ("2", "stuck")):
            with contextlib.suppress(UnavailableError):
                behind.answer(Question(model=MODEL, process=process, name=name, own=FIRST))
        found = known_versions([service, url])[MODEL]
    assert (found.current, found.following(), found.lagging()) == (newer, ["moved"], ["stuck"])


# --- what holds in all orders --------------------------------------------------------------------------------------------


def test_a_node_is_ready_when_it_knows_which_weights_are_current(judge: Authority, tmp_path: Path) -> None:
    asked, respond = [], answering(judge)

    def late(path: str, body: bytes | None) -> Response:
        asked.append(path)
        return Response(503, b"not yet") if len(asked) < 6 else respond(path, body)

    with serving("127.0.0.1", 0, late, 64) as (_, port):
        master = {"name": "master", "role": "master", "port": free_port(), "versions_port": port}
        file = cluster_file(tmp_path, nodes=[master, {"name": "decode-0", "role": "decode", "port": free_port()}])
        with Node("decode", "decode-0", file):
            assert len(asked) >= 6


class Versions(RuleBasedStateMachine):
    """Engines whose weights are numbers. A label that two engines use must stand for equal weights, whatever was lost.

    Each engine says once for each change that its weights have changed, whether it is believed or not; a command says it of all of them.
    """

    engines = Bundle("engines")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.all: list[Engine] = []
        self.stands_for: dict[str, int] = {FIRST: 0}
        self.command: tuple[Version, float] | None = None
        """A command under way, and when it is done."""
        self.told: list[Engine] = []
        """Those to which its weights were given."""
        self.floor = 0
        """The number of the last version that was reported as done."""
        self.highest = 0
        self.sent: list[Question] = []
        """Changes that may arrive late, or once more."""

    @rule(target=engines)
    def start(self) -> Engine:
        self.all.append(self.world.engine(asks=False))
        return self.all[-1]

    @rule(engine=consumes(engines))
    def kill(self, engine: Engine) -> None:
        self.all.remove(engine)

    @rule(engine=engines, question=st.booleans(), answer=st.booleans())
    def poll(self, engine: Engine, question: bool, answer: bool) -> None:
        engine.wire.question, engine.wire.answer = question, answer
        engine.poll()
        engine.wire.question = engine.wire.answer = True

    @rule(engine=engines, seconds=st.sampled_from([0.1, 1.0, LEASE_S]))
    def poll_late(self, engine: Engine, seconds: float) -> None:
        engine.wire.meanwhile = [lambda: self.world.clock.sleep(seconds)]
        engine.poll()

    @rule(seconds=st.sampled_from([0.1, 0.5, LEASE_S, CHANGE_S, KNOWN_S + 1]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @precondition(lambda self: self.command is None)
    @rule(
        engine=engines,
        named=st.booleans(),
        plan=st.lists(st.sampled_from(["", "question", "answer"]), max_size=4),
        cut=st.booleans(),
    )
    def change(self, engine: Engine, named: bool, plan: list[str], cut: bool) -> None:
        engine.weights += 1
        self.highest = max(self.highest, engine.weights)
        engine.wire.plan = [*plan, *(["question"] * 100 if cut else [])]
        known = engine.version.reset(f"w{engine.weights}" if named else None)
        if known is not None:
            self.floor = max(self.floor, engine.version._known.number)
        engine.wire.plan = []
        self.sent += engine.wire.sent
        engine.wire.sent = []

    @precondition(lambda self: self.command is None)
    @rule(engine=engines, data=st.data())
    def go_back(self, engine: Engine, data: st.DataObject) -> None:
        """An engine gets weights again that have a label."""
        label = data.draw(st.sampled_from(sorted(self.stands_for.keys() - {FIRST}) or ["w0"]))
        engine.weights = self.stands_for.setdefault(label, 0)
        if engine.version.reset(label) is not None:
            self.floor = max(self.floor, engine.version._known.number)
        engine.wire.sent = []

    @precondition(lambda self: self.sent and self.command is None)
    @rule(data=st.data())
    def arrive_late_or_again(self, data: st.DataObject) -> None:
        with contextlib.suppress(UnavailableError):
            self.world.authority.answer(data.draw(st.sampled_from(self.sent)))

    @precondition(lambda self: self.command is None)
    @rule(data=st.data(), back=st.booleans())
    def begin_command(self, data: st.DataObject, back: bool) -> None:
        labels = sorted(self.stands_for.keys() - {FIRST}) if back else []
        label = data.draw(st.sampled_from(labels)) if labels else f"w{self.highest + 1}"
        try:
            # before the weights change, as the authority may not answer
            begun = self.world.command(label)
        except UnavailableError:
            return
        weights = self.stands_for.setdefault(label, self.highest + 1)
        self.highest = max(self.highest, weights)
        self.told = list(self.all)
        for engine in self.told:
            engine.weights = weights
        self.command = begun, self.world.clock.now + OVER_S

    @precondition(lambda self: self.command is not None)
    @rule(engine=engines)
    def change_of_the_command(self, engine: Engine) -> None:
        """An engine says by itself what the command says of it."""
        if self.command and engine in self.told and self.world.clock.now < self.command[1]:
            engine.version.reset()

    @precondition(lambda self: self.command is not None and self.world.clock.now >= self.command[1])
    @rule()
    def end_command(self) -> None:
        self.floor = max(self.floor, self.command[0].number)
        self.command = None

    @precondition(lambda self: self.command is None)
    @rule(kept=st.booleans())
    def restart_authority(self, kept: bool) -> None:
        newest = max(self.all, key=lambda one: one.version._known.number, default=None)
        if not kept:
            if newest is None or newest.version._known.number < self.floor:
                return  # nobody is left that knows
            self.world.values = FileValues()
        made = Authority(self.world.values, clock=self.world.clock, wall=self.world.clock)
        self.world.authority = made
        for engine in self.all:
            engine.wire.authority = made
        if newest is not None:
            newest.poll()
        self.world.clock.now += OVER_S

    @invariant()
    def labels_stand_for_weights(self) -> None:
        if self.command is not None:
            return  # the weights change now: what is used is not reported as the new ones
        for engine in self.all:
            label = engine.uses()
            if label is not None:
                assert self.stands_for.setdefault(label, engine.weights) == engine.weights, label
                assert engine.version._known.number >= self.floor, "what was stored before a reset that is done"


TestAllOrders = Versions.TestCase
TestAllOrders.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
