"""KV events and vLLM: its own classes read ours, ours read those of its publisher, and a real node's events
say what its cache holds."""

import json
from contextlib import closing
from typing import NamedTuple

import msgspec
import pytest

from launch.discovery import file_records
from launch.proxy.events import KnownCache, KnownRank
from launch.proxy.routing.prefixes import PromptNamer
from pd_cache.chunks import Namespace
from pd_cache.cluster import ClusterConfig, load_config, read_about
from pd_cache.events import EventEndpoints, EventSubscriber
from tests.support.waiting import wait_for
from tests.vllm.servers import PdCacheServer

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM's own imports warn of


def test_a_subscriber_of_vllms_publisher_that_comes_later_catches_up_by_its_replay(tmp_path):
    """More batches than a socket holds: vLLM's replays lose what does not fit, and the rest is asked for
    again."""
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
        ZmqEventPublisher,
    )

    ends = EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")
    publisher = ZmqEventPublisher(0, ends.stream, ends.replay)
    known = KnownRank(lambda: 1 << 20)
    try:
        for number in range(6000):
            event = BlockStored(
                [number], None, [1, 2], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
            )
            publisher.publish(KVEventBatch(ts=float(number), events=[event]))
        with closing(EventSubscriber()) as subscriber:
            subscriber.follow({"vllm": (ends, known.apply)})
            wait_for(lambda: len(known) == 6000, "everything was replayed")
            publisher.publish(KVEventBatch(ts=6001.0, events=[BlockRemoved([3], "GPU", 0)]))
            wait_for(lambda: len(known) == 5999, "the stream goes on")
            publisher.publish(KVEventBatch(ts=6002.0, events=[AllBlocksCleared()]))
            wait_for(lambda: len(known) == 0, "all were cleared")
    finally:
        publisher.shutdown()


class Observed(NamedTuple):
    """A real node, and what its events say."""

    node: PdCacheServer
    cache: KnownCache
    namer: PromptNamer
    config: ClusterConfig


@pytest.fixture
def observed(pair):
    config = load_config(pair.a.file)
    addresses = config.event_addresses(config.node("prefill-0"))
    with closing(EventSubscriber(check_s=0.5)) as subscriber:
        (space,) = spaces(pair.a)
        cache = KnownCache(lambda: 1 << 20)
        cache.fingerprint = space.fingerprint()
        subscriber.follow({"node": (EventEndpoints(*addresses), cache.ranks[0].apply)})
        yield Observed(pair.a, cache, PromptNamer(space), config)


def spaces(server):
    return [
        msgspec.convert(
            {k: v for k, v in server.ask("/health")["namespace"].items() if k != "token_hash"}, Namespace
        )
    ]


def test_a_real_node_says_how_large_its_own_cache_and_a_request_may_be(observed):
    (block,) = {space.block_size for space in spaces(observed.node)}
    told = read_about(json.dumps(observed.node.ask("/health")))
    record = next(one for one in file_records(observed.config) if one.name == "prefill-0")
    capacity = record.telling(told).capacity
    assert capacity.kv_tokens == (1024 - 1) * block, (
        "as `num-gpu-blocks-override` says, without the null block"
    )
    assert capacity.max_model_len == 4096


def test_a_real_nodes_events_say_what_its_own_cache_holds_until_it_forgets(observed, new_prompt):
    tokens = new_prompt(700)
    named = observed.namer.name(tokens, None)
    observed.node.complete(tokens)
    whole = len(named.blocks) * named.block_tokens
    wait_for(lambda: observed.cache.tokens(named) == whole, "the node's events say that it has the prompt")
    salted = observed.namer.name(tokens, "tenant")
    assert observed.cache.tokens(salted) == 0
    observed.node.complete(tokens, cache_salt="tenant")
    wait_for(lambda: observed.cache.tokens(salted) == whole, "another tenant's are other blocks")
    # vLLM forgets nothing while blocks are being stored, and publishes what it forgot with its next step
    observed.node.settle()
    observed.node.forget_prefixes()
    observed.node.complete(tokens[:3], 1)
    wait_for(lambda: len(observed.cache) == 0, "it forgot all")
