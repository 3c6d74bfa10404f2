"""What Mooncake's master answers over HTTP: its role, its segments, and where keys lie."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from launch.http import fetch
from pd_cache.cluster.machine import host_of
from pd_cache.decoding import decode_json

LEADER = "leader"


class MasterHealth(msgspec.Struct, frozen=True):
    """What a master's `/health` says."""

    role: Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,40}\Z")] = ""
    """`leader`, `standby` or such; empty if it does not say."""
    service_ready: bool = False


def read_master_health(body: bytes) -> MasterHealth:
    """Returns what a master's `/health` says. Raises ValueError for any other answer."""
    return decode_json(body, MasterHealth)


def master_health(metrics: str, timeout: float) -> MasterHealth:
    """Returns what the master with these metrics says about itself. Raises OSError or ValueError if it does not answer."""
    return read_master_health(fetch(f"{metrics}/health", timeout))


_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Bounded so that every ratio of two of them is a number."""


class Segment(msgspec.Struct, frozen=True):
    """A segment, as the master's `/get_segments_detail` reports it."""

    segment_name: str
    """The segment's name, as in `preferred_segment`: `host:port`."""
    size_bytes: _Size
    te_endpoint: str
    """Where its owner accepts connections: `host:port`."""
    allocator_used_bytes: _Size = 0
    protocol: str = ""

    @property
    def host(self) -> str:
        return host_of(self.segment_name)

    @property
    def free(self) -> int:
        return max(0, self.size_bytes - self.allocator_used_bytes)


class _Segments(msgspec.Struct, frozen=True):
    segments: list[Segment]


def segments_at(metrics: str) -> list[Segment]:
    """Returns the segments that the master with these metrics knows. Raises OSError or ValueError if it does not answer."""
    return read_segments(fetch(f"{metrics}/get_segments_detail"))


def read_segments(body: bytes) -> list[Segment]:
    """Returns the segments of a master's `/get_segments_detail`. Raises ValueError for any other answer."""
    return decode_json(body, _Segments).segments


class _Replica(msgspec.Struct, frozen=True):
    transport_endpoint_: str


class _Replicas(msgspec.Struct, frozen=True):
    values: Annotated[list[_Replica], msgspec.Meta(min_length=1)]


class _KeyReplicas(msgspec.Struct, frozen=True):
    data: dict[str, _Replicas]


def read_places(body: bytes, keys: Iterable[str]) -> list[str]:
    """Returns where each key lies, from a master's `/batch_query_keys`. Raises ValueError for any other answer."""
    told = decode_json(body, _KeyReplicas).data
    missing = [key for key in keys if key not in told]
    if missing:
        raise ValueError(f"it says nothing of {missing[0]}")
    return [told[key].values[0].transport_endpoint_ for key in keys]


def places_at(metrics: str, keys: Sequence[str]) -> list[str]:
    """Returns where each key lies, as its master says. Raises OSError or ValueError if it does not answer."""
    listed = ",".join(urllib.parse.quote(key) for key in keys)
    return read_places(fetch(f"{metrics}/batch_query_keys?keys={listed}"), keys)
