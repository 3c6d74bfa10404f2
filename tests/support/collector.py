"""A collector of OpenTelemetry in this process: takes OTLP over HTTP, and decodes it by the protocol's own
messages."""

import gzip
import threading
from contextlib import contextmanager
from typing import NamedTuple

from tests.support.pages import serving


class ReceivedSpan(NamedTuple):
    service: str
    node: str
    name: str
    kind: int
    trace: str
    """32 hexadecimal digits."""
    span: str
    """16 hexadecimal digits."""
    parent: str
    """As `span`; empty for a root."""
    begin: int
    end: int
    """Nanoseconds since 1970."""
    failed: bool
    attributes: dict


class Collector:
    """Everything that has been sent so far."""

    def __init__(self):
        self.endpoint = ""
        self._spans = []
        self._lock = threading.Lock()

    @property
    def spans(self):
        with self._lock:
            return list(self._spans)

    def of(self, trace):
        """The spans of one trace, by service and name: `pd-cache-proxy: pd_cache.prefill`."""
        found = {}
        for span in self.spans:
            if span.trace == trace:
                found.setdefault(f"{span.service}: {span.name}", []).append(span)
        return found

    def take(self, body):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for of_resource in request.resource_spans:
                resource = _attributes(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self._spans += [_received(resource, span) for span in of_scope.spans]


def _received(resource, span):
    return ReceivedSpan(
        str(resource["service.name"]),
        str(resource.get("service.instance.id", "")),
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        _attributes(span.attributes),
    )


def _attributes(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collecting():
    collector = Collector()

    def take(path, body):
        assert path == "/v1/traces"
        collector.take(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)
        return b""

    with serving(take) as port:
        collector.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        yield collector
