"""The `transfer` section of the YAML, with a node's part in the pool; and sizes such as `4GiB`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)

_LARGEST = 2**60
_ADDRESS = re.compile(r"[^\s:]+:[0-9]{1,5}")

MIN_SEGMENT = 16 << 20
"""The smallest segment: Mooncake refuses smaller ones with -600 (measured). 0 means none and is allowed."""


class ByteSize(int):
    """A number of bytes, written in YAML as an integer or as `512MiB`, `4GiB`, `1GB`."""

    @classmethod
    def parse(cls, text: object) -> ByteSize:
        """Returns the size that `text` spells. Raises ValueError, which says what is allowed, if it is not a size."""
        if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= _LARGEST:
            return cls(text)
        if isinstance(text, str) and (match := _SIZE.fullmatch(text.strip())):
            unit = _UNITS.get(match[2].lower())
            if unit is not None and len(match[1]) <= 20 and float(match[1]) * unit <= _LARGEST:
                return cls(float(match[1]) * unit)
        raise ValueError(f"expected a size such as 512MiB, 4GiB or a number of bytes, got {text!r}")

    def __str__(self) -> str:
        for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
            if self >= 1024**power and self % 1024**power == 0:
                return f"{int(self) // 1024**power}{letter}iB"
        return f"{int(self)}B"

    __repr__ = __str__


Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time limits of the calls to the pool. The caller abandons a call that outlives its limit."""

    exist_ms: Milliseconds = 500
    get_ms: Milliseconds = 10_000
    put_ms: Milliseconds = 10_000
    close_ms: Milliseconds = 5_000


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the pool counts as down. Calls then return at once, and one probe per interval finds out when it is back."""

    failures: Positive = 3
    probe_interval_ms: Milliseconds = 1_000


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Says where in the pool a writer's objects go, and how long they stay."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """How many copies of each object there are, on different segments; fewer if there are fewer segments."""
    pin: Literal["none", "soft", "hard"] = "none"
    """`soft`: evicted only when nothing unpinned is left. `hard`: never evicted, so a pool can stay full for good."""
    soft_pin_ttl_s: Annotated[int, msgspec.Meta(ge=1, le=86_400)] = 1_800
    """How long a soft pin holds."""
    preferred_segment: Annotated[str, msgspec.Meta(pattern=r"^(own|any|[^\s:]+:[0-9]{1,5})\Z")] = "own"
    """`own`: this node's own segment, if it has one. `any`: a segment with room. `host:port`: that segment. If the preferred segment is
    full, Mooncake takes another."""


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `transfer` section: how a node's processes talk to the Mooncake pool."""

    client: Literal["embedded", "host"] = "embedded"
    """`embedded`: each process is a full client of the pool. `host`: each process shares memory with the one
    `mooncake_client` of its host, which a store node runs and which owns the host's segment."""
    client_address: str = ""
    """`host:port` of that `mooncake_client`. Empty in a cluster's file means the one of the same host's store node."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    metadata: str = "P2PHANDSHAKE"
    """`P2PHANDSHAKE`, `http://host:port/metadata` or `etcd://host:port`. All clients of one master must use the same."""
    devices: tuple[str, ...] = ()
    """The names of RDMA devices, e.g. `mlx5_0`. If it is empty, Mooncake chooses."""
    segment_size: ByteSize = ByteSize(0)
    """The memory that each node gives to the pool, unless the node sets its own; 0 gives none."""
    local_buffer_size: ByteSize = ByteSize(16 << 20)
    """Mooncake's own bounce buffer, used for small control objects only. Host clients have none."""
    staging_size: ByteSize = ByteSize(512 << 20)
    """The registered memory between the paged cache and the network: the only copy of a chunk on its way."""
    prefault: bool = True
    """Whether to touch segment and staging memory at start, so that no first write pays for page faults."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """How many transfer calls may be in flight at once in each direction. One saturates TCP; give RDMA 2 to 4."""
    direct_lookups: bool = True
    """Whether an embedded client's lookups ask a master that is not elected over connections of our own (`transfer.exist_rpc`). `false`: only
    through Mooncake's client, which takes longer."""
    timeouts: Timeouts = Timeouts()
    breaker: BreakerSettings = BreakerSettings()

    def __post_init__(self) -> None:
        if self.metadata != "P2PHANDSHAKE" and not self.metadata.startswith(("http://", "https://", "etcd://")):
            raise ValueError(
                f"metadata: {self.metadata!r} is neither P2PHANDSHAKE nor an address that starts with http:// or etcd://"
            )
        if self.protocol == "tcp" and self.devices:
            raise ValueError(f"devices: {list(self.devices)} given, but only protocol: rdma uses devices")
        if self.client == "embedded" and self.client_address:
            raise ValueError(f"client_address: {self.client_address!r} given, but only client: host uses it")
        if self.client_address and not _ADDRESS.fullmatch(self.client_address):
            raise ValueError(f"client_address: must be an address such as 127.0.0.1:50052, got {self.client_address!r}")
        if self.client == "host" and self.segment_size:
            raise ValueError(
                f"segment_size: {self.segment_size} given, but with client: host only store nodes give memory to the pool"
            )
        if 0 < self.segment_size < MIN_SEGMENT:
            raise ValueError(f"segment_size: must be 0 for none, or at least 16MiB, got {self.segment_size}")


def rdma_devices(sysfs: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Returns the names of this machine's RDMA devices, sorted."""
    return tuple(sorted(entry.name for entry in sysfs.iterdir())) if sysfs.is_dir() else ()
