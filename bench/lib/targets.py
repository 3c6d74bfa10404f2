"""What `bench/suites/serve.py` puts under load: a cluster of its own, the proxy of a cluster's file, or any server by its address."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.lib.pool import cluster_here
from bench.lib.trace import BLOCK_TOKENS
from launch.discovery import open_directory
from launch.http import NOBODY, Access, client_key, fetch, proxy_access, proxy_certificate
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
)
from pd_cache.config import CacheConfig
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize, TransferSettings

_FIND_S = 10.0
_ANY_LENGTH = 1 << 30


class ServerUnderLoad(NamedTuple):
    """What is under load."""

    url: str
    model: str
    vocabulary: int
    """Prompts are made of token ids below it."""
    longest: int
    """Tokens of a prompt and its answer; more than it takes is not asked."""
    prefill: tuple[str, ...] = ()
    """Where the nodes are that look prompts up in the pool, as far as they are known."""
    key: str = ""
    """What it asks clients for."""
    certificate: str = ""
    """Its own, in PEM format, where it speaks TLS and we have it."""
    watching: Access = NOBODY
    """What its metrics ask for."""


@contextmanager
def own_cluster(vocabulary: int | None) -> Iterator[ServerUnderLoad]:
    """Yields a small cluster of the reference engine on this machine; a block of a trace, sixteen times shorter, is one chunk there."""
    config = ClusterConfig(
        name="bench-serve",
        transfer=TransferSettings(staging_size=ByteSize(64 << 20)),
        cache=CacheConfig(chunk_size=BLOCK_TOKENS // 16),
        engine=ReferenceEngineConfig(
            model=ModelConfig(name="bench", random=RandomModel(seed=7, vocab_size=2048, hidden_size=256, layers=4)),
            num_blocks=2048,
            max_model_len=4096,
            max_queue=256,
            threads=1,
        ),
        nodes=(
            MasterNode(name="master", port=0, metrics_port=0),
            PrefillNode(name="prefill", segment_size=ByteSize(512 << 20)),
            DecodeNode(name="decode", segment_size=ByteSize(0)),
            ProxyNode(name="proxy", port=0),
        ),
    )
    with cluster_here(config) as cluster:
        model, words, longest = _of_engine(config.engine, vocabulary)
        yield ServerUnderLoad(cluster.urls["proxy"], model, words, longest, (cluster.urls["prefill"],))


def clusters_proxy(config: ClusterConfig, vocabulary: int | None) -> ServerUnderLoad:
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
    prefill = tuple(record.address for record in view.by_role("prefill") if record.address.startswith("http"))
    return ServerUnderLoad(
        proxies[0],
        model,
        words,
        longest,
        prefill,
        key=client_key(config),
        certificate=proxy_certificate(config),
        watching=proxy_access(config),
    )


def _of_engine(engine: EngineConfig | None, vocabulary: int | None) -> tuple[str, int, int]:
    """Returns name, vocabulary and longest request of the model that a file names. Raises ConfigError if the file does not say."""
    if isinstance(engine, ReferenceEngineConfig):
        return engine.model.name, vocabulary or engine.model.random.vocab_size, engine.max_model_len
    if engine is None or vocabulary is None:
        raise ConfigError("the file does not tell the model's vocabulary: say --vocabulary")
    return engine.name or engine.model, vocabulary, _ANY_LENGTH


def any_server(url: str, model: str | None, vocabulary: int | None, key: str) -> ServerUnderLoad:
    """Returns the server at `url`. Raises ConfigError if it does not list its models."""
    if vocabulary is None:
        raise ConfigError("--url needs --vocabulary: prompts are made of token ids below it")
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        if model is None:
            with urllib.request.urlopen(request, timeout=_FIND_S) as answer:
                model = str(msgspec.json.decode(answer.read(1 << 20))["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} does not list its models: {error}; say --model") from None
    return ServerUnderLoad(url.rstrip("/"), model, vocabulary, _ANY_LENGTH)


def past_prefill(proxy: str, access: Access = NOBODY) -> float:
    """Prompts that went past the prefill nodes because the pool held them; 0 where that is not a proxy of ours."""
    try:
        samples = _samples(proxy, access)
    except (OSError, ValueError):
        return 0.0
    name = "pd_cache_proxy_handoffs_total"
    return sum(one.value for one in samples if one.name == name and one.labels.get("result") == "in_pool")


def looked_up(nodes: Sequence[str]) -> tuple[float, float] | None:
    """Returns how many tokens nodes found in the pool and how many they looked up, since their start; None if not all of them report it."""
    try:
        samples = [one for node in nodes for one in _samples(node)]
    except (OSError, ValueError):
        return None
    lookups = [
        one for one in samples if one.name.endswith("pd_cache_tokens_total") and one.labels.get("op") == "lookup"
    ]
    found = sum(one.value for one in lookups if one.labels["outcome"] == "hit")
    return (found, sum(one.value for one in lookups if one.labels["outcome"] == "requested")) if nodes else None


def _samples(node: str, access: Access = NOBODY) -> list[Sample]:
    text = fetch(f"{node}/metrics", _FIND_S, access).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
