"""Spans of requests, for OpenTelemetry. Off unless a collector is configured; then nothing of OpenTelemetry is imported.

A span is begun under the `traceparent` of the request that it belongs to (W3C Trace Context), and ended on whatever thread its work
ends. Ended spans wait in a bounded queue of the SDK, which a thread of its own sends. When the queue is full, spans are dropped: a
collector that is slow, or gone, costs nothing else. This is the only module that imports OpenTelemetry.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

from pd_cache.config import TracingConfig
from pd_cache.errors import ConfigError

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


class TraceContext(NamedTuple):
    """What a `traceparent` says."""

    trace: int
    span: int
    sampled: bool


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def read_traceparent(text: str) -> TraceContext | None:
    """Returns the trace context of a `traceparent`; None if it is none. A later version may have more fields, as W3C says."""
    match = _TRACEPARENT.fullmatch(text.strip(" \t"))
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    trace, span = int(match[2], 16), int(match[3], 16)
    return TraceContext(trace, span, bool(int(match[4], 16) & 1)) if trace and span else None


_MOST_STATE = 512
"""The longest `tracestate` that is passed on, in characters: what W3C asks for at least."""
_MOST_MEMBERS = 32
_MEMBER = re.compile(
    r"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})=([ -+\--<>-~]{0,255}[!-+\--<>-~])"
)


def read_tracestate(text: str) -> tuple[tuple[str, str], ...]:
    """Returns the members of a `tracestate`; none if it is longer than 512 characters, or not as W3C says.

    The SDK has such a reader. It logs what it refuses, a client's text of any length, once for each span; and 8 KiB of commas take it 20 ms.
    """
    if len(text) > _MOST_STATE:
        return ()
    parts = [part.strip(" \t") for part in text.split(",")]
    found = [_MEMBER.fullmatch(part) for part in parts if part]
    members = tuple((match[1], match[2]) for match in found if match is not None)
    well = len(members) == len(found) == len(dict(members)) <= _MOST_MEMBERS
    return members if well else ()


class _SdkTracing(Tracing):
    """Sends spans by the SDK's processor and exporter. An engine in the same process may have a provider of its own.

    The SDK's tracer is left out: it takes several times as long for a span, all of it while a request waits.
    """

    on = True

    def __init__(self, config: TracingConfig, endpoint: str, service: str, node: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, TraceState
        from opentelemetry.trace import SpanKind as Kinds

        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            _be_quiet(logging.getLogger(name))
        self._kinds = {"internal": Kinds.INTERNAL, "server": Kinds.SERVER, "client": Kinds.CLIENT}
        self._sample_ratio = config.sample_ratio
        resource = Resource.create({"service.name": f"pd-cache-{service}", "service.instance.id": node})
        scope = InstrumentationScope("pd_cache")
        sampled, well = TraceFlags(TraceFlags.SAMPLED), Status()
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S),
            max_queue_size=_QUEUE,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH,
        )

        def send(span: _SampledSpan, error: str) -> None:
            state = TraceState(span.state) if span.state else None
            parent = SpanContext(span.trace, span.parent, True, sampled, state) if span.parent else None
            self._processor.on_end(
                ReadableSpan(
                    name=span.name,
                    context=SpanContext(span.trace, span.id, False, sampled, state),
                    parent=parent,
                    resource=resource,
                    attributes=span.attributes,
                    kind=self._kinds[span.kind],
                    status=Status(StatusCode.ERROR, error[:_LONGEST_ERROR]) if error else well,
                    start_time=span.begun,
                    end_time=time.time_ns(),
                    instrumentation_scope=scope,
                )
            )

        self._send = send

    def begin(
        self,
        name: str,
        parent: Mapping[str, str] | None = None,
        *,
        kind: SpanKind = "internal",
        **attributes: Attribute,
    ) -> TraceSpan:
        headers = parent or {}
        context = read_traceparent(headers.get("traceparent", ""))
        if context is None:
            trace = random.getrandbits(128) or 1
            if random.random() >= self._sample_ratio:
                return _Untraced({"traceparent": f"00-{trace:032x}-{random.getrandbits(64) or 1:016x}-00"})
            return _SampledSpan(self._send, name, kind, trace, 0, (), _prefixed(attributes))
        if not context.sampled:
            return _Untraced(headers)
        state = read_tracestate(headers.get("tracestate", ""))
        return _SampledSpan(self._send, name, kind, context.trace, context.span, state, _prefixed(attributes))

    def close(self, timeout: float = 2.0) -> None:
        # the SDK's own time-outs do not hold while an export is under way
        closing = threading.Thread(target=self._processor.shutdown, name="pd-cache-traces", daemon=True)
        closing.start()
        closing.join(timeout)


class _SampledSpan:
    def __init__(
        self,
        send: Callable[[_SampledSpan, str], None],
        name: str,
        kind: SpanKind,
        trace: int,
        parent: int,
        state: tuple[tuple[str, str], ...],
        attributes: dict[str, Attribute],
    ) -> None:
        """`parent` is 0 for a root."""
        self.begun = time.time_ns()
        self.name, self.kind, self.trace, self.parent, self.state = name, kind, trace, parent, state
        self.id = random.getrandbits(64) or 1
        self.attributes = attributes
        self._send: Callable[[_SampledSpan, str], None] | None = send

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"traceparent": f"00-{self.trace:032x}-{self.id:016x}-01"}
        return (
            {**headers, "tracestate": ",".join(f"{key}={value}" for key, value in self.state)}
            if self.state
            else headers
        )

    def note(self, **attributes: Attribute) -> None:
        if self._send is not None:
            self.attributes |= _prefixed(attributes)

    def end(self, error: str = "") -> None:
        send, self._send = self._send, None
        if send is not None:
            send(self, error)

    def __enter__(self) -> TraceSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("" if kind is None else f"{kind.__name__}: {error}" if str(error) else kind.__name__)


def _prefixed(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
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
