"""The connector's part in the scheduler, by histories of events: no vLLM, no pool, no time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pd_cache.blocks import Restored, StoreOutcome, TierChunks
from pd_cache.reports import RequestReport
from pd_cache.vllm.layers import KeptLayers
from pd_cache.vllm.steps import GroupChunks, StepReport
from tests.pd_cache.vllm.histories import BLOCK, CHUNK, METADATA, PER_CHUNK, Request, Scene

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


@pytest.mark.parametrize(
    ("length", "loaded", "blocks"),
    [
        (3 * CHUNK, 3 * CHUNK - BLOCK, [10, 11, 12, 13, 14, -1]),
        (3 * CHUNK + 1, 3 * CHUNK, [10, 11, 12, 13, 14, 15]),
        (2 * CHUNK + BLOCK, 2 * CHUNK, [10, 11, 12, 13]),
    ],
    ids=["a block is left", "a token is left anyway", "the pool has whole chunks only"],
)
@pytest.mark.parametrize("load", ["async", "sync"])
def test_if_wanted_a_full_hit_leaves_what_vllms_own_cache_leaves(
    load: str, length: int, loaded: int, blocks: list[int]
) -> None:
    scene, request = Scene(recompute="block", load=load), Request("a", PROMPT[:length])
    assert hit(scene, request, 3) == (loaded, load == "async")
    (op,) = scene.step().loads
    assert op.parts == [GroupChunks(0, scene.names(request), blocks)], "a block behind the load's end is not touched"
    request.num_computed_tokens = loaded
    assert scene.step(a=length - loaded).stores == [], "the chunk that was loaded in part is in the pool"


def test_what_vllm_holds_and_what_it_would_leave_can_be_in_one_chunk() -> None:
    scene, request = Scene(recompute="block"), Request("a", PROMPT[: 2 * CHUNK])
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 2 * CHUNK - BLOCK) == (0, False)  # type: ignore[arg-type]
    assert scene.side.matched_tokens(request, CHUNK) == (CHUNK - BLOCK, True)  # type: ignore[arg-type]


def test_a_hand_off_is_waited_for_only_up_to_what_vllms_own_cache_leaves() -> None:
    state = KeptLayers(1, CHUNK, "state")
    scene = Scene(recompute="block", layers=[KeptLayers(0, BLOCK), state])
    request = Request("a", PROMPT[: 2 * CHUNK], announced(2 * CHUNK))
    assert scene.side.matched_tokens(request, 0) == (None, False)  # type: ignore[arg-type]
    scene.lookups.there = set(scene.names(request)[:1])
    scene.clock.now += 1
    assert scene.side.matched_tokens(request, 0) == (CHUNK, True)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("load", ["sync", "layerwise"])
def test_what_is_computed_behind_a_load_of_the_same_step_is_stored_when_the_load_is_known_to_be_good(load: str) -> None:
    scene, request = Scene(load=load), Request("a", PROMPT)
    assert hit(scene, request, 1) == (CHUNK, False)
    request.num_computed_tokens = CHUNK
    step = scene.step(a=2 * CHUNK + 3)
    assert [op.in_step for op in step.loads] == [True]
    assert step.stores == []
    request.num_computed_tokens += 2 * CHUNK + 3
    scene.side.take_report(StepReport(loads={"a": Restored(1)}))
    (store,) = scene.step(a=1).stores
    assert store.chunks.names == scene.names(request)[1:]


def test_a_request_that_ends_with_the_step_of_its_load_is_stored_with_the_next_one() -> None:
    scene, request = Scene(load="layerwise"), Request("a", PROMPT)
    hit(scene, request, 1)
    request.num_computed_tokens = CHUNK
    scene.step(a=2 * CHUNK + 3)
    request.num_computed_tokens = len(PROMPT)
    scene.side.finished(request)  # type: ignore[arg-type]
    (late,) = scene.step().stores
    assert late.chunks.names == scene.names(request)[1:]


class Sharing:
    """A request that loads its first chunk in the step that computes the others. vLLM has put all of its blocks into its own cache."""

    def __init__(self) -> None:
        self.scene, self.request = Scene(load="layerwise"), Request("a", PROMPT)
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
    one.scene.side.take_report(StepReport(loads={"a": Restored(1)}))
    assert one.cached == [10, 11, 12, 13, 14, 15]


def test_after_a_failed_load_in_a_step_blocks_are_shared_as_they_are_computed_again() -> None:
    one = Sharing()
    one.computed(BLOCK)  # the first block was good
    one.scene.side.take_report(StepReport(failed_loads={"a"}, loads={"a": Restored(0, "damaged")}))
    assert one.cached == [10]
    one.request.num_computed_tokens = CHUNK + BLOCK
    one.scene.step(a=CHUNK)
    assert one.cached == [10, 11, 12]


def test_blocks_stay_hidden_while_none_of_them_is_known_to_be_good() -> None:
    one = Sharing()
    one.computed(0)
    one.scene.side.take_report(StepReport(failed_loads={"a"}, loads={"a": Restored(0, "damaged")}))
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
    one.scene.side.take_report(StepReport(loads={"a": Restored(1)}))
    assert one.cached == []


def test_a_new_epoch_leaves_no_block_of_the_old_one_in_vllms_own_cache() -> None:
    one = Sharing()
    assert one.scene.side.reset()
    one.computed(len(PROMPT))
    one.scene.side.take_report(StepReport(loads={"a": Restored(1)}))
    assert one.cached == []


@pytest.mark.parametrize(
    ("load", "length", "in_step"),
    [
        ("layerwise", 3 * CHUNK + 3, True),
        ("layerwise", 3 * CHUNK, False),
        ("async", 3 * CHUNK + 3, False),
        ("auto", 3 * CHUNK + 3, False),
    ],
    ids=["whole blocks", "the last block is loaded and computed", "not wanted", "nothing measured yet"],
)
def test_a_load_runs_in_the_step_that_needs_it_only_if_no_block_is_both_loaded_and_computed(
    load: str, length: int, in_step: bool
) -> None:
    scene, request = Scene(load=load), Request("a", PROMPT[:length])
    _, later = hit(scene, request, 3)
    assert later is not in_step
    assert [op.in_step for op in scene.step().loads] == [in_step]


def test_auto_loads_in_the_step_when_loading_takes_long_beside_computing_and_nothing_else_computes() -> None:
    scene = Scene(load="auto")
    tokens = list(range(1000, 1000 + 20 * CHUNK))

    def loads_in_step(number: int, found: int = 10) -> bool:
        request = Request(f"r{number}", [number, *tokens])
        _, later = hit(scene, request, found)
        scene.step()
        scene.side.finished(request)  # type: ignore[arg-type]
        scene.manager.free(request)
        return not later

    def computed(seconds: float) -> None:
        scene.step(other=10 * CHUNK)
        scene.clock.now += seconds
        scene.side.end_step()
        scene.step()

    def loaded(seconds: float) -> None:
        request = Request("measured", [0, *tokens])
        hit(scene, request, 10)
        scene.side.take_report(StepReport(loads={"measured": Restored(10)}, load_seconds={"measured": seconds}))
        scene.side.finished(request)  # type: ignore[arg-type]
        scene.manager.free(request)

    assert not loads_in_step(1), "nothing is known yet"
    computed(1.0)
    loaded(0.5)
    assert loads_in_step(2), "half a second of 1.5 can be saved"
    scene.step(other=1)
    assert not loads_in_step(3), "another request would wait for it"
    scene.step(other=1)
    scene.side.finished(Request("other", tokens))  # type: ignore[arg-type]
    assert loads_in_step(4), "it has ended, and the engine has made no step since"
    for _ in range(8):
        loaded(0.02)
    assert not loads_in_step(5), "the link is fast"


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


def test_a_chunk_that_a_lookup_found_evicted_is_announced_as_removed_and_one_that_was_never_there_is_not() -> None:
    scene = Scene()
    scene.lookups.there = set(scene.names(Request("a", PROMPT))[:1])
    for name, reason, events in (("a", "never_stored", []), ("b", "evicted", [("gone", "b", 1)])):
        scene.lookups.reason = reason  # type: ignore[assignment]
        request = Request(name, PROMPT)
        for _ in range(3):  # vLLM asks again and again
            scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
        assert list(scene.side.take_events()) == events


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


# --- reports -------------------------------------------------------------------------------------------------------


def ended(scene: Scene, request: Request) -> RequestReport:
    """The report on a request whose prompt vLLM has computed."""
    request.num_computed_tokens = request.num_prompt_tokens
    answer = scene.side.finished(request)  # type: ignore[arg-type]
    (report,) = scene.reports
    assert answer is not None
    assert answer["pd_cache"]["report"] == msgspec.to_builtins(report)
    return report


def test_a_report_says_where_the_prompt_was_found_and_what_was_not_there() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    hit(scene, request, 2)
    scene.step()
    scene.side.take_report(StepReport(loads={"a": Restored(2, "none", TierChunks(memory=1, pool=1))}))
    assert ended(scene, request) == RequestReport(
        asked=27, found=16, loaded=16, memory=8, pool=8, computed=11, reason="never_stored"
    )
    assert scene.metrics.totals()["requests", "never_stored"] == 1
    assert scene.metrics.totals()["missed_tokens", "never_stored"] == 11


def test_a_report_counts_what_vllms_own_cache_had_apart() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    external, _ = scene.side.matched_tokens(request, CHUNK + 4)  # type: ignore[arg-type]
    scene.side.allocated(request, scene.manager.allocate(request, 10), external)  # type: ignore[arg-type]
    scene.side.take_report(StepReport(loads={"a": Restored(2, "none", TierChunks(pool=2))}))
    assert ended(scene, request) == RequestReport(asked=27, at_hand=12, found=16, loaded=12, pool=16, computed=3)


def test_a_report_says_why_a_load_ended_early_and_what_vllm_keeps_of_it() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    hit(scene, request, 3)
    scene.step()
    scene.side.take_report(StepReport(failed_loads={"a"}, loads={"a": Restored(1, "damaged", TierChunks(disk=1))}))
    scene.side.matched_tokens(request, CHUNK)  # type: ignore[arg-type]
    assert ended(scene, request) == RequestReport(asked=27, found=24, loaded=8, disk=8, computed=19, reason="damaged")


def test_of_a_load_that_fails_as_a_whole_nothing_counts_as_loaded() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    external, _ = scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, list(range(10, 17)), list(range(20, 27)))
    scene.side.allocated(request, blocks, external)  # type: ignore[arg-type]
    scene.side.take_report(StepReport(failed_loads={"a"}, loads={"a": Restored(2, "evicted", TierChunks(pool=2))}))
    report = ended(scene, request)
    assert (report.loaded, report.computed, report.reason) == (0, 27, "evicted")


@pytest.mark.parametrize("namespace", ["", "0123456789abcdef"])
def test_an_announced_prefix_that_did_not_come_gives_the_reason(namespace: str) -> None:
    scene, request = Scene(), Request("a", PROMPT, announced(2 * CHUNK, namespace))
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.clock.now += 3.0
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert ended(scene, request).reason == ("other_namespace" if namespace else "deadline")


def test_a_request_that_may_not_read_the_cache_says_so() -> None:
    scene, request = Scene(), Request("a", PROMPT, skip_reading_prefix_cache=True)
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    assert ended(scene, request) == RequestReport(asked=27, computed=27, reason="not_asked")


def test_a_request_that_ends_before_its_prompt_is_computed_has_no_report() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    assert scene.side.finished(request) is None  # type: ignore[arg-type]
    assert not scene.reports


def test_a_handed_over_request_carries_the_prefill_nodes_reason_to_the_decode_nodes_answer() -> None:
    scene, request = Scene(), Request("a", PROMPT, {"do_remote_decode": True})
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    request.num_computed_tokens = len(PROMPT)
    handed = scene.side.finished(request)  # type: ignore[arg-type]
    assert handed is not None
    assert handed["pd_cache"]["prefill"] == {"cached_tokens": 0, "computed_tokens": 27, "reason": "never_stored"}
    assert handed["pd_cache"]["report"]["computed"] == 27
    decode, there = Scene(), Request("a", PROMPT, handed)
    hit(decode, there, 3)
    there.num_computed_tokens = len(PROMPT)
    answer = decode.side.finished(there)  # type: ignore[arg-type]
    assert answer is not None
    assert answer["pd_cache"]["prefill"] == handed["pd_cache"]["prefill"]
    assert "do_remote_prefill" not in answer


def test_a_lookup_client_learns_what_was_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=3 * CHUNK).stores
    scene.side.take_report(StepReport({store.job: (1, [NEW, NOT, StoreOutcome.BEFORE])}))
    names = scene.names(request)
    assert scene.lookups.noted == {names[0], names[2]}


# --- models whose layers do not all keep every token ---------------------------------------------------------------

FULL = KeptLayers(1, BLOCK)
WINDOW = KeptLayers(0, BLOCK, "window", BLOCK + 2)
"""Reaches into two blocks, that is one chunk."""
STATE = KeptLayers(2, CHUNK, "state")


def in_groups(scene: Scene, request: Request, *groups: list[int]) -> Any:
    """Gives a request these blocks, one list for each of vLLM's groups."""
    scene.manager.groups[request.request_id] = groups
    return SimpleNamespace(get_block_ids=lambda: groups)


def test_of_a_window_the_end_is_loaded_without_the_blocks_that_vllm_has_not_allocated() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [0, 0, 0, 0, 0, 35, 36], [10, 11, 12, 13, 14, 15, 16])
    scene.side.allocated(request, blocks, 3 * CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    assert load.parts == [
        GroupChunks(0, scene.names(request), [10, 11, 12, 13, 14, 15]),
        GroupChunks(1, scene.names(request)[2:], [-1, 35]),
    ]
    assert load.blocks == [], "with several groups a load fails as a whole"


@pytest.mark.parametrize("layers", [KeptLayers(0, BLOCK, "window", 2 * BLOCK), KeptLayers(0, CHUNK, "state")])
def test_a_load_of_windows_or_states_only_fails_as_a_whole_because_a_part_of_one_is_of_no_use(
    layers: KeptLayers,
) -> None:
    scene, request = Scene(layers=[layers]), Request("a", PROMPT)
    hit(scene, request, 3)
    (load,) = scene.step().loads
    assert [len(part.names) for part in load.parts] == [1]
    assert load.blocks == []


def test_a_window_is_restored_at_a_chunks_end_also_if_vllms_own_cache_leaves_less() -> None:
    scene, request = Scene(layers=[FULL, WINDOW], recompute="block"), Request("a", PROMPT[: 3 * CHUNK])
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (2 * CHUNK, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [0, 0, 32, 33], [10, 11, 12, 13])
    scene.side.allocated(request, blocks, 2 * CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    names = scene.names(request)
    assert load.parts == [GroupChunks(0, names[:2], [10, 11, 12, 13]), GroupChunks(1, names[1:2], [32, 33])]


def test_of_states_the_last_is_loaded_and_a_token_is_left_to_compute() -> None:
    scene, request = (
        Scene(layers=[KeptLayers(0, BLOCK), KeptLayers(1, CHUNK, "state")]),
        Request("a", PROMPT[: 2 * CHUNK]),
    )
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (CHUNK, True)  # type: ignore[arg-type]
    scene.side.allocated(request, in_groups(scene, request, [10, 11], [20]), CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    names = scene.names(request)[:1]
    assert load.parts == [GroupChunks(0, names, [10, 11]), GroupChunks(1, names, [20])]


def scarce(blocks: int) -> Scene:
    """Two layers, of which one has a window, and a pool of so many blocks besides the null block."""
    scene = Scene(layers=[FULL, WINDOW])
    scene.manager.block_pool.num_gpu_blocks = blocks + 1
    return scene


def offered(scene: Scene, request: Request) -> Any:
    """A request of which the pool holds all. It needs 7 blocks for full attention and 3 for the window."""
    scene.lookups.there |= set(scene.names(request))
    external, later = scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    if external:
        blocks = in_groups(scene, request, [0, 0, 0, 0, 34, 35, 36], [10, 11, 12, 13, 14, 15, 16])
        scene.side.allocated(request, blocks, external)  # type: ignore[arg-type]
    return external, later


def test_a_load_waits_while_others_hold_blocks_that_it_would_need_to_go_on_until_vllm_can_preempt_them() -> None:
    scene, first, second = scarce(19), Request("a", PROMPT), Request("b", PROMPT)
    assert offered(scene, first) == (3 * CHUNK, True)
    scene.step()
    assert offered(scene, second) == (None, False)
    scene.step(a=3)
    assert offered(scene, second) == (3 * CHUNK, True)


def test_loads_for_which_there_are_blocks_wait_for_nothing() -> None:
    scene = scarce(20)
    assert offered(scene, Request("a", PROMPT)) == offered(scene, Request("b", PROMPT)) == (3 * CHUNK, True)


def test_a_long_prompt_that_shorter_ones_overtake_is_computed_when_it_has_waited_as_long_as_a_load_may_take() -> None:
    scene, long = scarce(19), Request("long", PROMPT)
    offered(scene, Request("0", PROMPT))
    for number in range(10):  # there is always one that holds blocks
        scene.clock.now += 0.99
        assert offered(scene, long) == (None, False)
        scene.side.finished(Request(str(number), PROMPT))  # type: ignore[arg-type]
        offered(scene, Request(str(number + 1), PROMPT))
    scene.clock.now += 1.1
    assert offered(scene, long) == (0, False)


@pytest.mark.parametrize("end", ["finished", "failed to load"])
def test_a_request_that_gave_its_blocks_back_keeps_no_load_waiting(end: str) -> None:
    scene, first, second = scarce(19), Request("a", PROMPT), Request("b", PROMPT)
    offered(scene, first)
    if end == "finished":
        scene.side.finished(first)  # type: ignore[arg-type]
    else:
        scene.side.take_report(StepReport(failed_loads={"a"}))
        assert offered(scene, first) == (0, False)
    assert offered(scene, second) == (3 * CHUNK, True)


def test_a_load_is_not_kept_waiting_for_more_blocks_than_there_are() -> None:
    assert offered(scarce(5), Request("a", PROMPT)) == (3 * CHUNK, True), "vLLM says what cannot be served"


def test_what_vllm_holds_is_not_loaded_in_any_group() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    computed = 2 * CHUNK + BLOCK
    assert scene.side.matched_tokens(request, computed) == (3 * CHUNK - computed, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [0, 0, 0, 0, 34, 35, 36], [10, 11, 12, 13, 14, 15, 16])
    scene.side.allocated(request, blocks, 3 * CHUNK - computed)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    name = scene.names(request)[2:3]
    assert load.parts == [GroupChunks(0, name, [-1, 15]), GroupChunks(1, name, [-1, 35])]


def test_windows_are_stored_at_the_end_of_the_prompt_and_behind_it() -> None:
    scene, request = Scene(layers=[FULL, WINDOW], store_generated=True), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 37)), list(range(10, 17)))
    stores = scene.step(a=len(PROMPT)).stores
    names = scene.names(request)
    assert [store.chunks for store in stores] == [
        GroupChunks(0, names, list(range(10, 16))),
        GroupChunks(1, names[2:], [34, 35]),
    ]
    request.num_computed_tokens = len(PROMPT)
    request.all_token_ids = list(range(4 * CHUNK))
    in_groups(scene, request, [0, 0, 0, 0, 0, 0, 36, 37], list(range(10, 18)))
    stores = scene.step(a=4 * CHUNK - len(PROMPT)).stores
    assert [store.chunks.blocks for store in stores] == [[16, 17], [36, 37]]


def test_a_window_is_stored_where_prompts_part() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", [*range(5 * CHUNK), 1])
    scene.lookups.leading = 2
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert request.shared_prefix_boundary == 2 * CHUNK, "vLLM ends a step there"
    in_groups(scene, request, list(range(30, 41)), list(range(10, 21)))
    windows = [store.chunks for store in scene.step(a=5 * CHUNK).stores if store.chunks.group == 1]
    names = scene.names(request)
    assert windows == [GroupChunks(1, names[1:2], [32, 33]), GroupChunks(1, names[4:], [38, 39])]


def test_where_prompts_part_is_said_each_time_vllm_asks_because_it_forgets_it() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", [*range(5 * CHUNK), 1])
    scene.lookups.leading = 2
    for _ in range(2):
        request.shared_prefix_boundary = 0
        scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
        assert request.shared_prefix_boundary == 2 * CHUNK
    assert scene.lookups.asked == [0]


@pytest.mark.parametrize(("retention", "stored"), [(None, [0, 1, 2, 3, 4]), (2 * CHUNK, [1, 3, 4]), (0, [4])])
def test_windows_are_kept_as_densely_as_vllm_keeps_them(retention: int | None, stored: list[int]) -> None:
    scene, request = Scene(layers=[FULL, WINDOW], retention=retention), Request("a", [*range(5 * CHUNK), 1])
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 41)), list(range(10, 21)))
    windows = [store.chunks for store in scene.step(a=5 * CHUNK).stores if store.chunks.group == 1]
    assert [name for run in windows for name in run.names] == [scene.names(request)[number] for number in stored]


def test_a_window_of_which_vllm_has_given_back_what_a_load_would_need_is_not_stored() -> None:
    wide = KeptLayers(0, BLOCK, "window", CHUNK + BLOCK)
    scene, request = Scene(layers=[FULL, wide]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [0, 0, 0, 33, 34, 35, 36], list(range(10, 17)))
    windows = [store.chunks for store in scene.step(a=len(PROMPT)).stores if store.chunks.group == 1]
    assert windows == [GroupChunks(1, scene.names(request)[2:], [34, 35])]
    narrow = Scene(layers=[FULL, KeptLayers(0, BLOCK, "window", 2)])
    narrow.side.track(request)  # type: ignore[arg-type]
    in_groups(narrow, request, [0, 0, 0, 0, 0, 35, 36], list(range(10, 17)))
    windows = [store.chunks for store in narrow.step(a=len(PROMPT)).stores if store.chunks.group == 1]
    assert windows == [GroupChunks(1, scene.names(request)[2:], [-1, 35])], "the window of its end needs one block"
    assert 0 not in narrow.manager.block_pool.used


def test_states_are_stored_from_where_vllm_says_they_are_if_they_are_those_of_a_chunks_end() -> None:
    scene, request = Scene(layers=[FULL, WINDOW, STATE]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 37)), list(range(10, 17)), [50, 51, 52, 53])
    offers = [(2, 61, 2 * CHUNK), (2, 62, 2 * CHUNK + 1), (0, 63, CHUNK), (2, 60, 9 * CHUNK)]
    stores = scene.step({"a": offers, "gone": offers}, a=len(PROMPT)).stores
    states = [store for store in stores if store.chunks.group == 2]
    assert [store.chunks for store in states] == [GroupChunks(2, scene.names(request)[1:2], [61])]
    assert 61 in scene.manager.block_pool.used
    scene.side.take_report(StepReport({store.job: (1, [NEW] * len(store.chunks.names)) for store in stores}))
    assert scene.manager.block_pool.used == set()


# --- draft models ----------------------------------------------------------------------------------------------------

DRAFTS = KeptLayers(1, BLOCK, drafts="next")
"""Layers of a draft model, in the blocks of the model that it drafts for."""


def test_of_a_draft_model_a_chunk_is_stored_when_and_as_the_next_one_is_named() -> None:
    scene, request = Scene(layers=[FULL, DRAFTS]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [], list(range(10, 17)))
    names = scene.names(request)
    assert [store.chunks for store in scene.step(a=CHUNK).stores] == [GroupChunks(0, names[:1], [10, 11])]
    request.num_computed_tokens = CHUNK
    assert [store.chunks for store in scene.step(a=2 * CHUNK + 3).stores] == [
        GroupChunks(0, names[1:], [12, 13, 14, 15]),
        GroupChunks(1, names[1:], [10, 11, 12, 13]),
    ]


def test_of_a_draft_model_a_load_takes_each_chunk_by_the_name_of_the_next_and_leaves_the_last() -> None:
    scene, request = Scene(layers=[FULL, DRAFTS]), Request("a", PROMPT[: 3 * CHUNK])
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, BLOCK) == (2 * CHUNK - BLOCK, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [], list(range(10, 16)))
    scene.side.allocated(request, blocks, 2 * CHUNK - BLOCK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    names = scene.names(request)
    assert load.parts == [GroupChunks(0, names[:2], [-1, 11, 12, 13]), GroupChunks(1, names[1:3], [-1, 11, 12, 13])]
    request.num_computed_tokens = 2 * CHUNK
    assert [store.chunks for store in scene.step(a=CHUNK).stores] == [GroupChunks(0, names[2:], [14, 15])], (
        "what was loaded is not stored again"
    )


def test_a_draft_model_costs_the_block_that_it_costs_in_vllms_own_cache() -> None:
    drafts = KeptLayers(0, CHUNK, drafts="next")
    scene = Scene(layers=[KeptLayers(0, CHUNK), drafts], recompute="block")
    for length, loaded in ((3 * CHUNK, CHUNK), (3 * CHUNK + 1, 2 * CHUNK)):
        request = Request(f"{length}", PROMPT[:length])
        scene.lookups.there = set(scene.names(request))
        assert scene.side.matched_tokens(request, 0) == (loaded, True), length  # type: ignore[arg-type]


@pytest.mark.parametrize("store_generated", [False, True])
def test_what_names_a_draft_models_last_chunk_of_a_prompt_is_stored_with_what_was_generated(
    store_generated: bool,
) -> None:
    scene = Scene(layers=[FULL, DRAFTS], store_generated=store_generated)
    request = Request("a", PROMPT[: 2 * CHUNK])
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [], list(range(10, 17)))
    scene.step(a=2 * CHUNK)
    request.num_computed_tokens = 2 * CHUNK
    request.all_token_ids = PROMPT
    stores = [store.chunks for store in scene.step(a=CHUNK + 3).stores]
    names = scene.names(request)[2:]
    expected = [GroupChunks(0, names, [14, 15]), GroupChunks(1, names, [12, 13])]
    assert stores == (expected if store_generated else [])


def test_a_window_is_stored_where_a_load_will_end_that_leaves_a_chunk() -> None:
    narrow = KeptLayers(0, BLOCK, "window", BLOCK + 2)
    scene, request = Scene(layers=[FULL, narrow, DRAFTS]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 37)), list(range(10, 17)))
    windows = [store.chunks for store in scene.step(a=len(PROMPT)).stores if store.chunks.group == 1]
    assert windows == [GroupChunks(1, scene.names(request)[1:], [32, 33, 34, 35])]


def test_a_draft_model_that_reads_what_the_other_reads_loads_and_stores_what_the_other_does() -> None:
    scene, request = Scene(layers=[FULL, DRAFTS._replace(drafts="same")]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [], list(range(10, 17)))
    names, blocks = scene.names(request), list(range(10, 16))
    stores = [store.chunks for store in scene.step(a=len(PROMPT)).stores]
    assert stores == [GroupChunks(0, names, blocks), GroupChunks(1, names, blocks)]


def test_what_vllm_computed_without_its_draft_model_is_not_stored_of_it() -> None:
    scene = Scene(layers=[FULL, DRAFTS], drafted_up_to=4 * CHUNK)
    request, longer = Request("a", PROMPT), Request("b", list(range(5 * CHUNK)))
    for one in (request, longer):
        scene.side.track(one)  # type: ignore[arg-type]
        in_groups(scene, one, [], list(range(10, 20)))
    scene.step(a=2 * CHUNK, b=CHUNK)
    request.num_computed_tokens, longer.num_computed_tokens = 2 * CHUNK, CHUNK
    stores = scene.step(a=CHUNK + 3, b=4 * CHUNK).stores
    drafts = [store.chunks for store in stores if store.chunks.group == 1]
    assert drafts == [
        GroupChunks(1, scene.names(request)[2:], [12, 13]),
        GroupChunks(1, scene.names(longer)[1:2], [10, 11]),
    ], "the chunks before that step"
    after = Request("c", PROMPT)
    scene.side.matched_tokens(after, 2 * CHUNK + BLOCK)  # type: ignore[arg-type]
    in_groups(scene, after, [], list(range(10, 17)))
    after.num_computed_tokens = 2 * CHUNK + BLOCK
    assert [store.chunks.group for store in scene.step(c=BLOCK).stores] == [0], "vLLM's own cache may have such blocks"


def test_an_announced_prefix_leaves_the_chunk_that_a_load_leaves() -> None:
    scene = Scene(layers=[FULL, DRAFTS])
    request = Request("a", PROMPT, {"do_remote_decode": True}, num_computed_tokens=len(PROMPT))
    scene.side.track(request)  # type: ignore[arg-type]
    answer = scene.side.finished(request)  # type: ignore[arg-type]
    assert answer is not None
    assert answer["pd_cache"]["prefix_tokens"] == 2 * CHUNK
    other = Scene(layers=[FULL, DRAFTS])
    waiting = Request("b", PROMPT, answer)
    assert other.side.matched_tokens(waiting, 0) == (None, False)  # type: ignore[arg-type]
    other.lookups.there = set(other.names(waiting))
    other.clock.now += 0.1
    assert other.side.matched_tokens(waiting, 0) == (2 * CHUNK, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("further", [[], ["0123456789abcdef"]])
def test_a_prefix_without_the_kv_of_the_own_draft_model_is_not_waited_for(further: list[str]) -> None:
    announced = {"prefix_tokens": 2 * CHUNK, "namespace": Scene().lookups._database.namespace.fingerprint()}
    params = {"do_remote_prefill": True, "pd_cache": {**announced, "further": further}}
    scene = Scene(layers=[FULL, DRAFTS])
    assert scene.side.matched_tokens(Request("a", PROMPT, params), 0) == (0, False)  # type: ignore[arg-type]
    assert scene.metrics.totals()["troubles", "lookup", "other_namespace"] == 1
    without = Scene().side.matched_tokens(Request("a", PROMPT, params), 0)  # type: ignore[arg-type]
    assert without == (None, False), "a node without a draft model waits"


def test_after_a_failed_load_every_group_is_stored_again() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, list(range(30, 37)), list(range(10, 17)))
    scene.side.allocated(request, blocks, 3 * CHUNK)  # type: ignore[arg-type]
    scene.step()
    assert scene.step(a=len(PROMPT)).stores == []
    scene.side.take_report(StepReport(failed_loads={"a"}))
    assert {store.chunks.group for store in scene.step(a=len(PROMPT)).stores} == {0, 1}


# --- epochs of the weights -----------------------------------------------------------------------------------------------


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
    scene.manager.block_pool.evicted.clear()
    assert scene.step(old=len(PROMPT) - CHUNK).stores == []
    assert scene.manager.block_pool.evicted == set(range(10, 17)), "what vLLM's own cache would keep of it"
    running(scene, new, block=20)
    (store,) = scene.step(new=CHUNK).stores
    assert store.epoch == scene.lookups.epoch == "run-1"
    scene.manager.block_pool.evicted.clear()
    scene.side.finished(old)  # type: ignore[arg-type]
    assert scene.manager.block_pool.evicted == set(range(10, 17))
    scene.manager.block_pool.evicted.clear()
    scene.step(new=CHUNK)
    assert not scene.manager.block_pool.evicted


def test_a_reset_on_another_node_is_known_with_the_next_lookup() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", [7] * len(PROMPT))
    running(scene, old)
    scene.lookups.reset()
    assert len(scene.step(old=CHUNK).stores) == 1, "in the epoch in which it was computed"
    running(scene, new, block=20)
    (store,) = scene.step(old=1, new=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("run-1", scene.names(new)[:2])


def test_what_may_be_at_hand_from_before_a_reset_is_not_stored() -> None:
    scene, old, late = Scene(), Request("old", PROMPT), Request("late", PROMPT)
    running(scene, old)
    scene.side.reset()
    running(scene, late, at_hand=CHUNK, block=20)
    assert scene.step(old=1, late=CHUNK).stores == []
    clean = Request("clean", PROMPT)
    for request in (old, late):
        scene.side.finished(request)  # type: ignore[arg-type]
    running(scene, clean, at_hand=CHUNK, block=30)
    assert len(scene.step(clean=CHUNK).stores) == 1, "nobody is left who could have put old KV into vLLM's own cache"


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


def test_a_reset_that_the_pool_does_not_take_is_tried_again_and_until_then_nothing_is_loaded_or_stored() -> None:
    scene, request, later = Scene(), Request("a", PROMPT), Request("b", PROMPT)
    scene.lookups.there = set(scene.names(request))
    scene.lookups.resets = False
    assert not scene.side.reset()
    running(scene, request)
    assert scene.step(a=CHUNK).stores == []
    scene.lookups.resets = True
    assert scene.side.matched_tokens(later, 0) == (0, False), "a second has not passed"  # type: ignore[arg-type]
    scene.clock.now += 1
    assert scene.side.matched_tokens(later, 0) == (0, False)  # type: ignore[arg-type]
    assert scene.lookups.begun == 1
    assert scene.step(a=CHUNK).stores == [], "it was computed before"


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


def test_chunks_of_an_earlier_epoch_are_not_announced() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    request.num_computed_tokens = 0
    (store,) = scene.step(a=CHUNK).stores
    scene.side.reset()
    scene.side.take_report(StepReport(jobs={store.job: (1, [NEW])}))
    assert list(scene.side.take_events()) == []


def test_of_an_outdated_request_only_what_is_new_is_taken_out_of_vllms_cache_and_all_of_it_when_it_is_preempted() -> (
    None
):
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    evicted = scene.manager.block_pool.evicted
    seen = []
    for _ in range(5):
        evicted.clear()
        scene.step(a=1)
        seen.append(set(evicted))
    assert seen[:3] == [set(range(10, 17))] * 3
    assert seen[3:] == [{16}] * 2
    scene.manager.free(request)
    evicted.clear()
    scene.step()
    assert evicted == {16}


def test_a_request_that_resumes_with_what_was_its_own_before_a_reset_stays_outdated() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    scene.manager.free(request)
    running(scene, request, at_hand=CHUNK, block=20)
    assert scene.step(a=CHUNK).stores == []


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
