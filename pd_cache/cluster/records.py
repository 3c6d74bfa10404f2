"""What a node publishes about itself, and how two nodes that never share a hit differ. Pure."""

from __future__ import annotations

import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from pd_cache.cluster.schema import HOST, Name
from pd_cache.decoding import UndecodableError, decode_json, one_line, prepared
from pd_cache.errors import PdCacheError
from pd_cache.tokens import Namespace

MAX_RECORD = 64 << 10
"""Most bytes of a record; ours have about one thousand."""

_HOST = rf"(\[[0-9A-Fa-f:.]+\]|\*|{HOST})"
_PORT = r":[0-9]{1,5}"
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Bounded so that every program can compute with it, also one that has only floating-point numbers."""
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
Address = Annotated[
    str,
    msgspec.Meta(pattern=rf"^(((https?|tcp)://)?{_HOST}{_PORT}|ipc://[^\x00-\x1f\x7f-\x9f]+)\Z", max_length=300),
]
Line = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""Matches text that a log and a terminal can show as it is."""

_EXPECTED = {
    "master": (re.compile(rf"{_HOST}{_PORT}"), "a master's address is host:port"),
    "store": (re.compile(rf"{_HOST}{_PORT}"), "a store's address is host:port"),
    "cache-server": (re.compile(rf"ipc://.+|tcp://{_HOST}{_PORT}"), "a cache-server's address is ipc://path or tcp://host:port"),
    "prefill": (re.compile(rf"https?://{_HOST}{_PORT}"), "a prefill node's address is http://host:port"),
    "decode": (re.compile(rf"https?://{_HOST}{_PORT}"), "a decode node's address is http://host:port"),
    "proxy": (re.compile(rf"https?://{_HOST}{_PORT}"), "a proxy's address is http://host:port"),
}  # fmt: skip
"""The form of an address, by role. For a role that this version does not know, any of the forms is allowed."""


class RecordError(PdCacheError):
    """A record that cannot be used."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has room for; 0 if it has none or does not say."""

    segment_bytes: Count = 0
    """Memory that it gives to the pool."""
    kv_tokens: Count = 0
    """Tokens that its engine's own paged cache holds."""
    max_running: Count = 0
    """Requests that it computes at the same time."""


class Namespaced(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says about its cache, in its record and in its `/health`: `Namespace.described`.

    Fields that a newer version adds are ignored.
    """

    fingerprint: Annotated[Line, msgspec.Meta(max_length=64)] | None = None
    """The namespace's; nodes share hits if theirs are equal. None if the node keeps no cache, or cannot say."""
    namespace: dict[Line, Line | int] | None = None
    """The namespace, field by field."""

    @property
    def cache_namespace(self) -> Namespace | None:
        """The namespace as this version understands it; None if there is none or it has other fields."""
        if self.namespace is None:
            return None
        try:
            found = msgspec.convert(self.namespace, prepared(Namespace))
        except msgspec.ValidationError:
            return None
        return found if found.fingerprint() == self.fingerprint else None


class NodeRecord(Namespaced, frozen=True, kw_only=True):
    """One node of a cluster."""

    name: Name
    role: Name
    address: Address
    """`http://host:port` if it speaks HTTP, `host:port` if not; for a cache server the address to which its engines connect."""
    metrics: Annotated[str, msgspec.Meta(pattern=rf"^http://{_HOST}{_PORT}\Z", max_length=300)] | None = None
    """Where its metrics are, if not at `address`."""
    lease_ttl_ms: Milliseconds = 0
    """For a master: how long it protects a key that was looked up."""
    master: Annotated[Line, msgspec.Meta(max_length=2048)] | None = None
    """For a client of the pool: where it expects the master."""
    instance: Annotated[Line, msgspec.Meta(max_length=64)] = ""
    """Differs from one start of the node to the next."""
    model: Annotated[Line, msgspec.Meta(max_length=1024)] | None = None
    """What clients write into `model`."""
    capacity: Capacity = Capacity()
    version: Annotated[Line, msgspec.Meta(max_length=64)] = ""

    def encode(self) -> bytes:
        """Returns the record as JSON."""
        return msgspec.json.encode(self)


class About(Namespaced, frozen=True, kw_only=True):
    """What a node's `/health` says about it, as far as others use it."""

    version: Annotated[Line, msgspec.Meta(max_length=64)] = ""


def decode_record(raw: bytes) -> NodeRecord:
    """Returns a record that was read from outside. Raises RecordError for anything that cannot be used as one."""
    if len(raw) > MAX_RECORD:
        raise RecordError(f"it has {len(raw)} bytes, and at most {MAX_RECORD} are allowed")
    try:
        record = decode_json(raw, NodeRecord)
    except UndecodableError as error:
        raise RecordError(f"it is no record of a node: {error}") from None
    expected, words = _EXPECTED.get(record.role, (None, ""))
    if expected is not None and not expected.fullmatch(record.address):
        raise RecordError(f"{words}, not {record.address}")
    if not _port_of(record.address) and record.role != "store":  # a segment's address is only a name
        raise RecordError(f"{record.address} is no address: port 0")
    if record.metrics is not None:
        _port_of(record.metrics)
    return record


def _port_of(address: str) -> int:
    if address.startswith("ipc://"):
        return -1
    try:
        port = urllib.parse.urlsplit(address if "://" in address else f"//{address}").port
    except ValueError as error:
        raise RecordError(f"{address} is no address: {error}") from None
    return port or 0


def read_about(body: bytes | str) -> About:
    """Returns what a `/health` says about its node; an empty `About` if it says nothing that can be read."""
    try:
        return decode_json(body, About)
    except UndecodableError:
        return About()


def differences(records: Iterable[NodeRecord]) -> dict[str, str]:
    """Returns, by name, how each node differs that shares no hit with most of the others.

    It differs in its namespace, or it follows a master that has moved since the node was started.
    """
    nodes = list(records)
    masters = sorted(record.address for record in nodes if record.role == "master")
    stranded = {
        record.name: f"takes the master to be at {one_line(record.master)}, and it registered at {', '.join(masters)}: "
        "start the node again, or it shares no hit"
        for record in nodes
        if masters and record.master and not record.master.startswith("etcd://") and record.master not in masters
    }
    known = sorted((record for record in nodes if record.fingerprint), key=lambda record: record.name)
    counts = Counter(record.fingerprint for record in known)
    if len(counts) < 2:
        return stranded
    usual = next(record for record in known if counts[record.fingerprint] == max(counts.values()))
    return stranded | {
        record.name: f"{_difference(record, usual)}: these two never share a hit"
        for record in known
        if record.fingerprint != usual.fingerprint
    }


def _difference(here: NodeRecord, there: NodeRecord) -> str:
    mine, theirs = here.namespace or {}, there.namespace or {}
    fields = [name for name in (*mine, *(set(theirs) - set(mine))) if mine.get(name) != theirs.get(name)]
    if not fields:
        return one_line(f"fingerprint {here.fingerprint} here, {there.fingerprint} on {there.name}")
    return ", ".join(
        f"{one_line(name)} {_shown(mine, name)} here, {_shown(theirs, name)} on {there.name}" for name in sorted(fields)
    )


def _shown(fields: dict[str, str | int], name: str) -> str:
    value = fields.get(name, "not known")
    return one_line(str(value)) if value != "" else "empty"
