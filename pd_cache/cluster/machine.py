"""Checks whether this machine can run the nodes of a file: addresses, ports, devices, memory and files.

`config check`, `launch`, `up` and `doctor` all use these checks, so that they agree. Only `config check`
refuses problems with which nodes start (`further_problems`). Memory is compared with limits only: free memory
changes by the minute, and only `doctor` knows which nodes already have their memory.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pd_cache.cluster.checks import KeyPath, Problem
from pd_cache.cluster.reader import Source
from pd_cache.cluster.schema import (
    ClusterConfig,
    EngineNode,
    EtcdDiscovery,
    Node,
    ProxyNode,
    VllmEngineConfig,
    argument,
    data_parallel,
    tensor_parallel,
)
from pd_cache.config import DiskTier, LocalTier
from pd_cache.weights import SUFFIXES
from transfer.settings import rdma_devices

_CAP_IPC_LOCK = 14
_GPU_SHARE = 0.9
"""The smallest share of a GPU's memory that vLLM takes by default."""


def check_machine(config: ClusterConfig, source: Source, nodes: Iterable[Node]) -> None:
    """Raises ConfigError for `machine_problems`."""
    if problems := list(machine_problems(config, nodes)):
        raise source.error(*problems)


def machine_problems(
    config: ClusterConfig, nodes: Iterable[Node], root: Path = Path("/")
) -> Iterator[Problem]:
    """Yields the reasons why the machine cannot run `nodes`, the most basic problems first. Its `/proc` and
    `/sys` are below `root`."""
    mine = list(nodes)
    yield from _device_problems(config) if mine else ()
    yield from _memory_problems(config, mine, root)
    yield from _file_problems(config, mine)
    yield from _port_problems(config, mine)
    yield from _gpu_problems(config, mine, root)


def further_problems(config: ClusterConfig, nodes: Iterable[Node]) -> Iterator[Problem]:
    """Yields problems with which `nodes` start all the same: hosts that cannot be resolved, disks that cannot
    be written or are too small."""
    named: list[tuple[KeyPath, str]] = [
        (("nodes", n, "host"), node.host) for n, node in enumerate(config.nodes)
    ]
    if isinstance(config.discovery, EtcdDiscovery):
        named += [
            (("discovery", "endpoints", n), host_of(endpoint))
            for n, endpoint in enumerate(config.discovery.endpoints)
        ]
    for path, host in named:
        try:
            socket.getaddrinfo(host, None, socket.AF_INET)
        except OSError as error:
            yield Problem(path, f"this machine finds no IPv4 address for it: {error.strerror}")
    all_caching = config.caching_nodes()
    caching, wanted = [node for node in nodes if node in all_caching], Counter[int]()
    for index, tier in enumerate(config.cache.tiers):
        if isinstance(tier, DiskTier) and caching:
            folder = next(path for path in (Path(tier.path), *Path(tier.path).parents) if path.exists())
            if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                what = "cannot be written by this user" if folder.is_dir() else "is no folder"
                yield Problem(("cache", "tiers", index, "path"), f"{folder} {what} on this machine")
                continue
            wanted[disk := folder.stat().st_dev] += len(caching) * tier.capacity
            if (size := shutil.disk_usage(folder).total) < wanted[disk]:
                yield Problem(
                    ("cache", "tiers", index, "capacity"),
                    f"the disk of {folder} has {shown_bytes(size)}, too little for the {shown_bytes(wanted[disk])} "
                    f"of tiers at {', '.join(node.name for node in caching)}; a full disk switches the tier off",
                )


def missing_model(engine: VllmEngineConfig) -> Path | None:
    """Returns where Hugging Face's cache would hold the engine's model, if the model is not there. Returns
    None if it is, or if `model` is no name of a model."""
    if Path(engine.model).is_dir() or engine.model.startswith(("/", ".")) or "://" in engine.model:
        return None
    env = {**os.environ, **engine.env}
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    hubs = (argument(engine.args, "download-dir"), env.get("HF_HUB_CACHE") or f"{home}/hub")
    places = [
        Path(str(hub), f"models--{engine.model.partition(':')[0].replace('/', '--')}") for hub in hubs if hub
    ]
    return None if any(any(place.glob("snapshots/*/*")) for place in places) else places[-1]


def find_program(name: str) -> str | None:
    """Returns the path of a program beside this Python, or else in PATH; None if it is in neither."""
    beside = Path(sys.executable).parent / name  # this is the program itself if `name` is an absolute path
    return str(beside) if beside.is_file() else shutil.which(name)


def _device_problems(config: ClusterConfig) -> Iterator[Problem]:
    if config.transfer.protocol != "rdma":
        return
    present = rdma_devices()
    there = ", ".join(present) or "none"
    if not present:
        yield Problem(
            ("transfer", "protocol"),
            "this machine has no RDMA device (/sys/class/infiniband is empty); use tcp",
        )
    for index, device in enumerate(config.transfer.devices):
        if device not in present:
            yield Problem(
                ("transfer", "devices", index), f"is not an RDMA device of this machine; there are: {there}"
            )


def _memory_problems(config: ClusterConfig, nodes: Sequence[Node], root: Path) -> Iterator[Problem]:
    wanted = needs(config, nodes)
    if lacking := shortage(wanted, machine_memory(root)):
        largest = max(wanted, key=wanted.__getitem__)
        yield Problem(("nodes", [node.name for node in config.nodes].index(largest)), lacking)
    if config.transfer.protocol == "rdma" and (lacking := locked_shortage(wanted, root)):
        yield Problem(
            ("transfer", "protocol"), f"rdma locks memory: {lacking}; run `ulimit -l unlimited`, or use tcp"
        )


def _file_problems(config: ClusterConfig, nodes: Sequence[Node]) -> Iterator[Problem]:
    """Yields the files and folders of the configuration that the processes of `nodes` cannot read on this
    machine."""
    engine = config.engine
    if isinstance(engine, VllmEngineConfig) and any(isinstance(node, EngineNode) for node in nodes):
        if find_program(engine.executable) is None:
            yield Problem(
                ("engine", "executable"), f"is not installed: neither beside {sys.executable} nor in PATH"
            )
        if engine.model.startswith(("/", ".")) and not (Path(engine.model) / "config.json").is_file():
            yield Problem(
                ("engine", "model"),
                "is not a Hugging Face model folder on this machine: it has no config.json",
            )
        elif (folder := Path(engine.model)).is_dir() and argument(engine.args, "load-format") is None:
            if not any(file.suffix in SUFFIXES for file in folder.iterdir()):
                yield Problem(
                    ("engine", "model"),
                    f"has no weights: no file that ends with {', '.join(sorted(SUFFIXES))}",
                )
        elif {**os.environ, **engine.env}.get("HF_HUB_OFFLINE", "0") not in ("", "0") and (
            place := missing_model(engine)
        ):
            yield Problem(
                ("engine", "model"),
                f"is neither a folder nor at {place}, and HF_HUB_OFFLINE forbids to download it",
            )
    files: list[tuple[KeyPath, object]] = []
    if any(isinstance(node, ProxyNode) for node in nodes):
        keys = ("api_keys_file", "monitor_keys_file", "node_key_file", "tenants_file")
        files += [(("proxy", key), getattr(config.proxy, key)) for key in keys]
        if config.proxy.tls is not None:
            files += [
                (("proxy", "tls", key), file)
                for key, file in msgspec.structs.asdict(config.proxy.tls).items()
            ]
    if nodes and isinstance(config.discovery, EtcdDiscovery):
        files.append((("discovery", "password_file"), config.discovery.password_file))
        if (tls := config.discovery.tls) is not None:
            files += [(("discovery", "tls", key), file) for key, file in msgspec.structs.asdict(tls).items()]
    for path, file in files:
        if file is not None and not os.access(str(file), os.R_OK):
            yield Problem(path, "does not exist on this machine, or cannot be read")


def _port_problems(config: ClusterConfig, nodes: Iterable[Node]) -> Iterator[Problem]:
    for node in nodes:
        if not is_local(node.host):
            place = ("nodes", config.nodes.index(node), "host")
            yield Problem(place, "is not an address of this machine")
            continue
        for key, port in node.ports.items():
            if port and not is_bindable(node.host, port):
                yield Problem(
                    ("nodes", config.nodes.index(node), key),
                    f"another process uses this port of {node.host}; choose another port, or 0 for any free one "
                    "(if the node itself runs already, all is well: `config check --file-only` does not look)",
                )


def _gpu_problems(config: ClusterConfig, nodes: Iterable[Node], root: Path) -> Iterator[Problem]:
    """Yields the nodes that share a GPU and together want more than all of its memory."""
    engine, there = config.engine, len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    if not isinstance(engine, VllmEngineConfig):
        return
    shares: dict[str, dict[str, float]] = {}
    for node in nodes:
        if not there or not isinstance(node, EngineNode):
            continue
        visible = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(there))),
            **os.environ,
            **engine.env,
            **node.env,
        }
        stages, share = (
            argument(node.args, name) or argument(engine.args, name)
            for name in ("pipeline-parallel-size", "gpu-memory-utilization")
        )
        ranks = tensor_parallel(engine, node) * len(data_parallel(engine, node)[1])
        ranks *= stages if isinstance(stages, int) else 1
        for gpu in filter(None, map(str.strip, visible["CUDA_VISIBLE_DEVICES"].split(",")[:ranks])):
            taken = shares.setdefault(gpu, {})
            taken[node.name] = share if isinstance(share, float) else _GPU_SHARE
            if len(taken) > 1 and sum(taken.values()) > 1:
                yield Problem(
                    ("nodes", config.nodes.index(node)),
                    f"{', '.join(taken)} together want {sum(taken.values()):.0%} of the memory of GPU {gpu} (gpu-memory-utilization); "
                    "give each a GPU of its own, env: {CUDA_VISIBLE_DEVICES: N}, or a smaller share",
                )


# --- addresses and ports ------------------------------------------------------------------------------------


def is_local(host: str) -> bool:
    """Returns whether an address belongs to this machine: whether it can be bound."""
    return is_bindable(host, 0)


def local_nodes(config: ClusterConfig) -> list[Node]:
    """Returns the nodes that run on this machine."""
    local = {host: is_local(host) for host in {node.host for node in config.nodes}}
    return [node for node in config.nodes if local[node.host]]


def own_host(config: ClusterConfig) -> str:
    """Returns this machine's address in the file, or else the one from which it reaches the file's first
    node: the address for a client of the pool."""
    if mine := local_nodes(config):
        return mine[0].host
    try:
        return source_address(config.nodes[0].host, 9)
    except OSError:
        return "127.0.0.1"


def is_bindable(host: str, port: int) -> bool:
    """Returns whether an address belongs to this machine and nothing listens at it."""
    try:
        with bound_socket(host, port):
            return True
    except OSError:
        return False


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an IPv4 address, as Mooncake's are. Raises OSError if that is impossible."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def source_address(host: str, port: int) -> str:
    """Returns this machine's address as `host` sees it. Raises OSError if it is not reachable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((host, port))  # nothing is sent
        return str(sender.getsockname()[0])


def host_of(address: str) -> str:
    """Returns the host of `host:port` or of a URL; empty if there is none."""
    try:
        return urllib.parse.urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


def port_of(address: str) -> int:
    """Returns the port of `host:port` or of a URL; 0 if there is none."""
    try:
        return urllib.parse.urlsplit(address if "://" in address else f"//{address}").port or 0
    except ValueError:
        return 0


# --- memory: what nodes need, and what the machine and its cgroups allow ------------------------------------


def needs(config: ClusterConfig, nodes: Iterable[Node]) -> dict[str, int]:
    """Returns the bytes that each of `nodes` holds while it runs, besides its engine: its segment, staging
    memory and local tiers. Leaves out nodes that need none."""
    caching = config.caching_nodes()
    tiers = sum(int(tier.capacity) for tier in config.cache.tiers if isinstance(tier, LocalTier))
    own = int(config.transfer.staging_size) + tiers
    found = {node.name: config.segment_size(node) + (own if node in caching else 0) for node in nodes}
    return {name: size for name, size in found.items() if size}


class MachineMemory(NamedTuple):
    """The bytes that this process and its children may use."""

    total: int
    free: int
    """The part of them that is free now. The page cache counts as free."""
    limiter: str
    """The limit that sets the total: `the machine` or `its cgroup`."""


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Returns the memory of the machine whose `/proc` and `/sys` are below `root`, within the limits of this
    process's cgroups."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE))
    total, free = (int(info.get(name, 0)) << 10 for name in ("MemTotal", "MemAvailable"))
    limiter = "the machine"
    for limit, used in _cgroup_limits(root):
        if limit < total:
            total, limiter = limit, "its cgroup"
        free = min(free, max(0, limit - used))
    return MachineMemory(total, free, limiter)


def shortage(wanted: Mapping[str, int], memory: MachineMemory) -> str | None:
    """Returns why a machine is too small for its nodes, even if nothing else runs there; None if it is
    not."""
    everything = sum(wanted.values())
    if everything <= memory.total:
        return None
    return (
        f"the nodes of this host need {shown_bytes(everything)} ({shown_needs(wanted)}), but it has "
        f"{shown_bytes(memory.total)} ({memory.limiter})"
    )


def locked_shortage(wanted: Mapping[str, int], root: Path = Path("/")) -> str | None:
    """Returns why RDMA, which locks every byte that it registers, cannot register a node's memory; None if it
    can."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    largest = max(wanted.values(), default=0)
    capable = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(root / "proc/self/status"), re.MULTILINE)
    exempt = capable is not None and int(capable[1], 16) >> _CAP_IPC_LOCK & 1
    if exempt or limit == resource.RLIM_INFINITY or limit >= largest:
        return None
    return f"the limit is {shown_bytes(limit)}, but the largest process locks {shown_bytes(largest)}"


def shown_needs(wanted: Mapping[str, int]) -> str:
    """Returns the needs of each node as text."""
    return ", ".join(f"{name} {shown_bytes(size)}" for name, size in wanted.items())


def shown_bytes(value: float) -> str:
    """Returns a number of bytes as text for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and the use, without the page cache, of each memory cgroup (of version 2) of this
    process."""
    path = re.search(r"^0::(.*)$", read_text(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    here = top / (path[1].strip("/") if path else "")
    # in a container the path may be that of the host; then only the top folder exists
    for folder in dict.fromkeys((here, *here.parents)):
        if not folder.is_relative_to(top):
            break
        limit, used = read_text(folder / "memory.max"), read_text(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            cached = re.search(r"^inactive_file (\d+)", read_text(folder / "memory.stat"), re.MULTILINE)
            yield int(limit), max(0, int(used) - (int(cached[1]) if cached else 0))


def read_text(file: Path) -> str:
    """Returns the text of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeError):
        return ""
