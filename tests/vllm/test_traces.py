"""Spans of requests through vLLM: its own, and the connector's, under the client's trace context."""

import os

from tests.support.waiting import wait_for
from tests.vllm.servers import CHUNK


def ask(server, prompt):
    """Sends a prompt under a new trace context. Returns its trace and the client's span."""
    trace, span = os.urandom(16).hex(), os.urandom(8).hex()
    server.complete(prompt, 4, {"traceparent": f"00-{trace}-{span}-01"})
    return trace, span


def received(collector, trace, *names):
    wait_for(lambda: collector.of(trace).keys() >= set(names), f"{names} of {trace}")
    return collector.of(trace)


VLLM, LOOKUP, LOAD, STORE = (
    "vllm-prefill: llm_request",
    "pd-cache-prefill: pd_cache.lookup",
    "pd-cache-prefill: pd_cache.load",
    "pd-cache-prefill: pd_cache.store",
)


def test_lookup_store_and_load_lie_under_the_clients_span_beside_vllms_own(pair, collector, new_prompt):
    node = pair.a
    prompt = new_prompt(5 * CHUNK + 1)
    trace, client = ask(node, prompt)
    spans = received(collector, trace, VLLM, LOOKUP, STORE)
    wait_for(
        lambda: sum(span.attributes["pd_cache.stored"] for span in collector.of(trace)[STORE]) >= 5,
        "all chunks in spans of stores",
    )
    assert {span.parent for name in (VLLM, LOOKUP, STORE) for span in collector.of(trace)[name]} == {client}
    (lookup,) = spans[LOOKUP]
    assert (lookup.attributes["pd_cache.found"], lookup.attributes["pd_cache.reason"]) == (0, "never_stored")
    assert LOAD not in spans

    node.forget_prefixes()
    trace, client = ask(node, prompt)
    spans = received(collector, trace, VLLM, LOOKUP, LOAD)
    assert {span.parent for name in (VLLM, LOOKUP, LOAD) for span in spans[name]} == {client}
    (lookup,), (load,), (whole,) = spans[LOOKUP], spans[LOAD], spans[VLLM]
    assert lookup.attributes["pd_cache.found"] == load.attributes["pd_cache.loaded"] == 5 * CHUNK
    assert lookup.end <= load.begin
    assert whole.begin <= lookup.begin
    assert load.end <= whole.end
    assert STORE not in spans, "all of it was there"


def test_a_request_without_a_context_leaves_no_span(pair, collector, new_prompt):
    pair.a.complete(new_prompt(3 * CHUNK))
    trace, _ = ask(pair.a, new_prompt(3 * CHUNK))
    received(collector, trace, LOOKUP)
    ours = [span for span in collector.spans if span.service.startswith("pd-cache-")]
    assert all(span.parent for span in ours), "each has the client's span as its parent"
