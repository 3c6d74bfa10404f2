"""Streams, by histories of events: prompts whose chunks are loaded while a prefill node computes them."""

import pytest

from pd_cache.reasons import Loaded
from pd_cache.vllm.steps import LoadOp, StepReport
from tests.pd_cache.vllm.histories import CHUNK, PLAIN, PROMPT, WINDOW, Request, Scene, announced, blocks_of

STREAM = {"do_remote_prefill": True, "pd_cache": {"stream": True}}
ALL = len(PROMPT) - 1


def begun(scene, computed=0, request_id="a"):
    """A stream with blocks from 10 on."""
    request = Request(request_id, PROMPT, STREAM)
    assert scene.load(request, computed) == (ALL - computed, True)
    return request


def part(scene):
    """The only load of the next step."""
    scene.clock.now += 1
    (op,) = scene.step().loads
    return op


def end(scene, chunks, reason="none", request_id="a"):
    """A rank has loaded a part."""
    scene.side.take_report(StepReport(streams={request_id: (1, Loaded(chunks, reason))}))


def test_chunks_are_loaded_as_they_appear_and_each_goes_into_vllms_own_cache():
    scene = Scene()
    stream = begun(scene)
    blocks, names = blocks_of(stream), scene.names(stream)
    assert scene.step().loads == [], "the pool has nothing yet"
    scene.has(stream, 1)
    op = part(scene)
    assert (op.parts[0].names, op.parts[0].blocks, op.streams) == (names[:1], blocks[:2], True)
    scene.has(stream)
    scene.clock.now += 1
    assert scene.step().loads == [], "one part at a time"
    assert not scene.manager.cached_tokens, "the first may still be written to"
    end(scene, 1)
    assert scene.manager.cached_tokens == {"a": CHUNK}
    rest = part(scene).parts[0]
    assert (rest.names, rest.blocks) == (names[1:3], blocks[2:6])
    end(scene, 2)
    assert scene.manager.cached_tokens == {"a": 3 * CHUNK}
    asked = len(scene.lookups.asked)
    scene.clock.now += 1
    assert scene.step().loads == []
    assert len(scene.lookups.asked) == asked, "there is nothing more to look for"


def test_a_part_counts_when_all_ranks_have_it_and_as_far_as_the_worst_has_it():
    scene = Scene(ranks=2)
    scene.has(begun(scene))
    part(scene)
    end(scene, 3)
    assert not scene.manager.cached_tokens
    end(scene, 2, "evicted")
    assert scene.manager.cached_tokens == {"a": 2 * CHUNK}
    scene.clock.now += 1
    assert scene.step().loads == [], "a load that failed is left to the request that is to be answered"


def test_blocks_at_hand_count_as_held():
    """Several streams may begin with cached blocks of their own, and keep them from being evicted."""
    scene = Scene()
    begun(scene, 2 * CHUNK)
    begun(scene, 2 * CHUNK, "b")
    assert scene.ask(Request("c", PROMPT, STREAM), 2 * CHUNK) == (None, False), (
        "three times 7 of 64 are more than a quarter"
    )


def test_what_vllm_has_at_hand_is_not_written_to():
    scene = Scene()
    stream = begun(scene, CHUNK + CHUNK // 2)
    scene.has(stream)
    op = part(scene).parts[0]
    assert (op.names, op.blocks) == (scene.names(stream)[1:3], [-1, *blocks_of(stream)[3:6]])


@pytest.mark.parametrize("loads", [False, True], ids=["between two parts", "while a part is loaded"])
def test_a_cancelled_stream_gives_its_blocks_back_when_nothing_writes_to_them(loads):
    scene = Scene()
    stream = begun(scene)
    if loads:
        scene.has(stream, 1)
        part(scene)
    scene.finish(stream)
    if loads:
        assert scene.side.streams.leaving, "vLLM has to go on stepping"
        assert scene.step().loads == []
        end(scene, 1)
        assert scene.manager.cached_tokens == {"a": CHUNK}, "it was loaded all the same"
    assert scene.step().loads == [LoadOp("a", [], [])], (
        "the workers report the load's end, and vLLM takes the blocks"
    )
    assert not scene.side.streams.leaving


def test_a_stream_that_nobody_cancels_ends_and_vllm_computes_what_is_missing():
    scene = Scene()
    stream = begun(scene)
    scene.has(stream, 1)
    part(scene)
    end(scene, 1)
    scene.clock.now += 601
    assert scene.step().loads == [LoadOp("a", [], [])], (
        "it has failed as a whole; vLLM's own cache has the first chunk"
    )
    assert scene.ask(stream) == (0, False)
    assert scene.step().loads == []


def test_a_reset_ends_streams_and_nothing_of_them_gets_into_vllms_own_cache():
    scene = Scene()
    stream = begun(scene)
    scene.has(stream)
    part(scene)
    scene.side.reset()
    scene.version.reset("w1")
    assert scene.step().loads == [], "a part is still being loaded"
    end(scene, 3)
    assert not scene.manager.cached_tokens
    scene.has(stream)
    assert scene.step().loads == [LoadOp("a", [], [])], "its blocks are given back"
    assert scene.ask(stream) == (None, False), "it waits on without any, and computes nothing"


def test_while_vllm_reserves_blocks_for_streams_that_gave_way_a_load_that_is_refused_is_computed():
    """vLLM reserves the blocks of a load that has failed until its request ends, and so refuses them to other
    loads."""
    scene, request = Scene(), Request("c", PROMPT[::-1])
    streams = [begun(scene), begun(scene, request_id="b")]
    scene.has(request)
    loads = scene.ask(request)
    assert loads[0]
    scene.step(d=1)
    for gone in ("b", "a"):
        assert scene.ask(request) == loads
        assert scene.step().loads == [LoadOp(gone, [], [])]
    assert scene.ask(request) == loads, "there may be room now"
    assert scene.step().loads == []
    assert scene.ask(request) == (0, False), "a prompt that is computed gets blocks"
    assert scene.ask(Request("d", PROMPT[: CHUNK + 1], STREAM)) == (None, False), "it is a load, too"
    assert scene.step(c=1).loads == []
    assert scene.ask(request) == loads
    for stream in streams:
        scene.finish(stream)
    scene.step()
    assert scene.ask(request) == loads, "it waits for others' blocks, as without streams"


def test_the_request_that_is_to_be_answered_waits_for_the_part_under_way_and_says_what_came():
    scene = Scene()
    stream, request = begun(scene), Request("b", PROMPT, announced(3 * CHUNK))
    scene.has(stream, 2)
    part(scene)
    assert scene.ask(request) == (None, False), "or else it would load the same"
    end(scene, 2)
    scene.has(stream)
    scene.clock.now += 1
    assert scene.step().loads == [], "the rest is for the request"
    assert scene.load(request, 2 * CHUNK, blocks_of(request, 30)) == (CHUNK, True)
    (op,) = scene.step().loads
    assert (op.request_id, op.parts[0].names) == ("b", scene.names(request)[2:3])
    scene.finish(stream)
    scene.loaded(Loaded(1), "b")
    request.num_computed_tokens = len(PROMPT)
    scene.step(b=1)
    scene.finish(request)
    (report,) = scene.reports
    assert (report.streamed, report.at_hand, report.loaded) == (2 * CHUNK, 2 * CHUNK, CHUNK)


def test_streams_together_hold_a_bounded_share_of_the_blocks_and_others_wait_without_any():
    scene = Scene()
    begun(scene)
    begun(scene, request_id="b")
    late = Request("c", PROMPT, STREAM)
    assert scene.ask(late) == (None, False), "of 64 blocks they may have 16, and two prompts take 14"
    assert scene.step().expecting
    scene.pool.touch(scene.pool.blocks[20:])
    scene.finish(Request("a"))
    assert scene.ask(late) == (None, False), "13 blocks are free, and it would take more than half of them"


def test_lookups_of_many_streams_are_few():
    scene = Scene()
    scene.pool.num_gpu_blocks = 1 << 20
    scene.pool.get_num_free_blocks = lambda: 1 << 20
    for number in range(1000):
        begun(scene, request_id=f"stream-{number}")
    before = len(scene.lookups.asked)
    for _ in range(1000):
        scene.clock.now += 0.001
        scene.step()
    assert 100 <= len(scene.lookups.asked) - before <= 200, "in a second"


def test_streams_are_looked_up_in_turn():
    scene = Scene()
    begun(scene)
    other = Request("b", PROMPT[::-1], STREAM)
    scene.load(other)
    scene.has(other, 1)
    loads = []
    for _ in range(2):
        scene.clock.now += 1
        loads += scene.step().loads
    assert [load.request_id for load in loads] == ["b"]


def test_nothing_is_looked_up_while_the_pool_is_away():
    scene = Scene()
    stream = begun(scene)
    scene.lookups.here = False
    scene.clock.now += 1
    assert scene.step().loads == []
    assert scene.lookups.asked == []
    assert scene.ask(Request("b", PROMPT, STREAM)) == (None, False)
    scene.finish(stream)


@pytest.mark.parametrize(
    "layer, caching", [(WINDOW, True), (PLAIN, False)], ids=["a window", "no cache of vLLM's own"]
)
def test_an_engine_that_cannot_do_it_says_so(layer, caching):
    scene = Scene(layer)
    scene.manager.enable_caching = caching
    assert not scene.side.streams.possible
    assert scene.ask(Request("a", PROMPT, STREAM)) == (None, False), (
        "it waits until it is cancelled, and computes nothing"
    )
