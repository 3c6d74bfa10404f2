"""Spans of requests through a whole cluster, as a collector receives them."""

import os
from typing import NamedTuple

import pytest

from launch.run.up import LocalCluster
from tests.support.cluster import CHUNK, complete, kill, started
from tests.support.collector import Collector, collecting
from tests.support.waiting import wait_for

pytest.importorskip(
    "opentelemetry.sdk", reason="no OpenTelemetry; `make install` installs pd-cache's extra otel"
)


class Traced(NamedTuple):
    cluster: LocalCluster
    collector: Collector

    def ask(self, prompt):
        """Sends a prompt under a new trace context. Returns its trace and the client's span."""
        trace, span = os.urandom(16).hex(), os.urandom(8).hex()
        headers = {"traceparent": f"00-{trace}-{span}-01"}
        assert complete(self.cluster.urls["proxy"], prompt, headers=headers).status == 200
        return trace, span

    def received(self, trace, *names):
        """Waits for these spans of a trace. Returns all of the trace, by `service: name`. Only what a node
        does in parts is there several times."""
        wait_for(lambda: self.collector.of(trace).keys() >= set(names), f"{names} of {trace}")
        found = self.collector.of(trace)
        assert all(len(spans) == 1 for name, spans in found.items() if name.split(".")[-1] not in IN_PARTS), (
            found
        )
        return found

    def summed(self, trace, name, attribute):
        """The sum over all spans of this name so far."""
        return sum(
            int(span.attributes[f"pd_cache.{attribute}"]) for span in self.collector.of(trace).get(name, ())
        )


IN_PARTS = ("lookup", "load", "store")
PATH = (
    "pd-cache-proxy: pd_cache.proxy",
    "pd-cache-proxy: pd_cache.prefill",
    "pd-cache-proxy: pd_cache.decode",
    "pd-cache-prefill: pd_cache.engine",
    "pd-cache-prefill: pd_cache.lookup",
    "pd-cache-prefill: pd_cache.store",
    "pd-cache-decode: pd_cache.engine",
    "pd-cache-decode: pd_cache.lookup",
    "pd-cache-decode: pd_cache.load",
)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    with collecting() as collector:
        folder = tmp_path_factory.mktemp("traced")
        with started(folder, tracing={"endpoint": collector.endpoint, "sample_ratio": 0.0}) as cluster:
            yield Traced(cluster, collector)


def test_a_request_is_one_trace_through_both_hops_to_the_pool_and_says_how_much_was_found_loaded_and_stored(
    traced,
):
    trace, client = traced.ask(list(range(4 * CHUNK)))
    store, load = "pd-cache-prefill: pd_cache.store", "pd-cache-decode: pd_cache.load"
    wait_for(lambda: traced.summed(trace, store, "stored") == 4, "the spans of all stores")
    wait_for(lambda: traced.summed(trace, load, "loaded") == 4 * CHUNK, "the spans of all loads")
    spans = traced.received(trace, *PATH)
    (proxy,) = spans["pd-cache-proxy: pd_cache.proxy"]
    (prefill,), (decode,) = (
        spans["pd-cache-proxy: pd_cache.prefill"],
        spans["pd-cache-proxy: pd_cache.decode"],
    )
    (at_prefill,), (at_decode,) = (
        spans["pd-cache-prefill: pd_cache.engine"],
        spans["pd-cache-decode: pd_cache.engine"],
    )
    parents = {
        "pd-cache-proxy: pd_cache.proxy": client,
        "pd-cache-proxy: pd_cache.proxy_lookup": proxy.span,
        "pd-cache-proxy: pd_cache.prefill": proxy.span,
        "pd-cache-proxy: pd_cache.decode": proxy.span,
        "pd-cache-prefill: pd_cache.engine": prefill.span,
        "pd-cache-prefill: pd_cache.lookup": at_prefill.span,
        store: at_prefill.span,
        "pd-cache-decode: pd_cache.engine": decode.span,
        "pd-cache-decode: pd_cache.lookup": at_decode.span,
        load: at_decode.span,
    }
    assert {name: {span.parent for span in several} for name, several in spans.items()} == {
        name: {parent} for name, parent in parents.items()
    }
    assert not any(span.failed for several in spans.values() for span in several)
    nodes = {
        span.node for name, several in spans.items() if name.startswith("pd-cache-decode") for span in several
    }
    assert nodes == {"decode-0"}
    last = max(spans["pd-cache-decode: pd_cache.lookup"], key=lambda span: span.end).attributes
    assert (last["pd_cache.announced"], last["pd_cache.found"]) == (4 * CHUNK, 4 * CHUNK)
    assert traced.summed(trace, load, "asked") == 4 * CHUNK
    (looked_up,) = spans["pd-cache-prefill: pd_cache.lookup"]
    assert looked_up.attributes["pd_cache.reason"] == "never_stored"
    assert proxy.attributes["pd_cache.status"] == 200
    for hop in (prefill, decode):
        assert proxy.begin <= hop.begin < hop.end <= proxy.end
    assert prefill.end <= decode.begin


def test_a_node_that_dies_leaves_a_failed_span(traced):
    """Last in this file: the cluster has no prefill node afterwards."""
    kill(traced.cluster, "prefill-0")
    trace, _ = traced.ask([n * 5 % 500 for n in range(3 * CHUNK)])
    names = (
        "pd-cache-proxy: pd_cache.proxy",
        "pd-cache-proxy: pd_cache.prefill",
        "pd-cache-proxy: pd_cache.decode",
    )
    spans = traced.received(trace, *names)
    assert [spans[name][0].failed for name in names] == [False, True, False]
