"""`lmcache bench l2` with our plugin, with raw Mooncake and with LMCache's adapter for file systems, in turn.

Needs LMCache beside pd-cache (`make install-lmcache`). Each adapter runs in processes of its own, one at a time, several times in turn;
medians over all rounds are compared. Raw Mooncake moves bytes from and to LMCache's memory without a copy and without a checksum.
The files lie in memory if `--folder` does (/dev/shm): then they show what copying alone costs.

    python -m bench.suites.lmcache_l2 --size 4MiB --objects 16
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.lib.pool import local_pool
from transfer.settings import ByteSize

ROOT = Path(__file__).resolve().parents[2]
_ROUND = re.compile(r"\[(Store|Lookup|Load)\] Round (\d+): ([\d.]+) ms, \w+=(\d+)/(\d+)")
_TIMEOUT_S = 600.0
_MOVES = ("Store", "Load")


def rounds_of(adapter: dict[str, Any], size: int, objects: int, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each measured round, by operation. Raises RuntimeError if a round did not store or load all objects."""
    command = [
        *(str(Path(sys.executable).parent / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter)),
        *("--num-keys", str(objects), "--data-size-kb", str(size >> 10), "--rounds", str(rounds)),
        *("--lookup-max-hit-rate", "1.0", "--l1-align-bytes", "4096"),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_DISABLE_BANNER": "1", "MC_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=_TIMEOUT_S)
    took: dict[str, list[float]] = {"Store": [], "Lookup": [], "Load": []}
    for operation, number, milliseconds, right, asked in _ROUND.findall(done.stdout):
        if right != asked:
            raise RuntimeError(f"{operation} round {number}: {right} of {asked} objects\n{done.stdout[-2000:]}")
        if int(number) > 1:  # the first is for warming up
            took[operation].append(float(milliseconds))
    if any(len(times) != rounds for times in took.values()):
        raise RuntimeError(
            f"lmcache bench l2 ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return took


@click.command(help=__doc__)
@click.option(
    "--size", default="4MiB", help="Of an object; LMCache's have 256 tokens of all layers.", show_default=True
)
@click.option("--objects", default=16, help="In one task.", show_default=True)
@click.option("--rounds", default=5, help="In each process.", show_default=True)
@click.option("--turns", default=3, help="Processes for each adapter.", show_default=True)
@click.option("--folder", default="/dev/shm", help="Where the files lie.", show_default=True)
def main(size: str, objects: int, rounds: int, turns: int, folder: str) -> None:
    nbytes = int(ByteSize.parse(size))
    plugin = {"type": "plugin", "module_path": "pd_cache.adapters.lmcache", "class_name": "PdCacheL2Adapter"}
    bare = {"type": "plugin", "module_path": "bench.lib.lmcache_raw", "class_name": "RawMooncakeL2Adapter"}
    took: dict[str, dict[str, list[float]]] = {}
    room = 4 * nbytes * objects * (rounds + 2) + (256 << 20)
    for _ in range(turns):
        run = uuid.uuid4().hex
        with local_pool(room) as master, tempfile.TemporaryDirectory(dir=folder) as files:
            params = {
                "master": master,
                "namespace": run,
                "part_size": nbytes,
                "transfer": {"staging_size": max(512 << 20, 32 * nbytes)},
            }
            adapters: dict[str, dict[str, Any]] = {
                "pd-cache": {**plugin, "adapter_params": params},
                "raw Mooncake": {**bare, "adapter_params": {"master": master, "prefix": run}},
                "LMCache fs": {"type": "fs", "base_path": files},
            }
            for name, adapter in adapters.items():
                for operation, times in rounds_of(adapter, nbytes, objects, rounds).items():
                    took.setdefault(name, {}).setdefault(operation, []).extend(times)
    total = nbytes * objects
    click.echo(f"{objects} objects of {size} in a task, median (best) of {rounds * turns} rounds")
    click.echo(f"{'':14}{'store GB/s':>18}{'load GB/s':>18}{'lookup ms':>18}")
    for name, of_each in took.items():
        cells = [f"{total / median(of_each[o]) / 1e6:.2f} ({total / min(of_each[o]) / 1e6:.2f})" for o in _MOVES]
        cells.append(f"{median(of_each['Lookup']):.2f} ({min(of_each['Lookup']):.2f})")
        click.echo(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells))
    raw, ours = took["raw Mooncake"], took["pd-cache"]
    ratios = {o: median(raw[o]) / median(ours[o]) for o in _MOVES}
    best = {o: min(raw[o]) / min(ours[o]) for o in _MOVES}
    click.echo(
        f"pd-cache / raw: store {ratios['Store']:.2f} ({best['Store']:.2f}), load {ratios['Load']:.2f} ({best['Load']:.2f})"
    )


if __name__ == "__main__":
    main()
