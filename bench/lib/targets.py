"""What `bench/suites/serve.py` puts under load: a cluster of its own, the proxy of a cluster's file, or any server by its address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from bench.lib.load import ANY_LENGTH, Destination
from bench.lib.pool import cluster_here
from bench.lib.trace import BLOCK_TOKENS
from launch.discovery import open_directory
from launch.http import Access, client_key, fetch, proxy_certificate
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
)
from pd_cache.config import CacheConfig
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize, TransferSettings

_FIND_S = 10.0


@contextmanager
def own_cluster(vocabulary: int | None) -> Iterator[Destination]:
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
    """Returns name, vocabulary and longest request of the model that a file names. Raises ConfigError if the file does not say."""
    if isinstance(engine, ReferenceEngineConfig):
        return engine.model.name, vocabulary or engine.model.random.vocab_size, engine.max_model_len
    if engine is None or vocabulary is None:
        raise ConfigError("the file does not tell the model's vocabulary: say --vocabulary")
    return engine.name or engine.model, vocabulary, ANY_LENGTH


def any_server(url: str, vocabulary: int | None, key: str) -> Destination:
    """Returns the server at `url`, with the first model that it lists. Raises ConfigError if it lists none."""
    if vocabulary is None:
        raise ConfigError("--url needs --vocabulary: prompts are made of token ids below it")
    try:
        listed = read_models(fetch(f"{url.rstrip('/')}/v1/models", _FIND_S, Access(key)))
        model = str(msgspec.json.decode(listed[0])["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{url} does not list its models: {error}") from None
    return Destination(url.rstrip("/"), model, vocabulary)
