"""What the proxy predicts for a request, and which requests it refuses."""

import asyncio
import math
import random
import time
from contextlib import ExitStack, asynccontextmanager
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.openai import ApiError
from launch.proxy import nodes, requests
from launch.proxy.routing import limits as limits_module
from launch.proxy.routing.limits import Limits
from launch.proxy.routing.node_pool import NodePool
from launch.proxy.routing.prefixes import RoutedPrompt
from launch.proxy.routing.roles import NodeReport
from pd_cache.cluster import LimitsConfig
from tests.support.proxy import (
    answers,
    bearer,
    cluster,
    decodes,
    error_of,
    files_of,
    record,
    says,
    scenario,
    until,
    waits_for,
)

PREFILL, DECODE = "http://prefill", "http://decode"
PROMPT = RoutedPrompt(10_000)


class Scene:
    """A prefill node that computes a token in `token` seconds, one prompt after the other, and a decode node
    that begins answers at once."""

    def __init__(self, token=0.001):
        self.pools = {"prefill": NodePool("prefill"), "decode": NodePool("decode")}
        self.pools["prefill"].update([record(PREFILL)])
        self.pools["decode"].update([record(DECODE)])
        self.limits, self.token, self.now = Limits(self.pools), token, 100.0

    def computes(self, *several, by=1.0):
        """Prompts of so many tokens come at once. Each is answered when those before it are, `by` times as
        late as usual."""
        with ExitStack() as stack:
            asked = [self.ask(stack, tokens) for tokens in several]
            for one, tokens in zip(asked, several, strict=True):
                self.now += tokens * self.token * by
                one.answered(self.now)

    def learned(self):
        """The same scene after some hundred answers."""
        rng = random.Random(0)
        for _ in range(100):
            self.computes(*(rng.randrange(100, 20_000) for _ in range(rng.randrange(1, 7))))
        return self

    def ask(self, stack, tokens):
        return stack.enter_context(self.limits.asking("prefill", PREFILL, tokens, self.now))

    def predicted(self):
        return self.limits.predict(PREFILL, PROMPT, self.now)

    def refused(self, *, waiting=False, **limits):
        """After how many seconds the request should come again; None if it is admitted."""
        error = self.limits.missed(self.predicted(), LimitsConfig(**limits), waiting=waiting)
        return None if error is None else int(error.response().headers["Retry-After"])

    def decodes(self, running, token_s=0.05, queued=0, used=0.5):
        """The decode node reports that it has generated 100 tokens for each of these."""
        tokens = 100 * running + getattr(self, "tokens", 0)
        seconds = 100 * running * token_s + getattr(self, "seconds", 0.0)
        self.tokens, self.seconds, self.now = tokens, seconds, self.now + 2
        self.limits.look(self.now, DECODE, NodeReport(queued, running, used, 0, tokens, seconds))


@given(
    token=st.floats(1e-5, 1e-2),
    ahead=st.lists(st.integers(100, 20_000), max_size=8),
    done=st.floats(0, 1),
)
def test_a_first_token_comes_when_the_prompts_in_front_are_computed(token, ahead, done):
    scene = Scene(token).learned()
    alone = scene.predicted()
    with ExitStack() as stack:
        for tokens in ahead:
            scene.ask(stack, tokens)
        left = sum(ahead) - (done * ahead[0] if ahead else 0)
        scene.now += (sum(ahead) - left) * token
        predicted = scene.predicted()
        assert predicted.first_s == pytest.approx((left + 10_000) * token, rel=0.2)
        assert predicted.alone_s == alone.first_s == alone.alone_s


@given(st.lists(st.integers(1, 9999), max_size=2))
def test_nothing_is_refused_before_three_answers_were_measured(answered):
    scene = Scene(token=100.0)
    scene.computes(*answered)
    with ExitStack() as stack:
        scene.ask(stack, 9999)
        assert scene.refused(ttft_s=1, token_s=0.001) is None


def test_a_refused_request_is_admitted_after_the_seconds_of_its_refusal():
    scene = Scene().learned()
    with ExitStack() as stack:
        asked = [scene.ask(stack, 3000) for _ in range(5)]
        assert scene.refused(ttft_s=30) is None
        seconds = scene.refused(ttft_s=20)
        assert seconds in (5, 6)  # 25 s of work, with its own
        for one in asked[: seconds // 3]:
            scene.now += 3
            one.answered(scene.now)
        scene.now += seconds % 3
        assert scene.refused(ttft_s=20) is None


def test_a_request_with_none_in_front_is_admitted_however_long_it_takes():
    scene = Scene(token=1.0).learned()
    assert scene.refused(ttft_s=1) is None
    with ExitStack() as stack:
        scene.ask(stack, 100)
        assert scene.refused(ttft_s=1) in range(90, 111)  # until it has none in front


def test_what_waits_leaves_half_of_the_limit_to_others():
    scene = Scene().learned()
    with ExitStack() as stack:
        scene.ask(stack, 10_000)
        assert scene.refused(ttft_s=25) is None
        assert scene.refused(waiting=True, ttft_s=16) is not None
        assert scene.refused(waiting=True, ttft_s=25) is None


def test_a_stall_changes_predictions_by_a_tenth_and_a_slower_node_is_learned_in_time():
    scene = Scene().learned()
    before = scene.predicted().first_s
    scene.computes(1000, by=1000)
    assert scene.predicted().first_s == pytest.approx(before, rel=0.11)
    scene.token *= 3
    scene.learned()
    assert scene.predicted().first_s == pytest.approx(3 * before, rel=0.2)


def test_late_first_tokens_make_predictions_count_as_longer():
    scene = Scene().learned()
    with ExitStack() as stack:
        scene.ask(stack, 10_000)
        predicted = scene.predicted()
        limit = 1.2 * predicted.first_s
        assert scene.refused(ttft_s=limit) is None
        for _ in range(100):  # however many a node that stops has
            assert scene.limits.measured(predicted, 2 * predicted.first_s) == pytest.approx(0.5)
        assert scene.refused(ttft_s=limit) in (8, 9)  # about 20 s of work, and the limit counts as that of 12
        for _ in range(500):
            assert scene.limits.measured(predicted, predicted.first_s) == 0
        assert scene.refused(ttft_s=limit) is None


def test_a_full_decode_node_lets_the_first_token_wait_for_the_end_of_an_answer():
    scene = Scene()
    for _ in range(3):
        scene.limits.ended(40.0)
    scene.decodes(8, used=0.5)
    assert scene.predicted().first_s == 0
    scene.decodes(8, used=1.0, queued=1)
    # two wait for one of eight places, and in 5 s one of eight answers of 40 s ends
    assert scene.predicted().first_s == pytest.approx(10.0)
    assert scene.refused(ttft_s=9) is not None
    scene.limits.forget(scene.now + 11)  # nothing is known of a node that reports no more
    assert scene.refused(ttft_s=9) is None


def test_requests_that_wait_at_a_decode_node_with_room_have_not_to_wait_for_answers():
    scene = Scene()
    scene.limits.ended(40.0)
    scene.decodes(2, used=0.1, queued=3)
    assert scene.predicted().first_s == 0


def test_other_proxies_prompts_count_until_their_node_reports_no_more():
    scene = Scene().learned()
    alone = scene.predicted().first_s
    scene.limits.look(scene.now, PREFILL, NodeReport(4, 1, 0.5, 0))
    assert scene.predicted().first_s > 2 * alone
    scene.limits.forget(scene.now + 11)
    assert scene.predicted().first_s == alone


def test_once_a_prompt_is_given_up_the_next_one_has_just_begun():
    scene = Scene().learned()
    with ExitStack() as stack:
        with ExitStack() as given_up:
            scene.ask(given_up, 10_000)
            scene.ask(stack, 10_000)
            scene.now += 9
        assert scene.predicted().first_s == pytest.approx(20, rel=0.2)


def test_tenants_and_clients_share_the_places_of_waiting_requests():
    limits, over = Scene().limits, ApiError(429, "late")
    with ExitStack() as stack, patch.object(limits_module, "_MOST_WAITING", 6):
        for holder, most in (("a", 6), ("b", 3), ("c", 2)):
            for _ in range(most):
                stack.enter_context(limits.place(0, holder, over))
            with pytest.raises(ApiError, match="late"):
                stack.enter_context(limits.place(0, holder, over))
    assert limits.waiting == []


def test_tokens_take_longer_the_more_answers_a_decode_node_generates():
    scene = Scene()
    scene.limits.ended(60.0)
    for _ in range(30):
        for running in (1, 1, 1, 3, 3, 3, 8, 8, 8):
            scene.decodes(running, token_s=0.02 + 0.01 * running)
    scene.decodes(8, token_s=0.1)
    assert scene.predicted().token_s == pytest.approx(0.11, rel=0.2)
    assert scene.refused(token_s=0.14) is None
    # with five answers less there would be room, and in 7.5 s one of eight ends
    assert scene.refused(token_s=0.06) in range(20, 60)
    scene.decodes(0)
    assert scene.refused(token_s=0.03) is None


@given(st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=20))
def test_nothing_is_in_front_once_all_are_answered_or_given_up(requests):
    scene = Scene()
    for tokens, answered in requests:
        with ExitStack() as stack:
            one = scene.ask(stack, tokens)
            if answered:
                one.answered(scene.now + 1)
    predicted = scene.predicted()
    assert predicted.first_s == predicted.alone_s
    assert not math.isnan(predicted.first_s)


# --- at the proxy -------------------------------------------------------------------------------------------

KEY, OF_A = "key-of-nobody-0123456789", "key-of-a-0123456789"
AHEAD = {"prompt": [1, 2, 3]}
AHEAD = AHEAD


@asynccontextmanager
async def slow(*nodes, over="refuse", **options):
    """A cluster, and its limits. Every prefill and decode node has been seen to take a second a token."""
    async with cluster(*nodes, limits=LimitsConfig(ttft_s=3, over=over), **options) as c:
        limits = c.proxy.hops.limits
        for hop, pool in limits._pools.items():
            for url in pool.nodes:
                for now in range(3):
                    with limits.asking(hop, url, 1.0, now) as asked:
                        asked.answered(now + 1.0)
        yield c, limits


@scenario
async def test_what_would_be_late_gets_a_429_before_a_node_is_asked():
    async with slow() as (c, _):
        await c.ask()  # nothing is in front of it
        async with c.stuck_at(c.prefill[0], AHEAD):
            asked = len(c.prefill[0].bodies)
            async with c.post({"prompt": [1, 2]}) as response:
                assert response.status == 429
                assert 1 <= int(response.headers["Retry-After"]) <= 4
                assert (await error_of(response))["code"] == "over_ttft_s"
            assert len(c.prefill[0].bodies) == asked
            assert c.metric("refused_total", code="over_ttft_s") == 1


@scenario
async def test_only_the_first_tokens_of_streamed_answers_are_measured():
    async with slow() as (c, limits):
        for behaviour, stream in ((decodes, False), (answers(400), True)):
            c.decode[0].script = [behaviour]
            await c.ask({"prompt": [1], "stream": stream}, status=200 if behaviour is decodes else 400)
        assert c.metric("prediction_error_count") == limits._answer_s == 0
        async with c.stuck_at(c.decode[0], {"prompt": [1] * 9}):
            await c.ask({"prompt": [1], "stream": True})
        assert c.metric("prediction_error_count") == 1
        assert limits._answer_s > 0


@scenario
async def test_requests_that_end_while_a_node_is_slow_to_report_are_not_taken_for_another_proxys(monkeypatch):
    monkeypatch.setattr(nodes, "HEALTH_TIMEOUT_S", 60.0)
    async with slow(2, 1) as (c, limits):
        go, (node, slow_one) = asyncio.Event(), c.prefill
        async with c.stuck_at(node, AHEAD):
            node.script = [says("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")]
            slow_one.script = [waits_for(go, answers(404))]
            checking = asyncio.ensure_future(c.proxy.check_nodes())
            await until(lambda: node.url in limits._reported, "it has reported")
        go.set()
        await checking
        assert limits._reported[node.url].others == 0


@scenario
async def test_what_may_wait_goes_by_its_priority_once_there_is_room_and_others_overtake_it():
    async with slow(over="best_effort") as (c, limits):
        async with c.stuck_at(c.prefill[0], AHEAD):
            waiting, turns = [], c.proxy.hops.pools["prefill"]._turns
            for number, priority in enumerate((7, None, -5, 7)):
                body = {"prompt": [number, 1], "priority": priority}
                waiting.append(asyncio.ensure_future(c.ask(body)))
                await until(lambda: len(limits.waiting) == len(waiting), "it waits")
            before = len(c.prefill[0].bodies)
        await asyncio.gather(*waiting)
        assert c.proxy.hops.pools["prefill"]._turns == turns + len(waiting), "who waits takes no turns"
        assert [body["prompt"][0] for body in c.prefill[0].bodies[before:]] == [2, 1, 0, 3]
        assert limits.waiting == []
        assert c.metric("refused_total", code="over_ttft_s") == 0


@scenario
async def test_what_waits_is_refused_in_the_end_and_too_many_at_once():
    async with slow(over="best_effort") as (c, limits):
        async with c.stuck_at(c.prefill[0], AHEAD):
            url, place = c.prefill[0].url, limits.place

            def longer(*args):
                limits.look(time.monotonic(), url, NodeReport(200, 1, 0, 0))
                return place(*args)

            with patch.object(requests, "WAIT_S", 0.0), patch.object(limits, "place", longer):
                async with c.post({"prompt": [1, 2]}) as response:
                    assert response.status == 429
                    assert int(response.headers["Retry-After"]) > 50  # as long as the queue is by then
            limits.look(time.monotonic(), url, NodeReport(0, 1, 0, 0))
            with patch.object(limits_module, "_MOST_WAITING", 1):
                waits = asyncio.ensure_future(c.ask({"prompt": [1, 2]}))
                await until(lambda: limits.waiting, "it waits")
                await c.ask({"prompt": [1, 2]}, status=429)
        await waits


@pytest.mark.parametrize(
    "tenants", ["tenants: {a: {limits: {ttft_s: 100}}}", "tenants: {a: {}}\nkeys: {ann: {ttft_s: 100}}"]
)
@scenario
async def test_a_tenants_and_a_keys_own_limits_count_for_it(tmp_path, tenants):
    files = files_of(tmp_path, api_keys=f"pat {KEY}\nann {OF_A} a\n", tenants=tenants)
    async with slow(**files) as (c, _), c.stuck_at(c.prefill[0], AHEAD, headers=bearer(KEY)):
        await c.ask({"prompt": [1]}, status=429, headers=bearer(KEY))
        await c.ask({"prompt": [1]}, headers=bearer(OF_A))


@scenario
async def test_what_waits_for_a_strict_limit_holds_up_nobody_who_has_another(tmp_path):
    files = files_of(
        tmp_path,
        api_keys=f"pat {KEY}\nann {OF_A} a\n",
        tenants="tenants: {a: {limits: {ttft_s: 0.001, over: best_effort}}}",
    )
    async with slow(over="best_effort", **files) as (c, limits):
        async with c.stuck_at(c.prefill[0], AHEAD, headers=bearer(KEY)):
            strict = asyncio.ensure_future(c.ask({"prompt": [1]}, headers=bearer(OF_A)))
            await until(lambda: limits.waiting, "the strict one waits")
            other = asyncio.ensure_future(c.ask({"prompt": [1, 2]}, headers=bearer(KEY)))
            await until(lambda: len(limits.waiting) == 2, "the other one waits")
            limits.look(time.monotonic(), c.prefill[0].url, NodeReport(0.2, 1, 0, 0))  # and another proxy's
        await other
        assert not strict.done()
        limits.look(time.monotonic(), c.prefill[0].url, NodeReport(0, 0, 0, 0))
        await strict
