"""Time to first token with vLLM: a full hit from the pool against recompute, and against vLLM's own MooncakeStoreConnector.

    pd-cache bench ttft [--model-kind KIND] [--json] [--check]

Five servers of one model are up at the same time and asked in turn, so that what else happens on the machine meets all of
them: a plain one, and of each connector A, which computes and stores, and B, which takes what A stored. Runs in an
environment that has vLLM (`make test-vllm` sets one up).
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click

from bench.lib.kv import RawPool, timed
from bench.lib.model import VOCABULARY, ModelKind, write_model
from bench.lib.pool import raw_client
from bench.lib.report import Check, finish, option, output_options, progress
from bench.lib.stats import quantile
from bench.lib.vllm_server import vllm_server
from launch.up import quiet, running
from pd_cache.cluster import (
    ClusterConfig,
    ConnectorConfig,
    DecodeNode,
    MasterNode,
    PrefillNode,
    StoreNode,
    SupervisorConfig,
    VllmEngineConfig,
    dump_config,
    read_config,
)
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.lookup import MooncakeLookupClient
from pd_cache.tokens import CacheMetadata
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import StagingPool

CHUNK, BLOCK = 256, 128
SHAPE = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 8, "positions": 32768}
_KV_BYTES = 12 * 2 * 8 * 64 * 2
"""Of a token: layers, K and V, KV heads, head dimension, bytes of a bfloat16."""
TOKEN_BYTES: dict[ModelKind, int] = {
    "llama": _KV_BYTES,
    "mla": 12 * (512 + 64) * 2,
    "gemma3": _KV_BYTES // 3,
    "gptoss": _KV_BYTES // 2,
    "qwen3next": _KV_BYTES // 4,
    "mamba2": _KV_BYTES // 4,
}
"""What our connector moves for a token of a long prompt: the KV of layers with full attention. Windows and states come on top, once."""
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # "auto" gives one server more cores than another
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "MC_LOG_LEVEL": "ERROR",
}
_READY_S = 600.0
_SETTLE_S = 60.0


class OpenAIServer:
    """An OpenAI-compatible server at `url`."""

    def __init__(self, url: str) -> None:
        self._host = url.removeprefix("http://")

    def first_token(self, prompt: Sequence[int]) -> float:
        """Returns the seconds from sending a request to its first token."""
        body = {"model": "bench", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "stream": True}
        encoded = json.dumps({**body, "return_token_ids": True}).encode()
        connection = http.client.HTTPConnection(self._host, timeout=300)
        try:
            start = time.perf_counter()
            connection.request("POST", "/v1/completions", encoded, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        seconds = time.perf_counter() - start
                        answer.read()
                        return seconds
            raise RuntimeError(f"{self._host} answered {answer.status} without a token")
        finally:
            connection.close()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; waits until no store holds its blocks any more."""
        end = time.monotonic() + _SETTLE_S
        while True:
            connection = http.client.HTTPConnection(self._host, timeout=30)
            try:
                connection.request("POST", "/reset_prefix_cache")
                connection.getresponse().read()
            finally:
                connection.close()
            if self.cached_share() == 0:
                return
            if time.monotonic() > end:
                raise RuntimeError(f"{self._host} still holds blocks {_SETTLE_S:g} s after its last request")
            time.sleep(0.1)

    def cached_share(self) -> float:
        """The share of the KV cache's blocks that are held."""
        with urllib.request.urlopen(f"http://{self._host}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))


class Servers(NamedTuple):
    """All that are compared."""

    plain: OpenAIServer
    ours: tuple[OpenAIServer, OpenAIServer]
    theirs: tuple[OpenAIServer, OpenAIServer]
    master: str


def arguments(positions: int, kind: ModelKind) -> dict[str, Any]:
    """Flags of every server."""
    flags: dict[str, Any] = {
        "max-model-len": positions,
        "block-size": BLOCK,
        "enforce-eager": True,
        "dtype": "bfloat16",
    }
    if kind == "mamba2":  # vLLM 0.32 on CPUs has no states inside a step, so a step must not reach beyond a block
        flags |= {"max-num-batched-tokens": BLOCK, "max-num-seqs": 16}
    return flags


@contextmanager
def servers(model: Path, folder: Path, pool: ByteSize, flags: dict[str, Any]) -> Iterator[Servers]:
    """Starts them one after the other: each takes all cores while it starts."""
    config = ClusterConfig(
        name="bench",
        transfer=TransferSettings(staging_size=ByteSize(512 << 20)),
        cache=CacheConfig(),
        engine=VllmEngineConfig(model=str(model), name="bench", args=flags, env=_ENV),
        connector=ConnectorConfig(),
        supervisor=SupervisorConfig(ready_timeout_s=_READY_S, stop_grace_s=30),
        nodes=(
            MasterNode(name="master", port=0, metrics_port=0),
            StoreNode(name="store", segment_size=pool),
            PrefillNode(name="a", segment_size=ByteSize(0)),
            DecodeNode(name="b", segment_size=ByteSize(0)),
        ),
    )
    file = folder / "cluster.yaml"
    file.write_text(dump_config(config))
    with ExitStack() as stack:
        cluster = stack.enter_context(running(*read_config(file), sink=quiet))
        master = cluster.config.master_address
        mooncake = folder / "mooncake.json"
        mooncake.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": master,
                    "protocol": "tcp",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": "512MB",
                }
            )
        )
        connector = json.dumps({"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"})
        configured = {"MOONCAKE_CONFIG_PATH": str(mooncake)}
        theirs = [
            OpenAIServer(stack.enter_context(vllm(model, flags, configured, f"--kv-transfer-config={connector}")))
            for _ in range(2)
        ]
        plain = OpenAIServer(stack.enter_context(vllm(model, flags, {})))
        yield Servers(
            plain,
            (OpenAIServer(cluster.urls["a"]), OpenAIServer(cluster.urls["b"])),
            (theirs[0], theirs[1]),
            master,
        )


def vllm(model: Path, flags: dict[str, Any], env: dict[str, str], *more: str) -> AbstractContextManager[str]:
    """Returns a server without pd-cache, otherwise as the others are."""
    return vllm_server(model, "bench", flags, {**_ENV, **env}, *more, ready_timeout_s=_READY_S)


def measure(up: Servers, tokens: int, rounds: int, raw: RawPool, client: Any) -> dict[str, float]:
    """Milliseconds to the first token, medians over the rounds. `client` empties the pool after each."""
    rng = random.Random(tokens)
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(1000 * seconds)

    for number in range(rounds + 1):
        prompt = [rng.randrange(10, VOCABULARY) for _ in range(tokens + 1)]
        whole = prompt[:tokens]
        times = {"recompute_ms": up.plain.first_token(whole)}
        up.plain.first_token(prompt)
        times["warm_ms"] = up.plain.first_token(prompt)  # all whole blocks are cached: one token is left to compute
        for name, (a, b) in (("ours", up.ours), ("theirs", up.theirs)):
            times[f"{name}_a_ms"] = a.first_token(whole)
            a.forget()
            times[f"{name}_b_ms"] = b.first_token(whole)
            b.forget()
        up.plain.forget()
        raw.put()
        times["raw_get_ms"] = timed(raw.get)
        client.remove_all(True)
        if number:  # the first round touches what was never touched
            for name, seconds in times.items():
                note(name, seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def lookup_p99_ms(master: str, tokens: int, rounds: int = 500) -> float:
    """Returns the 99th percentile, in ms, of the scheduler's lookup for a prompt if it has to ask for all its chunks."""
    metadata = CacheMetadata(
        model=uuid.uuid4().hex, kv_dtype="bfloat16", page_format="bench", layers=12, block_size=BLOCK, page_bytes=1
    )
    settings = NodeSettings(master=master, cache=CacheConfig(chunk_size=CHUNK, hash_mode="blocks"))
    client = MooncakeLookupClient(settings, metadata, master)
    try:
        client.store.wait_open(30)
        seconds = []
        for number in range(rounds):
            hashes = [random.Random(number * tokens + index).randbytes(32) for index in range(tokens // BLOCK)]
            seconds.append(timed(lambda hashes=hashes: client.lookup(block_hashes=hashes)))  # type: ignore[misc]
        return 1000 * quantile(seconds, 0.99)
    finally:
        client.close()


@click.command()
@option("--tokens", "lengths", multiple=True, default=(4096, 8192), type=click.IntRange(CHUNK))
@option("--rounds", default=5, type=click.IntRange(3))
@option("--model-kind", "kind", default="llama", type=click.Choice(get_args(ModelKind)))
@output_options
def main(lengths: tuple[int, ...], rounds: int, kind: ModelKind, **output: Any) -> None:
    """Time to first token with vLLM: from the pool, from vLLM's own connector, and computed."""
    if any(tokens % CHUNK for tokens in lengths):
        raise click.UsageError(f"--tokens must be whole chunks of {CHUNK}")
    longest = max(lengths)
    # a prompt of each connector and the raw objects, and as much again
    pool = ByteSize(6 * longest * TOKEN_BYTES[kind])
    results, checks = [], []
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as name, progress() as bar:
        folder = Path(name)
        started = bar.add_task("starting five vLLMs", total=1)
        model = write_model(folder / "model", kind=kind, **SHAPE)
        with servers(model, folder, pool, arguments(2 * longest, kind)) as up, raw_client(up.master) as client:
            bar.update(started, completed=1)
            for tokens in bar.track(lengths, description="prompt lengths"):
                count, size = tokens // CHUNK, CHUNK * TOKEN_BYTES[kind]
                memory = StagingPool(count * size, size)
                raw = RawPool(client, memory, [f"raw/{uuid.uuid4().hex}" for _ in range(count)], size)
                row = measure(up, tokens, rounds, raw, client)
                limit = 1.25 * (row["warm_ms"] + row["raw_get_ms"])
                results.append({"tokens": tokens, **row, "limit_ms": limit})
                checks += [
                    Check(f"{tokens}: ours_b / theirs_b", row["ours_b_ms"] / row["theirs_b_ms"], 0.5, at_least=False),
                    Check(f"{tokens}: ours_b_ms", row["ours_b_ms"], limit, at_least=False),
                    Check(
                        f"{tokens}: ours_a / recompute", row["ours_a_ms"] / row["recompute_ms"], 1.03, at_least=False
                    ),
                ]
            checks.append(Check("lookup p99 ms, 8192 tokens", lookup_p99_ms(up.master, 8192), 2.0, at_least=False))
    finish({"results": results}, checks, **output)


if __name__ == "__main__":
    main()
