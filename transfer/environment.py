"""The variables that Mooncake's client reads, set from our settings in this one place.

They are read at the first `setup()` of a process, so `prepare` runs before it; a variable that the user has set wins.
docs/mooncake.md says what each was measured to do.
"""

from __future__ import annotations

import os

from transfer.settings import TransferSettings

MAX_TRANSFERS = 1000
"""Most transfers in one call. More than 2048 outstanding ones to a peer fail with -800 at Mooncake's defaults."""


def split_master(master: str) -> tuple[str, str | None]:
    """Splits a master's address into Mooncake's own form and the election's name, which `etcd://host:port;host:port/NAME` has."""
    if not master.startswith("etcd://"):
        return master, None
    endpoints, _, name = master.removeprefix("etcd://").partition("/")
    return f"etcd://{endpoints}", name or None


def stall_seconds(settings: TransferSettings) -> int:
    """How long a transfer over TCP may stand still before Mooncake fails it."""
    return max(1, min(10, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 3000))


def engine_timeout_seconds(settings: TransferSettings) -> int:
    """After how many seconds a TransferEngine that is used directly gives a transfer up; Mooncake takes no less than 5 s."""
    return max(5, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 1000)


def client_variables(settings: TransferSettings, election: str | None = None) -> dict[str, str]:
    """The variables that `prepare` sets, by name."""
    stall = str(stall_seconds(settings))
    return {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # 20 by default: 90 s in setup() while the master is away
        "MC_RPC_TIMEOUT_MS": str(max(1000, settings.timeouts.exist_ms)),  # 30 s for a master that is stopped
        "MC_TCP_PROGRESS_TIMEOUT_SEC": stall,
        "MC_TCP_STATUS_TIMEOUT_SEC": stall,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
        # of a TransferEngine used directly; the store does not read it
        "MC_TRANSFER_TIMEOUT": str(engine_timeout_seconds(settings)),
        "MC_LOG_LEVEL": "ERROR",
        # which masters' election to follow; without it a client of elected masters cannot set up
        **({"MC_STORE_CLUSTER_ID": election} if election is not None else {}),
    }


def host_environment(settings: TransferSettings, election: str | None = None) -> dict[str, str]:
    """The whole environment of a host's `mooncake_client`, which is the client of all processes of its host.

    It allocates its segment with malloc and does not touch it; the first writer of each page would pay for the fault.
    With `prefault`, glibc is asked for huge pages, and to fill what it allocates: that happens before the segment is
    mounted. `election`: see `split_master`.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if settings.prefault:
        tunables = ":".join(filter(None, ("glibc.malloc.hugetlb=1:glibc.malloc.perturb=85", tunables)))
    return {**client_variables(settings, election), **os.environ, "GLIBC_TUNABLES": tunables}


def prepare(settings: TransferSettings, election: str | None = None) -> None:
    """Sets the variables that are not set yet. `election`: see `split_master`."""
    for name, value in client_variables(settings, election).items():
        os.environ.setdefault(name, value)
