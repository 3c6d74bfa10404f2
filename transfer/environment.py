"""Sets the variables that Mooncake's client reads, from our settings.

Mooncake reads them at the first `setup()` of a process, so `prepare` runs before it. A variable that the user has set wins.
docs/mooncake.md says what each does, as measured.
"""

from __future__ import annotations

import os

from transfer.settings import TransferSettings

MAX_TRANSFERS = 1000
"""The most transfers in one call. With Mooncake's defaults, more than 2048 outstanding transfers to a peer fail with -800."""


def split_master(master: str) -> tuple[str, str | None]:
    """Returns a master's address in Mooncake's form, and the name of the election in `etcd://host:port;host:port/NAME` or None."""
    if not master.startswith("etcd://"):
        return master, None
    endpoints, _, name = master.removeprefix("etcd://").partition("/")
    return f"etcd://{endpoints}", name or None


def stall_seconds(settings: TransferSettings) -> int:
    """Returns how long a transfer over TCP may stand still before Mooncake fails it."""
    return max(1, min(10, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 3000))


def engine_timeout_seconds(settings: TransferSettings) -> int:
    """Returns after how many seconds a TransferEngine that is used directly gives up a transfer. Mooncake takes no less than 5 s."""
    return max(5, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 1000)


def client_variables(settings: TransferSettings, election: str | None = None) -> dict[str, str]:
    """Returns the variables that `prepare` sets, by name."""
    stall = str(stall_seconds(settings))
    return {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # the default of 20 takes 90 s in setup() while the master is away
        "MC_RPC_TIMEOUT_MS": str(max(1000, settings.timeouts.exist_ms)),  # the default is 30 s if the master is stopped
        "MC_TCP_PROGRESS_TIMEOUT_SEC": stall,
        "MC_TCP_STATUS_TIMEOUT_SEC": stall,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
        # only a TransferEngine that is used directly reads it
        "MC_TRANSFER_TIMEOUT": str(engine_timeout_seconds(settings)),
        "MC_LOG_LEVEL": "ERROR",
        # the election to follow; without it, setup() fails with elected masters
        **({"MC_STORE_CLUSTER_ID": election} if election is not None else {}),
    }


def host_environment(settings: TransferSettings, election: str | None = None) -> dict[str, str]:
    """Returns the whole environment of a host's `mooncake_client`, which is the client of all processes of its host.

    `mooncake_client` allocates its segment with malloc and does not touch it, so the first writer of each page would pay for the
    fault. With `prefault`, glibc uses huge pages and fills what it allocates, before the segment is mounted. `election`: see
    `split_master`.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if settings.prefault:
        tunables = ":".join(filter(None, ("glibc.malloc.hugetlb=1:glibc.malloc.perturb=85", tunables)))
    return {**client_variables(settings, election), **os.environ, "GLIBC_TUNABLES": tunables}


def prepare(settings: TransferSettings, election: str | None = None) -> None:
    """Sets the variables that are not set yet. `election`: see `split_master`."""
    for name, value in client_variables(settings, election).items():
        os.environ.setdefault(name, value)
