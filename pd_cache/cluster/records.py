"""The records that nodes publish about themselves, and the differences between nodes that share no hits. No
I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pd_cache.chunks import Namespace
from pd_cache.cluster.schema import ENGINES, HOST, PORT, Name
from pd_cache.decoding import UndecodableError, decode_json, one_line, prepared
from pd_cache.errors import PdCacheError
from pd_cache.versions import FIRST, Weights
from transfer.settings import mooncake_release

_AT = rf"{HOST}:{PORT}"
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""A whole number that programs with only floating-point numbers read exactly."""
Milliseconds = Annotated[int, Meta(ge=0, le=86_400_000)]
Address = Annotated[
    str,
    Meta(pattern=rf"^((https?://)?{_AT}|{HOST}:0|ipc://[^\x00-\x1f\x7f-\x9f]+)\Z"),
]
Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""Matches text that a log and a terminal can show as it is."""

HttpAddress = Annotated[str, Meta(pattern=rf"^http://{_AT}\Z")]
EventAddress = Annotated[str, Meta(pattern=rf"^(tcp://{_AT}|ipc:///[^\x00-\x1f\x7f-\x9f]+)\Z")]

_FORMS = {
    "master": ("host:port",),
    "store": ("host:port",),
    "cache-server": ("ipc://path",),
    **dict.fromkeys((*ENGINES, "proxy"), ("http://host:port", "https://host:port")),
}
"""The forms of an address, by role. An unknown role may have an address of any form."""


class RecordError(PdCacheError):
    """A record that cannot be used."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a node. 0 means none or unknown."""

    segment_bytes: Count = 0
    """The memory that the node gives to the pool."""
    kv_tokens: Count = 0
    """How many tokens the engine's paged cache holds."""
    max_model_len: Count = 0
    """The most tokens of a request, with its answer."""
    max_running: Count = 0
    """How many requests the engine computes at the same time."""


class Namespaced(msgspec.Struct, frozen=True, kw_only=True):
    """A node's cache, in its record and in its `/health`: the fields of `Namespace.described`.

    Fields that a newer version adds are ignored.
    """

    fingerprint: Line | None = None
    """The fingerprint of the namespace; nodes with equal ones share hits. None if the node has no cache or
    does not know it."""
    namespace: dict[Line, Line | int] | None = None
    """The namespace, field by field."""
    further: tuple[dict[Line, Line | int], ...] = ()
    """The namespaces of the model's other layer groups, field by field."""
    streams: bool = False
    """Whether it can load a prompt while another node computes it."""
    renders: bool = False
    """Whether it returns the tokens and media of chats (vLLM's `/render`)."""

    @property
    def cache_namespaces(self) -> tuple[Namespace, ...]:
        """The namespaces as this version understands them, one for each layer group. Empty if there are none,
        if one of them has other fields, or if the first does not fit the fingerprint."""
        if self.namespace is None:
            return ()
        try:
            found = tuple(
                msgspec.convert(fields, prepared(Namespace)) for fields in (self.namespace, *self.further)
            )
        except msgspec.ValidationError:
            return ()
        return found if found[0].fingerprint() == self.fingerprint else ()


class NodeRecord(Namespaced, frozen=True, kw_only=True):
    """A node of a cluster."""

    name: Name
    role: Name
    address: Address
    """`http://host:port` if the node speaks HTTP, otherwise `host:port`; for a cache server the address to
    which its engines connect."""
    metrics: HttpAddress | None = None
    """The address of its metrics, if not `address`."""
    lease_ttl_ms: Milliseconds = 0
    """For a master: how long it protects a key that was looked up."""
    master: Line | None = None
    """For a client of the pool: the address at which it expects the master."""
    instance: Line = ""
    """Differs from one start of the node to the next."""
    model: Line | None = None
    """What clients write into `model`."""
    capacity: Capacity = Capacity()
    events: EventAddress | None = None
    """The ZMQ address at which it publishes KV events; None if it publishes none."""
    replays: EventAddress | None = None
    """The address at which the node sends the events again."""
    ranks: tuple[tuple[EventAddress, EventAddress], ...] = ()
    """The same two addresses for its further data-parallel ranks."""
    version: Line = ""
    mooncake: Line = ""
    """The version of the node's Mooncake; empty if unknown."""
    weights: tuple[Weights, ...] = ()
    """As in `About`. No published record has them."""

    def telling(self, about: About) -> NodeRecord:
        """Returns the record with the fields of `about` that it lacks."""
        capacity, described = self.capacity, self if self.fingerprint is not None else about
        return replace(
            self,
            weights=about.weights,
            capacity=replace(
                capacity,
                kv_tokens=capacity.kv_tokens or about.kv_tokens,
                max_model_len=capacity.max_model_len or about.max_model_len,
            ),
            streams=self.streams or about.streams,
            renders=self.renders or about.renders,
            # vLLM may run in an environment of its own
            version=about.version or self.version,
            mooncake=about.mooncake or self.mooncake,
            fingerprint=described.fingerprint,
            namespace=described.namespace,
            further=described.further,
        )

    @property
    def label(self) -> str | None:
        """The label of its engines' weights; None if they have none, or different labels."""
        labels = {state.label for state in self.weights} or {FIRST}
        return labels.pop() if len(labels) == 1 else None

    @property
    def declines(self) -> int:
        """The most tokens of a hand-off that its engines would compute, because loading takes too long."""
        return min((state.declines for state in self.weights), default=0)

    def encode(self) -> bytes:
        """Returns the record as JSON."""
        return msgspec.json.encode(self)


class About(Namespaced, frozen=True, kw_only=True):
    """The part of a node's `/health` that other programs use."""

    kv_tokens: Count = 0
    """How many tokens the engine's paged cache holds; 0 if unknown."""
    max_model_len: Count = 0
    """The most tokens of a request, with its answer; 0 if unknown."""
    version: Line = ""
    mooncake: Line = ""
    """The version of Mooncake in the process that has the cache."""
    weights: tuple[Weights, ...] = ()
    """The state of each engine's weights; empty if unknown."""


def decode_record(raw: bytes) -> NodeRecord:
    """Returns the record in `raw`. Raises RecordError if there is no usable record."""
    try:
        record = decode_json(raw, NodeRecord)
    except UndecodableError as error:
        raise RecordError(f"it is not the record of a node: {error}") from None
    scheme = record.address.rpartition("://")[0]
    forms = _FORMS.get(record.role, (record.address,))
    if scheme not in [form.rpartition("://")[0] for form in forms]:
        raise RecordError(f"the address of a {record.role} is {' or '.join(forms)}, not {record.address}")
    if record.address.endswith(":0") and record.role != "store":  # a segment's address is only a name
        raise RecordError(f"{record.address} is no address: port 0")
    return record


def read_about(body: bytes | str) -> About:
    """Parses a `/health`. Returns an empty `About` if it cannot be read."""
    try:
        return decode_json(body, About)
    except UndecodableError:
        return About()


def differences(records: Iterable[NodeRecord]) -> dict[str, str]:
    """Returns why nodes do not share all hits with most of the others, by name of the node.

    The namespace of the node or of one of its layer groups differs, or the node follows a master that has
    moved since the node's start.
    """
    nodes = list(records)
    masters = sorted(record.address for record in nodes if record.role == "master")
    stranded = {
        record.name: f"expects the master at {one_line(record.master)}, but it registered at {', '.join(masters)}: "
        "the node shares no hit until it is started again"
        for record in nodes
        if masters
        and record.master
        and not record.master.startswith("etcd://")
        and record.master not in masters
    }
    known = sorted((record for record in nodes if record.fingerprint), key=lambda record: record.name)
    spaces = {
        record.name: frozenset(
            [record.fingerprint, *(space.fingerprint() for space in record.cache_namespaces[1:])]
        )
        for record in known
    }
    counts = Counter(spaces.values())
    usual = next((record for record in known if counts[spaces[record.name]] == max(counts.values())), None)
    return stranded | {
        record.name: _difference(record, usual)
        for record in known
        if usual is not None and spaces[record.name] != spaces[usual.name]
    }


_TOGETHER = {(0, 3, 13), (0, 3, 14)}
"""Versions of Mooncake that work with one another, tried in all pairs of client and master."""
_NAMED = 4


class Skew(NamedTuple):
    """Nodes whose versions of Mooncake differ."""

    found: str
    fails: bool
    """Whether they are known not to work together. Otherwise they were not tried."""


def mooncake_skew(records: Iterable[NodeRecord]) -> Skew | None:
    """Returns how the known versions of Mooncake differ between nodes; None if they are known to work
    together.

    With 0.3.12 beside 0.3.13, reads work and every put fails (Mooncake#2579).
    """
    nodes: dict[str, list[str]] = {}
    for record in records:
        if record.mooncake[:1].isdigit():
            nodes.setdefault(record.mooncake, []).append(record.name)
    releases = {mooncake_release(version) for version in nodes}
    if len(releases) < 2 or _TOGETHER.issuperset(releases):
        return None
    found = _beside((version, nodes[version]) for version in sorted(nodes, key=mooncake_release))
    return Skew(f"Mooncake {found}", min(releases) < min(_TOGETHER) <= max(releases))


def different_lengths(records: Iterable[NodeRecord]) -> str:
    """Returns how the known `max-model-len` differs between nodes of a model; empty if it does not."""
    models: dict[str, dict[int, list[str]]] = {}
    for record in records:
        if length := record.capacity.max_model_len:
            models.setdefault(record.model or "", {}).setdefault(length, []).append(record.name)
    return "; ".join(
        f"max-model-len {_beside((str(length), nodes[length]) for length in sorted(nodes))}"
        for nodes in models.values()
        if len(nodes) > 1
    )


def _beside(values: Iterable[tuple[str, list[str]]]) -> str:
    """Returns different values as text, each with the names of its nodes."""
    shown = []
    for value, names in values:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        shown.append(f"{one_line(value)} ({', '.join(sorted(names)[:_NAMED])}{more})")
    return " beside ".join(shown)


def _difference(here: NodeRecord, there: NodeRecord) -> str:
    mine: Mapping[str, str | int]
    theirs: Mapping[str, str | int]
    if here.fingerprint == there.fingerprint:
        mine, theirs = (
            {f"layers {space.group}": space.keeps for space in of.cache_namespaces[1:]}
            for of in (here, there)
        )
        why = "neither node can load what the other stores for these layers"
    else:
        mine, theirs = here.namespace or {}, there.namespace or {}
        why = "these nodes never share hits"
    fields = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    shown = [
        f"{one_line(name)} {_shown(mine, name)} here, {_shown(theirs, name)} on {there.name}"
        for name in fields
    ]
    return f"{', '.join(shown) or 'the fingerprints of the namespaces differ'}: {why}"


def _shown(fields: Mapping[str, str | int], name: str) -> str:
    value = fields.get(name, "not known")
    return one_line(str(value)) if value != "" else "empty"
