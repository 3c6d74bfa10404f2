"""Spans of one process, and what becomes of them where no collector takes them."""

import logging
import socket
import sys
from functools import partial

import pytest

from pd_cache.config import TracingConfig
from pd_cache.errors import ConfigError
from pd_cache.tracing import UNTRACED, open_tracing
from tests.support.cli import printed
from tests.support.collector import collecting
from tests.support.waiting import together, wait_for

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}


@pytest.fixture
def sdk():
    pytest.importorskip(
        "opentelemetry.sdk", reason="no OpenTelemetry; `make install` installs pd-cache's extra otel"
    )


def test_without_a_collector_nothing_is_imported_and_the_clients_context_is_passed_on():
    assert open_tracing(TracingConfig(), "proxy", "p") is UNTRACED
    with UNTRACED.begin("work", PARENT, asked=1) as span:
        span.note(found=1)
        assert span.headers == PARENT
    program = (
        "import sys; from pd_cache.tracing import *; from pd_cache.config import TracingConfig; "
        "open_tracing(TracingConfig(), 'proxy', 'p').begin('x').end(); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert printed(sys.executable, "-c", program).strip() == "[]"


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        open_tracing(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"), "proxy", "p")


@pytest.mark.usefixtures("sdk")
def test_spans_keep_the_trace_and_its_state_and_end_on_any_thread_once():
    with collecting() as collector:
        tracing = open_tracing(TracingConfig(endpoint=collector.endpoint, sample_ratio=0), "decode", "d-0")
        span = tracing.begin("outer", PARENT, kind="server", asked=7)
        assert span.headers["tracestate"] == "vendor=1"
        inner = tracing.begin("inner", span.headers)
        together(partial(inner.end, "broken"))
        inner.end()
        inner.note(late=True)
        span.note(found=3, reason="none")
        span.end()
        tracing.close()
        wait_for(lambda: len(collector.spans) == 2)
        received = {one.name: one for one in collector.spans}
        assert {one.trace for one in collector.spans} == {PARENT["traceparent"][3:35]}
        outer, noted = (
            received["outer"],
            {"pd_cache.asked": 7, "pd_cache.found": 3, "pd_cache.reason": "none"},
        )
        assert (outer.service, outer.node, outer.failed, outer.attributes) == (
            "pd-cache-decode",
            "d-0",
            False,
            noted,
        )
        assert (outer.parent, received["inner"].parent) == (PARENT["traceparent"][36:52], outer.span)
        assert (received["inner"].failed, received["inner"].attributes) == (True, {})


@pytest.mark.usefixtures("sdk")
def test_a_collector_that_takes_nothing_bounds_the_queue_the_log_and_the_end(caplog):
    """The collector accepts connections and never answers. Ten thousand spans wait for none of them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        tracing = open_tracing(TracingConfig(endpoint=endpoint), "proxy", "p")
        caplog.set_level(logging.DEBUG)
        for _ in range(10_000):
            tracing.begin("work", PARENT).end()
        tracing.close(timeout=0.2)  # returns, although the exporter still waits for an answer
        # pytest hears loggers that pass nothing on, too
        ours = [record for record in caplog.records if record.name == "pd_cache.tracing"]
        complaints = [record for record in ours if "traces are not sent" in record.getMessage()]
        assert len(complaints) <= 2, "one of the SDK, one of the exporter"


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize(
    "text", ["00-0-0-01", f"ff{PARENT['traceparent'][2:]}", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", ""]
)
def test_a_traceparent_that_is_none_begins_a_trace(text):
    tracing = open_tracing(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"), "proxy", "p")
    with tracing.begin("work", {"traceparent": text}) as span:
        trace = span.headers["traceparent"].split("-")
        assert (len(trace[1]), int(trace[3], 16) & 1) == (32, 1)
        assert trace[1] != PARENT["traceparent"].split("-")[1]
    tracing.close(timeout=0.2)


@pytest.mark.usefixtures("sdk")
def test_a_root_that_is_not_sampled_decides_for_the_whole_trace():
    with collecting() as collector:
        tracing = open_tracing(TracingConfig(endpoint=collector.endpoint, sample_ratio=0), "proxy", "p")
        with tracing.begin("root") as root:
            assert int(root.headers["traceparent"][-2:], 16) & 1 == 0
            tracing.begin("child", root.headers).end()
        tracing.begin("other", PARENT).end()
        tracing.close()
        wait_for(lambda: collector.spans)
        assert [span.name for span in collector.spans] == ["other"]


@pytest.mark.usefixtures("sdk")
def test_a_state_that_is_none_is_neither_sent_nor_passed_on_nor_logged(caplog):
    with collecting() as collector:
        tracing = open_tracing(TracingConfig(endpoint=collector.endpoint), "proxy", "p")
        span = tracing.begin("work", {**PARENT, "tracestate": "SECRET" * 1000})
        span.end()
        tracing.begin("odd", {**PARENT, "tracestate": "\x01=;,," * 40}).end("x" * 100_000)
        tracing.close()
        wait_for(lambda: len(collector.spans) == 2)
        assert {one.name: one.failed for one in collector.spans} == {"work": False, "odd": True}
    assert "tracestate" not in span.headers
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "ftp://c/v1/traces", "http://", "http://c\n/v1/traces"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    import msgspec

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"endpoint": endpoint}, TracingConfig)
