"""How a figure came about: what a reader needs to compare it with another one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import msgspec

import pd_cache
from pd_cache.cluster import ClusterConfig

_MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13")


def about(config: ClusterConfig | None = None) -> dict[str, str]:
    """Returns the command, when and where it ran, versions, and those of the file's settings that bear on speed, unless they are the
    defaults."""
    facts = {
        "command": command(),
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "machine": machine(),
        "versions": versions(),
    }
    if config is not None:
        facts["cluster"] = config.name
        facts |= {"transfer": _changed(config.transfer), "cache": _changed(config.cache)}
    return facts


def command() -> str:
    """Returns what was typed; a bench that was started as a module is named as `pd-cache` knows it."""
    program = Path(sys.argv[0])
    words = ["pd-cache", "bench", program.stem] if program.parent.name == "suites" else [program.name]
    return shlex.join([*words, *sys.argv[1:]])


def machine() -> str:
    """Name, processors, memory, kernel and present load of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{socket.gethostname()}: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, load {load}"


def versions() -> str:
    """The versions of pd-cache, Mooncake's wheel and Python."""
    found = [f"pd-cache {pd_cache.__version__}"]
    for name in _MOONCAKE:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _changed(section: msgspec.Struct) -> str:
    here: Mapping[str, object] = msgspec.to_builtins(section, enc_hook=str)
    usual: Mapping[str, object] = msgspec.to_builtins(type(section)(), enc_hook=str)
    return ", ".join(f"{key}: {value}" for key, value in here.items() if value != usual[key]) or "defaults"
