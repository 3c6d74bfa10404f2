"""The connector's part in the scheduler, by histories of events: versions of the weights."""

from __future__ import annotations

import pytest

from tests.pd_cache.vllm.histories import (
    CHUNK,
    PROMPT,
    Request,
    Scene,
    hit,
)


def running(scene: Scene, request: Request, *, at_hand: int = 0, block: int = 10) -> None:
    """A request that has computed its first chunk, or has it at hand."""
    assert scene.side.matched_tokens(request, at_hand) == (0, False)  # type: ignore[arg-type]
    scene.manager.allocate(request, block)
    request.num_computed_tokens = CHUNK


def test_after_a_reset_what_was_computed_before_is_neither_stored_nor_kept_by_vllm() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", [7] * len(PROMPT))
    running(scene, old)
    assert scene.side.reset()
    assert scene.manager.block_pool.evicted == set(range(64))
    scene.manager.coordinator.cache_blocks(old, len(PROMPT))
    assert scene.step(old=len(PROMPT) - CHUNK).stores == []
    running(scene, new, block=20)
    scene.manager.coordinator.cache_blocks(new, 2 * CHUNK)
    (store,) = scene.step(new=CHUNK).stores
    assert store.epoch == scene.lookups.epoch == "run-1"
    assert scene.manager.put_into_cache == ["new"]


def test_a_reset_on_another_node_is_known_with_the_next_lookup() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", [7] * len(PROMPT))
    running(scene, old)
    scene.lookups.reset()
    assert len(scene.step(old=CHUNK).stores) == 1, "in the epoch in which it was computed"
    running(scene, new, block=20)
    (store,) = scene.step(old=1, new=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("run-1", scene.names(new)[:2])


def test_what_is_at_hand_after_a_reset_is_of_the_new_epoch_also_while_requests_of_the_one_before_run() -> None:
    scene, old, late = Scene(), Request("old", PROMPT), Request("late", PROMPT)
    running(scene, old)
    scene.side.reset()
    running(scene, late, at_hand=CHUNK, block=20)
    (store,) = scene.step(old=1, late=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("run-1", scene.names(late)[:2])


def test_a_request_that_learns_of_a_reset_with_tokens_at_hand_is_not_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.reset()
    running(scene, request, at_hand=CHUNK)
    assert scene.step(a=CHUNK).stores == []


def test_a_request_that_was_preempted_for_a_reset_is_computed_anew_and_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    scene.manager.free(request)
    request.num_computed_tokens = 0
    running(scene, request, block=20)
    (store,) = scene.step(a=CHUNK).stores
    assert (store.epoch, len(store.chunks.names)) == ("run-1", 2)


def test_after_a_reset_that_was_not_taken_nothing_is_loaded_or_stored_until_the_version_is_known() -> None:
    scene, request, later = Scene(), Request("a", PROMPT), Request("b", PROMPT)
    scene.lookups.resets = False
    assert not scene.side.reset()
    running(scene, request)
    assert scene.step(a=CHUNK).stores == []
    scene.lookups.epoch = "v2"  # a command has said for all nodes which weights they have
    running(scene, later, block=20)
    (store,) = scene.step(a=CHUNK, b=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("v2", scene.names(later)[:2]), "a was computed before"


def test_after_a_reset_that_was_not_taken_the_version_before_is_outdated_even_if_it_is_reported_again() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.lookups.resets = False
    assert not scene.side.reset()
    scene.lookups.resets = True
    assert scene.side.reset()
    assert scene.step(a=CHUNK).stores == []


def test_a_lookup_without_an_answer_says_nothing_of_epochs() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", PROMPT)
    scene.side.reset()
    scene.manager.block_pool.evicted.clear()
    running(scene, old)
    scene.lookups.epoch = None
    running(scene, new, block=20)
    stores = scene.step(old=CHUNK, new=CHUNK).stores
    assert {store.epoch for store in stores} == {"run-1"}
    assert not scene.manager.block_pool.evicted


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_not_stored_because_of_a_reset_is_not_announced(taken: bool) -> None:
    scene, request = Scene(), Request("a", PROMPT, kv_transfer_params={"do_remote_decode": True})
    running(scene, request)
    scene.lookups.resets = taken
    scene.side.reset()
    request.num_computed_tokens = len(PROMPT)
    answer = scene.side.finished(request)  # type: ignore[arg-type]
    assert answer is not None
    assert answer["pd_cache"]["prefix_tokens"] == 0


def test_a_load_bears_the_epoch_in_which_its_chunks_were_found() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.reset()
    hit(scene, request, 2)
    (load,) = scene.step().loads
    assert load.epoch == "run-1"


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_ends_in_the_step_of_its_load_after_a_reset_is_not_stored(aborted: bool) -> None:
    """Its end is known before that of its load. A store would put KV of the weights before into the epoch of those after."""
    scene, request = Scene(load="sync"), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request)[:2])
    assert scene.side.matched_tokens(request, CHUNK) == (CHUNK, False)  # type: ignore[arg-type]
    scene.side.allocated(request, scene.manager.allocate(request, 10), CHUNK)  # type: ignore[arg-type]
    request.num_computed_tokens = 2 * CHUNK
    scene.step(a=CHUNK + 3)
    assert scene.side.reset()
    request.num_computed_tokens, request.num_in_flight_tokens = len(PROMPT), CHUNK + 3 if aborted else 0
    scene.side.finished(request)  # type: ignore[arg-type]
    assert scene.step().stores == []


def test_what_a_load_of_before_a_reset_brought_stays_out_of_vllms_cache_however_late_vllm_would_put_it_there() -> None:
    """vLLM caches these blocks when it takes notice of the load's end: any number of steps after it has allocated them."""
    scene, request = Scene(), Request("a", PROMPT)
    hit(scene, request, 3)
    request.num_computed_tokens = 3 * CHUNK
    scene.step()
    assert scene.side.reset()
    for _ in range(5):
        scene.step()
    scene.manager.coordinator.cache_blocks(request, 3 * CHUNK)
    assert scene.manager.put_into_cache == []


def test_an_outdated_request_that_was_preempted_begins_anew_like_any_other() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    scene.step(a=1)
    scene.manager.free(request)
    running(scene, request, at_hand=CHUNK, block=20)
    scene.manager.coordinator.cache_blocks(request, 2 * CHUNK)
    assert scene.manager.put_into_cache == ["a"]
