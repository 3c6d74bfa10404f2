"""What the proxy remembers of the last requests: which nodes they went to, and what these reported. Pure.

A node's answer holds a report on the prompt (docs/explain.md). The proxy passes answers on as they come, and looks only at their ends. vLLM's
streams hold no report; the node itself still has it.
"""

from __future__ import annotations

import msgspec

from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.reports import KEY, RequestReport

_TAIL = 1 << 14
_MARK = f'"{KEY}"'.encode()


class HopReport(msgspec.Struct, frozen=True):
    """What one node did for a request."""

    hop: str
    node: str
    """The node's URL."""
    report: RequestReport | None = None
    """None if its answer held none."""


class Trip(msgspec.Struct, frozen=True):
    """A request's way through the nodes."""

    client: str
    """The name of the client's key; empty if clients need no keys."""
    hops: tuple[HopReport, ...]


class AnswerEnd:
    """The end of an answer that is passed on in pieces: at most 32 KiB."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, piece: bytes) -> None:
        """Takes in the next piece."""
        self._kept += piece[-_TAIL:]
        if len(self._kept) > 2 * _TAIL:
            del self._kept[:-_TAIL]

    def report(self) -> RequestReport | None:
        """Returns the report in the answer; None if there is none."""
        return read_report(bytes(self._kept))


def read_report(answer: bytes) -> RequestReport | None:
    """Returns the last report in a node's answer or in the end of one; None if there is none.

    A report is a flat object, so it ends at the first closing brace. Inside a JSON string, such as a generated text, the quotes around the
    key would be escaped.
    """
    _, mark, rest = answer[-2 * _TAIL :].rpartition(_MARK)
    value = rest.lstrip()
    end = value.find(b"}")
    if not mark or value[:1] != b":" or end < 0:
        return None
    try:
        return decode_json(value[1 : end + 1], RequestReport)
    except UndecodableError:
        return None
