"""KV events and vLLM: its own classes read ours, ours read those of its publisher, and a real node's events say what its cache holds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from launch.pool_events import PoolWatch
from launch.proxy.block_index import BlockBudget, KnownCache
from launch.proxy.naming import PromptNamer
from pd_cache.cluster import load_config
from pd_cache.kv_events import ClearedEvent, EventBatch, Forget, RemovedEvent, Step, StoredEvent, encode_batch
from pd_cache.tokens import Namespace
from pd_cache.wire.event_streams import EventEndpoints, EventSubscriber
from tests.support.pool import Pool, free_port
from tests.support.waiting import wait_for
from tests.vllm.servers import PdCacheServer, cluster_file, running

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM's own imports warn of


def test_vllms_own_decoder_reads_every_event_of_ours() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    tokens = msgspec.Raw(msgspec.msgpack.encode([5, 6]))
    raw = encode_batch(
        EventBatch(
            12.5,
            [
                StoredEvent([b"n" * 16], medium="STORAGE", locality="REMOTE", ownership="space", block_size=256),
                StoredEvent([7, 8], 6, tokens, 1, None, "STORAGE", group_idx=0, locality="REMOTE"),
                RemovedEvent([b"n" * 16], "STORAGE", locality="REMOTE", ownership="space"),
                ClearedEvent(),
            ],
        )
    )
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(raw)
    assert batch.ts == 12.5
    stored, described, removed, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert isinstance(described, BlockStored)
    assert (stored.block_hashes, stored.token_ids, stored.medium, stored.locality, stored.ownership) == (
        [b"n" * 16], [], "STORAGE", "REMOTE", "space",
    )  # fmt: skip
    assert (described.block_hashes, described.parent_block_hash, described.token_ids) == ([7, 8], 6, [5, 6])
    assert removed == BlockRemoved([b"n" * 16], "STORAGE", None, "REMOTE", "space")
    assert isinstance(cleared, AllBlocksCleared)


def test_a_subscriber_of_vllms_publisher_that_comes_later_catches_up_by_its_replay(tmp_path: Path) -> None:
    """More batches than a socket holds: vLLM's replays lose what does not fit, and the rest is asked for again."""
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

    ends = EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")
    publisher = ZmqEventPublisher(0, ends.stream, ends.replay)
    known = KnownCache(BlockBudget(1 << 20))
    try:
        for number in range(6000):
            event = BlockStored(
                [number], None, [1, 2], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
            )
            publisher.publish(KVEventBatch(ts=float(number), events=[event]))
        with closing(EventSubscriber(again_s=0.02)) as subscriber:
            subscriber.follow({"vllm": (ends, known.apply)})
            wait_for(lambda: len(known) == 6000, what="everything was replayed")
            publisher.publish(KVEventBatch(ts=6001.0, events=[BlockRemoved([3], "GPU", 0)]))
            wait_for(lambda: len(known) == 5999, what="the stream goes on")
            publisher.publish(KVEventBatch(ts=6002.0, events=[AllBlocksCleared()]))
            wait_for(lambda: len(known) == 0, what="all were cleared")
    finally:
        publisher.shutdown()


class Observed(NamedTuple):
    """A real node, what its events say, and what the pool's say."""

    node: PdCacheServer
    cache: KnownCache
    namer: PromptNamer
    pool: list[object]


@pytest.fixture(scope="module")
def observed(model: Path, vllm_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("events")
    file = cluster_file(folder, vllm_pool, model, {"prefill-0": {"events_port": free_port()}})
    config = load_config(file)
    node = config.node("prefill-0")
    assert node is not None
    addresses = config.event_addresses(node)
    assert addresses is not None
    ends, told = EventEndpoints(f"ipc://{folder}/pool", f"ipc://{folder}/pool.replay"), []

    def hear(steps: Sequence[Step]) -> None:
        told.extend(event for step in steps if not isinstance(step, Forget) for event in step.events)

    with running(file, "prefill-0") as (server,), ExitStack() as stack:
        (space,) = spaces(server)
        metrics = f"http://127.0.0.1:{vllm_pool.metrics_port}"
        watch = PoolWatch(metrics, ends, interval_s=0.1, most_chunks=1000, read_namespace=lambda _: space)
        stack.callback(watch.close)
        from launch.discovery import describe_node

        watch.follow([describe_node(config, node, server.url)])
        watch.start()
        subscriber = stack.enter_context(closing(EventSubscriber(check_s=0.5)))
        cache = KnownCache(BlockBudget(1 << 20))
        cache.fingerprint = space.fingerprint()
        subscriber.follow({"node": (EventEndpoints(*addresses), cache.apply), "pool": (ends, hear)})
        yield Observed(server, cache, PromptNamer(space), told)


def spaces(server: PdCacheServer) -> list[Namespace]:
    return [msgspec.convert({k: v for k, v in server.health()["namespace"].items() if k != "token_hash"}, Namespace)]


def prompt_of(seed: int, tokens: int = 700) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in range(tokens)]


def test_a_real_nodes_events_say_what_its_own_cache_holds_until_it_forgets(observed: Observed) -> None:
    tokens = prompt_of(1)
    named = observed.namer.name(tokens, None).prompt
    observed.node.complete(tokens)
    whole = len(named.blocks) * named.block_tokens
    wait_for(lambda: observed.cache.tokens(named) == whole, what="the node's events say that it has the prompt")
    salted = observed.namer.name(tokens, "tenant").prompt
    assert observed.cache.tokens(salted) == 0
    observed.node.complete(tokens, cache_salt="tenant")
    wait_for(lambda: observed.cache.tokens(salted) == whole, what="another tenant's are other blocks")
    # vLLM forgets nothing while blocks are being stored, and publishes what it forgot with its next step
    wait_for(lambda: not observed.node.blocks_in_use, what="everything is stored")
    observed.node.forget_prefixes()
    observed.node.complete(tokens[:3], 1)
    wait_for(lambda: len(observed.cache) == 0, what="it forgot all")


def test_the_pools_events_have_the_engines_hashes_and_tokens_and_so_has_the_removal(observed: Observed) -> None:
    tokens = prompt_of(2)
    naming = observed.namer.name(tokens, None)
    observed.node.complete(tokens)
    step = naming.prompt.chunk_tokens // naming.prompt.block_tokens

    def described() -> list[StoredEvent]:
        return [
            event
            for event in list(observed.pool)
            if isinstance(event, StoredEvent)
            and bytes(event.token_ids) != b"\x90"
            and event.block_hashes[-1][:16] in naming.names  # type: ignore[index]
        ]

    wait_for(lambda: len(described()) == len(naming.names), what="every chunk with its blocks")
    by_name = {event.block_hashes[-1][:16]: event for event in described()}  # type: ignore[index]
    for number, name in enumerate(naming.names):
        event = by_name[name]
        size = naming.prompt.chunk_tokens
        assert msgspec.msgpack.decode(event.token_ids) == tokens[number * size : (number + 1) * size]
        assert len(event.block_hashes) == step
        assert (event.parent_block_hash is None) == (number == 0)
    observed.node.reset_external()
    wait_for(lambda: isinstance(observed.pool[-1], ClearedEvent), what="the reset is published")
