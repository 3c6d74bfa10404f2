"""What loads and steps take, learned from histories of them; and which prefixes a request then loads."""

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cache.reasons import Loaded
from pd_cache.vllm.costs import HANDOFF_MARGIN, Costs, LinkTime, StepWork
from pd_cache.vllm.steps import StepReport
from tests.pd_cache.vllm.histories import (
    CHUNK,
    COMPUTES,
    FULL,
    PROMPT,
    WAITS,
    WINDOW,
    Request,
    Scene,
    announced,
)

_MANY = st.integers(256, 100_000)


class Engine:
    """An engine whose loads take `fixed` and `load` seconds a token, and whose steps take `compute` seconds a
    token, and `context` more for each token before it."""

    def __init__(self, *, load=0.0001, fixed=0.005, compute=5e-05, context=0.0):
        self.load, self.fixed, self.compute, self.context = load, fixed, compute, context
        self.costs, self.now = Costs(), 100.0

    @classmethod
    def measured(cls, count=3, **options):
        """An engine that has seen `count` loads of 4096 tokens, and `count` steps of 2048."""
        engine = cls(**options)
        engine.loads(*[4096] * count)
        engine.steps(*[(2048, 0)] * count)
        return engine

    def begins(self, name, tokens):
        """A load from the pool begins."""
        self.costs.load_began(name, (0, 0, tokens), self.now)

    def loads(self, *several, by=1.0, whole=True):
        """One load after the other, each `by` times as long as usual."""
        for tokens in several:
            self.begins("a", tokens)
            self.now += (seconds := by * (self.fixed + self.load * tokens))
            self.costs.load_ended("a", seconds, whole=whole)

    def steps(self, *several):
        """One step after the other, of so many tokens behind so many others."""
        for tokens, position in several:
            work = StepWork(self.now, tokens, tokens, tokens * (position + tokens / 2))
            self.now += self.computed(tokens, position)
            self.costs.step_ended(work, self.now)

    def computed(self, tokens, position=0):
        return tokens * (self.compute + self.context * (position + tokens / 2))

    def not_worth(self, tokens, position=0, *ahead, memory=0, **options):
        """The verdict on so many tokens in the pool, and so many in memory."""
        return self.costs.not_worth((memory, 0, tokens), position, ahead, self.now, **options)


@given(loads=st.lists(_MANY, max_size=20), steps=st.lists(_MANY, max_size=20), tokens=_MANY)
def test_nothing_is_declined_before_three_loads_and_three_steps_were_measured(loads, steps, tokens):
    engine = Engine(load=1.0)
    engine.loads(*loads)
    engine.steps(*((some, 0) for some in steps))
    assert (engine.not_worth(tokens) is None) == (len(loads) < 3 or len(steps) < 3)


@given(
    loads=st.lists(_MANY, min_size=8, max_size=40),
    steps=st.lists(st.tuples(st.integers(128, 8192), st.integers(0, 32_000)), min_size=8, max_size=40),
    slower=st.floats(1.2, 50),
    context=st.sampled_from((0.0, 2e-9)),
)
def test_a_prefix_is_declined_if_its_load_takes_longer_than_its_steps_and_else_loaded(
    loads, steps, slower, context
):
    tokens, before = 4096, 2048
    for declined in (True, False):
        engine = Engine(context=context)
        steps_s = engine.computed(tokens, before)
        load_s = steps_s * slower if declined else steps_s / slower
        engine.load, engine.fixed = load_s / tokens, 0.0
        engine.loads(*loads)
        engine.steps(*steps)
        assert (engine.not_worth(tokens, before) is not None) == declined


def test_the_figures_are_those_that_were_measured():
    engine = Engine(load=1e-3, fixed=0.03, compute=1e-4, context=1e-8)
    engine.loads(1000, 500, 8000, 2000, 300)
    engine.steps((2000, 0), (2000, 2000), (1000, 4000), (500, 0))
    verdict = engine.not_worth(4000, 1000, (1000, 500))
    assert verdict is not None
    assert verdict.load_s == pytest.approx(4.03, rel=0.01)
    assert verdict.compute_s == pytest.approx(engine.computed(4000, 1000) + engine.computed(1000), rel=0.01)


@given(tokens=_MANY, others=st.lists(_MANY, min_size=3, max_size=9), by=st.floats(1, 1000))
def test_one_stall_changes_nothing_and_two_in_a_row_count(tokens, others, by):
    engine = Engine(load=2e-5, fixed=0.0)
    engine.loads(*others)
    engine.steps((2048, 0), (2048, 0), (2048, 0))
    engine.loads(tokens, by=100 * by + 1e5 / tokens)
    assert engine.not_worth(4096) is None
    engine.loads(*others)
    assert engine.not_worth(4096) is None
    engine.loads(tokens, tokens, by=100 * by + 1e5 / tokens)
    assert engine.not_worth(4096) is not None


@given(
    before=st.lists(_MANY, min_size=3, max_size=30),
    after=st.lists(st.integers(5000, 100_000), min_size=3, max_size=3),
    whole=st.booleans(),
)
def test_a_link_that_becomes_ten_times_slower_or_faster_is_noticed_within_three_loads(before, after, whole):
    for fast_first in (True, False):
        engine = Engine(load=2e-5 if fast_first else 2e-4)
        engine.steps(*[(2048, 0)] * 5)
        engine.loads(*before)
        assert (engine.not_worth(8192) is None) == fast_first
        engine.load = 2e-4 if fast_first else 2e-5
        engine.loads(*after, whole=whole or not fast_first)  # deadlines may cut slow ones short
        assert (engine.not_worth(8192) is None) != fast_first


def test_a_declined_prefix_corrects_no_figure_while_a_load_is_under_way_which_will():
    engine = Engine.measured()
    engine.loads(4096, by=5)
    assert engine.not_worth(4096).probe
    engine.begins("b", 4096)
    assert not engine.not_worth(4096).probe


def test_loads_under_way_and_prompts_in_front_count():
    engine = Engine.measured(4, load=4e-5, fixed=0.0)
    assert engine.not_worth(4096) is None
    engine.begins("b", 4096)
    assert engine.not_worth(4096) is not None, "the link is busy"
    assert engine.not_worth(4096, 0, (4096, 2048)) is None, "and so is the engine"
    engine.now += 0.9 * 4096 * 4e-5
    assert engine.not_worth(4096) is None, "the other load is almost over"


def test_loaded_requests_would_wait_for_a_computed_prompt_so_it_is_loaded_behind_many_short_ones():
    engine = Engine.measured(4, load=4e-5, fixed=0.0)
    engine.begins("long", 3400)
    assert engine.not_worth(4096) is not None
    engine.costs.load_ended("long", None)
    for name in "abcde":
        engine.begins(name, 680)
    assert engine.not_worth(4096) is None


class Link:
    """A link that at most two loads share in equal parts."""

    def __init__(self, now):
        self.now, self.time, self.running, self.queue = now, LinkTime(), [], []

    def begin(self, name, seconds):
        """A load begins that would take so long alone."""
        self.queue.append([seconds, name, 0.0])
        self._fill()

    def _fill(self):
        while self.queue and len(self.running) < 2:
            self.running.append(self.queue.pop(0))
            self.running[-1][2] = self.time.passed(self.now, 1)

    @property
    def next_end(self):
        return self.now + len(self.running) * min(self.running)[0] if self.running else math.inf

    def until(self, now):
        """Goes on until then. Yields the loads that have ended, with their time."""
        while self.next_end <= now:
            self._pass(self.next_end)
            ended = min(self.running)
            self.running.remove(ended)
            yield ended[1], self.time.passed(self.now, -1) - ended[2]
            self._fill()
        self._pass(now)

    def _pass(self, now):
        for load in self.running:
            load[0] -= (now - self.now) / len(self.running)
        self.now = now


def over_one_link(engine, at_once, sizes, pause, rng, count=300):
    """`count` loads over one link. `at_once` clients begin one load after the other, after random pauses.
    Returns how long each load was expected to take, and took; and the names of those under way at the
    end."""
    engine.loads(4096, 8192, 4096)
    engine.steps(*[(2048, 0)] * 3)
    link, begun, ended = Link(engine.now), {}, []
    arrivals = [engine.now + rng.random() * pause for _ in range(at_once)]
    while len(ended) < count:
        engine.now = min([link.next_end, *arrivals])
        for name, seconds in link.until(engine.now):
            engine.costs.load_ended(name, seconds)
            expected, arrived = begun.pop(name)
            ended.append((expected, engine.now - arrived))
            arrivals.append(engine.now + rng.random() * pause)
        for _ in [at for at in arrivals if at <= engine.now]:
            arrivals.remove(min(arrivals))
            tokens, name = rng.randint(*sizes), f"{len(ended)} {engine.now} {len(begun)}"
            begun[name] = engine.not_worth(tokens).load_s, engine.now
            engine.begins(name, tokens)
            link.begin(name, engine.fixed + engine.load * tokens)
    return ended, list(begun)


@pytest.mark.parametrize("at_once", [1, 4, 16])
@settings(max_examples=10)
@given(
    sizes=st.sampled_from(((4096, 4096), (512, 16384))),
    pause=st.sampled_from((0.01, 0.2)),
    seed=st.integers(0, 1000),
)
def test_loads_that_share_a_link_take_as_long_as_expected_and_so_does_the_next_alone(
    at_once, sizes, pause, seed
):
    engine = Engine(load=2.5e-5, fixed=0.002, compute=1e-9)
    ended, under_way = over_one_link(engine, at_once, sizes, pause, random.Random(seed))
    expected, took = map(sum, zip(*ended, strict=True))
    assert expected == pytest.approx(took, rel=0.2)
    for name in under_way:
        engine.costs.load_ended(name, None)
    assert engine.not_worth(4096).load_s == pytest.approx(engine.fixed + 4096 * engine.load, rel=0.02)


def first_tokens(engine, link, load, count, step, tokens=4096):
    """Returns the mean time to the first token of prompts that come together and are in the pool, if vLLM
    computes up to `step` tokens a step, those that it has begun first."""
    begin, loaded, running, first = engine.now, [], [], []
    at = {f"{begin} {number}": 0 for number in range(count)}
    new = list(at)
    while len(first) < count:
        for name, seconds in link.until(engine.now):
            engine.costs.load_ended(name, seconds)
            loaded.append(name)
        work, left = {}, step
        for name in [*running, *loaded, *new]:
            if not left:
                break
            if name in new:
                new.remove(name)
                ahead = [(tokens - at[other], (tokens + at[other]) / 2) for other in running]
                if load == "always" or (load == "auto" and not engine.not_worth(tokens - 1, 0, *ahead)):
                    at[name] = tokens - 1
                    engine.begins(name, tokens - 1)
                    link.begin(name, engine.fixed + engine.load * (tokens - 1))
                    continue
            if name not in running:
                running.append(name)
            work[name] = min(left, tokens - at[name])
            left -= work[name]
        loaded = [name for name in loaded if name not in running]
        if not work:
            engine.now = link.next_end
            continue
        positions, total = sum(some * (at[name] + some / 2) for name, some in work.items()), step - left
        planned = StepWork(engine.now, total, total, positions)
        engine.now += 0.01 + sum(engine.computed(some, at[name]) for name, some in work.items())
        engine.costs.step_ended(planned, engine.now)
        for name, some in work.items():
            at[name] += some
            if at[name] == tokens:
                running.remove(name)
                first.append(engine.now - begin)
    return sum(first) / count


@pytest.mark.parametrize("step", [2048, 8192])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_loading_what_pays_is_as_fast_as_the_better_of_loading_all_and_nothing_at_every_rate(step, count):
    engines = {load: Engine(compute=1.5e-4, context=3e-8) for load in ("auto", "always", "never")}
    for engine in engines.values():
        engine.steps((2048, 0), (2048, 2048), (2048, 0), (2048, 2048))
    for rate in (2e-5, 4e-5, 7e-5, 1e-4, 1.3e-4, 1.6e-4, 1.8e-4, 2e-4, 2.2e-4, 2.5e-4, 3e-4, 6e-4, 6e-3):
        took = {}
        for load, engine in engines.items():
            engine.load = rate
            engine.loads(*[4096] * 3)
            took[load] = first_tokens(engine, Link(engine.now), load, count, step)
        assert took["auto"] <= 1.05 * min(took["always"], took["never"]), (rate, took)


def test_an_engine_says_up_to_which_length_it_declines_hand_offs_unless_one_should_correct_the_figures():
    engine = Engine(load=2e-4, fixed=0.1, compute=5e-5, context=2e-8)

    def declines(*ahead):
        engine.costs.set_declines(ahead, engine.now)
        return engine.costs.declines

    engine.loads(1000, 2000, 4000)
    assert declines() == 0, "nothing is known of steps"
    engine.steps((2048, 0), (2048, 2048), (2048, 0), (2048, 4096))
    length = declines()
    assert 4096 <= length <= 16384
    for tokens in (length, 2 * length):
        declined = engine.not_worth(tokens, margin=HANDOFF_MARGIN) is not None
        assert declined == (tokens == length)
    engine.begins("b", 4096)
    assert declines() == length, "that load will be over"
    engine.costs.load_ended("b", None)
    assert 0 < declines((1536, 768)) < length, "the hand-off comes while it computes"
    assert declines((8192, 4096)) == 0
    engine.now += 60
    assert declines() == 0
    engine.loads(1000)
    assert declines() == length
    engine.load = 1e-6
    engine.loads(4000)
    assert declines() == 0, "another has to confirm it"
    engine.loads(4000, 4000)
    assert declines() == 0


def test_a_load_that_was_cut_short_counts_only_if_it_took_longer_than_expected():
    engine = Engine()
    engine.loads(*[4096] * 3)
    for seconds, counted in ((0.0, None), (0.1, None), (0.6, (4096, 0.6))):
        engine.begins("a", 4096)
        assert engine.costs.load_ended("a", seconds, whole=False) == counted


def test_each_tier_has_costs_of_its_own():
    engine = Engine.measured()
    assert engine.not_worth(4096) is not None
    assert engine.not_worth(0, memory=4096) is None, "unknown"
    for _ in range(3):
        engine.costs.load_began("a", (4096, 0, 0), engine.now)
        engine.now += 0.001
        engine.costs.load_ended("a", 0.001)
    assert engine.not_worth(0, memory=4096) is None, "worth it"
    assert engine.not_worth(4096, memory=4096) is None
    assert engine.not_worth(4096, memory=2048) is not None


def test_a_step_that_was_planned_while_another_ran_takes_from_the_others_end():
    costs = Costs()
    assert costs.step_ended(StepWork(10.0, 2048, 2048, 2e6), 11.0) == (2048, 1.0)
    assert costs.step_ended(StepWork(10.1, 100, 4000, 2e6), 11.5) is None, "too little of prompts"
    assert costs.step_ended(StepWork(10.9, 2048, 2048, 2e6), 12.0) == (2048, 0.5)


# --- the scheduler ------------------------------------------------------------------------------------------

LONG = list(range(100 * CHUNK + 1))


def known(load_s, compute_s, *layers, **options):
    """A scheduler that has seen three such loads and three such steps, each of 24 chunks."""
    scene, length = Scene(*layers, **options), 24 * CHUNK
    for name in "abc":
        loaded = Request(name, [*range(length), 0])
        scene.has(loaded)
        assert scene.load(loaded, 0, *[[0] * 49] * 2) == (length, True)
        scene.loaded(Loaded(24), name, load_s)
        scene.finish(loaded)
        scene.begin(Request(name.upper(), [*range(length)]), *[[0] * 48] * 2)
        step = scene.step(**{name.upper(): length})
        scene.clock.now += compute_s
        scene.side.take_report(StepReport(work=step.work))
        scene.finish(Request(name.upper()))
    return scene


def ended(scene, request):
    request.num_computed_tokens = request.num_prompt_tokens
    scene.finish(request)
    return scene.reports.pop()


def test_a_prefix_that_is_computed_sooner_is_not_loaded_and_the_report_has_the_figures():
    scene, request = known(1.92, 0.48), Request("d", PROMPT)
    scene.has(request)
    assert scene.ask(request) == COMPUTES
    scene.clock.now += 1000
    assert scene.ask(request) == COMPUTES, "it is decided once"
    told = ended(scene, request)
    assert (told.found, told.loaded, told.computed, told.reason) == (24, 0, 27, "not_worth")
    assert told.detail == "24 tokens would load in 0.24 s at 0.0016 MB/s; computing them takes 0.06 s"
    assert told.detail in told.text()
    assert told.detail in told.line()
    assert scene.side.costs.declines == 1 << 17
    totals = scene.metrics.totals()
    assert totals["loads_declined_tokens",] == 24
    assert (totals["measured_tokens", "load"], totals["measured_tokens", "compute"]) == (576, 576)
    assert totals["measured_seconds", "load"] / totals["measured_seconds", "compute"] == pytest.approx(4)


@pytest.mark.parametrize("load_s, params", [(0.4, None), (0.7, announced(3 * CHUNK))])
def test_a_prefix_is_loaded_if_that_is_sooner_and_a_hand_off_unless_it_takes_twice_as_long(load_s, params):
    scene, request = known(load_s, 0.4), Request("d", PROMPT, params)
    scene.has(request)
    assert scene.ask(request) == (3 * CHUNK, True)
    assert ended(scene, request).detail is msgspec.UNSET


@pytest.mark.parametrize("there", [0, 1, 3])
def test_a_hand_off_that_is_not_worth_loading_is_computed_at_once_and_not_waited_for_either(there):
    scene, request = known(0.9, 0.4), Request("d", PROMPT, announced(3 * CHUNK))
    scene.has(request, there)
    assert scene.ask(request) == COMPUTES
    scene.clock.now += 1
    scene.has(request)
    asked = len(scene.lookups.asked)
    assert scene.ask(request) == COMPUTES, "it is decided once"
    assert len(scene.lookups.asked) == asked
    told = ended(scene, request)
    assert (told.found, told.loaded, told.computed, told.reason) == (there * CHUNK, 0, 27, "not_worth")
    assert told.detail == "24 tokens would load in 0.112 s at 0.00341 MB/s; computing them takes 0.05 s"
    assert scene.metrics.totals()["loads_declined_tokens",] == 24


@pytest.mark.parametrize("load_s, waits", [(0.7, True), (0.9, False)])
def test_a_request_waits_for_the_load_of_its_stream_as_it_would_wait_for_a_hand_off(load_s, waits):
    scene, stream = known(load_s, 0.4), Request("s", PROMPT, announced(0, stream=True))
    scene.has(stream)
    assert scene.load(stream) == (len(PROMPT) - 1, True), "it is loaded in any case: nothing waits for it"
    scene.clock.now += 1
    (op,) = scene.step().loads
    assert len(op.parts[0].names) == 3
    request = Request("d", PROMPT, announced(3 * CHUNK))
    for _ in range(2):  # vLLM asks again if it has no blocks for it
        assert scene.ask(request) == (WAITS if waits else COMPUTES)
    if not waits:
        scene.has(request, 0)
        assert scene.ask(Request("e", PROMPT, announced(3 * CHUNK))) == COMPUTES
        assert scene.ask(Request("e", PROMPT), CHUNK) == COMPUTES, "by now a chunk is at hand"


def test_a_declined_hand_off_corrects_the_figure_with_its_first_chunk_as_soon_as_that_is_there():
    scene, request = known(0.9, 0.4), Request("d", PROMPT, announced(3 * CHUNK))
    scene.clock.now += 60
    scene.has(request, 0)
    assert scene.ask(request) == WAITS
    scene.has(request)
    scene.clock.now += 1
    for _ in range(2):
        assert scene.load(request) == (CHUNK, True)
    assert ended(scene, request).reason == "not_worth"
    assert scene.metrics.totals()["loads_declined_tokens",] == 2 * CHUNK
    late = Request("e", PROMPT, announced(3 * CHUNK))
    scene.clock.now += 60
    scene.has(late, 0)
    assert scene.ask(late) == WAITS
    scene.clock.now += 2
    assert scene.ask(late) == COMPUTES, "it never came"
    assert ended(scene, late).reason == "not_worth"


def test_a_preempted_prompt_does_not_count_as_one_that_is_computed_before_it():
    scene, request = known(0.45, 0.4), Request("d", PROMPT)
    scene.has(request, 0)
    assert scene.ask(request) == COMPUTES
    scene.begin(request)
    scene.step(d=len(PROMPT))
    scene.manager.free(request)
    scene.has(request)
    assert scene.ask(request) == COMPUTES
    assert ended(scene, request).computed == len(PROMPT)


def test_always_loads_what_is_there_and_never_does_not_ask():
    scene, request = known(1.9, 0.4, load="always"), Request("d", PROMPT)
    scene.has(request)
    assert scene.ask(request) == (3 * CHUNK, True)
    scene, request = Scene(load="never"), Request("d", PROMPT, announced(3 * CHUNK))
    scene.has(request)
    assert scene.ask(request) == COMPUTES
    assert not scene.lookups.asked
    assert ended(scene, request).reason == "not_asked"


def test_prompts_that_compute_are_waited_for_so_a_load_meanwhile_is_worth_more():
    scene, running, request = known(1.9, 0.4), Request("r", LONG), Request("d", PROMPT)
    scene.has(request)
    scene.begin(running, [0] * 201)
    scene.step(r=200)
    running.num_computed_tokens = running.num_in_flight_tokens = 200
    assert scene.ask(request) == (3 * CHUNK, True)


def test_prompts_that_are_computed_from_this_step_on_are_waited_for_too():
    scene, declined, request = known(1.9, 0.4), Request("c", LONG), Request("d", PROMPT)
    scene.has(declined, 100)
    assert scene.ask(declined) == COMPUTES
    scene.begin(declined, [0] * 201)
    scene.has(request)
    assert scene.ask(request) == (3 * CHUNK, True)


def test_after_a_minute_without_a_load_a_chunk_of_a_declined_prefix_may_correct_the_figure_and_another_confirms_it():
    scene = known(1.9, 0.4)
    scene.clock.now += 60

    def loaded(name):
        request = Request(name, LONG)
        scene.has(request, 100)
        tokens, _ = scene.load(request, 0, [0] * 201)
        return tokens, request

    tokens, probe = loaded("d")
    assert (tokens, loaded("e")[0]) == (CHUNK, 0), "one a minute"
    scene.loaded(Loaded(1), "d", 0.001)  # the pool is as fast as it was once
    told = ended(scene, probe)
    assert (told.found, told.loaded, told.reason) == (800, CHUNK, "not_worth")
    assert loaded("f")[0] == CHUNK
    scene.loaded(Loaded(1), "f", 0.001)
    assert loaded("g")[0] == 800
    assert scene.metrics.totals()["loads_declined_tokens",] == 3 * 800 - 2 * CHUNK


def test_a_load_of_windows_is_whole_also_if_it_corrects_a_figure():
    scene, request = known(1.9, 0.4, FULL, WINDOW), Request("d", LONG)
    scene.has(request, 100)
    assert scene.ask(request) == COMPUTES
    scene.clock.now += 60
    request = Request("e", LONG)
    assert scene.ask(request) == (800, True)


@pytest.mark.parametrize("reason, counts", [("none", True), ("deadline", True), ("transfer_failed", False)])
def test_a_load_that_missed_its_deadline_is_measured_and_one_that_failed_otherwise_is_not(reason, counts):
    scene, request = Scene(), Request()
    scene.has(request, 100)
    scene.load(request)
    scene.loaded(Loaded(3 if reason == "none" else 0, reason), "a", 10.0)
    assert scene.metrics.totals().get(("measured_seconds", "load"), 0) == (10 if counts else 0)
