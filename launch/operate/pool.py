"""`pd-cache pool`: lists the namespaces in the pool with their sizes, and removes them.

The master makes one list of all keys. We read it as it arrives, and keep only counts. Then we ask for the
sizes of the first keys of each namespace, with short requests, until a deadline. None of this takes a lease,
so nothing stays in the pool longer because it was counted.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.masters import KEYS_IN_A_URL, LONGEST_IN_A_URL, Segment, copies_at, keys_at
from launch.watch.asker import cluster_status, leading_master, leading_metrics
from launch.watch.state import ClusterStatus
from pd_cache.chunks import KEY_FORMAT, Namespace
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import own_host, shown_bytes
from pd_cache.decoding import one_line
from pd_cache.errors import PdCacheError
from pd_cache.objects.values import KEY_FORMAT as VALUE_FORMAT
from transfer.deadlines import end_in
from transfer.errors import PoolUnavailableError, Status
from transfer.store import MooncakeStore

SAMPLES = 100
"""For how many keys of a namespace the size is asked. All chunks of a namespace have the same size; values by
name may have any size."""
_SIZES_S = 5.0
_LISTING_S = 120.0
_OPEN_S = 10.0
_MANIFESTS_S = 5.0
_REMOVALS = 1000
"""How many keys a request removes: the answer then takes milliseconds, and the client waits for up to a
second."""
_REMOVAL_S = 10.0
OTHERS = "(other)"
"""The name under which objects of other programs and of `pd-cache doctor` are counted."""
_CHUNK = rf"{KEY_FORMAT}/([0-9a-f]{{16}}(?:\.[A-Za-z0-9._-]{{1,64}})?)/[0-9]+"
_PREFIX = re.compile(rf"{_CHUNK}|{VALUE_FORMAT}/([0-9a-f]{{16}})".encode())
_MANIFEST = re.compile(rf"{KEY_FORMAT}/([0-9a-f]{{16}})/manifest".encode())


# --- counting -----------------------------------------------------------------------------------------------


class Counted:
    """The keys of one namespace."""

    def __init__(self) -> None:
        self.prefixes: Counter[bytes] = Counter()
        """How many keys have each prefix; chunks have one for each shard."""
        self.sample: list[str] = []


class Tally:
    """Counts keys by namespace. It holds only the first `SAMPLES` keys of each namespace. They are a random
    sample, because a master lists keys in the order of their hashes."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.spaces: defaultdict[str, Counted] = defaultdict(Counted)
        self.manifests: set[str] = set()
        """Fingerprints of the namespaces whose manifest is there."""
        for key in keys:
            prefix = key[: key.rfind(b"/")]
            name = _namespace(prefix)
            if name == OTHERS:
                prefix = b""
                if (manifest := _MANIFEST.fullmatch(key)) is not None:
                    self.manifests.add(manifest[1].decode())
                    continue
            counted = self.spaces[name]
            counted.prefixes[prefix] += 1
            if len(counted.sample) < SAMPLES and len(key) <= LONGEST_IN_A_URL:
                counted.sample.append(key.decode(errors="replace"))


@functools.lru_cache(1 << 12)
def _namespace(prefix: bytes) -> str:
    """Returns the name of the namespace whose keys begin with `prefix`; `OTHERS` for manifests and for keys
    that are not ours."""
    match = _PREFIX.fullmatch(prefix)
    return OTHERS if match is None else (match[1] or match[2]).decode()


def _sizes(metrics: str, samples: Iterable[Sequence[str]]) -> dict[str, int]:
    """Returns how many bytes all copies of each key take in memory. If there is not enough time for all keys,
    asks for equally many keys of each namespace."""
    alike = (key for keys in itertools.zip_longest(*samples) for key in keys if key is not None)
    end, found = time.monotonic() + _SIZES_S, dict[str, int]()
    while (batch := list(itertools.islice(alike, KEYS_IN_A_URL))) and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError, ValueError):  # keys of other programs may be of any kind
            listed = copies_at(metrics, batch, left)
            found |= {key: sum(copy.size_ for copy in copies) for key, copies in listed.items() if copies}
    return found


# --- what is there ------------------------------------------------------------------------------------------


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace in one weights version."""

    name: str
    """The second part of its keys: the fingerprint and, for all versions but the first, a dot and the
    version."""
    kind: str
    """`chunks`, `values` (of `ObjectCache` and of adapters), or `other`."""
    model: str
    """The model's name, from the nodes or from the manifest; empty if it is not known."""
    nodes: list[str]
    """The nodes that have this namespace."""
    current: bool | None
    """Whether an engine has this weights version; None if no engine has the namespace, or if an engine does
    not report its version."""
    shards: int
    """The number of objects of a chunk, according to the present keys."""
    objects: int
    bytes: int | None
    """The bytes of all copies in memory; None if the master did not say. An estimate, unless `sampled` equals
    `objects`."""
    sampled: int
    """The number of objects whose size is known."""
    namespace: dict[str, Any] | None
    """The fields of the manifest, if they are known."""

    @property
    def fingerprint(self) -> str:
        return self.name.partition(".")[0]


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool holds."""

    namespaces: list[Space]
    segments: list[Segment]


def survey(config: ClusterConfig) -> PoolReport:
    """Returns what the pool holds. Takes seconds for a million keys. Raises PdCacheError if no master lists
    its keys."""
    status = cluster_status(config)
    metrics, records = leading_metrics(status), [row.record for row in status.nodes]
    tally = Tally(_keys(metrics))
    sizes = _sizes(metrics, [counted.sample for counted in tally.spaces.values()])
    known = {space.fingerprint(): space for record in records for space in record.cache_namespaces}
    known |= _manifests(config, status, tally.manifests.difference(known))
    for fingerprint in tally.manifests.difference(name.partition(".")[0] for name in tally.spaces):
        tally.spaces[fingerprint]  # only the manifest is left
    spaces = []
    for name, counted in tally.spaces.items():
        fingerprint, _, version = name.partition(".")
        space, objects = known.get(fingerprint), counted.prefixes.total()
        having = [record for record in records if space is not None and space in record.cache_namespaces]
        labels = {state.label for record in having for state in record.weights}
        found = [sizes[key] for key in counted.sample if key in sizes]
        values = any(prefix.startswith(VALUE_FORMAT.encode()) for prefix in counted.prefixes)
        spaces.append(
            Space(
                name=name,
                kind="other" if name == OTHERS else "values" if values else "chunks",
                model=next(
                    (record.model for record in having if record.model), "" if space is None else space.model
                ),
                nodes=[record.name for record in having],
                current=version in labels if having and all(record.weights for record in having) else None,
                shards=len(counted.prefixes),
                objects=objects,
                bytes=round(objects * sum(found) / len(found)) if found else None if objects else 0,
                sampled=len(found),
                namespace=None if space is None else msgspec.to_builtins(space),
            )
        )
    spaces.sort(key=lambda space: (space.kind == "other", -(space.bytes or 0), space.name))
    return PoolReport(namespaces=spaces, segments=list(status.segments or ()))


def _keys(metrics: str) -> Iterator[bytes]:
    try:
        yield from keys_at(metrics, _LISTING_S)
    except (OSError, ValueError) as error:
        raise PdCacheError(f"the master does not list its keys: {error}") from error


def keys_of(metrics: str, names: Collection[str], manifests: Collection[bytes] = ()) -> Iterator[str]:
    """Yields the keys of these namespaces, and those of `manifests` that are there. Raises PdCacheError if
    the master does not list its keys."""
    for key in _keys(metrics):
        if _namespace(key[: key.rfind(b"/")]) in names or key in manifests:
            yield key.decode(errors="replace")  # another program's key may be any bytes


def open_store(config: ClusterConfig, status: ClusterStatus) -> MooncakeStore:
    """Returns a client of the pool whose master leads. Does not wait for the pool."""
    return MooncakeStore(
        config.transfer,
        master=leading_master(config, status),
        host=own_host(config),
        segment_size=0,
        placement=config.cache.pool,
    )


@contextlib.contextmanager
def opened(config: ClusterConfig, status: ClusterStatus) -> Iterator[MooncakeStore]:
    """Opens a client of the pool. Raises PoolUnavailableError."""
    with open_store(config, status) as store:
        store.wait_open(_OPEN_S)
        yield store


def _manifests(
    config: ClusterConfig, status: ClusterStatus, fingerprints: Collection[str]
) -> dict[str, Namespace]:
    """Returns namespaces that no node has reported. Leaves out those whose manifests cannot be read within a
    few seconds."""
    found: dict[str, Namespace] = {}
    if not fingerprints:
        return found
    with contextlib.suppress(PoolUnavailableError), opened(config, status) as store:
        end = time.monotonic() + _MANIFESTS_S
        for fingerprint in sorted(fingerprints):
            manifest = store.get_small(manifest_key(fingerprint), end) if time.monotonic() < end else None
            with contextlib.suppress(ValueError):
                found[fingerprint] = Namespace.read(manifest or b"")
    return found


def manifest_key(fingerprint: str) -> str:
    return f"{KEY_FORMAT}/{fingerprint}/manifest"


# --- removal ------------------------------------------------------------------------------------------------


def choose(report: PoolReport, pattern: str, *, old: bool) -> list[Space]:
    """Returns the namespaces whose name or model matches a shell pattern; with `old`, only versions that are
    known not to be current.

    Raises PdCacheError if there is none.
    """
    ours = [
        space for space in report.namespaces if space.kind != "other" and (space.objects or not space.nodes)
    ]
    chosen = [
        space
        for space in ours
        if (space.current is False or not old)
        and (fnmatch.fnmatchcase(space.name, pattern) or fnmatch.fnmatchcase(space.model, pattern))
    ]
    if not chosen:
        what = "namespace of an old version" if old else "namespace"
        raise PdCacheError(f"no {what} in the pool matches {pattern}: see `pd-cache pool ls`")
    return chosen


def remove(config: ClusterConfig, report: PoolReport, chosen: Sequence[Space]) -> tuple[int, int]:
    """Removes all objects of the namespaces `chosen`, even leased ones. If no node has a namespace, its
    manifest is removed with its last version.

    Returns how many were removed, and how many stay because they are being written. Raises PdCacheError,
    which says how many are gone already, if the master or the pool does not answer.
    """
    names = {space.name for space in chosen}
    stay = {space.fingerprint for space in report.namespaces if space.nodes or space.name not in names}
    manifests = {
        manifest_key(space.fingerprint).encode() for space in chosen if space.fingerprint not in stay
    }
    status, removed, busy = cluster_status(config), 0, 0
    metrics = leading_metrics(status)
    try:
        with opened(config, status) as store:
            keys = keys_of(metrics, names, manifests)
            while batch := list(itertools.islice(keys, _REMOVALS)):
                outcomes = Counter(store.remove(batch, end_in(_REMOVAL_S), force=True))
                removed, busy = removed + outcomes[Status.OK], busy + outcomes[Status.BUSY]
                if failed := outcomes.keys() - {Status.OK, Status.BUSY, Status.MISSING}:
                    raise PdCacheError(f"the pool's answer: {', '.join(outcome.value for outcome in failed)}")
    except PdCacheError as error:
        raise PdCacheError(
            f"{removed} objects were removed, and then: {error}; run it again for the others"
        ) from error
    return removed, busy


# --- showing ------------------------------------------------------------------------------------------------


def space_table(spaces: Sequence[Space], segments: Sequence[Segment] = ()) -> Group:
    """Returns namespaces, and below them segments, as text for people, at most 80 columns wide."""
    table = _table("namespace", "used by", ">chunks", ">bytes", "model")
    for space in spaces:
        users = chunks = ""
        about = f"{space.objects:,} objects of {'other programs' if space.kind == 'other' else 'ObjectCache'}"
        if space.kind == "chunks":
            group = (space.namespace or {}).get("group")
            count = len(space.nodes)
            users = "old" if space.current is False else f"{count or 'no'} node{'s' if count > 1 else ''}"
            chunks = f"{space.objects // max(1, space.shards):,}"
            about = f"{space.model or '?'}, layers {group}" if group else space.model or "?"
        table.add_row(
            space.name,
            users,
            chunks,
            "?" if space.bytes is None else shown_bytes(space.bytes),
            escape(one_line(about)),
        )
    shown: list[RenderableType] = [table]
    sampled, objects = sum(space.sampled for space in spaces), sum(space.objects for space in spaces)
    if sampled < objects:
        shown.append(Text(f"bytes are estimated from {sampled:,} of {objects:,} objects"))
    if segments:
        table = _table("segment", ">used", ">size")
        for segment in segments:
            sizes = shown_bytes(segment.allocator_used_bytes), shown_bytes(segment.size_bytes)
            table.add_row(escape(one_line(segment.segment_name)), *sizes)
        shown += [Text(), table]
    return Group(*shown)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(
            name.removeprefix(">"), justify="right" if name[0] == ">" else "left", overflow="fold"
        )
    return table
