"""How soon does a decode node answer after the prefill? `bench ttft --pd` reports `after_prefill_ms` beside
vLLM's own connectors.

A prefill and a decode node stand behind a proxy; each has a core of its own, or half of a GPU. `never` and
`always` are values of `handoff.stream`. With vLLM's own connectors, the bench makes both hops. With `--link`,
the decode node is in a network namespace of its own, behind a link of this rate. Everything else, and all of
the pool's memory, is on the prefill node's side. Each prompt is new.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.lib.links import Place, linked
from bench.lib.report import Check, Report, Rows, at_most, tracked
from bench.lib.small_models import random_prompts
from bench.lib.vllm_server import BLOCK, CHUNK, READY_S, OpenAIServer, Peer, connector_flag, vllm_server
from launch.run.supervise import Program, Supervisor
from launch.run.up import chosen_ports, program_of, quiet
from pd_cache.cluster import (
    ClusterConfig,
    DecodeNode,
    HandoffConfig,
    MasterNode,
    Node,
    PrefillNode,
    ProxyConfig,
    ProxyNode,
    StoreNode,
    SupervisorConfig,
    VllmEngineConfig,
    dump_config,
)
from transfer.settings import TransferSettings

STREAM: tuple[Literal["never", "always"], ...] = ("never", "always")
PEERS: dict[Peer, str] = {"mooncake": "MooncakeConnector", "nixl": "NixlConnector"}
COMPUTED = ("vllm:prompt_tokens_by_source_total", "source", "local_compute")
MISSED = "vllm:pd_cache_missed_tokens_total"
"""The tokens that our decode node computed although it might have loaded them, by reason."""
COLUMNS = ("prefill_ms", "after_prefill_ms", "first_token_ms", "step_ms", "computed")
STEP = 512
"""The most tokens of a step. The last step's KV can only be moved after the prefill's end."""


Ask = Callable[[Sequence[int]], tuple[float, float]]
"""Sends a prompt. Returns when its prefill ended and when its first token came, in seconds from the request's
start."""


@contextmanager
def ours(
    model: Path, flags: dict[str, Any], places: tuple[Place, Place], pool: int, folder: Path
) -> Iterator[tuple[Mapping[str, Ask], OpenAIServer]]:
    """Yields a function that asks, for each value of `handoff.stream`, and the decode node."""
    here, there = places
    config = ClusterConfig(
        name="bench",
        transfer=TransferSettings(staging_size=512 << 20),
        engine=VllmEngineConfig(model=str(model), name="bench", args=flags),
        proxy=ProxyConfig(direct_tokens=0),
        supervisor=SupervisorConfig(ready_timeout_s=READY_S, stop_grace_s=30),
        nodes=(
            MasterNode(name="master", host=here.host, port=0, metrics_port=0),
            StoreNode(name="store", host=here.host, segment_size=pool),
            PrefillNode(name="prefill", host=here.host, port=0, segment_size=0, env=here.env),
            DecodeNode(name="decode", host=there.host, port=there.port, segment_size=0, env=there.env),
            *(ProxyNode(name=stream, host=here.host, port=0) for stream in STREAM),
        ),
    )
    mine = [node for node in config.nodes if node.host == here.host]

    def program(node: Node) -> Program:
        # a proxy has the name of its file
        started = program_of(node, folder / f"{node.name if node.role == 'proxy' else 'always'}.yaml")
        before = {"prefill": here.before, "decode": there.before}.get(node.role, ())
        return dataclasses.replace(started, argv=(*before, *started.argv))

    def ask(proxy: OpenAIServer, prompt: Sequence[int]) -> tuple[float, float]:
        before = proxy.total("pd_cache_proxy_prefill_seconds_sum")
        first = proxy.first_token(prompt)
        return proxy.total("pd_cache_proxy_prefill_seconds_sum") - before, first

    with chosen_ports(config, mine) as config, Supervisor(config.supervisor, sink=quiet) as supervisor:
        for stream in STREAM:
            streaming = msgspec.structs.replace(config, handoff=HandoffConfig(stream=stream))
            (folder / f"{stream}.yaml").write_text(dump_config(streaming))
        master, store, prefill, decode, *proxies = map(program, config.nodes)
        supervisor.start([master, store, [prefill, decode], proxies])
        urls = supervisor.ready_urls
        ways: dict[str, Ask] = {
            stream: functools.partial(ask, OpenAIServer(urls[stream])) for stream in STREAM
        }
        yield ways, OpenAIServer(urls["decode"])


@contextmanager
def theirs(
    peer: Peer, model: Path, flags: dict[str, Any], places: tuple[Place, Place]
) -> Iterator[tuple[Ask, OpenAIServer]]:
    """Yields a function that asks two nodes with a connector of vLLM's own, one after the other, and the
    decode node."""
    nodes = []
    with ExitStack() as stack:
        for role, place in zip(("kv_producer", "kv_consumer"), places, strict=True):
            flag = connector_flag(
                PEERS[peer],
                role,
                engine_id=role,
                kv_buffer_device="cuda" if place.gpu else "cpu",
                kv_connector_module_path="bench.lib.peer_connectors",
                kv_connector_extra_config={"mooncake_protocol": "tcp"},
            )
            at: Any = {"host": place.host, "port": place.port, "before": place.before}
            server = vllm_server(model, "bench", flags, place.env, flag, **at)
            nodes.append(OpenAIServer(stack.enter_context(server)))
        prefill, decode = nodes

        def asked(prompt: Sequence[int]) -> tuple[float, float]:
            transfer = {"transfer_id": uuid.uuid4().hex}
            params = {**transfer, "do_remote_decode": True, "do_remote_prefill": False}
            body = {"model": "bench", "prompt": list(prompt), "max_tokens": 1, "kv_transfer_params": params}
            start = time.perf_counter()
            with prefill.ask("/v1/completions", json.dumps(body).encode(), timeout=300) as answer:
                handoff = json.loads(answer.read())["kv_transfer_params"]
            prefilled = time.perf_counter() - start
            if handoff is None:  # MooncakeConnector leaves this to the proxy
                address = {
                    "remote_engine_id": "kv_producer",
                    "remote_bootstrap_addr": f"http://{places[0].host}:8998",
                }
                handoff = {**transfer, "do_remote_decode": False, "do_remote_prefill": True, **address}
            return prefilled, prefilled + decode.first_token(prompt, kv_transfer_params=handoff)

        yield asked, decode


def measure_handoffs(
    model: Path,
    flags: dict[str, Any],
    folder: Path,
    lengths: Sequence[int],
    rounds: int,
    rate: str | None,
    peers: Sequence[Peer],
    token_bytes: int,
    *,
    gpu: bool,
) -> Report:
    """Returns the figures, medians over the rounds, and the targets."""
    rng = random.Random(0)
    found: dict[tuple[int, str], list[tuple[float, ...]]] = defaultdict(list)
    flags = {**flags, "max-num-batched-tokens": STEP}
    pool = len(STREAM) * (rounds + 1) * sum(lengths) * token_bytes * 5 // 4

    def measure(ways: Mapping[str, Ask], decode: OpenAIServer) -> None:
        for number in tracked(range(rounds + 1), ", ".join(ways)):
            # the first prompt touches memory that was never touched
            for tokens in lengths if number else lengths[:1]:
                for way, asked in ways.items():
                    (prompt,) = random_prompts(rng, tokens + 1, 1)
                    before = decode.total(*COMPUTED)
                    prefilled, first = asked(prompt[:tokens])
                    fresh = decode.total(*COMPUTED) - before
                    times = prefilled, first - prefilled, first, decode.first_token(prompt)
                    if number:
                        found[tokens, way].append((*(1000 * seconds for seconds in times), fresh))

    with linked(rate, gpu=gpu) as places:
        with ours(model, flags, places, pool, folder) as (ways, decode):
            measure(ways, decode)
            missed = {
                reason: tokens
                for labels, tokens in decode.metric(MISSED).items()
                if tokens and (reason := labels.partition('reason="')[2].partition('"')[0]) != "none"
            }
        for peer in peers:
            with theirs(peer, model, flags, places) as (asked, decode):
                measure({peer: asked}, decode)
    rows: Rows = []
    checks: list[Check] = []
    for tokens in lengths:
        medians = {}
        for way in (*STREAM, *peers):
            columns = zip(*found[tokens, way], strict=True)
            medians[way] = row = dict(zip(COLUMNS, map(statistics.median, columns), strict=True))
            rows.append({"tokens": tokens, "way": way, **row})
            checks.append(
                at_most(f"{tokens}, {way}: tokens that the decode node computed", row["computed"], BLOCK)
            )
        never, always = medians["never"], medians["always"]
        chunk = (never["after_prefill_ms"] - never["step_ms"]) * CHUNK / tokens
        limit = 1.05 * never["prefill_ms"] + chunk + never["step_ms"]
        name = f"{tokens}: always / (1.05 prefill alone + chunk + step)"
        checks.append(at_most(name, always["first_token_ms"] / limit, 1.0))
        if rate is not None:  # over loopback, a step is a large part of what comes after
            share = always["after_prefill_ms"] / never["after_prefill_ms"]
            checks.append(at_most(f"{tokens}: after prefill, always / never", share, 0.25))
    return {"link": rate or "loopback", "results": rows, "missed": missed}, checks
