"""The connector's part in the scheduler, by histories of events: what must not be shared. Nothing of a load within a step is stored, or kept in
vLLM's own cache, before it is known to be good; nothing of other weights is at all."""

from __future__ import annotations

import pytest

from pd_cache.reasons import Loaded
from tests.pd_cache.vllm.histories import BLOCK, CHUNK, FAILED, PROMPT, Request, Scene, blocks_of

# --- loads within the step that needs them ---------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["sync", "async"])
def test_what_is_computed_behind_a_load_of_the_same_step_is_stored_when_the_load_is_known_to_be_good(load: str) -> None:
    scene, request = Scene(load=load), Request()
    scene.has(request, 1)
    assert scene.load(request) == (CHUNK, load == "async")
    request.num_computed_tokens = CHUNK
    step = scene.step(a=2 * CHUNK + 3)
    assert [op.in_step for op in step.loads] == [load == "sync"]
    request.num_computed_tokens += 2 * CHUNK + 3
    scene.loaded(Loaded(1))
    stores = step.stores + scene.step(a=1).stores
    assert (len(step.stores), len(stores)) == (load == "async", 1)
    assert stores[0].chunks.names == scene.names(request)[1:]


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
def test_what_a_step_loads_behind_vllms_own_hit_is_not_stored_before_the_load_is_known_to_be_good(
    aborted: bool,
) -> None:
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


class Sharing:
    """A request that loads its first chunk in the step that computes the others. vLLM has put all of its blocks into its own cache."""

    def __init__(self) -> None:
        self.scene, self.request = Scene(load="sync"), Request()
        self.scene.has(self.request, 1)
        for number in range(10, 16):
            self.scene.pool.blocks[number].block_hash = "vllm's"
        self.scene.load(self.request)
        self.request.num_computed_tokens = CHUNK
        self.scene.step(a=2 * CHUNK + 3)
        self.request.num_in_flight_tokens = 2 * CHUNK + 3

    def over(self, tokens: int, loaded: Loaded) -> list[int]:
        """The step is over, and vLLM keeps this many tokens. Returns which blocks are in its cache."""
        self.request.num_computed_tokens, self.request.num_in_flight_tokens = tokens, 0
        self.scene.loaded(loaded)
        return self.scene.pool.cached

    def goes_on(self, tokens: int) -> list[int]:
        """A step computes a chunk behind `tokens`. Returns which blocks are in vLLM's cache when it begins."""
        self.request.num_computed_tokens = tokens
        self.scene.step(a=CHUNK)
        return self.scene.pool.cached


def test_no_other_request_can_share_blocks_before_the_load_of_their_step_is_known_to_be_good() -> None:
    one = Sharing()
    assert one.scene.pool.cached == []
    assert one.over(len(PROMPT), Loaded(1)) == list(range(10, 16))


@pytest.mark.parametrize(
    ("kept", "cached", "computed", "then"),
    [(BLOCK, [10], CHUNK + BLOCK, [10, 11, 12]), (0, [], 2 * CHUNK, [10, 11, 12, 13])],
    ids=["the first block was good", "none was"],
)
def test_after_a_failed_load_in_a_step_blocks_are_shared_as_they_are_computed_again(
    kept: int, cached: list[int], computed: int, then: list[int]
) -> None:
    one = Sharing()
    assert one.over(kept, FAILED) == cached
    assert one.goes_on(computed) == then


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_ends_with_the_step_of_its_load_leaves_good_blocks_in_vllms_own_cache_if_it_was_not_aborted(
    aborted: bool,
) -> None:
    one = Sharing()
    one.request.num_computed_tokens = len(PROMPT)
    if not aborted:
        one.request.num_in_flight_tokens = 0
    one.scene.finish(one.request)
    assert one.scene.pool.cached == ([] if aborted else list(range(10, 16)))


@pytest.mark.parametrize("event", ["preempted", "reset"])
def test_blocks_of_a_request_that_was_preempted_or_outdated_are_not_put_into_vllms_own_cache(event: str) -> None:
    one = Sharing()
    if event == "preempted":
        one.scene.manager.free(one.request)
        one.scene.manager.allocate(one.request, blocks_of(one.request, 30))
    else:
        assert one.scene.side.reset()
    assert one.over(len(PROMPT), Loaded(1)) == []


# --- versions of the weights -----------------------------------------------------------------------------------------


def running(scene: Scene, request: Request, *, at_hand: int = 0, block: int = 10) -> None:
    """A request that has computed its first chunk, or has it at hand."""
    assert scene.ask(request, at_hand) == (0, False)
    scene.manager.allocate(request, blocks_of(request, block))
    request.num_computed_tokens = CHUNK


def test_after_a_reset_what_was_computed_before_is_neither_stored_nor_kept_by_vllm() -> None:
    scene, old, new = Scene(), Request("old"), Request("new", [7] * len(PROMPT))
    running(scene, old)
    assert scene.side.reset()
    assert scene.pool.evicted == set(range(64))
    scene.manager.coordinator.cache_blocks(old, len(PROMPT))
    assert scene.step(old=len(PROMPT) - CHUNK).stores == []
    running(scene, new, block=20)
    scene.manager.coordinator.cache_blocks(new, 2 * CHUNK)
    (store,) = scene.step(new=CHUNK).stores
    assert store.epoch == scene.lookups.epoch == "run-1"
    assert scene.manager.put_into_cache == ["new"]


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


def test_what_a_load_of_before_a_reset_brought_stays_out_of_vllms_cache_however_late_vllm_would_put_it_there() -> None:
    """vLLM caches these blocks when it takes notice of the load's end: any number of steps after it has allocated them."""
    scene, request = Scene(), Request()
    scene.has(request)
    scene.load(request)
    request.num_computed_tokens = 3 * CHUNK
    scene.step()
    assert scene.side.reset()
    for _ in range(5):
        scene.step()
    scene.manager.coordinator.cache_blocks(request, 3 * CHUNK)
    assert scene.manager.put_into_cache == []
