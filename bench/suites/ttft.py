"""How soon does vLLM answer if the pool has the prompt? Reports `ours_b_ms`, and compares it with recomputing
and with vLLM's own MooncakeStoreConnector.

    pd-cache bench ttft [--model-kind KIND] [--json] [--check]
    pd-cache bench ttft --link 10gbit --link 1gbit      over links of these rates, against no cache
    pd-cache bench ttft --pd [--link 1gbit] [--peer mooncake] [--peer nixl]      `ttft_pd.py`

Servers run one after the other, because several servers on one machine slow each other down. First comes a
plain server. Then, for each connector, A computes and stores, and B loads what A stored. A plain server takes
turns with our A, because a machine's speed drifts by more than storing costs. With `--link`, the pool and A
are on one side of a link, and B is on the other; the link gets one rate after the other. `auto` and `always`
are values of `connector.load`. Before each rate is measured, B computes a prompt and loads three long prompts
from the pool. Runs in an environment that has vLLM (`make test-vllm` sets one up).
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import click

from bench.lib.kv import RawPool
from bench.lib.links import Place, check_rates, limit, linked
from bench.lib.pool import local_pool, raw_client
from bench.lib.report import Report, at_least, at_most, finish, option, output_options, tracked
from bench.lib.small_models import ModelKind, random_prompts, write_model
from bench.lib.stats import timed
from bench.lib.vllm_server import BLOCK, CHUNK, ENV, OpenAIServer, Peer, connector_flag, vllm_server
from bench.suites.ttft_pd import measure_handoffs
from pd_cache.cluster import (
    ClusterConfig,
    ConnectorConfig,
    DecodeNode,
    MasterNode,
    PrefillNode,
    VllmEngineConfig,
    dump_config,
)
from pd_cache.cluster.machine import host_of, port_of
from pd_cache.paged import has_gpu
from transfer.settings import TransferSettings
from transfer.staging import StagingPool

SHAPE = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 8, "positions": 32768}
_KV_BYTES = 12 * 2 * 8 * 64 * 2
"""Bytes of a token: layers, K and V, KV heads, head dimension and bytes of a bfloat16, multiplied."""
_LINK_SHAPE = {**SHAPE, "hidden": 512, "layers": 4, "heads": 8, "kv_heads": 2}
_LINK_KV_BYTES = 4 * 2 * 2 * 64 * 2
"""The bytes of a token of the small model of `--link`. Its KV is so small that transfers, at the rate at
which the core computes its tokens, hardly use the core; the same holds for a large model on a GPU."""
TOKEN_BYTES: dict[ModelKind, int] = {
    "llama": _KV_BYTES,
    "gemma3": _KV_BYTES // 3,
    "gptoss": _KV_BYTES // 2,
    "qwen3next": _KV_BYTES // 4,
    "mamba2": _KV_BYTES // 4,
}
"""Bytes that our connector moves for a token of a long prompt: the KV of layers with full attention, without
windows and states."""
STATES: tuple[ModelKind, ...] = ("qwen3next", "mamba2")
"""Models that continue only from the end of a block: every cache leaves the last block of a prompt to be
computed."""


Start = Callable[[str], AbstractContextManager[str]]
"""Starts the node `a` or `b` of a connector; yields its URL."""
Load = Literal["auto", "always"]
Prompts = Mapping[int, Sequence[Sequence[int]]]
"""By length in tokens: prompts that have one token more."""


_OURS, _THEIRS = (
    ("vllm:pd_cache_bytes_total", "op"),
    ("vllm:mooncake_store_operation_bytes_total", "operation"),
)
STORED = {"ours": (*_OURS, "store"), "theirs": (*_THEIRS, "save_put")}
LOADED = {"ours": (*_OURS, "retrieve"), "theirs": (*_THEIRS, "load_get")}
"""The connectors' own counters on vLLM's `/metrics`: name, label and the label's value."""
LOAD = ("vllm:pd_cache_op_seconds_total", "op", "retrieve")
"""The seconds that our connector spends on loads."""


def arguments(positions: int, kind: ModelKind, *, gpu: bool) -> dict[str, Any]:
    """Flags of every server. On a `gpu`, two servers share its memory."""
    flags: dict[str, Any] = {
        "max-model-len": positions,
        "block-size": BLOCK,
        "enforce-eager": True,
        "dtype": "bfloat16",
    }
    if gpu:
        flags["gpu-memory-utilization"] = 0.4
    elif (
        kind == "mamba2"
    ):  # vLLM 0.32 on CPUs has no states inside a step, so a step must not reach beyond a block
        flags |= {"max-num-batched-tokens": BLOCK, "max-num-seqs": 16}
    return flags


class Servers(NamedTuple):
    """vLLM's servers of a model, with each connector and without one."""

    model: Path
    flags: dict[str, Any]
    folder: Path
    """Where to write the connectors' settings."""

    def plain(self, at: Place | None = None) -> Start:
        """Returns a function that starts servers without a connector. It starts B at the place `at` of
        `linked`, if given."""
        return partial(self._server, at, {})

    def ours(self, master: str, load: Load = "always", at: Place | None = None) -> Start:
        """Returns a function that starts servers with pd-cache's connector, as `plain` does."""
        config = ClusterConfig(
            name="bench",
            transfer=TransferSettings(staging_size=512 << 20),
            engine=VllmEngineConfig(model=str(self.model), name="bench", args=self.flags, env=ENV),
            connector=ConnectorConfig(load=load, lookup_timeout_ms=1000),
            nodes=(
                MasterNode(name="master", host=host_of(master), port=port_of(master)),
                PrefillNode(name="a", segment_size=0),
                DecodeNode(name="b", segment_size=0, host="127.0.0.1" if at is None else at.host),
            ),
        )
        file = self.folder / f"{load}.yaml"
        file.write_text(dump_config(config))

        def start(node: str) -> AbstractContextManager[str]:
            flag = connector_flag(
                "PdCacheConnector",
                {"a": "kv_producer", "b": "kv_consumer"}[node],
                kv_connector_module_path="pd_cache.vllm.connector",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"config_file": str(file), "node": node},
            )
            return self._server(at, {}, node, flag)

        return start

    def theirs(self, master: str, at: Place | None = None) -> Start:
        """Returns a function that starts servers with vLLM's own connector, as `plain` does."""
        file = self.folder / "mooncake.json"
        settings = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "protocol": "tcp",
            "mode": "standalone-store",
            "global_segment_size": 0,
            "local_buffer_size": "512MB",
        }
        file.write_text(json.dumps(settings))
        flag = connector_flag("MooncakeStoreConnector", "kv_both")
        return lambda node: self._server(at, {"MOONCAKE_CONFIG_PATH": str(file)}, node, flag)

    def _server(
        self, at: Place | None, env: dict[str, str], node: str, *more: str
    ) -> AbstractContextManager[str]:
        where: dict[str, Any] = {}
        if at is not None and node == "b":
            where = {"host": at.host, "port": at.port, "before": at.enter}
            env = {"VLLM_HOST_IP": at.host, **env}
        return vllm_server(self.model, "bench", self.flags, {**ENV, **env}, *more, **where)


Figures = dict[tuple[int, str], list[float]]
"""The figures of each prompt, by the prompts' length and the figure's name; times in ms."""


def alone(server: OpenAIServer, prompt: Sequence[int]) -> float:
    """Returns the milliseconds until the first token. Empties vLLM's own cache afterwards."""
    took = 1000 * server.first_token(prompt)
    server.forget()
    return took


def measure_plain(
    server: OpenAIServer,
    kind: ModelKind,
    prompts: Prompts,
    raws: Mapping[int, RawPool],
    client: Any,
    found: Figures,
) -> None:
    """Measures a vLLM without a connector, whose own cache has all of a prompt except a token, or except a
    block if the model has states. Between prompts, reads as many bytes from the pool as our connector loads
    for such a prompt. `client` empties the pool."""
    for tokens, several in prompts.items():
        for prompt in several:
            server.first_token(prompt[:tokens])
            again = prompt[:tokens] if kind in STATES else prompt
            server.first_token(again)
            found[tokens, "warm_ms"].append(alone(server, again))
            raws[tokens].put()
            found[tokens, "raw_get_ms"].append(1000 * timed(raws[tokens].get))
            client.remove_all(True)


def measure_connector(
    name: str, start: Start, prompts: Prompts, found: Figures, plain: Start | None = None
) -> dict[str, float]:
    """Measures a connector. A computes and stores all prompts. If a `plain` vLLM is given, which only
    computes them, A takes turns with it. After A has ended, B starts and takes the prompts from the pool; the
    first time is not measured. Returns how many chunks A did not store or B did not load, by node, operation
    and reason, as far as the connector reports this."""
    troubles: dict[str, float] = {}
    for node in ("a", "b"):
        counters = {"stored": STORED[name]}
        if node == "b":
            counters = {"loaded": LOADED[name], "found": ("vllm:external_prefix_cache_hits_total", "", "")}
        with start(node) as url, ExitStack() as stack:
            server, beside = OpenAIServer(url), None
            if node == "b":
                # the first use of vLLM's blocks makes page faults, which are no part of a load
                for prompt in (prompt[:tokens] for tokens, several in prompts.items() for prompt in several):
                    alone(server, prompt)
            elif plain is not None:
                beside = OpenAIServer(stack.enter_context(plain(node)))
            for tokens, several in prompts.items():
                before = {what: server.total(*counter) for what, counter in counters.items()}
                for prompt in several:
                    if beside is not None:
                        found[tokens, "recompute_ms"].append(alone(beside, prompt[:tokens]))
                    spent = server.total(*LOAD)
                    found[tokens, f"{name}_{node}_ms"].append(alone(server, prompt[:tokens]))
                    if name == "ours" and node == "b":
                        found[tokens, "ours_load_ms"].append(1000 * (server.total(*LOAD) - spent))
                for what, counter in counters.items():
                    found[tokens, f"{name}_{what}"] = [(server.total(*counter) - before[what]) / len(several)]
            missed = server.metric("vllm:pd_cache_troubles_total")
            troubles |= {f"{node}: {labels}": chunks for labels, chunks in missed.items() if chunks}
    return troubles


def measure(servers: Servers, kind: ModelKind, lengths: Sequence[int], rounds: int) -> Report:
    """Returns the figures, medians of all prompts but the first, which touches memory that was never touched;
    and the targets."""
    rng = random.Random(0)
    prompts = {tokens: random_prompts(rng, tokens + 1, rounds + 1) for tokens in lengths}
    found: Figures = defaultdict(list)
    # twice the prompts of one connector; some connectors also store KV that windows have passed
    pool = local_pool(2 * (rounds + 1) * sum(lengths) * _KV_BYTES)
    with pool as master, raw_client(master) as client:
        raws = {}
        for tokens in lengths:
            count, size = tokens // CHUNK, CHUNK * TOKEN_BYTES[kind]
            memory = StagingPool(count * size, size)
            raws[tokens] = RawPool(client, memory, [f"raw/{uuid.uuid4().hex}" for _ in range(count)], size)
        with servers.plain()("a") as url:
            measure_plain(OpenAIServer(url), kind, prompts, raws, client, found)
        troubles: dict[str, float] = {}
        ways = (("ours", servers.ours(master), servers.plain()), ("theirs", servers.theirs(master), None))
        for name, start, beside in tracked(ways, "connectors"):
            troubles |= measure_connector(name, start, prompts, found, beside)
            client.remove_all(True)
    rows: dict[int, dict[str, Any]] = {tokens: {"tokens": tokens} for tokens in lengths}
    for (tokens, name), values in found.items():
        rows[tokens][name] = statistics.median(values[1:] or values)
    checks = []
    of_theirs, of_limit = (1.0, 1.3) if kind in STATES else (0.7, 1.1)
    for tokens, row in rows.items():
        # for as many bytes as our connector loaded: the measured read was without windows and states
        row["raw_ms"] = row["raw_get_ms"] * row["ours_loaded"] / (tokens * TOKEN_BYTES[kind])
        floor = row["warm_ms"] + row["raw_ms"]
        checks += [
            at_most(f"{tokens}: ours_b / theirs_b", row["ours_b_ms"] / row["theirs_b_ms"], of_theirs),
            at_most(f"{tokens}: ours_b / (warm + raw)", row["ours_b_ms"] / floor, of_limit),
            at_most(f"{tokens}: ours_a / recompute", row["ours_a_ms"] / row["recompute_ms"], 1.03),
        ]
        # a connector that found less has computed the rest: its time would say nothing about loading
        for name in ("ours_found", "theirs_found"):
            checks.append(at_least(f"{tokens}: {name}", row[name], tokens - BLOCK))
    return {"model": kind, "results": list(rows.values()), "troubles": troubles}, checks


def measure_links(
    servers: Servers, rates: Sequence[str], lengths: Sequence[int], rounds: int, at_once: int
) -> Report:
    """Returns the figures, medians over the rounds and means over `at_once` prompts that come together; and
    the targets."""
    new = partial(random_prompts, random.Random(0))
    prompts = {tokens: new(tokens, rounds) for tokens in lengths}
    warming, together = new(max(lengths), 3), new(lengths[0], at_once)
    stored = [*warming, *together, *itertools.chain(*prompts.values())]
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    size = 5 * sum(map(len, stored)) * _LINK_KV_BYTES // 2
    with linked(rates[0], gpu=has_gpu()) as (here, there), local_pool(size, host=here.host) as master:
        first, second, third = (there._replace(port=there.port + number) for number in range(3))
        ours = servers.ours(master, "auto", first)
        beside = {"always": servers.ours(master, "always", second), "no cache": servers.plain(third)}
        for ways in ({"auto": ours, **beside}, {"theirs": servers.theirs(master, first)}):
            with next(iter(ways.values()))("a") as url:
                for prompt in stored:
                    OpenAIServer(url).first_token(prompt)
                OpenAIServer(url).forget()
            with ExitStack() as running, ThreadPoolExecutor(at_once) as threads:
                nodes = {way: OpenAIServer(running.enter_context(start("b"))) for way, start in ways.items()}
                for rate in tracked(rates, ", ".join(ways)):
                    limit((here, there), rate)
                    for way, server in nodes.items():
                        # vLLM's workers spin for a while after a request, so no two servers take turns.
                        # Long prompts are loaded also over a link that seems too slow for short ones
                        for prompt in (*new(lengths[0], 1), *warming):
                            server.first_token(prompt)
                        server.forget()
                        for prompt in itertools.chain(*prompts.values()):
                            found[rate, str(len(prompt)), way].append(alone(server, prompt))
                        mean = statistics.mean(threads.map(server.first_token, together))
                        found[rate, f"{at_once} at once", way].append(1000 * mean)
                        server.forget()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (rate, what, way), values in found.items():
        row = rows.setdefault((rate, what), {"link": rate, "prompt": what})
        row[f"{way.replace(' ', '_')}_ms"] = statistics.median(values)
    checks = [
        at_most(
            f"{rate}, {what}: auto / the better of always and no cache",
            row["auto_ms"] / min(row["always_ms"], row["no_cache_ms"]),
            1.05,
        )
        for (rate, what), row in rows.items()
    ]
    return {"results": list(rows.values())}, checks


@click.command()
@option("--tokens", "lengths", multiple=True, default=(4096, 8192), type=click.IntRange(CHUNK))
@option("--rounds", default=5, type=click.IntRange(1))
@option("--model-kind", "kind", default="llama", type=click.Choice(tuple(TOKEN_BYTES)))
@option(
    "--pd", is_flag=True, help="Through a prefill and a decode node, with and without streaming the hand-off."
)
@option("--link", "links", multiple=True, callback=check_rates, help="A link of this rate, such as 1gbit, before the node that loads; needs root. Several, the fastest first, without --pd. By default loopback.")  # fmt: skip
@option("--at-once", default=16, type=click.IntRange(1), help="With --link: prompts that come together.")
@option("--peer", "peers", multiple=True, type=click.Choice(get_args(Peer)), help="With --pd: vLLM's own connectors to compare with.")  # fmt: skip
@output_options
def main(
    lengths: tuple[int, ...],
    rounds: int,
    kind: ModelKind,
    pd: bool,
    links: tuple[str, ...],
    at_once: int,
    peers: tuple[Peer, ...],
    **output: Any,
) -> None:
    """Time to first token with vLLM: from the pool, from vLLM's own connector, and computed."""
    if any(tokens % CHUNK for tokens in lengths):
        raise click.UsageError(f"--tokens must be whole chunks of {CHUNK}")
    if pd and len(links) > 1:
        raise click.UsageError("--pd takes one --link")
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as name:
        folder, gpu = Path(name), has_gpu()
        shape = _LINK_SHAPE if links and not pd else SHAPE
        model = write_model(folder / "model", kind=kind, **shape)
        servers = Servers(model, arguments(2 * max(lengths), kind, gpu=gpu), folder)
        if pd:
            link = links[0] if links else None
            found = measure_handoffs(
                model, servers.flags, folder, lengths, rounds, link, peers, TOKEN_BYTES[kind], gpu=gpu
            )
        elif links:
            found = measure_links(servers, links, lengths, rounds, at_once)
        else:
            found = measure(servers, kind, lengths, rounds)
    finish(*found, **output)
