"""What processes hold, and what a run has left behind. Reads /proc; compares without I/O.

Each node is compared with itself at a calm moment before the first fault, even if it was started again meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DESCRIPTORS, THREADS = 24, 6
"""How many more may be there: connections to peers come and go, and threads are started when they are first needed."""
RSS_BYTES, RSS_PART = 96 << 20, 0.25
"""By how much memory may have grown: by this many bytes, and by this part of what it was."""


class Footprint(NamedTuple):
    """What a process and its children hold."""

    processes: int
    descriptors: int
    threads: int
    rss: int
    """Bytes."""


def footprint_of(group: int) -> Footprint:
    """Returns what the processes of a process group hold now."""
    processes = descriptors = threads = rss = 0
    for pid, pgid, state in _processes():
        if pgid != group or state == "Z":
            continue
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, ValueError):
            continue  # it ended meanwhile
        processes += 1
        threads += int(status.get("Threads", "0"))
        rss += int(status.get("VmRSS", "0 kB").split()[0]) << 10
    return Footprint(processes, descriptors, threads, rss)


def grown(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[str]:
    """Returns, as text, what each node holds beyond what it held before and what is allowed."""
    found = []
    for name, then in before.items():
        now = after.get(name)
        if now is None or not now.processes:
            found.append(f"{name} does not run")
            continue
        limits = (
            ("processes", then.processes, now.processes, then.processes),
            ("descriptors", then.descriptors, now.descriptors, then.descriptors + DESCRIPTORS),
            ("threads", then.threads, now.threads, then.threads + THREADS),
            ("MiB", then.rss >> 20, now.rss >> 20, (then.rss + RSS_BYTES + int(RSS_PART * then.rss)) >> 20),
        )
        found += [
            f"{name} had {was} {what} and has {there}, more than {limit}"
            for what, was, there, limit in limits
            if there > limit
        ]
    return found


def strangers_left() -> list[str]:
    """Returns the processes besides this one in its namespace. Reaps those that have ended."""
    found = []
    for pid, _, state in _processes():
        if pid == os.getpid():
            continue
        if state == "Z":
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        found.append(f"process {pid}: {command[:120]}")
    return found


def files_left(folder: Path, known: set[str]) -> list[str]:
    """Returns the files of a folder, except those of these names."""
    return sorted(f"{folder}/{entry.name}" for entry in folder.iterdir() if entry.name not in known)


def disk_troubles(path: Path, capacity: int) -> list[str]:
    """Returns what is wrong with a disk tier's folder when nothing is being written: half-written files, or more than its capacity."""
    files = [file for file in path.glob("*/*/[0-9a-f][0-9a-f]/*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    found = [f"{file} was never finished" for file in path.glob("*/*/tmp/*")]
    if total > capacity:
        found.append(f"{len(files)} files of the disk tier take {total} bytes, more than its capacity of {capacity}")
    return found


def _processes() -> list[tuple[int, int, str]]:
    """Returns number, process group and state of each process."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found.append((int(entry), int(fields[2]), fields[0]))
    return found
