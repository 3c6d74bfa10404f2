"""Checks of this machine: Mooncake's libraries, RDMA and memory.

Each check yields findings, and changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from launch.doctor.report import Finding, broken, ok, skipped, warning
from pd_cache.cluster import ClusterConfig, Node
from pd_cache.cluster.machine import (
    machine_memory,
    needs,
    read_text,
    shortage,
    shown_bytes,
    shown_needs,
)
from transfer.settings import WHEELS, TransferSettings, rdma_devices

# --- Mooncake's libraries -----------------------------------------------------------------------------------


_WHY_MOONCAKE = "without it no process of pd-cache can reach the pool"
_IMPORT_S = 30.0
_PROGRAM = "from transfer.store import load_mooncake; load_mooncake()"


def library_findings() -> Iterator[Finding]:
    """Checks Mooncake's wheel in this Python."""
    installed, check = {}, "libraries.wheel"
    for name in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        yield broken(
            check, "no Mooncake wheel is installed", why=_WHY_MOONCAKE,
            repair="pip install mooncake-transfer-engine-non-cuda   # with a GPU: mooncake-transfer-engine (CUDA 12) or -cuda13",
        )  # fmt: skip
    elif len(installed) > 1:
        yield broken(
            check, f"{shown}: several wheels of one package", why="each overwrites the files of the other",
            repair=f"pip uninstall -y {' '.join(installed)}; then pip install one of them",
        )  # fmt: skip
    else:
        yield ok(check, shown)
    yield _import_finding()


def _import_finding() -> Finding:
    """Imports Mooncake as our processes do, but in a separate process, because a library that crashes must
    not end the doctor."""
    check = "libraries.import"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            capture_output=True,
            text=True,
            check=False,
            timeout=_IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        return broken(check, f"importing mooncake.store did not end within {_IMPORT_S:g} s", why=_WHY_MOONCAKE,
                      repair=f'{sys.executable} -c "import mooncake.store"   # and see where it hangs')  # fmt: skip
    if done.returncode == 0:
        return ok(check, "mooncake.store can be imported")
    lines = done.stderr.strip().splitlines()
    why = (
        lines[-1].partition("MissingLibraryError: ")[2] or lines[-1]
        if lines
        else f"it ended with {done.returncode}"
    )
    return broken(
        check,
        f"mooncake.store cannot be imported: {why}",
        why=_WHY_MOONCAKE,
        repair="install the library that it names",
    )


# --- RDMA ---------------------------------------------------------------------------------------------------


_WHY_RDMA = "transfer.protocol is rdma; Mooncake would silently run over TCP"
_ONLY_RDMA = "needed only with transfer.protocol: rdma"


def rdma_findings(transfer: TransferSettings | None, root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at the devices of the machine whose `/sys`, `/proc` and `/dev` are below `root`.

    `transfer`: the `transfer` section of the cluster's file; None without a file.
    """
    needed = transfer is not None and transfer.protocol == "rdma"
    problem = broken if needed else warning
    sysfs = root / "sys/class/infiniband"
    present = rdma_devices(sysfs)
    chosen = transfer.devices if transfer is not None and transfer.devices else present
    if not present:
        if needed:
            yield broken(
                "rdma.devices", f"this machine has no RDMA device ({sysfs} is empty)", why=_WHY_RDMA,
                repair="load the NIC's driver, e.g. modprobe mlx5_ib; in a container: pass the devices in; or transfer.protocol: tcp",
            )  # fmt: skip
        else:
            yield skipped("rdma.devices", f"this machine has none; {_ONLY_RDMA}")
        return
    for name in chosen:
        if name not in present:
            yield broken(
                "rdma.devices", f"is not a device of this machine; there are: {', '.join(present)}", name, why=_WHY_RDMA,
                repair="transfer.devices: name devices that this machine has, or [] for Mooncake's choice",
            )  # fmt: skip
        else:
            yield ok("rdma.devices", "is there", name)
            for port in sorted((sysfs / name / "ports").glob("*")):
                yield _link_finding(port, f"{name}/{port.name}", problem)
                yield _gid_finding(port, f"{name}/{port.name}", problem)
    if verbs := sorted((root / "dev/infiniband").glob("uverbs*")):
        yield ok("rdma.verbs", ", ".join(f"/dev/infiniband/{node.name}" for node in verbs))
    else:
        yield problem(
            "rdma.verbs", "/dev/infiniband has no uverbs device", why="libibverbs opens the NIC through it",
            repair="modprobe ib_uverbs; in a container: docker run --device=/dev/infiniband --cap-add=IPC_LOCK",
        )  # fmt: skip


def _link_finding(port: Path, about: str, problem: Callable[..., Finding]) -> Finding:
    check = "rdma.link"
    state, physical = _word(port / "state"), _word(port / "phys_state")
    layer, rate = read_text(port / "link_layer"), read_text(port / "rate")
    found = f"{state or 'state unknown'} ({physical or 'link unknown'}), {layer}, {rate}"
    if state == "ACTIVE":
        return ok(check, found, about)
    repair = {
        "INIT": "start a subnet manager for the fabric: systemctl start opensm",
        "DOWN": f"ibstat {about.partition('/')[0]}; plug in the cable, or ip link set DEV up",
    }.get(state, "ibstat; see the driver's messages in dmesg")
    return problem(check, found, about, why="a port that is not ACTIVE carries nothing", repair=repair)


def _gid_finding(port: Path, about: str, problem: Callable[..., Finding]) -> Finding:
    check = "rdma.gids"
    gids = {}
    for file in sorted((port / "gids").glob("*"), key=lambda file: int(file.name)):
        gid = read_text(file)
        if gid and int(gid.replace(":", ""), 16) & (1 << 64) - 1:
            gids[int(file.name)] = gid
    if gids and read_text(port / "link_layer") != "Ethernet":
        return ok(check, f"{len(gids)} GIDs", about)
    routable = [
        f"{index} ({address})"
        for index, gid in gids.items()
        if "v2" in read_text(port / "gid_attrs" / "types" / str(index))
        and (address := ipaddress.IPv6Address(gid).ipv4_mapped)
    ]
    if not routable:
        return problem(
            check, f"{len(gids)} GIDs, none of them RoCE v2 with an IPv4 address", about,
            why="peers address a port by its GID; RoCE v1 and link-local GIDs do not cross routers, and peers may choose another kind",
            repair="ip addr add ADDRESS/PREFIX dev DEV   # RoCE makes its GIDs from the interface's addresses; then show_gids",
        )  # fmt: skip
    return ok(check, f"{len(gids)} GIDs; RoCE v2 over IPv4 at index {', '.join(routable)}", about)


def _word(file: Path) -> str:
    """Returns the word of `4: ACTIVE`."""
    return read_text(file).rpartition(":")[2].strip()


# --- memory -------------------------------------------------------------------------------------------------


_TIGHT = 0.9
"""The share of the free memory: more than this leaves too little to engines and the page cache."""


def memory_finding(
    config: ClusterConfig | None, nodes: Collection[Node], running: Collection[str], root: Path = Path("/")
) -> Finding:
    """Compares the free memory with the needs of this machine's `nodes`. `running`: the names of the nodes
    that already have their memory."""
    wanted = needs(config, nodes) if config is not None else {}
    check = "memory.free"
    why = "segments and staging memory are made resident at the start; a process that does not fit is killed"
    memory = machine_memory(root)
    have = f"{shown_bytes(memory.free)} free of {shown_bytes(memory.total)} ({memory.limiter})"
    missing = sum(size for name, size in wanted.items() if name not in running)
    if not wanted:
        return ok(check, have)
    if lacking := shortage(wanted, memory):
        return broken(
            check, lacking, why=why,
            repair="lower segment_size of these nodes, transfer.staging_size or the local tier's capacity",
        )  # fmt: skip
    if not missing:
        return ok(check, f"{have}; all nodes of this host have theirs: {shown_bytes(sum(wanted.values()))}")
    found = f"{have}; nodes that do not run yet need {shown_bytes(missing)} ({shown_needs(wanted)})"
    if missing > memory.free:
        return broken(
            check,
            found,
            why=why,
            repair="stop other programs that use memory (ps aux --sort=-rss), or lower segment_size",
        )
    if missing > memory.free * _TIGHT:
        return warning(
            check, found, why="little memory is left for engines", repair="lower segment_size of these nodes"
        )
    return ok(check, found)
