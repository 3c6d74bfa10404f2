"""What a node says about itself, and what two nodes that never share a hit differ in. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from pd_cache.config import Name
from pd_cache.errors import PdCacheError
from pd_cache.tokens import Namespace

MAX_RECORD = 64 << 10
"""Bytes of a record; ours have about one thousand."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Address = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(((https?|tcp)://)?[A-Za-z0-9._*\[\]:-]+:[0-9]{1,5}|ipc://[^\x00-\x1f\x7f]+)$", max_length=300
    ),
]


class RecordError(PdCacheError):
    """A record that cannot be used."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has room for; 0 where it has none of it or does not say."""

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

    fingerprint: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """Of the namespace; nodes share hits where it is equal. None where the node keeps no cache, or cannot say."""
    namespace: dict[str, str | int] | None = None
    """The namespace in words, field by field."""

    @property
    def cache_namespace(self) -> Namespace | None:
        """The namespace as this version understands it; None where there is none or it has other fields."""
        if self.namespace is None:
            return None
        try:
            found = msgspec.convert(self.namespace, Namespace)
        except msgspec.ValidationError:
            return None
        return found if found.fingerprint() == self.fingerprint else None


class NodeRecord(Namespaced, frozen=True, kw_only=True):
    """One node of a cluster."""

    name: Name
    role: Name
    address: Address
    """`http://host:port` of what speaks HTTP, `host:port` of what does not; of a cache server what its engines connect to."""
    metrics: (
        Annotated[str, msgspec.Meta(pattern=r"^http://[A-Za-z0-9._\[\]:-]+:[0-9]{1,5}$", max_length=300)] | None
    ) = None
    """Where its metrics are, if not at `address`."""
    lease_ttl_ms: Count = 0
    """Of a master: for how long it protects a key that was looked up."""
    master: Annotated[str, msgspec.Meta(max_length=2048)] | None = None
    """Of a client of the pool: where it takes the master to be."""
    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Differs from one start of the node to the next."""
    model: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    """What clients write into `model`."""
    capacity: Capacity = Capacity()
    version: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


def decode_record(raw: bytes) -> NodeRecord:
    """A record as it was read from outside. RecordError says what is wrong with it."""
    if len(raw) > MAX_RECORD:
        raise RecordError(f"it has {len(raw)} bytes, and at most {MAX_RECORD} are allowed")
    try:
        return msgspec.json.decode(raw, type=NodeRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"it is no record of a node: {error}") from None


def differences(records: Iterable[NodeRecord]) -> dict[str, str]:
    """For each node that shares no hit with most: in what it differs, in words, by the node's name.

    That is its namespace, or that it follows a master which has moved since it was started.
    """
    nodes = list(records)
    masters = sorted(record.address for record in nodes if record.role == "master")
    stranded = {
        record.name: f"takes the master to be at {record.master}, and it registered at {', '.join(masters)}: "
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
        return f"fingerprint {here.fingerprint} here, {there.fingerprint} on {there.name}"
    return ", ".join(
        f"{name} {_shown(mine, name)} here, {_shown(theirs, name)} on {there.name}" for name in sorted(fields)
    )


def _shown(fields: dict[str, str | int], name: str) -> str:
    value = fields.get(name, "not known")
    return str(value) if value != "" else "empty"
