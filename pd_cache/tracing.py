"""Spans of requests, for OpenTelemetry. Off unless a collector is configured; then nothing of OpenTelemetry is imported.

A span is begun under the `traceparent` of the request that it belongs to (W3C Trace Context), and ended on whatever thread its work
ends. Ended spans wait in a bounded queue of the SDK, which a thread of its own sends. When the queue is full, spans are dropped: a
collector that is slow, or gone, costs nothing else. This is the only module that imports OpenTelemetry.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pd_cache.config import TracingConfig
from pd_cache.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

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
_QUIET_S = 60.0
"""An exporter's complaint is logged once in this time."""


class TraceSpan(Protocol):
    """Work of one request. Ends with its `with` block, or with `end`."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What work that is done for this span gets as its parent."""

    def note(self, **attributes: Attribute) -> None:
        """Adds attributes. Their names get the prefix `pd_cache.`."""

    def end(self, error: str = "") -> None:
        """Ends it. Further calls do nothing. `error`: why it failed, if it did."""

    def __enter__(self) -> TraceSpan: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracing:
    """Begins spans. This one begins none; `open_tracing` returns one that does."""

    on = False

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | None = None,
        *,
        kind: SpanKind = "internal",
        **attributes: Attribute,
    ) -> TraceSpan:
        """Returns a span that has begun. `parent`: the headers of the request, or `TraceSpan.headers`. Never raises."""
        return _Untraced(parent or {})

    def close(self, timeout: float = 2.0) -> None:
        """Sends what waits, for at most `timeout` seconds."""


UNTRACED = Tracing()


class _Untraced:
    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def note(self, **attributes: Attribute) -> None:
        return

    def end(self, error: str = "") -> None:
        return

    def __enter__(self) -> TraceSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the trace context among a request's headers, by lower-case names. `headers` must ignore upper and lower case."""
    return {name: headers[name] for name in HEADERS if name in headers}


def open_tracing(config: TracingConfig, service: str, node: str) -> Tracing:
    """Returns what begins spans of this process: nothing without `config.endpoint`. `service` is the role, `node` the node's name.

    Does not wait for the collector. Raises ConfigError if the extra `otel` is not installed.
    """
    if config.endpoint is None:
        return UNTRACED
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError(
            "tracing.endpoint: needs OpenTelemetry; install pd-cache with the extra otel: pip install 'pd-cache[otel]'"
        )
    try:
        return _SdkTracing(config, config.endpoint, service, node)
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: {error}; install pd-cache with the extra otel: pip install 'pd-cache[otel]'"
        ) from None


class _SdkTracing(Tracing):
    """Spans of OpenTelemetry's SDK, of a provider of its own: an engine in the same process may have another."""

    on = True

    def __init__(self, config: TracingConfig, endpoint: str, service: str, node: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace import SpanKind as Kinds
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            _be_quiet(logging.getLogger(name))
        self._propagator = TraceContextTextMapPropagator()
        self._in_context = set_span_in_context
        self._kinds = {"internal": Kinds.INTERNAL, "server": Kinds.SERVER, "client": Kinds.CLIENT}
        resource = Resource.create({"service.name": f"pd-cache-{service}", "service.instance.id": node})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=resource,
            shutdown_on_exit=False,  # which waits for a dead collector
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=_QUEUE, schedule_delay_millis=_DELAY_MS, max_export_batch_size=_BATCH
            )
        )
        self._tracer = self._provider.get_tracer("pd_cache")

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | None = None,
        *,
        kind: SpanKind = "internal",
        **attributes: Attribute,
    ) -> TraceSpan:
        # an empty context: not that of whatever else traces in this thread
        from opentelemetry.context import Context

        context = self._propagator.extract(parent or {}, Context())
        begun = self._tracer.start_span(name, context, self._kinds[kind], _prefixed(attributes))
        return _SdkSpan(begun, self)

    def headers_of(self, span: OtelSpan) -> dict[str, str]:
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._in_context(span))
        return headers

    def close(self, timeout: float = 2.0) -> None:
        # the SDK's own time-outs do not hold while an export is under way
        closing = threading.Thread(target=self._provider.shutdown, name="pd-cache-traces", daemon=True)
        closing.start()
        closing.join(timeout)


class _SdkSpan:
    def __init__(self, span: OtelSpan, tracing: _SdkTracing) -> None:
        self._span = span
        self.headers: Mapping[str, str] = tracing.headers_of(span)
        self._ended = False

    def note(self, **attributes: Attribute) -> None:
        if not self._ended:
            self._span.set_attributes(_prefixed(attributes))

    def end(self, error: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def __enter__(self) -> TraceSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("" if kind is None else f"{kind.__name__}: {error}" if str(error) else kind.__name__)


def _prefixed(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    return {f"pd_cache.{name}": value for name, value in attributes.items()}


class _OnceInAWhile(logging.Filter):
    """Lets an exporter complain once a minute, and not about each batch and each retry."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.levelno < logging.WARNING or now < self._next:
            return False
        self._next = now + _QUIET_S
        record.msg, record.args, record.exc_info = f"traces are not sent: {record.getMessage()}", (), None
        return True


def _be_quiet(logger: logging.Logger) -> None:
    """Filters what a package's loggers pass on. A logger's own filter does not see what its children log, so a handler's does."""
    if any(isinstance(handler, _QuietHandler) for handler in logger.handlers):
        return
    logger.addHandler(_QuietHandler())
    logger.propagate = False


class _QuietHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.addFilter(_OnceInAWhile())
        self._ours = logging.getLogger("pd_cache.tracing")

    def emit(self, record: logging.LogRecord) -> None:
        self._ours.warning("%s", record.getMessage())
