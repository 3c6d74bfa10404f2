"""Pages of an SGLang host pool, to and from a Mooncake pool: by pd-cache's HiCache backend, and by SGLang's own Mooncake backend.

Needs SGLang beside pd-cache (`make install-sglang`). Both run in this process, in turn, over the same host pool (attention heads), each with
names of its own. SGLang's moves bytes straight from and to the host pool, without a checksum and without a deadline.

    python -m bench.suites.hicache --pages 64 --rounds 7
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import Callable
from statistics import median
from typing import Any

import click
import torch

from bench.lib import sglang_pools
from bench.lib.pool import local_pool

_MIB = 1 << 20


@click.command(help=__doc__)
@click.option("--pages", default=64, help="In one call.", show_default=True)
@click.option("--tokens", default=64, help="Of a page.", show_default=True)
@click.option("--layers", default=32, help="Of the model, which has 8 KV heads of 128 in bf16.", show_default=True)
@click.option("--layout", default="page_first", help="As --hicache-mem-layout of SGLang.", show_default=True)
@click.option("--rounds", default=7, help="Of which the first is for warming up.", show_default=True)
def main(pages: int, tokens: int, layers: int, layout: str, rounds: int) -> None:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    host = sglang_pools.mha_pool(layout, pages=2 * pages, tokens=tokens, layers=layers)
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    page_bytes = 2 * tokens * layers * 8 * 128 * 2
    took: dict[tuple[str, str], list[float]] = {}

    def timed(what: str, who: str, call: Callable[[], Any], number: int) -> Any:
        begun = time.perf_counter()
        result = call()
        if number:
            took.setdefault((what, who), []).append(time.perf_counter() - begun)
        return result

    with local_pool(round(2.5 * pages * page_bytes * rounds) + (64 << 20)) as master:
        backends = {"pd-cache": _ours(host, master, page_bytes), "SGLang's own": _mooncakes_own(host, master)}
        places = host.alloc(pages * tokens), host.alloc(pages * tokens)
        for number in range(rounds):
            for name, backend in backends.items():
                keys = [uuid.uuid4().hex for _ in range(pages)]
                moves = {
                    "store": functools.partial(backend.batch_set_v1, keys, places[0]),
                    "load": functools.partial(backend.batch_get_v1, keys, places[1]),
                }
                for what, move in moves.items():
                    if not all(timed(what, name, move, number)):
                        raise click.ClickException(f"{name}: not every page was moved ({what})")
        for backend in backends.values():
            backend.close()
    print(f"{pages} pages of {page_bytes / _MIB:g} MiB, {layout}, medians of {rounds - 1} rounds, GB/s")
    own = "SGLang's own"
    speeds = {key: pages * page_bytes / 1e9 / median(times) for key, times in took.items()}
    for what in ("store", "load"):
        line = "".join(f"  {who} {speed:5.2f}" for (of, who), speed in speeds.items() if of == what)
        print(f"{what:6}{line}  ratio {speeds[what, 'pd-cache'] / speeds[what, own]:.2f}")


def _ours(host: Any, master: str, page_bytes: int) -> Any:
    extra = sglang_pools.our_options(
        revision="bench", master=master, timeout_s=60, transfer={"staging_size": 32 * (page_bytes + _MIB)}
    )
    backend = sglang_pools.open_backend("dynamic", host, sglang_pools.storage_config(extra))
    backend.cache.wait_available(60)
    return backend


def _mooncakes_own(host: Any, master: str) -> Any:
    extra = sglang_pools.mooncakes_options(master)
    return sglang_pools.open_backend("mooncake", host, sglang_pools.storage_config(extra, model_name="bench"))


if __name__ == "__main__":
    main()
