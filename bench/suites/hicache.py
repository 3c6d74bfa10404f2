"""Pages of an SGLang host pool, to and from a Mooncake pool: by pd-cache's HiCache backend, and by SGLang's own Mooncake backend.

Needs SGLang beside pd-cache (`make install-sglang`). Both run in this process, in turn, over the same host pool (`page_first`, attention
heads), each with names of its own. SGLang's moves bytes straight from and to the host pool, without a checksum and without a deadline.

    python -m bench.suites.hicache --pages 64 --rounds 7
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from statistics import median

import click

from bench.lib.pool import local_pool
from bench.lib.sglang_pools import host_pool, mooncakes_own, ours

_MIB = 1 << 20


@click.command(help=__doc__)
@click.option("--pages", default=64, help="In one call.", show_default=True)
@click.option("--tokens", default=64, help="Of a page.", show_default=True)
@click.option("--layers", default=32, help="Of the model, which has 8 KV heads of 128 in bf16.", show_default=True)
@click.option("--rounds", default=7, help="Of which the first is for warming up.", show_default=True)
def main(pages: int, tokens: int, layers: int, rounds: int) -> None:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    host = host_pool(pages=2 * pages, tokens=tokens, layers=layers)
    page_bytes = 2 * tokens * layers * 8 * 128 * 2
    took: dict[tuple[str, str], list[float]] = {}
    with local_pool(2 * pages * page_bytes * rounds + (1 << 30)) as master:
        backends = {"pd-cache": ours(host, master, page_bytes), "SGLang's own": mooncakes_own(host, master)}
        places = host.alloc(pages * tokens), host.alloc(pages * tokens)
        for number in range(rounds):
            for name, backend in backends.items():
                keys = [uuid.uuid4().hex for _ in range(pages)]
                moves = {
                    "store": functools.partial(backend.batch_set_v1, keys, places[0]),
                    "load": functools.partial(backend.batch_get_v1, keys, places[1]),
                }
                for what, move in moves.items():
                    begun = time.perf_counter()
                    if not all(move()):
                        raise click.ClickException(f"{name}: not every page was moved ({what})")
                    if number:
                        took.setdefault((what, name), []).append(time.perf_counter() - begun)
        for backend in backends.values():
            backend.close()
    print(f"{pages} pages of {page_bytes / _MIB:g} MiB, medians of {rounds - 1} rounds, GB/s")
    for what in ("store", "load"):
        speeds = {name: pages * page_bytes / 1e9 / median(took[what, name]) for name in backends}
        own = speeds["SGLang's own"]
        print(
            f"{what:6}"
            + "".join(f"  {name} {speed:5.2f}" for name, speed in speeds.items())
            + f"  ratio {speeds['pd-cache'] / own:.2f}"
        )


if __name__ == "__main__":
    main()
