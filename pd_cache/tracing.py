"""Spans of requests, for OpenTelemetry. If no collector is configured, there are no spans, and OpenTelemetry
is not imported.

A span begins under the `traceparent` of its request (W3C Trace Context), and may end on any thread. Ended
spans wait in a bounded queue of the SDK, whose own thread sends them. When the queue is full, spans are
dropped. A slow or dead collector costs nothing else. Only this module imports OpenTelemetry.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from pd_cache.config import TracingConfig
from pd_cache.errors import ConfigError
from pd_cache.sparse_log import SparseLog

_logger = logging.getLogger(__name__)

HEADERS = ("traceparent", "tracestate")
"""The headers of W3C Trace Context."""
SpanKind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool

_QUEUE = 2048
"""The most spans that wait to be sent; about 2 KiB each."""
_BATCH = 256
_DELAY_MS = 1000
_EXPORT_S = 2.0
"""How long the collector may take for a batch."""
_LONGEST_ERROR = 300
_QUIET_S = 60.0
_MOST_STATE = 512
"""The longest `tracestate` that is passed on, in characters: the least that W3C demands."""


class TraceSpan:
    """A span: work for a request. Ends with its `with` block, or with `end`. This class sends nothing."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._parent = headers

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that make this span the parent of other spans."""
        return self._parent

    def note(self, **attributes: Attribute) -> None:
        """Adds attributes. Their names get the prefix `pd_cache.`."""

    def end(self, error: str = "") -> None:
        """Ends the span. Further calls do nothing. `error`: why the work failed, if it did."""

    def __enter__(self) -> TraceSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("" if kind is None else f"{kind.__name__}: {error}" if str(error) else kind.__name__)


class Tracing:
    """Begins spans. The spans of this class send nothing; `open_tracing` returns an object whose spans do."""

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | None = None,
        *,
        kind: SpanKind = "internal",
        **attributes: Attribute,
    ) -> TraceSpan:
        """Returns a span that has begun. `parent`: the headers of the request, or `TraceSpan.headers`. Never
        raises."""
        return TraceSpan(parent or {})

    def close(self, timeout: float = 2.0) -> None:
        """Sends the waiting spans, for at most `timeout` seconds."""


UNTRACED = Tracing()


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the trace context among a request's headers, by lower-case names. Lookups in `headers` must
    ignore case."""
    return {name: headers[name] for name in HEADERS if name in headers}


def open_tracing(config: TracingConfig, service: str, node: str) -> Tracing:
    """Returns the tracing of this process; without `config.endpoint`, one that sends nothing. `service` is
    the role, `node` the node's name.

    Does not wait for the collector. Raises ConfigError if the extra `otel` is not installed.
    """
    if config.endpoint is None:
        return UNTRACED
    try:
        return _SdkTracing(config, config.endpoint, service, node)
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: {error}; pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None


class _SdkTracing(Tracing):
    """A provider of our own: an engine in the same process may have set the global one."""

    def __init__(self, config: TracingConfig, endpoint: str, service: str, node: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace import SpanKind as Kind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        for name in ("opentelemetry.exporter", "opentelemetry.sdk", "opentelemetry.trace"):
            logger = logging.getLogger(name)
            logger.addHandler(_QUIET)
            logger.propagate = False
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
            resource=Resource.create({"service.name": f"pd-cache-{service}", "service.instance.id": node}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S),
                max_queue_size=_QUEUE,
                schedule_delay_millis=_DELAY_MS,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("pd_cache")
        self._kinds = Kind
        self._headers = TraceContextTextMapPropagator()

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | None = None,
        *,
        kind: SpanKind = "internal",
        **attributes: Attribute,
    ) -> TraceSpan:
        from opentelemetry.context import Context

        given = dict(parent or {})
        if len(given.get("tracestate", "")) > _MOST_STATE:
            del given["tracestate"]  # the SDK needs 20 ms for 8 KiB of commas
        # never the context of this thread, where another span of the engine may be current
        within = self._headers.extract(given, Context())
        span = self._tracer.start_span(name, within, self._kinds[kind.upper()], _prefixed(attributes))
        return _SdkSpan(span, self._headers)

    def close(self, timeout: float = 2.0) -> None:
        # the SDK's own time-outs do not hold while an export is under way
        closing = threading.Thread(target=self._provider.shutdown, name="pd-cache-traces", daemon=True)
        closing.start()
        closing.join(timeout)


class _SdkSpan(TraceSpan):
    def __init__(self, span: Any, propagator: Any) -> None:
        self._span = span
        self._propagator = propagator

    @property
    def headers(self) -> Mapping[str, str]:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier

    def note(self, **attributes: Attribute) -> None:
        if self._span.is_recording():
            self._span.set_attributes(_prefixed(attributes))

    def end(self, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error[:_LONGEST_ERROR]))
        self._span.end()


def _prefixed(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"pd_cache.{name}": value for name, value in attributes.items()}


class _Quiet(logging.Handler):
    """Passes on one log line of the exporter a minute, because the SDK logs each batch and each retry.

    Drops the SDK's log lines about a client's headers, because they contain the headers' text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log = SparseLog(every_s=_QUIET_S)

    def emit(self, record: logging.LogRecord) -> None:
        sends = record.name.startswith(("opentelemetry.exporter", "opentelemetry.sdk"))
        if sends and record.levelno >= logging.WARNING and (times := self._log.admit()) is not None:
            _logger.warning("traces are not sent, %d times: %s", times, record.getMessage())


_QUIET = _Quiet()
