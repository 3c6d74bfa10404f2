"""The `transfer` section of the YAML file, a node's part in the pool, and sizes such as `4GiB`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= dict.fromkeys((_letter, f"{_letter}i", f"{_letter}ib"), 1024**_power)
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)

_LARGEST = 2**60

WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
"""Mooncake's wheels: without CUDA, for CUDA 12, for CUDA 13. Each installs the package `mooncake`."""

MIN_SEGMENT = 16 << 20
"""The smallest segment: Mooncake refuses smaller ones with -600 (measured). 0 means none and is allowed."""


@functools.cache
def mooncake_version() -> str:
    """Returns the version of the installed wheel, as `0.3.13.post1`; empty if there is none. Does not load
    Mooncake."""
    import importlib.metadata  # only commands and roles ask

    for name in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def mooncake_release(version: str) -> tuple[int, ...]:
    """Returns `(0, 3, 13)` for `0.3.13.post1`, so that versions can be compared; `()` for a text without
    numbers."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


class ByteSize(int):
    """A number of bytes: an integer, or a text such as `4GiB`. `4G` and `4Gi` mean the same; `4GB` is 4 ×
    1000³."""

    def __new__(cls, size: int | str) -> ByteSize:
        """Raises ValueError if `size` is not a size."""
        if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= _LARGEST:
            return super().__new__(cls, size)
        if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
            unit = _UNITS.get(match[2].lower())
            if unit is not None and len(match[1]) <= 20 and float(match[1]) * unit <= _LARGEST:
                return super().__new__(cls, float(match[1]) * unit)
        raise ValueError(f"expected a size such as 512MiB, 4GiB or a number of bytes, got {size!r}")

    def __str__(self) -> str:
        for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
            if self >= 1024**power and self % 1024**power == 0:
                return f"{int(self) // 1024**power}{letter}iB"
        return f"{int(self)}B"

    __repr__ = __str__


if TYPE_CHECKING:
    Bytes = int
else:
    Bytes = ByteSize
"""The type of a setting that is a size. A program may give an `int`, or a text as in YAML."""


def decode_custom(kind: type, value: Any) -> object:
    """Converts values of the types that settings have besides the built-in ones: msgspec's `dec_hook`."""
    if kind is ByteSize:
        return ByteSize(value)
    raise NotImplementedError(kind)  # for msgspec: the type is not one of ours


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that check their values wherever they are made; msgspec checks only those of a file.

    Raises ValueError, with the field and what is allowed.
    """

    def __post_init__(self) -> None:
        for name, kind in _fields(type(self)):
            value = getattr(self, name)
            try:
                value = msgspec.convert(value, kind, dec_hook=decode_custom)
            except msgspec.ValidationError as error:
                metas = (
                    meta for meta in typing.get_args(kind) if isinstance(meta, Meta) and meta.description
                )
                allowed = next((f"must be {meta.description}" for meta in metas), error)
                raise ValueError(f"{name}: {value!r}: {allowed}") from None
            msgspec.structs.force_setattr(self, name, value)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]


class Timeouts(Checked, frozen=True):
    """Time limits of calls to the pool. A caller abandons a call that outlives its limit."""

    exist_ms: Milliseconds = 500
    get_ms: Milliseconds = 10_000
    put_ms: Milliseconds = 10_000
    close_ms: Milliseconds = 5_000


class BreakerSettings(Checked, frozen=True):
    """When the pool counts as down. Calls then return at once, and a probe in each interval finds out when
    the pool is back."""

    failures: Positive = 3
    probe_interval_ms: Milliseconds = 1_000


class Placement(Checked, frozen=True, kw_only=True):
    """Where in the pool a writer's objects go, and how long they stay."""

    replicas: Annotated[int, Meta(ge=1, le=16)] = 1
    """How many copies each object has, on different segments; fewer if there are fewer segments."""
    pin: Literal["none", "soft", "hard"] = "none"
    """`soft`: evicted only when nothing unpinned is left. `hard`: never evicted, so the pool can stay full
    for good."""
    soft_pin_ttl_s: Annotated[int, Meta(ge=1, le=86_400)] = 1_800
    """How long a soft pin holds."""
    preferred_segment: Annotated[
        str,
        Meta(
            pattern=r"^(own|any|[^\s:]+:[0-9]{1,5})\Z",
            description="own, any or the host:port of a store node",
        ),
    ] = "own"
    """`own`: this node's own segment, if it has one. `any`: a segment with room. `host:port`: that segment.
    If the preferred segment is full, Mooncake takes another."""


class TransferSettings(Checked, frozen=True):
    """The `transfer` section: how a node's processes use the Mooncake pool."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    metadata: str = "P2PHANDSHAKE"
    """`P2PHANDSHAKE`, `http://host:port/metadata` or `etcd://host:port`. All clients of one master must use
    the same."""
    devices: tuple[str, ...] = ()
    """The names of RDMA devices, e.g. `mlx5_0`. If it is empty, Mooncake chooses."""
    segment_size: Bytes = ByteSize(0)
    """The memory that each node gives to the pool, unless the node sets its own; 0 gives none."""
    staging_size: Bytes = ByteSize(512 << 20)
    """The registered memory between the paged cache and the network. It holds the only copy of a chunk on its
    way."""
    prefault: bool = True
    """Whether to touch segment and staging memory at start, so that no first write pays for page faults."""
    threads: Annotated[int, Meta(ge=1, le=64)] = 1
    """How many transfer calls may be in flight in each direction. One call saturates TCP; give RDMA 2 to
    4."""
    direct_lookups: bool = True
    """Whether lookups ask the master over connections of our own (`transfer.lookup_rpc`), unless it is
    elected. `false`: only through Mooncake's client, which takes longer."""
    timeouts: Timeouts = Timeouts()
    breaker: BreakerSettings = BreakerSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metadata != "P2PHANDSHAKE" and not self.metadata.startswith(
            ("http://", "https://", "etcd://")
        ):
            raise ValueError(
                f"metadata: {self.metadata!r} is neither P2PHANDSHAKE nor an address that starts with http:// or etcd://"
            )
        if self.protocol == "tcp" and self.devices:
            raise ValueError(f"devices: {list(self.devices)} given, but only protocol: rdma uses devices")
        if 0 < self.segment_size < MIN_SEGMENT:
            raise ValueError(f"segment_size: must be 0 for none, or at least 16MiB, got {self.segment_size}")


def rdma_devices(sysfs: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Returns the names of this machine's RDMA devices, sorted."""
    return tuple(sorted(entry.name for entry in sysfs.iterdir())) if sysfs.is_dir() else ()


# --- the variables that Mooncake reads ----------------------------------------------------------------------

MAX_TRANSFERS = 1000
"""The most transfers in one call. With Mooncake's defaults, more than 2048 outstanding transfers to a peer
fail with -800."""


def split_master(master: str) -> tuple[str, str | None]:
    """Returns a master's address in Mooncake's form, and the name of the election: NAME in
    `etcd://host:port;host:port/NAME`, otherwise None."""
    if not master.startswith("etcd://"):
        return master, None
    endpoints, _, name = master.removeprefix("etcd://").partition("/")
    return f"etcd://{endpoints}", name or None


def stall_seconds(settings: TransferSettings) -> int:
    """Returns how long a transfer over TCP may stand still before Mooncake fails it."""
    return max(1, min(10, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 3000))


def prepare(settings: TransferSettings, election: str | None = None) -> None:
    """Sets the variables that Mooncake's client reads, unless the user has set them. docs/mooncake.md
    describes the measured effect of each.

    Mooncake reads them when it is imported and at the first `setup()` of a process, so call this before both.
    `election`: see `split_master`.
    """
    stall = str(stall_seconds(settings))
    variables = {
        # the default of 20 takes 90 s in setup() while the master is away
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        # the default is 30 s if the master is stopped
        "MC_RPC_TIMEOUT_MS": str(max(1000, settings.timeouts.exist_ms)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": stall,
        "MC_TCP_STATUS_TIMEOUT_SEC": stall,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
        "MC_LOG_LEVEL": "ERROR",
    }
    if election is not None:  # the election to follow; without it, setup() fails with elected masters
        variables["MC_STORE_CLUSTER_ID"] = election
    for name, value in variables.items():
        os.environ.setdefault(name, value)


_ERROR, _FATAL = 2, 3


@contextlib.contextmanager
def hushed(when: bool = True) -> Iterator[None]:
    """Keeps Mooncake's log silent while the block runs, because an engine looks for its segment before it has
    registered it, and logs an error. Does nothing if the user chose a log level, or if this wheel's glog is
    no library of its own."""
    level = ctypes.c_int32()
    if when:
        with contextlib.suppress(OSError, StopIteration, ValueError):
            maps = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
            glog = ctypes.CDLL(next(line.split(maxsplit=5)[-1] for line in maps if "/libglog" in line))
            level = ctypes.c_int32.in_dll(glog, "_ZN3fLI17FLAGS_minloglevelE")
    hushes = level.value == _ERROR
    if hushes:  # if two threads do this at once, a line may be logged
        level.value = _FATAL
    try:
        yield
    finally:
        if hushes:
            level.value = _ERROR
