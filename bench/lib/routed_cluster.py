"""A small real cluster for `bench routing`: two vLLM prefill nodes, a vLLM decode node, a master, memory, and the proxy in this process.

A block of the trace, 512 tokens, is a block of vLLM of 32 tokens here. Requests go at times of the trace, which the caller has compressed. What
counts is how many tokens of each prompt the prefill node had in its own cache, as the node itself reports.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
from aiohttp import web

from bench.lib.model import VOCABULARY, write_model
from bench.lib.trace import BLOCK_TOKENS, Request
from launch.discovery import View, file_records
from launch.proxy import Proxy
from launch.proxy.direct import DirectRule
from launch.up import quiet, running
from pd_cache.cluster import (
    Argument,
    ClusterConfig,
    DecodeNode,
    MasterNode,
    PrefillNode,
    ProxyConfig,
    StoreNode,
    VllmEngineConfig,
    dump_config,
    read_config,
)
from pd_cache.cluster.addresses import free_port
from pd_cache.cluster.schema import SupervisorConfig
from pd_cache.config import CacheConfig
from transfer.settings import ByteSize, TransferSettings

BLOCK = 32
_SHRUNK = BLOCK_TOKENS // BLOCK
_LONGEST = 4096
_READY_S, _KNOWN_S = 600.0, 120.0
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "MC_LOG_LEVEL": "ERROR",
}


@contextmanager
def routed_cluster(cache_blocks: int) -> Iterator[ClusterConfig]:
    """Yields the file of a running cluster, whose prefill nodes have `cache_blocks` blocks each for their own caches."""
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as name:
        folder = Path(name)
        model = write_model(folder / "model", hidden=128, layers=2, heads=4, kv_heads=2)
        ports = [free_port("127.0.0.1") for _ in range(3)]
        args: dict[str, Argument] = {
            "max-model-len": _LONGEST + BLOCK,
            "block-size": BLOCK,
            "max-num-batched-tokens": 2048,
            "max-num-seqs": 4,
            "num-gpu-blocks-override": cache_blocks + 1,  # vLLM keeps one block for itself
            "dtype": "float32",
            "enforce-eager": True,
        }
        config = ClusterConfig(
            name="bench",
            transfer=TransferSettings(staging_size=ByteSize(32 << 20)),
            cache=CacheConfig(chunk_size=8 * BLOCK),
            engine=VllmEngineConfig(model=str(model), name="bench", args=args, env=_ENV),
            supervisor=SupervisorConfig(ready_timeout_s=_READY_S),
            nodes=(
                MasterNode(name="master", port=0, metrics_port=0, events_port=ports[0]),
                StoreNode(name="store", segment_size=ByteSize(256 << 20)),
                *(
                    PrefillNode(name=f"prefill-{index}", port=0, segment_size=ByteSize(0), events_port=port)
                    for index, port in enumerate(ports[1:])
                ),
                DecodeNode(name="decode", port=0, segment_size=ByteSize(0)),
            ),
        )
        file = folder / "cluster.yaml"
        file.write_text(dump_config(config))
        with running(*read_config(file), sink=quiet) as cluster:
            yield cluster.config


def shrunken_prompts(requests: Sequence[Request], seed: int) -> list[list[int]]:
    """Returns prompts whose blocks are equal where those of the requests are, for one seed; all others differ."""
    prompts = []
    for request in requests:
        tokens: list[int] = []
        for block in request.hash_ids:
            rng = random.Random(seed << 40 | block)
            tokens += [rng.randrange(10, VOCABULARY) for _ in range(BLOCK)]
        prompts.append(tokens[: max(1, request.input_length // _SHRUNK)])
    return prompts


def fits(request: Request) -> bool:
    """Returns whether a request's prompt, shrunken, is one that the cluster's nodes take."""
    return request.input_length // _SHRUNK < _LONGEST


def real_reports(
    config: ClusterConfig, settings: ProxyConfig, events: bool, prompts: Sequence[list[int]], times: Sequence[float]
) -> list[dict[str, float]]:
    """Returns what the prefill nodes reported on each prompt, and how long it took (`seconds`), behind a proxy with these settings.

    Without `events` the proxy does not know that nodes publish any. `times`: when each request is sent, in seconds from the first.
    """
    return asyncio.run(_real_reports(config, settings, events, prompts, times))


async def _real_reports(
    config: ClusterConfig, settings: ProxyConfig, events: bool, prompts: Sequence[list[int]], times: Sequence[float]
) -> list[dict[str, float]]:
    records = file_records(config)
    if not events:
        records = [msgspec.structs.replace(record, events=None, replays=None) for record in records]
    master = config.master_address
    proxy = Proxy(settings, DirectRule(0), master=lambda view: master)
    runner = web.AppRunner(proxy.app(), handler_cancellation=True)
    await runner.setup()
    try:
        port = free_port("127.0.0.1")
        await web.TCPSite(runner, "127.0.0.1", port).start()
        proxy.update(View(tuple(records)))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            if events:
                await _until(lambda: _known(session), "the nodes' events have come")
            begun = time.monotonic()

            async def send(number: int) -> dict[str, float]:
                await asyncio.sleep(max(0.0, begun + times[number] - time.monotonic()))
                return await _prefill(session, f"bench-{number}", prompts[number])

            return list(await asyncio.gather(*(send(number) for number in range(len(prompts)))))
    finally:
        await runner.cleanup()


async def _prefill(session: aiohttp.ClientSession, name: str, prompt: list[int]) -> dict[str, float]:
    """Returns what the prefill node reports on a prompt."""
    begun = time.monotonic()
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    async with session.post("/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
        if answer.status != 200:
            raise click.ClickException(f"status {answer.status}: {(await answer.text())[:300]}")
        name = answer.headers["X-Request-Id"]
        await answer.read()
    seconds = time.monotonic() - begun
    async with session.get(f"/requests/{name}") as answer:
        trip: dict[str, Any] = await answer.json()
    report = next((hop["report"] for hop in trip["hops"] if hop["hop"] == "prefill"), None)
    if report is None:
        raise click.ClickException(f"no prefill node reported on {name}: {trip}")
    return {**{name: report[name] for name in ("asked", "at_hand", "loaded")}, "seconds": seconds}


async def _known(session: aiohttp.ClientSession) -> bool:
    async with session.post("/query", json={"token_ids": [1] * BLOCK}) as answer:
        if answer.status != 200:
            return False
    async with session.get("/health") as answer:
        publishers = (await answer.json()).get("events", {}).get("publishers", {})
    return bool(publishers) and all(one.get("in_order") for one in publishers.values())


async def _until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + _KNOWN_S
    while not await condition():
        if time.monotonic() > end:
            raise click.ClickException(f"not within {_KNOWN_S:g} s: {what}")
        await asyncio.sleep(0.1)
