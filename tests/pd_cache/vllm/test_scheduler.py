"""The connector's part in the scheduler, by histories of events: no vLLM, no pool, no time."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.vllm.steps import StepReport
from tests.pd_cache.vllm.histories import CHUNK, METADATA, PER_CHUNK, Request, Scene

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT
PROMPT = list(range(3 * CHUNK + 3))


def hit(scene: Scene, request: Request, chunks: int) -> Any:
    """A request of which the pool holds so many chunks, matched and allocated from block 10 on."""
    scene.lookups.there = set(scene.names(request)[:chunks])
    external, later = scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    assert external is not None
    blocks = scene.manager.allocate(request, 10)
    scene.side.allocated(request, blocks, external)  # type: ignore[arg-type]
    return external, later


def test_a_hit_is_loaded_with_the_next_step_and_only_the_rest_is_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    assert hit(scene, request, 2) == (2 * CHUNK, True)
    step = scene.step()
    (load,) = step.loads
    assert (load.parts[0].names, load.parts[0].blocks) == (scene.names(request)[:2], [10, 11, 12, 13])
    assert step.nothing_to_compute
    request.num_computed_tokens = 2 * CHUNK
    (store,) = scene.step(a=CHUNK + 3).stores
    assert (store.chunks.names, store.chunks.blocks) == (scene.names(request)[2:], [14, 15])


def test_a_prompt_is_named_and_looked_up_once_however_often_vllm_asks() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    for _ in range(5):
        assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert scene.lookups.asked == [0]


def test_the_last_token_is_left_to_compute() -> None:
    scene, request = Scene(), Request("a", PROMPT[: 2 * CHUNK])
    assert hit(scene, request, 2) == (2 * CHUNK - 1, True)
    (load,) = scene.step().loads
    assert len(load.parts[0].names) == 2, "the chunk is loaded whole"


def test_blocks_that_vllm_holds_are_left_out_of_a_load() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    external, _ = scene.side.matched_tokens(request, CHUNK + 4)  # type: ignore[arg-type]
    assert external == CHUNK + 4
    assert scene.lookups.asked == [1], "the chunk that is whole is not asked for"
    scene.side.allocated(request, scene.manager.allocate(request, 10), external)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    assert load.parts[0].names == scene.names(request)[1:3]
    assert load.parts[0].blocks == [-1, 13, 14, 15]


def test_room_for_another_number_of_tokens_than_was_matched_loads_nothing_and_fails() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.side.allocated(request, scene.manager.allocate(request, 10), CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    assert load.parts == []
    assert load.blocks, "the worker reports these as not loaded, and vLLM computes them"


def test_blocks_of_a_store_outlive_the_preemption_of_their_request() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=3 * CHUNK).stores
    assert scene.side.storing
    scene.manager.free(request)
    assert scene.manager.block_pool.used == set(range(10, 10 + 3 * PER_CHUNK)), "the store still reads these"
    assert scene.side.frees_blocks
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))
    assert not scene.manager.block_pool.used
    assert not scene.side.storing


def test_what_was_stored_before_a_preemption_is_matched_after_it() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=len(PROMPT)).stores
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))
    scene.manager.free(request)
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    assert scene.lookups.asked == [0], "without another lookup"


def test_after_a_failed_load_the_prompt_is_computed_and_stored_and_not_loaded_again() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    hit(scene, request, 3)
    scene.step()
    scene.side.take_report(StepReport(failed_loads={"a"}))
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    (store,) = scene.step(a=len(PROMPT)).stores
    assert store.chunks.names == scene.names(request)


def test_an_abort_during_a_store_gives_the_blocks_back_when_all_ranks_have_ended() -> None:
    scene, request = Scene(ranks=2), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=3 * CHUNK).stores
    scene.side.finished(request)  # type: ignore[arg-type]
    scene.manager.free(request)
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))
    assert scene.manager.block_pool.used, "the other rank still reads them"
    scene.side.take_report(StepReport({store.job: (1, [NEW, NOT, NEW])}))
    assert not scene.manager.block_pool.used
    assert list(scene.side.take_events()) == [("a", 0), ("a", 2)], "events of chunks that all ranks have stored"
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))  # told again: nothing happens


def test_with_asynchronous_scheduling_tokens_in_flight_are_not_stored_before_a_sync_load_is_known_to_be_good() -> None:
    scene, request = Scene(load="sync"), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    request.num_computed_tokens, request.num_in_flight_tokens = 3 * CHUNK, 2 * CHUNK
    (store,) = scene.step(a=3).stores
    assert store.chunks.names == scene.names(request)[:1]
    request.num_in_flight_tokens = 0
    scene.side.finished(request)  # type: ignore[arg-type]
    (late,) = scene.step().stores
    assert late.chunks.names == scene.names(request)[1:]


def test_tokens_that_are_only_speculated_on_are_not_stored() -> None:
    scene, request = Scene(store_generated=True), Request("a", PROMPT[: 2 * CHUNK - 1])
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=2 * CHUNK + 5).stores
    assert len(store.chunks.names) == 1


def test_a_reset_of_vllms_own_cache_has_the_prompt_looked_up_from_its_start() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 2 * CHUNK) == (CHUNK, True)  # type: ignore[arg-type]
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    assert scene.lookups.asked == [2, 0], "whether the pool has the first chunks had never been asked"


def test_a_lost_server_is_a_miss_and_its_stores_are_not_taken_for_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.here = False
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert scene.metrics.totals()["troubles", "lookup", "error_ConnectionError"] == 1
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=len(PROMPT)).stores
    scene.side.take_report(StepReport({store.job: (1, [NOT] * 3)}))
    scene.manager.free(request)
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert not list(scene.side.take_events())


def test_a_full_queue_of_stores_drops_the_rest_and_counts_it() -> None:
    scene, request = Scene(store_queue=2), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=len(PROMPT)).stores
    assert len(store.chunks.names) == 2
    assert scene.metrics.totals()["troubles", "store", "queue_full"] == 1
    assert not scene.step(a=0).stores, "what was dropped is not tried again with each step"


def test_a_consumer_stores_nothing() -> None:
    scene, request = Scene(stores=False), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    assert not scene.step(a=len(PROMPT)).stores


# --- hand-offs -------------------------------------------------------------------------------------------------------


def announced(tokens: int, namespace: str = "") -> dict[str, Any]:
    return {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": tokens, "namespace": namespace}}


def test_an_announced_prefix_is_waited_for_with_growing_pauses_until_it_is_there() -> None:
    scene, request = Scene(), Request("a", PROMPT, announced(2 * CHUNK))
    for _ in range(3):
        assert scene.side.matched_tokens(request, 0) == (None, False)  # type: ignore[arg-type]
    assert scene.step().expecting
    assert scene.lookups.asked == [0], "not before the pause is over"
    pauses = 0
    for _ in range(40):
        scene.clock.now += 0.001
        scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
        pauses += 1
    assert 3 <= len(scene.lookups.asked) <= 8 < pauses
    scene.lookups.there = set(scene.names(request)[:2])
    scene.clock.now += 0.1
    assert scene.side.matched_tokens(request, 0) == (2 * CHUNK, True)  # type: ignore[arg-type]


def test_an_announced_prefix_that_does_not_come_is_waited_for_no_longer_than_configured() -> None:
    scene, request = Scene(wait_s=2.0), Request("a", PROMPT, announced(2 * CHUNK))
    assert scene.side.matched_tokens(request, 0) == (None, False)  # type: ignore[arg-type]
    scene.clock.now += 2.0
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["lost", "other namespace", "nonsense"])
def test_an_announcement_that_cannot_come_true_is_not_waited_for(reason: str) -> None:
    scene = Scene()
    params = {
        "lost": announced(CHUNK),
        "other namespace": announced(CHUNK, "0123456789abcdef"),
        "nonsense": {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": -5}},
    }
    scene.lookups.here = reason != "lost"
    assert scene.side.matched_tokens(Request("a", PROMPT, params[reason]), 0) == (0, False)  # type: ignore[arg-type]


def test_a_prefill_node_announces_the_whole_chunks_of_what_it_computed() -> None:
    scene = Scene()
    request = Request("a", PROMPT, {"do_remote_decode": True}, num_computed_tokens=len(PROMPT))
    scene.side.track(request)  # type: ignore[arg-type]
    answer = scene.side.finished(request)  # type: ignore[arg-type]
    assert answer is not None
    assert answer["pd_cache"]["prefix_tokens"] == 3 * CHUNK
    assert answer["pd_cache"]["namespace"] == scene.lookups._database.namespace.fingerprint()
    assert METADATA.model == scene.lookups._database.namespace.model


def test_the_end_of_a_request_ends_its_lookup() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.side.finished(request)  # type: ignore[arg-type]
    assert scene.lookups.ended == ["a"]
