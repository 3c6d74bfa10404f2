"""The connector's part in the scheduler, by histories of events: nothing of other weights is stored, loaded, or kept in vLLM's own cache.
tests/vllm/test_random_histories.py has the usual cases."""

from __future__ import annotations

import pytest

from tests.pd_cache.vllm.histories import CHUNK, PROMPT, Request, Scene, blocks_of


def running(scene: Scene, request: Request, *, at_hand: int = 0, block: int = 10) -> None:
    """A request that has computed its first chunk, or has it at hand."""
    assert scene.ask(request, at_hand) == (0, False)
    scene.manager.allocate(request, blocks_of(request, block))
    request.num_computed_tokens = CHUNK


def test_a_request_that_learns_of_a_reset_with_tokens_at_hand_is_not_stored() -> None:
    scene, request = Scene(), Request()
    scene.lookups.reset()
    running(scene, request, at_hand=CHUNK)
    assert scene.step(a=CHUNK).stores == []


@pytest.mark.parametrize("at_hand", [0, CHUNK])
@pytest.mark.parametrize("name", ["old", "late"])
def test_what_begins_after_a_reset_is_of_the_new_epoch_also_if_it_was_preempted_for_it(name: str, at_hand: int) -> None:
    scene, old = Scene(), Request("old")
    running(scene, old)
    scene.side.reset()
    scene.step(old=1)
    request = old if name == "old" else Request("late")
    if request is old:
        scene.manager.free(old)
        old.num_computed_tokens = 0
    running(scene, request, at_hand=at_hand, block=20)
    scene.manager.coordinator.cache_blocks(request, 2 * CHUNK)
    assert scene.manager.put_into_cache == [name]
    (store,) = scene.step(**{name: CHUNK}).stores
    assert (store.epoch, store.chunks.names) == ("run-1", scene.names(request)[:2])


def test_after_a_reset_that_was_not_taken_nothing_is_loaded_or_stored_until_the_version_is_known() -> None:
    scene, request, later = Scene(), Request("a"), Request("b")
    scene.lookups.resets = False
    assert not scene.side.reset()
    assert scene.pool.evicted, "what vLLM's own cache holds is of other weights all the same"
    running(scene, request)
    assert scene.step(a=CHUNK).stores == []
    scene.lookups.epoch = "v2"  # a command has said for all nodes which weights they have
    running(scene, later, block=20)
    (store,) = scene.step(a=CHUNK, b=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("v2", scene.names(later)[:2]), "a was computed before"


@pytest.mark.parametrize("how", ["is reset again", "looks up again"])
def test_after_a_reset_that_was_not_taken_the_version_before_is_outdated_even_if_it_is_reported_again(how: str) -> None:
    scene, request, later = Scene(), Request("a"), Request("b")
    running(scene, request)
    scene.lookups.resets = False
    assert not scene.side.reset()
    scene.lookups.resets, scene.lookups.epoch = True, ""
    if how == "is reset again":
        assert scene.side.reset()
    else:
        running(scene, later, block=20)
    stores = scene.step(a=CHUNK, b=CHUNK).stores
    assert [store.chunks.blocks[0] for store in stores] == ([] if how == "is reset again" else [20]), "not a"


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_not_stored_because_of_a_reset_is_not_announced(taken: bool) -> None:
    scene, request = Scene(), Request(kv_transfer_params={"do_remote_decode": True})
    running(scene, request)
    scene.lookups.resets = taken
    scene.side.reset()
    request.num_computed_tokens = len(PROMPT)
    assert scene.finish(request)["pd_cache"]["prefix_tokens"] == 0


def test_a_load_bears_the_epoch_in_which_its_chunks_were_found() -> None:
    scene, request = Scene(), Request()
    scene.side.reset()
    scene.has(request)
    scene.load(request)
    (load,) = scene.step().loads
    assert load.epoch == "run-1"
