"""Streams, by histories of events: prompts whose chunks are loaded while a prefill node computes them."""

import pytest

from pd_cache.reasons import Loaded
from pd_cache.vllm.steps import LoadOp, StepReport
from tests.pd_cache.vllm.histories import (
    CHUNK,
    COMPUTES,
    PLAIN,
    PROMPT,
    STREAM,
    WAITS,
    WINDOW,
    Request,
    Scene,
    announced,
    blocks_of,
)

ALL = len(PROMPT) - 1
END = LoadOp("a", [], [])
"""With it the workers report the end of the stream's load, and vLLM takes its blocks back."""


def begun(scene, computed=0, request_id="a"):
    """A stream with blocks from 10 on."""
    request = Request(request_id, PROMPT, STREAM)
    assert scene.load(request, computed) == (ALL - computed, True)
    return request


def loads(scene, seconds=0):
    """Those of the next step, after so long."""
    scene.clock.now += seconds
    return scene.step().loads


def part(scene):
    """The only load of the next step."""
    (op,) = loads(scene, 1)
    return op


def end(scene, chunks, reason="none", request_id="a"):
    """A rank has loaded a part."""
    scene.side.take_report(StepReport(streams={request_id: (1, Loaded(chunks, reason))}))


def test_chunks_are_loaded_as_they_appear_and_each_goes_into_vllms_own_cache():
    scene = Scene()
    stream = begun(scene)
    blocks, names = blocks_of(stream), scene.names(stream)
    assert loads(scene) == [], "the pool has nothing yet"
    scene.has(stream, 1)
    op = part(scene)
    assert (op.parts[0].names, op.parts[0].blocks, op.streams) == (names[:1], blocks[:2], True)
    scene.has(stream)
    assert loads(scene, 1) == [], "one part at a time"
    assert not scene.manager.cached_tokens, "the first may still be written to"
    end(scene, 1)
    assert scene.manager.cached_tokens == {"a": CHUNK}
    rest = part(scene).parts[0]
    assert (rest.names, rest.blocks) == (names[1:3], blocks[2:6])
    end(scene, 2)
    assert scene.manager.cached_tokens == {"a": 3 * CHUNK}
    asked = len(scene.lookups.asked)
    assert loads(scene, 1) == []
    assert len(scene.lookups.asked) == asked, "there is nothing more to look for"


def test_a_part_counts_when_all_ranks_have_it_and_as_far_as_the_worst_has_it():
    scene = Scene(ranks=2)
    scene.has(begun(scene))
    part(scene)
    end(scene, 3)
    assert not scene.manager.cached_tokens
    end(scene, 2, "evicted")
    assert scene.manager.cached_tokens == {"a": 2 * CHUNK}
    assert loads(scene, 1) == [], "a load that failed is left to the request that is to be answered"


def test_blocks_at_hand_count_as_held():
    """Several streams may begin with cached blocks of their own, and keep them from being evicted."""
    scene = Scene()
    begun(scene, 2 * CHUNK)
    begun(scene, 2 * CHUNK, "b")
    assert scene.ask(Request("c", PROMPT, STREAM), 2 * CHUNK) == WAITS, (
        "three times 7 of 64 are more than a quarter"
    )


def test_what_vllm_has_at_hand_is_not_written_to():
    scene = Scene()
    stream = begun(scene, CHUNK + CHUNK // 2)
    scene.has(stream)
    op = part(scene).parts[0]
    assert (op.names, op.blocks) == (scene.names(stream)[1:3], [-1, *blocks_of(stream)[3:6]])


@pytest.mark.parametrize("loading", [False, True], ids=["between two parts", "while a part is loaded"])
def test_a_cancelled_stream_gives_its_blocks_back_when_nothing_writes_to_them(loading):
    scene = Scene()
    stream = begun(scene)
    if loading:
        scene.has(stream, 1)
        part(scene)
    scene.finish(stream)
    if loading:
        assert scene.side.streams.leaving, "vLLM has to go on stepping"
        assert loads(scene) == []
        end(scene, 1)
        assert scene.manager.cached_tokens == {"a": CHUNK}, "it was loaded all the same"
    assert loads(scene) == [END]
    assert not scene.side.streams.leaving


def test_a_stream_that_nobody_cancels_ends_and_vllm_computes_what_is_missing():
    scene = Scene()
    stream = begun(scene)
    scene.has(stream, 1)
    part(scene)
    end(scene, 1)
    assert loads(scene, 601) == [END], "it has failed as a whole; vLLM's own cache has the first chunk"
    assert scene.ask(stream) == COMPUTES
    assert loads(scene) == []


def test_a_reset_ends_streams_and_nothing_of_them_gets_into_vllms_own_cache():
    scene = Scene()
    stream = begun(scene)
    scene.has(stream)
    part(scene)
    scene.side.reset()
    scene.version.reset("w1")
    assert loads(scene) == [], "a part is still being loaded"
    end(scene, 3)
    assert not scene.manager.cached_tokens
    scene.has(stream)
    assert loads(scene) == [END], "its blocks are given back"
    assert scene.ask(stream) == WAITS, "it waits on without any, and computes nothing"


def test_while_vllm_reserves_blocks_for_streams_that_gave_way_a_load_that_is_refused_is_computed():
    """vLLM reserves the blocks of a load that has failed until its request ends, and so refuses them to other
    loads."""
    scene, request = Scene(), Request("c", PROMPT[::-1])
    streams = [begun(scene), begun(scene, request_id="b")]
    scene.has(request)
    loaded = scene.ask(request)
    assert loaded[0]
    scene.step(d=1)
    for gone in ("b", "a"):
        assert scene.ask(request) == loaded
        assert loads(scene) == [LoadOp(gone, [], [])]
    assert scene.ask(request) == loaded, "there may be room now"
    assert loads(scene) == []
    assert scene.ask(request) == COMPUTES, "a prompt that is computed gets blocks"
    assert scene.ask(Request("d", PROMPT[: CHUNK + 1], STREAM)) == WAITS, "it is a load, too"
    assert scene.step(c=1).loads == []
    assert scene.ask(request) == loaded
    for stream in streams:
        scene.finish(stream)
    scene.step()
    assert scene.ask(request) == loaded, "it waits for others' blocks, as without streams"


def test_the_request_that_is_to_be_answered_waits_for_the_part_under_way_and_says_what_came():
    scene = Scene()
    stream, request = begun(scene), Request("b", PROMPT, announced(3 * CHUNK))
    scene.has(stream, 2)
    part(scene)
    assert scene.ask(request) == WAITS, "or else it would load the same"
    end(scene, 2)
    scene.has(stream)
    assert loads(scene, 1) == [], "the rest is for the request"
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
    assert scene.ask(late) == WAITS, "of 64 blocks they may have 16, and two prompts take 14"
    assert scene.step().expecting
    scene.pool.touch(scene.pool.blocks[20:])
    scene.finish(Request("a"))
    assert scene.ask(late) == WAITS, "13 blocks are free, and it would take more than half of them"


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
    assert [load.request_id for _ in range(2) for load in loads(scene, 1)] == ["b"]


def test_nothing_is_looked_up_while_the_pool_is_away():
    scene = Scene()
    stream = begun(scene)
    scene.lookups.here = False
    assert loads(scene, 1) == []
    assert scene.lookups.asked == []
    assert scene.ask(Request("b", PROMPT, STREAM)) == WAITS
    scene.finish(stream)


@pytest.mark.parametrize(
    "layer, caching", [(WINDOW, True), (PLAIN, False)], ids=["a window", "no cache of vLLM's own"]
)
def test_an_engine_that_cannot_do_it_says_so(layer, caching):
    scene = Scene(layer)
    scene.manager.enable_caching = caching
    assert not scene.side.streams.possible
    assert scene.ask(Request("a", PROMPT, STREAM)) == WAITS, (
        "it waits until it is cancelled, and computes nothing"
    )
