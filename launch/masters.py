"""Asks Mooncake's master over HTTP: for its role, its segments and their drain jobs, and where keys lie."""

from __future__ import annotations

import contextlib
import http
import itertools
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from launch.discovery import View
from launch.http import ANSWER_S, BadStatus, fetch, fetch_lines
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import host_of
from pd_cache.decoding import decode_json

LEADER = "leader"
KEYS_IN_A_URL = 64
LONGEST_IN_A_URL = 256
"""In bytes; a master's HTTP takes a few KiB."""


class MasterHealth(msgspec.Struct, frozen=True):
    """A master's `/health`."""

    role: Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,40}\Z")] = ""
    """`leader`, `standby` or such; empty if it does not say."""
    service_ready: bool = False


class Segment(msgspec.Struct, frozen=True):
    """A segment, as the master's `/get_segments_detail` reports it."""

    segment_name: str
    """The segment's name, as in `preferred_segment`: `host:port`."""
    size_bytes: int
    te_endpoint: str
    """The address at which its owner accepts connections: `host:port`."""
    allocator_used_bytes: int = 0
    protocol: str = ""
    status: Annotated[str, msgspec.Meta(pattern=r"^[A-Z_]{0,40}\Z")] = "OK"
    """`OK`, or another word of Mooncake's. A segment that is `DRAINING` or `DRAINED` takes no new objects."""

    @property
    def host(self) -> str:
        return host_of(self.segment_name)

    @property
    def free(self) -> int:
        return max(0, self.size_bytes - self.allocator_used_bytes)

    @property
    def shown_status(self) -> str:
        """`draining`, `drained` or such; empty if it takes objects."""
        return "" if self.status == "OK" else self.status.lower()


class _Segments(msgspec.Struct, frozen=True):
    segments: list[Segment]


def segments_at(metrics: str) -> list[Segment]:
    """Returns the segments of a master, from its metrics address. Raises OSError or ValueError if the master
    does not answer."""
    return decode_json(fetch(f"{metrics}/get_segments_detail"), _Segments).segments


def pool_bytes(config: ClusterConfig, view: View) -> int:
    """Returns how many bytes the pool can hold, with as many copies of each object as the file says. Segments
    that are drained do not count. Raises OSError or ValueError if no master answers."""
    failure: OSError | ValueError = ValueError("no master of the pool is known")
    sizes = []
    for record in view.by_role("master"):
        try:
            given = segments_at(record.metrics or "")
            sizes.append(sum(segment.size_bytes for segment in given if not segment.shown_status))
        except (OSError, ValueError) as error:
            failure = error
    if not sizes:
        raise failure
    return max(sizes) // config.cache.pool.replicas  # of elected masters, only the leader knows the segments


class Copy(msgspec.Struct, frozen=True):
    """A copy of an object in a segment."""

    transport_endpoint_: str
    size_: int = 0


class _Copies(msgspec.Struct, frozen=True):
    values: list[Copy] | None = None
    """None if the key is not there."""


class _Keys(msgspec.Struct, frozen=True):
    data: dict[str, _Copies]


def copies_at(metrics: str, keys: Iterable[str], timeout: float = ANSWER_S) -> dict[str, list[Copy]]:
    """Returns each key's copies in memory, as the master reports them. A key that is gone has none. Takes no
    lease.

    `keys` are at most `KEYS_IN_A_URL`, none of them longer than `LONGEST_IN_A_URL` or with a comma. Raises
    OSError or ValueError if the master does not answer.
    """
    listed = ",".join(urllib.parse.quote(key) for key in keys)
    found = decode_json(fetch(f"{metrics}/batch_query_keys?keys={listed}", timeout), _Keys).data
    return {key: copies.values or [] for key, copies in found.items()}


def keys_at(metrics: str, timeout: float) -> Iterator[bytes]:
    """Yields the keys of all complete objects of the default tenant, as the master lists them. Takes no
    lease.

    The master makes the whole list, about 55 bytes a key, before it sends the first key; `timeout` has to be
    long enough for this. Raises OSError or ValueError if the master does not answer.
    """
    return fetch_lines(f"{metrics}/get_all_keys", timeout)


def keys_in(metrics: str, endpoint: str, timeout: float) -> list[str]:
    """Returns the keys that have a copy at `endpoint`. Leaves out keys of other programs about which the
    master cannot be asked, because they contain a comma or are too long for a URL. Takes two seconds for each
    100,000 keys of the pool; `timeout` is as for `keys_at`. Raises OSError or ValueError if the master does
    not answer.
    """
    listed = (key.decode(errors="replace") for key in keys_at(metrics, timeout))
    keys, found = (key for key in listed if len(key) <= LONGEST_IN_A_URL and "," not in key), list[str]()
    while some := list(itertools.islice(keys, KEYS_IN_A_URL)):
        copies = copies_at(metrics, some)
        found += [
            key for key in some if any(copy.transport_endpoint_ == endpoint for copy in copies.get(key, ()))
        ]
    return found


# --- drain jobs ---------------------------------------------------------------------------------------------


class DrainJob(msgspec.Struct, frozen=True):
    """A drain job, as the master reports it."""

    status_name: str
    """`CREATED`, `PLANNING` or `RUNNING`; in the end `SUCCEEDED`, `FAILED` or `CANCELED`."""
    succeeded_units: int
    """Objects that were moved. A unit is an object in a segment."""
    failed_units: int
    """Attempts that failed. The master makes three for each object."""
    blocked_units: int
    """Objects that the master leaves alone for now: they are leased, are still being written, or fit into no
    other segment."""
    active_units: int
    migrated_bytes: int

    @property
    def ended(self) -> bool:
        return self.status_name in ("SUCCEEDED", "FAILED", "CANCELED")


class _Begun(msgspec.Struct, frozen=True):
    job_id: str


def begin_drain(metrics: str, segments: Sequence[str], at_a_time: int) -> str | None:
    """Makes the master move all objects out of `segments`. Returns the job's id, or None if one of the
    segments is already being drained.

    `at_a_time`: how many moves may wait or be under way. Raises OSError or ValueError if the master does not
    answer, or refuses.
    """
    wanted = {"segments": list(segments), "target_segments": [], "max_concurrency": at_a_time}
    try:
        return decode_json(
            fetch(f"{metrics}/api/v1/drain_jobs", body=msgspec.json.encode(wanted)), _Begun
        ).job_id
    except BadStatus as error:
        if error.status == http.HTTPStatus.CONFLICT:
            return None
        raise


def drain_job(metrics: str, job: str) -> DrainJob | None:
    """Returns the state of a job; None if the master does not know it, for example because the master was
    restarted. Raises OSError or ValueError if the master does not answer."""
    try:
        return decode_json(fetch(f"{metrics}/api/v1/drain_jobs/query?job_id={job}"), DrainJob)
    except BadStatus as error:
        if error.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.BAD_REQUEST):
            return None
        raise


def cancel_drain(metrics: str, job: str) -> None:
    """Cancels a job, so that its segments take objects again. The master refuses this while a move is under
    way. Raises OSError or ValueError if there is no answer."""
    with contextlib.suppress(BadStatus):
        fetch(f"{metrics}/api/v1/drain_jobs/cancel?job_id={job}", body=b"{}")
