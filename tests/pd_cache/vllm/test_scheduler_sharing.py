"""The connector's part in the scheduler, by histories of events: what must not be shared. Nothing of a load within a step is stored, or kept in
vLLM's own cache, before it is known to be good; nothing of other weights is at all. tests/vllm/test_random_histories.py has the usual cases."""

from __future__ import annotations

import pytest

from pd_cache.reasons import Loaded
from tests.pd_cache.vllm.histories import BLOCK, CHUNK, FAILED, PROMPT, Request, Scene, blocks_of

# --- loads within the step that needs them ---------------------------------------------------------------------------


def test_a_request_that_ends_with_the_step_of_its_load_is_stored_with_the_next_one() -> None:
    scene, request = Scene(load="sync"), Request()
    scene.has(request, 1)
    scene.load(request)
    request.num_computed_tokens = CHUNK
    scene.step(a=2 * CHUNK + 3)
    request.num_computed_tokens = len(PROMPT)
    scene.finish(request)
    (late,) = scene.step().stores
    assert late.chunks.names == scene.names(request)[1:]


@pytest.mark.parametrize("aborted", [False, True])
def test_what_a_step_loads_behind_vllms_own_hit_is_not_stored_before_the_load_is_known_to_be_good(aborted):
    """Such a store would put whatever a failed load left in the blocks into the pool, under the names of the chunks that it lacks."""
    scene, request = Scene(load="sync"), Request()
    scene.has(request, 2)
    assert scene.load(request, CHUNK) == (CHUNK, False)
    request.num_computed_tokens = 2 * CHUNK
    stores = scene.step(a=CHUNK).stores
    request.num_computed_tokens, request.num_in_flight_tokens = 3 * CHUNK, CHUNK
    if aborted:
        scene.finish(request)
        stores += scene.step().stores
    assert [name for op in stores for name in op.chunks.names] == scene.names(request)[:1], "what vLLM had at hand"
    if not aborted:
        request.num_computed_tokens, request.num_in_flight_tokens = CHUNK + BLOCK, 0
        scene.loaded(FAILED)
        (again,) = scene.step(a=2 * CHUNK - BLOCK).stores
        assert again.chunks.names == scene.names(request)


@pytest.mark.parametrize(
    ("event", "cached"),
    [("loaded", True), ("finished", True), ("aborted", False), ("preempted", False), ("reset", False)],
)
def test_blocks_that_a_step_loads_and_computes_are_kept_by_vllm_when_the_load_is_known_to_be_good(event, cached):
    """vLLM itself has put all blocks of the request into its own cache when it planned the step."""
    scene, request = Scene(load="sync"), Request()
    scene.has(request, 1)
    for number in range(10, 16):
        scene.pool.blocks[number].block_hash = "vllm's"
    scene.load(request)
    request.num_computed_tokens = CHUNK
    scene.step(a=2 * CHUNK + 3)
    assert scene.pool.cached == []
    request.num_computed_tokens = len(PROMPT)
    if event == "aborted":
        request.num_in_flight_tokens = 2 * CHUNK + 3
    if event in ("finished", "aborted"):
        scene.finish(request)
    if event == "preempted":
        scene.manager.free(request)
        scene.manager.allocate(request, blocks_of(request, 30))
    if event == "reset":
        assert scene.side.reset()
    scene.loaded(Loaded(1))
    assert scene.pool.cached == (list(range(10, 16)) if cached else [])


# --- versions of the weights -----------------------------------------------------------------------------------------


def running(scene: Scene, request: Request, *, at_hand: int = 0, block: int = 10) -> None:
    """A request that has computed its first chunk, or has it at hand."""
    assert scene.ask(request, at_hand) == (0, False)
    scene.manager.allocate(request, blocks_of(request, block))
    request.num_computed_tokens = CHUNK


def test_a_reset_on_another_node_is_known_with_the_next_lookup() -> None:
    scene, old, new = Scene(), Request("old"), Request("new", [7] * len(PROMPT))
    running(scene, old)
    scene.lookups.reset()
    assert len(scene.step(old=CHUNK).stores) == 1, "in the epoch in which it was computed"
    running(scene, new, block=20)
    (store,) = scene.step(old=1, new=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("run-1", scene.names(new)[:2])


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


def test_a_lookup_without_an_answer_says_nothing_of_epochs() -> None:
    scene, old, new = Scene(), Request("old"), Request("new")
    scene.side.reset()
    scene.pool.evicted.clear()
    running(scene, old)
    scene.lookups.epoch = None
    running(scene, new, block=20)
    assert {store.epoch for store in scene.step(old=CHUNK, new=CHUNK).stores} == {"run-1"}
    assert not scene.pool.evicted


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


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_ends_in_the_step_of_its_load_after_a_reset_is_not_stored(aborted: bool) -> None:
    """Its end is known before that of its load. A store would put KV of the weights before into the epoch of those after."""
    scene, request = Scene(load="sync"), Request()
    scene.has(request, 2)
    assert scene.load(request, CHUNK) == (CHUNK, False)
    request.num_computed_tokens = 2 * CHUNK
    scene.step(a=CHUNK + 3)
    assert scene.side.reset()
    request.num_computed_tokens, request.num_in_flight_tokens = len(PROMPT), CHUNK + 3 if aborted else 0
    scene.finish(request)
    assert scene.step().stores == []
