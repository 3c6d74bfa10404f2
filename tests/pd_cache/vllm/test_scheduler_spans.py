"""The spans of the connector's part in the scheduler, by histories of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.reasons import Loaded
from pd_cache.tracing import SpanKind, TraceSpan, Tracing
from pd_cache.vllm.steps import StepReport
from tests.pd_cache.vllm.histories import CHUNK, PROMPT, Request, Scene, announced, hit

PARENT = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}


class Recorded:
    def __init__(self, name: str, parent: Mapping[str, str] | None, noted: dict[str, Any]) -> None:
        self.name, self.parent, self.noted = name, parent, noted
        self.headers: Mapping[str, str] = {}
        self.ends: list[str] = []

    def note(self, **attributes: Any) -> None:
        self.noted |= attributes

    def end(self, error: str = "") -> None:
        self.ends.append(error)

    def __enter__(self) -> TraceSpan:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Recorder(Tracing):
    on = True

    def __init__(self) -> None:
        self.spans: list[Recorded] = []
        self.closed = False

    def begin(
        self, name: str, parent: Mapping[str, str] | None = None, *, kind: SpanKind = "internal", **attributes: Any
    ) -> TraceSpan:
        self.spans.append(Recorded(name.removeprefix("pd_cache."), parent, attributes))
        return self.spans[-1]

    def close(self, timeout: float = 2.0) -> None:
        self.closed = True

    def told(self) -> list[tuple[str, list[str]]]:
        return [(span.name, span.ends) for span in self.spans]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def scene(recorder: Recorder) -> Scene:
    return Scene(tracing=recorder)


def traced(tokens: list[int], params: Any = None) -> Request:
    request = Request("a", tokens, params)
    request.trace_headers = PARENT  # type: ignore[attr-defined]
    return request


def test_a_hit_is_a_lookup_a_load_and_a_store_under_the_requests_context(scene: Scene, recorder: Recorder) -> None:
    request = traced(PROMPT)
    hit(scene, request, 2)
    scene.step()
    assert recorder.told() == [("lookup", [""]), ("load", [])]
    scene.side.take_report(StepReport(loads={"a": Loaded(2)}))
    request.num_computed_tokens = 2 * CHUNK
    (store,) = scene.step(a=CHUNK + 3).stores
    assert recorder.told() == [("lookup", [""]), ("load", [""]), ("store", [])]
    scene.side.take_report(StepReport(jobs={store.job: (1, [StoreOutcome.NEW])}))
    assert recorder.told() == [("lookup", [""]), ("load", [""]), ("store", [""])]
    spans = recorder.spans
    assert all(span.parent == PARENT for span in spans)
    lookup, load, stored = (span.noted for span in spans)
    assert (lookup["asked"], lookup["found"]) == (3 * CHUNK, 2 * CHUNK)
    assert (load["asked"], load["loaded"]) == (2 * CHUNK, 2 * CHUNK)
    assert (stored["asked"], stored["stored"], stored["missing"]) == (1, 1, 0)


def test_the_wait_for_an_announced_prefix_is_one_span(scene: Scene, recorder: Recorder) -> None:
    request = traced(PROMPT, announced(3 * CHUNK))
    for _ in range(4):
        assert scene.side.matched_tokens(request, 0) == (None, False)  # type: ignore[arg-type]
        scene.clock.now += 0.1
    assert recorder.told() == [("lookup", [])]
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    assert recorder.told() == [("lookup", [""])]
    assert recorder.spans[0].noted["found"] == 3 * CHUNK


def test_a_request_that_ends_in_its_lookup_or_its_load_ends_their_spans(scene: Scene, recorder: Recorder) -> None:
    request = traced(PROMPT, announced(3 * CHUNK))
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.side.finished(request)  # type: ignore[arg-type]
    hit(scene, traced(PROMPT), 2)
    scene.step()
    scene.side.finished(request)  # type: ignore[arg-type]
    assert recorder.told() == [
        ("lookup", ["the request ended"]),
        ("lookup", [""]),
        ("load", ["the request ended"]),
    ]


def test_a_load_that_fails_is_a_failed_span(scene: Scene, recorder: Recorder) -> None:
    hit(scene, traced(PROMPT), 2)
    scene.step()
    scene.side.take_report(StepReport(loads={"a": Loaded(1, "transfer_failed")}))
    load = recorder.spans[-1]
    assert (load.name, load.ends, load.noted["reason"]) == ("load", ["failed"], "transfer_failed")


def test_the_tracing_is_closed_with_the_scheduler(scene: Scene, recorder: Recorder) -> None:
    scene.side.close()
    assert recorder.closed
