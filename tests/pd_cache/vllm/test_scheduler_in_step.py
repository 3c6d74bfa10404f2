"""The connector's part in the scheduler, by histories of events: loads within the step that needs them."""

from __future__ import annotations

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.reasons import Loaded
from pd_cache.vllm.steps import StepReport
from tests.pd_cache.vllm.histories import (
    BLOCK,
    CHUNK,
    PROMPT,
    Request,
    Scene,
    hit,
)

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT


def test_what_is_computed_behind_a_load_of_the_same_step_is_stored_when_the_load_is_known_to_be_good() -> None:
    scene, request = Scene(load="sync"), Request("a", PROMPT)
    assert hit(scene, request, 1) == (CHUNK, False)
    request.num_computed_tokens = CHUNK
    step = scene.step(a=2 * CHUNK + 3)
    assert [op.in_step for op in step.loads] == [True]
    assert step.stores == []
    request.num_computed_tokens += 2 * CHUNK + 3
    scene.side.take_report(StepReport(loads={"a": Loaded(1)}))
    (store,) = scene.step(a=1).stores
    assert store.chunks.names == scene.names(request)[1:]


def test_a_request_that_ends_with_the_step_of_its_load_is_stored_with_the_next_one() -> None:
    scene, request = Scene(load="sync"), Request("a", PROMPT)
    hit(scene, request, 1)
    request.num_computed_tokens = CHUNK
    scene.step(a=2 * CHUNK + 3)
    request.num_computed_tokens = len(PROMPT)
    scene.side.finished(request)  # type: ignore[arg-type]
    (late,) = scene.step().stores
    assert late.chunks.names == scene.names(request)[1:]


@pytest.mark.parametrize("aborted", [False, True])
def test_what_a_step_loads_behind_vllms_own_hit_is_not_stored_before_the_load_is_known_to_be_good(
    aborted: bool,
) -> None:
    """Such a store would put whatever a failed load left in the blocks into the pool, under the names of the chunks that it lacks."""
    scene, request = Scene(load="sync"), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request)[:2])
    assert scene.side.matched_tokens(request, CHUNK) == (CHUNK, False)  # type: ignore[arg-type]
    scene.side.allocated(request, scene.manager.allocate(request, 10), CHUNK)  # type: ignore[arg-type]
    request.num_computed_tokens = 2 * CHUNK
    stores = scene.step(a=CHUNK).stores
    request.num_computed_tokens, request.num_in_flight_tokens = 3 * CHUNK, CHUNK
    if aborted:
        scene.side.finished(request)  # type: ignore[arg-type]
        stores += scene.step().stores
    assert [name for op in stores for name in op.chunks.names] == scene.names(request)[:1], "what vLLM had at hand"
    if not aborted:
        request.num_computed_tokens, request.num_in_flight_tokens = CHUNK + BLOCK, 0
        scene.side.take_report(StepReport(loads={"a": Loaded(0, "evicted")}))
        (again,) = scene.step(a=2 * CHUNK - BLOCK).stores
        assert again.chunks.names == scene.names(request)


class Sharing:
    """A request that loads its first chunk in the step that computes the others. vLLM has put all of its blocks into its own cache."""

    def __init__(self) -> None:
        self.scene, self.request = Scene(load="sync"), Request("a", PROMPT)
        pool = self.scene.manager.block_pool
        self.scene.lookups.there = set(self.scene.names(self.request)[:1])
        external, _ = self.scene.side.matched_tokens(self.request, 0)  # type: ignore[arg-type]
        blocks = self.scene.manager.allocate(self.request, 10)
        for number in range(10, 16):
            pool.blocks[number].block_hash = "vllm's"
        self.scene.side.allocated(self.request, blocks, external or 0)  # type: ignore[arg-type]
        self.request.num_computed_tokens = CHUNK
        self.step = self.scene.step(a=2 * CHUNK + 3)
        self.request.num_in_flight_tokens = 2 * CHUNK + 3

    def computed(self, tokens: int) -> None:
        """The step is over, and vLLM keeps this many tokens."""
        self.request.num_computed_tokens, self.request.num_in_flight_tokens = tokens, 0

    @property
    def cached(self) -> list[int]:
        return self.scene.manager.block_pool.cached


def test_no_other_request_can_share_blocks_before_the_load_of_their_step_is_known_to_be_good() -> None:
    one = Sharing()
    assert one.cached == []
    one.computed(len(PROMPT))
    one.scene.side.take_report(StepReport(loads={"a": Loaded(1)}))
    assert one.cached == [10, 11, 12, 13, 14, 15]


def test_after_a_failed_load_in_a_step_blocks_are_shared_as_they_are_computed_again() -> None:
    one = Sharing()
    one.computed(BLOCK)  # the first block was good
    one.scene.side.take_report(StepReport(loads={"a": Loaded(0, "damaged")}))
    assert one.cached == [10]
    one.request.num_computed_tokens = CHUNK + BLOCK
    one.scene.step(a=CHUNK)
    assert one.cached == [10, 11, 12]


def test_blocks_stay_hidden_while_none_of_them_is_known_to_be_good() -> None:
    one = Sharing()
    one.computed(0)
    one.scene.side.take_report(StepReport(loads={"a": Loaded(0, "damaged")}))
    assert one.cached == []
    one.request.num_computed_tokens = 2 * CHUNK
    one.scene.step(a=CHUNK)
    assert one.cached == [10, 11, 12, 13]


def test_a_request_that_ends_with_the_step_of_its_load_leaves_good_blocks_in_vllms_own_cache() -> None:
    one = Sharing()
    one.computed(len(PROMPT))
    one.scene.side.finished(one.request)  # type: ignore[arg-type]
    assert one.cached == [10, 11, 12, 13, 14, 15]


def test_a_request_that_is_aborted_during_the_step_of_its_load_leaves_nothing_in_vllms_own_cache() -> None:
    one = Sharing()
    one.request.num_computed_tokens = len(PROMPT)
    one.scene.side.finished(one.request)  # type: ignore[arg-type]
    assert one.cached == []


def test_blocks_of_a_request_that_was_preempted_are_not_taken_for_those_that_it_has_now() -> None:
    one = Sharing()
    one.scene.manager.free(one.request)
    one.scene.manager.allocate(one.request, 30)
    one.computed(len(PROMPT))
    one.scene.side.take_report(StepReport(loads={"a": Loaded(1)}))
    assert one.cached == []


def test_a_new_epoch_leaves_no_block_of_the_old_one_in_vllms_own_cache() -> None:
    one = Sharing()
    assert one.scene.side.reset()
    one.computed(len(PROMPT))
    one.scene.side.take_report(StepReport(loads={"a": Loaded(1)}))
    assert one.cached == []


@pytest.mark.parametrize(("load", "in_step"), [("sync", True), ("async", False)])
def test_only_a_sync_load_runs_in_the_step_that_needs_it(load: str, in_step: bool) -> None:
    scene, request = Scene(load=load), Request("a", PROMPT)
    _, later = hit(scene, request, 3)
    assert later is not in_step
    assert [op.in_step for op in scene.step().loads] == [in_step]
