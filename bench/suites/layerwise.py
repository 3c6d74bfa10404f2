"""Time to first token of prompts whose first half is in the pool: `connector.load` async against layerwise and auto.

    pd-cache bench layerwise [--link 1gbit] [--json] [--check]

A first vLLM stores the first halves. Then a vLLM of each mode is up, and they take turns: each prompt goes to all of them, one at a time,
and in another order each time. With `--link`, the pool is in a network namespace behind a link of that rate (needs root); without it, it
is on loopback. Runs in an environment that has vLLM (`make test-vllm` sets one up).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import click

from bench.lib.model import VOCABULARY, write_model
from bench.lib.pool import local_pool
from bench.lib.report import Check, finish, option, output_options, progress
from bench.lib.slow_link import DistantPool, pool_behind
from bench.suites.ttft import BLOCK, CHUNK, OpenAIServer, arguments, connector_flag, vllm
from pd_cache.cluster import (
    ClusterConfig,
    ConnectorConfig,
    DecodeNode,
    MasterNode,
    PrefillNode,
    VllmEngineConfig,
    dump_config,
)
from transfer.settings import ByteSize, TransferSettings

Mode = Literal["async", "layerwise", "auto"]
MODES: tuple[Mode, ...] = ("async", "layerwise", "auto")
_BF16 = 2
_WARM = 2
"""Rounds that do not count: the first loads touch memory that was never touched, and tell `auto` how fast the link is."""
_GAIN, _LOSS = 0.8, 1.02


@contextmanager
def pool_at(link: str | None, nbytes: int) -> Iterator[DistantPool]:
    """Yields a pool behind a link, or on loopback."""
    transfer = TransferSettings()
    if link is None:
        with local_pool(nbytes, transfer=transfer) as master:
            yield DistantPool(master, "127.0.0.1")
    else:
        with pool_behind(link, nbytes, transfer) as pool:
            yield pool


def starting(
    mode: Mode, model: Path, flags: Mapping[str, Any], pool: DistantPool, folder: Path, role: str
) -> AbstractContextManager[str]:
    """Returns a server that loads in this mode, as a producer or a consumer. It is started when the block is entered."""
    host, _, port = pool.master.rpartition(":")
    config = ClusterConfig(
        name="bench",
        transfer=TransferSettings(staging_size=ByteSize(512 << 20)),
        engine=VllmEngineConfig(model=str(model), name="bench", args=dict(flags)),
        connector=ConnectorConfig(load=mode),
        nodes=(
            MasterNode(name="master", host=host, port=int(port)),
            PrefillNode(name="kv_producer", host=pool.here, segment_size=ByteSize(0)),
            DecodeNode(name="kv_consumer", host=pool.here, segment_size=ByteSize(0)),
        ),
    )
    file = folder / f"{mode}-{role}.yaml"
    file.write_text(dump_config(config))
    flag = connector_flag(
        "PdCacheConnector",
        role,
        kv_connector_module_path="pd_cache.vllm.connector",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"config_file": str(file), "node": role},
    )
    return vllm(model, dict(flags), {}, flag)


def store_all(server: OpenAIServer, halves: Sequence[Sequence[int]]) -> None:
    """Has each half computed, and waits until all of it is in the pool."""
    for half in halves:
        server.first_token(half)
        server.forget()
    stored = sum(server.metric("vllm:pd_cache_tokens_total", "outcome", "stored").values())
    wanted = sum(len(half) for half in halves)
    if stored < wanted:
        raise click.ClickException(f"only {stored:.0f} of {wanted} tokens were stored")


def measure(servers: Mapping[Mode, OpenAIServer], prompts: Sequence[Sequence[int]]) -> dict[Mode, list[float]]:
    """Returns the seconds to the first token of each prompt that counts, by mode."""
    seconds: dict[Mode, list[float]] = {mode: [] for mode in servers}
    order = list(servers)
    for prompt in prompts:
        order.append(order.pop(0))
        for mode in order:
            seconds[mode].append(servers[mode].first_token(prompt))
            servers[mode].forget()
            time.sleep(0.3)  # until the threads of the last server no longer spin
    return {mode: several[_WARM:] for mode, several in seconds.items()}


@click.command()
@option("--link", default=None, help="The rate of the link to the pool, e.g. 1gbit; without it, loopback.")
@option("--tokens", default=2048, type=click.IntRange(2 * CHUNK), help="Of each prompt.")
@option("--rounds", default=7, type=click.IntRange(3))
@option("--hidden", default=256, type=click.IntRange(64))
@option("--layers", default=32, type=click.IntRange(1))
@option("--heads", default=4, type=click.IntRange(1), help="Of each layer, for queries and for keys and values.")
@output_options
def main(link: str | None, tokens: int, rounds: int, hidden: int, layers: int, heads: int, **output: Any) -> None:
    """Time to first token of half-stored prompts: loads before the step, during it, or as the engine chooses."""
    if tokens % (2 * CHUNK):
        raise click.UsageError(f"--tokens must be an even number of chunks of {CHUNK}")
    half, token_bytes = tokens // 2, layers * 2 * hidden * _BF16
    flags = arguments(2 * tokens, "llama") | {"max-num-batched-tokens": tokens}
    rng = random.Random(0)
    prompts = [[rng.randrange(10, VOCABULARY) for _ in range(tokens)] for _ in range(rounds + _WARM)]
    loaded: dict[Mode, float] = {}
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as name, progress() as bar, ExitStack() as stack:
        folder = Path(name)
        model = write_model(
            folder / "model", hidden=hidden, layers=layers, heads=heads, kv_heads=heads, positions=2 * tokens
        )
        pool = stack.enter_context(pool_at(link, 2 * len(prompts) * half * token_bytes + (64 << 20)))
        steps = bar.add_task("storing the first halves", total=2)
        with starting("async", model, flags, pool, folder, "kv_producer") as url:
            store_all(OpenAIServer(url), [prompt[:half] for prompt in prompts])
        bar.update(steps, advance=1, description="loading them")
        servers = {
            mode: OpenAIServer(stack.enter_context(starting(mode, model, flags, pool, folder, "kv_consumer")))
            for mode in MODES
        }
        seconds = measure(servers, prompts)
        for mode, server in servers.items():
            by_layers = sum(server.metric("vllm:pd_cache_tokens_total", "outcome", "by_layers").values())
            loaded[mode] = by_layers / (half * len(prompts))
        load_s = sum(servers["async"].metric("vllm:pd_cache_op_seconds_total", "op", "retrieve").values())
    base = seconds["async"]
    rows = [
        {
            "load": mode,
            "ttft_ms": 1000 * statistics.median(seconds[mode]),
            "least_ms": 1000 * min(seconds[mode]),
            "most_ms": 1000 * max(seconds[mode]),
            "of_async": statistics.median(one / other for one, other in zip(seconds[mode], base, strict=True)),
            "by_layers": loaded[mode],
        }
        for mode in MODES
    ]
    figures = {
        "link": link or "loopback",
        "tokens": tokens,
        "loaded_tokens": half,
        "loaded_mb": half * token_bytes / 1e6,
        "async_load_ms": 1000 * load_s / len(prompts),
        "block": BLOCK,
        "results": rows,
    }
    limit = _LOSS if link is None else _GAIN
    checks = [
        Check(f"{row['load']}: TTFT / async", row["of_async"], limit, at_least=False)  # type: ignore[arg-type]
        for row in rows
        if row["load"] == "auto" or (row["load"] == "layerwise" and link is not None)
    ]
    finish(figures, checks, **output)


if __name__ == "__main__":
    main()
