"""The connector's part in the scheduler, by histories of events: hand-offs from node to node, and reports on requests."""

from __future__ import annotations

import msgspec
import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.reasons import Loaded, RequestReport, TierChunks
from pd_cache.vllm.steps import StepReport
from tests.pd_cache.vllm.histories import (
    CHUNK,
    FULL,
    METADATA,
    PROMPT,
    WINDOW,
    Request,
    Scene,
    announced,
    hit,
    in_groups,
)

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT


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
    scene.side.take_report(StepReport(loads={"a": Loaded(2, "none", TierChunks(memory=1, pool=1))}))
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
    scene.side.take_report(StepReport(loads={"a": Loaded(2, "none", TierChunks(pool=2))}))
    assert ended(scene, request) == RequestReport(asked=27, at_hand=12, found=16, loaded=12, pool=16, computed=3)


def test_a_report_says_why_a_load_ended_early_and_what_vllm_keeps_of_it() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    hit(scene, request, 3)
    scene.step()
    scene.side.take_report(StepReport(loads={"a": Loaded(1, "damaged", TierChunks(disk=1))}))
    scene.side.matched_tokens(request, CHUNK)  # type: ignore[arg-type]
    assert ended(scene, request) == RequestReport(asked=27, found=24, loaded=8, disk=8, computed=19, reason="damaged")


def test_of_a_load_that_fails_as_a_whole_nothing_counts_as_loaded() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    external, _ = scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, list(range(10, 17)), list(range(20, 27)))
    scene.side.allocated(request, blocks, external)  # type: ignore[arg-type]
    scene.side.take_report(StepReport(loads={"a": Loaded(2, "evicted", TierChunks(pool=2))}))
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
