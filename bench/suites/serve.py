"""How long do clients wait? `ttft_p50_ms` and `hit_rate` at a rate of requests, against the same requests
without reuse.

Open loop: requests begin when they are due, at random times of a given rate (Poisson) or as in a trace,
however slow the cluster is (`bench/lib/load.py`). The same load is sent twice: first with a `cache_salt` of
its own for each request, so that every prompt is computed anew; then without, so that prompts reuse what
others left in the pool. A few requests before both do not count.

    pd-cache bench serve --rate 2              a small cluster of the reference engine on this machine
    pd-cache bench serve --trace FILE --requests 300
    pd-cache bench serve --rate 50 -c cluster.yaml      requests to the cluster's proxy
    pd-cache bench serve --rate 2 --url http://HOST:PORT --vocabulary 32000      any OpenAI-like server
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import msgspec

from bench.lib.arrivals import Arrival, from_trace, ideal_hit_rate, poisson, synthetic
from bench.lib.load import ANY_LENGTH, Destination, generate, summarize
from bench.lib.pool import cluster_here, config_option
from bench.lib.report import Check, at_least, at_most, finish, option, output_options, progress
from bench.lib.trace import BLOCK_TOKENS, read_trace
from launch.discovery import open_directory
from launch.http import client_key, fetch, proxy_certificate
from launch.proxy.bodies import read_models
from pd_cache.cluster import (
    ClusterConfig,
    DecodeNode,
    EngineConfig,
    MasterNode,
    ModelConfig,
    PrefillNode,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    read_config,
)
from pd_cache.config import CacheConfig
from pd_cache.errors import ConfigError
from transfer.settings import TransferSettings

_FIND_S = 10.0
_START_S = 0.1
"""Until due time 0, when the first body has been made."""
_REQUESTS, _WARM_UP = 100, 8
_SHARED, _PREFIXES = 0.75, 8
"""Without a trace: the part of a prompt that others have, too, and how many such parts there are."""
_PASSES = ("recompute", "reuse")


# --- what is put under load ---------------------------------------------------------------------------------


@contextmanager
def own_cluster(vocabulary: int | None) -> Iterator[Destination]:
    """Yields a small cluster of the reference engine on this machine; a block of a trace, sixteen times
    shorter, is one chunk there."""
    config = ClusterConfig(
        name="bench-serve",
        transfer=TransferSettings(staging_size=64 << 20),
        cache=CacheConfig(chunk_size=BLOCK_TOKENS // 16),
        engine=ReferenceEngineConfig(
            model=ModelConfig(
                name="bench", random=RandomModel(seed=7, vocab_size=2048, hidden_size=256, layers=4)
            ),
            num_blocks=2048,
            max_model_len=4096,
            max_queue=256,
            threads=1,
        ),
        nodes=(
            MasterNode(name="master", port=0, metrics_port=0),
            PrefillNode(name="prefill", segment_size=512 << 20),
            DecodeNode(name="decode", segment_size=0),
            ProxyNode(name="proxy", port=0),
        ),
    )
    with cluster_here(config) as cluster:
        model, words, longest = _of_engine(config.engine, vocabulary)
        yield Destination(cluster.urls["proxy"], model, words, longest, hands_over=True)


def clusters_proxy(config: ClusterConfig, vocabulary: int | None) -> Destination:
    """Returns the first proxy that discovery finds. Raises ConfigError if it finds none."""
    with open_directory(config) as directory:
        directory.wait_synced(_FIND_S)
        view = directory.view()
    proxies = [record.address for record in view.by_role("proxy") if not record.address.endswith(":0")]
    if not proxies:
        raise ConfigError(
            f"the cluster {config.name} has no proxy whose address is known; is it running? --url names one"
        )
    model, words, longest = _of_engine(config.engine, vocabulary)
    return Destination(
        proxies[0],
        model,
        words,
        longest,
        hands_over=bool(view.by_role("prefill")),
        key=client_key(config),
        certificate=proxy_certificate(config),
    )


def _of_engine(engine: EngineConfig | None, vocabulary: int | None) -> tuple[str, int, int]:
    """Returns name, vocabulary and longest request of the model that a file names. Raises ConfigError if the
    file does not say."""
    if isinstance(engine, ReferenceEngineConfig):
        return engine.model.name, vocabulary or engine.model.random.vocab_size, engine.max_model_len
    if engine is None or vocabulary is None:
        raise ConfigError("the file does not give the model's vocabulary: say --vocabulary")
    return engine.name or engine.model, vocabulary, ANY_LENGTH


def any_server(url: str, vocabulary: int | None) -> Destination:
    """Returns the server at `url`, with the first model that it lists. Raises ConfigError if it lists
    none."""
    if vocabulary is None:
        raise ConfigError("--url needs --vocabulary: prompts are made of token ids below it")
    try:
        listed = read_models(fetch(f"{url.rstrip('/')}/v1/models", _FIND_S))
        model = str(msgspec.json.decode(listed[0])["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{url} does not list its models: {error}") from None
    return Destination(url.rstrip("/"), model, vocabulary)


# --- the load -----------------------------------------------------------------------------------------------


def send(what: str, target: Destination, arrivals: Sequence[Arrival], isolated: bool) -> dict[str, Any]:
    """Returns a row of the report. Each request is `isolated` from all others, or reuses what they left."""
    target = target._replace(salted=uuid.uuid4().hex if isolated else "")
    with progress() as bar:
        task = bar.add_task(what, total=len(arrivals))
        outcomes = asyncio.run(
            generate(target, arrivals, time.monotonic() + _START_S, lambda: bar.advance(task))
        )
    ideal = 0.0 if isolated else ideal_hit_rate(arrivals)
    return {"pass": what, **summarize(outcomes), "ideal_hit_rate": ideal}


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Everything answered, nothing found where requests are isolated, and answers sooner with reuse than
    without."""
    checks = [at_least(f"{row['pass']}: answered", row["answered"], row["requests"]) for row in rows]
    recompute, reuse = rows
    # a server that does not know cache_salt would be compared with itself
    if recompute["hit_rate"] is not None:
        checks.append(at_most("recompute: hit_rate", recompute["hit_rate"], 0.0))
    if reuse["ttft_p50_ms"] is not None and recompute["ttft_p50_ms"] is not None:
        checks.append(
            at_most("ttft_p50_ms: reuse / recompute", reuse["ttft_p50_ms"] / recompute["ttft_p50_ms"], 1.0)
        )
    return checks


@click.command()
@config_option
@option(
    "--url",
    help="A server to put under load, in place of the cluster's proxy or a small cluster of this machine.",
)
@option(
    "--vocabulary", type=click.IntRange(16), help="Prompts have token ids below this; by default the model's."
)
@option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Requests a second, at random times (Poisson)."
)
@option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Prompts, and times where no --rate is given, of a trace.",
)
@option(
    "--scale",
    default=16.0,
    type=click.FloatRange(1),
    help="How many times shorter than a trace's prompts are.",
)
@option("--requests", type=click.IntRange(1), help="How many; by default 100, or all of a trace.")
@option("--prompt-tokens", default=1024, type=click.IntRange(1), help="Without a trace: of a prompt.")
@option("--output-tokens", default=16, type=click.IntRange(1), help="Without a trace: of an answer.")
@output_options
def main(
    file: Path | None,
    url: str | None,
    vocabulary: int | None,
    rate: float | None,
    trace: Path | None,
    scale: float,
    requests: int | None,
    prompt_tokens: int,
    output_tokens: int,
    **output: Any,
) -> None:
    """A cluster under an open-loop load."""
    recorded = None if trace is None else read_trace(trace, requests)
    if rate is not None:
        times = poisson(rate, len(recorded) if recorded else requests or _REQUESTS)
    elif recorded is not None:
        times = [(request.timestamp - recorded[0].timestamp) / 1000 for request in recorded]
    else:
        raise click.UsageError("say how fast requests come: --rate, --trace, or both")
    config = None if file is None else read_config(file)[0]
    serving: AbstractContextManager[Destination]
    if url is not None:
        serving = nullcontext(any_server(url, vocabulary))
    elif config is not None:
        serving = nullcontext(clusters_proxy(config, vocabulary))
    else:
        serving = own_cluster(vocabulary)
    with serving as target:
        if recorded is not None:
            arrivals = from_trace(recorded, times, scale, target.longest)
        else:
            output_tokens = min(output_tokens, target.longest - 1)
            prompt_tokens = min(prompt_tokens, target.longest - output_tokens)
            arrivals = synthetic(times, prompt_tokens, _SHARED, _PREFIXES, output_tokens)
        send("warm-up", target, [arrival._replace(due=0.0) for arrival in arrivals[:_WARM_UP]], isolated=True)
        rows = [send(name, target, arrivals, isolated=name == "recompute") for name in _PASSES]
    finish({"results": rows}, checks_of(rows), config=config, **output)
