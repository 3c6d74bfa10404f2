"""How fast does LMCache move objects by our L2 plugin? `store_ratio` and `load_ratio` of `lmcache bench l2`, against raw Mooncake.

Needs LMCache beside pd-cache (`make install-lmcache`). Each adapter runs in processes of its own, one at a time, several times in turn;
medians over all rounds are compared. Raw Mooncake moves bytes from and to LMCache's memory without a copy and without a checksum.

    python -m bench.suites.lmcache_l2 --json
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.lib.pool import local_pool
from bench.lib.report import at_least, finish, option, output_options

ROOT = Path(__file__).resolve().parents[2]
_ROUND = re.compile(r"\[(Store|Lookup|Load)\] Round (\d+): ([\d.]+) ms, \w+=(\d+)/(\d+)")
_TIMEOUT_S = 600.0
_MOVES = ("Store", "Load")
_SIZE, _OBJECTS = 4 << 20, 16
"""Bytes of an object, and objects of a task. LMCache's objects have 256 tokens of all layers."""


def rounds_of(adapter: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each measured round, by operation. Raises RuntimeError if a round did not store or load all objects."""
    command = [
        *(str(Path(sys.executable).parent / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter)),
        *("--num-keys", str(_OBJECTS), "--data-size-kb", str(_SIZE >> 10), "--rounds", str(rounds)),
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


@click.command()
@option("--rounds", default=5, type=click.IntRange(1), help="In each process.")
@option("--turns", default=3, type=click.IntRange(1), help="Processes for each adapter.")
@output_options
def main(rounds: int, turns: int, **output: Any) -> None:
    """Stores, loads and lookups of LMCache's L2, by pd-cache's plugin and by raw Mooncake."""
    took: dict[str, dict[str, list[float]]] = {}
    for _ in range(turns):
        run = uuid.uuid4().hex
        room = 4 * _SIZE * _OBJECTS * (rounds + 2) + (256 << 20)
        with local_pool(room) as master:
            transfer = {"staging_size": max(512 << 20, 32 * _SIZE)}
            plugins = {
                "ours": (
                    "pd_cache.adapters.lmcache",
                    "PdCacheL2Adapter",
                    {"master": master, "namespace": run, "part_size": _SIZE, "transfer": transfer},
                ),
                "raw": ("bench.lib.lmcache_raw", "RawMooncakeL2Adapter", {"master": master, "prefix": run}),
            }
            for name, (module, kind, params) in plugins.items():
                adapter = {"type": "plugin", "module_path": module, "class_name": kind, "adapter_params": params}
                for operation, times in rounds_of(adapter, rounds).items():
                    took.setdefault(name, {}).setdefault(operation, []).extend(times)
    rows: list[dict[str, Any]] = []
    for name, of_each in took.items():
        of_raw = {f"{move.lower()}_ratio": median(took["raw"][move]) / median(of_each[move]) for move in _MOVES}
        rates = {f"{move.lower()}_gbps": _SIZE * _OBJECTS / median(of_each[move]) / 1e6 for move in _MOVES}
        rows.append({"adapter": name, **rates, "lookup_ms": median(of_each["Lookup"]), **of_raw})
    checks = [at_least(f"{move.lower()}: ours / raw", rows[0][f"{move.lower()}_ratio"], 0.9) for move in _MOVES]
    finish({"results": rows}, checks, **output)


if __name__ == "__main__":
    main()
