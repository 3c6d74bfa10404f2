"""How fast does SGLang move pages by our HiCache backend? `store_ratio` and `load_ratio`, against SGLang's own Mooncake backend.

Needs SGLang beside pd-cache (`make install-sglang`). Both run in this process, in turn, over the same host pool (attention heads), each with
names of its own. SGLang's moves bytes straight from and to the host pool, without a checksum and without a deadline.

    python -m bench.suites.hicache --json
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click
import torch

from bench.lib import sglang_pools
from bench.lib.pool import local_pool
from bench.lib.report import finish, option, output_options
from bench.lib.stats import gbps, in_turn

_MIB = 1 << 20
_TOKENS, _LAYERS = 64, 32
"""Tokens of a page, and layers of the model, which has 8 KV heads of 128 in bf16."""


@click.command()
@option("--pages", default=64, type=click.IntRange(1), help="In one call.")
@option("--rounds", default=6, type=click.IntRange(3))
@output_options
def main(pages: int, rounds: int, **output: Any) -> None:
    """Pages of an SGLang host pool to and from Mooncake, by pd-cache's backend and by SGLang's own."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    host = sglang_pools.mha_pool("page_first", pages=2 * pages, tokens=_TOKENS, layers=_LAYERS)
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    page_bytes = 2 * _TOKENS * _LAYERS * 8 * 128 * 2
    places = host.alloc(pages * _TOKENS), host.alloc(pages * _TOKENS)
    with local_pool(round(2.5 * pages * page_bytes * (rounds + 1)) + (64 << 20)) as master:
        keys = {"ours": [""], "theirs": [""]}

        def fresh() -> None:
            for side in keys:
                keys[side] = [uuid.uuid4().hex for _ in range(pages)]

        def move(side: str, method: Callable[..., Any], place: Any) -> None:
            if not all(method(keys[side], place)):
                raise click.ClickException(f"{side}: not every page was moved")

        steps: dict[str, Callable[[], object]] = {"_fresh": fresh}
        ours = sglang_pools.our_options(
            revision="bench", master=master, timeout_s=60, transfer={"staging_size": 32 * (page_bytes + _MIB)}
        )
        theirs = {
            "master_server_address": master,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,
            "protocol": "tcp",
            "device_name": "",
        }
        with ExitStack() as stack:
            for side, kind, extra in (("ours", "dynamic", ours), ("theirs", "mooncake", theirs)):
                config = sglang_pools.storage_config(extra, model_name="bench")
                backend = sglang_pools.open_backend(kind, host, config)
                stack.callback(backend.close)
                if side == "ours":
                    backend.cache.wait_available(60)
                steps[f"{side}_store"] = functools.partial(move, side, backend.batch_set_v1, places[0])
                steps[f"{side}_load"] = functools.partial(move, side, backend.batch_get_v1, places[1])
            rates = gbps(pages * page_bytes, in_turn(rounds, steps))
    ratios = {f"{what}_ratio": rates[f"ours_{what}_gbps"] / rates[f"theirs_{what}_gbps"] for what in ("store", "load")}
    finish({"pages": pages, "page_bytes": page_bytes, **rates, **ratios}, [], **output)


if __name__ == "__main__":
    main()
