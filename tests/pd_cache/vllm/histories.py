"""What vLLM's scheduler hands the connector, small enough to write a history down: requests, their blocks,
and the pool of blocks."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, LayerGroup
from pd_cache.cluster import ConnectorConfig
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, StoreOutcome, TierChunks
from pd_cache.tracing import UNTRACED
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.layers import KeptLayers
from pd_cache.vllm.lora import Adapters
from pd_cache.vllm.plan import ChunkPlan
from pd_cache.vllm.scheduler import SchedulerSide
from pd_cache.vllm.settings import Settings
from pd_cache.vllm.steps import StepReport
from tests.support.waiting import Clock

BLOCK, CHUNK = 4, 8
PROMPT = list(range(3 * CHUNK + 3))
METADATA = CacheMetadata(
    model="m", kv_dtype="bf16", page_format="p", layers=1, block_size=BLOCK, page_bytes=64
)
METADATA_OF_DRAFTER = msgspec.structs.replace(
    METADATA, group=LayerGroup(layers="1", keeps="every token, for drafts of d", tail=0, ahead=1)
)

PLAIN = KeptLayers(0, BLOCK)
FULL = KeptLayers(1, BLOCK)
WINDOW = KeptLayers(0, BLOCK, "window", BLOCK + 2)
"""Reaches into two blocks, that is one chunk."""
STATE = KeptLayers(2, CHUNK, "state")
DRAFTS = KeptLayers(1, BLOCK, drafts="next")
"""Layers of a draft model, in the blocks of the model that it drafts for."""
FAILED = Loaded(0, "evicted")
COMPUTES, WAITS = (0, False), (None, False)
"""What vLLM is answered if it is to compute a prompt, or to ask again."""


@dataclass
class Request:
    """The part of vLLM's `Request` that the connector reads."""

    request_id: str = "a"
    all_token_ids: list = field(default_factory=lambda: PROMPT)
    kv_transfer_params: Any = None
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_prompt_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    lora_request: Any = None
    trace_headers: Any = None
    mm_features: list = field(default_factory=list)
    shared_prefix_boundary: int = 0
    block_hashes: list = field(default_factory=list)

    def __post_init__(self):
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Pool:
    """vLLM's pool of blocks, with a count of references for each."""

    def __init__(self):
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(64)]
        self.null_block = self.blocks[0]
        self.num_gpu_blocks = len(self.blocks)
        self.evicted = set()
        self.freed = []

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} was given back twice"
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def get_num_free_blocks(self):
        return sum(not block.ref_cnt for block in self.blocks)

    def evict_blocks(self, ids):
        self.evicted |= ids

    @property
    def used(self):
        return {block.block_id for block in self.blocks if block.ref_cnt}


class Manager:
    """vLLM's manager of requests' blocks."""

    def __init__(self):
        self.block_pool = Pool()
        self.enable_caching = True
        self.coordinator = SimpleNamespace(cache_blocks=self._cache_blocks)
        self.cached_tokens = {}
        """For each request, how many of its tokens vLLM was told to put into its own cache."""
        self.put_into_cache = []
        """The requests whose blocks vLLM has put into its own cache, once for each time."""
        self._of = {}

    def _cache_blocks(self, request, tokens):
        self.put_into_cache.append(request.request_id)
        self.cached_tokens[request.request_id] = tokens

    def cache_blocks(self, request, tokens):
        self.coordinator.cache_blocks(request, tokens)

    def allocate(self, request, *groups):
        """Gives a request these blocks, a list for each of vLLM's groups; 0 where vLLM has given one back.
        Returns them as vLLM does."""
        self._of[request.request_id] = groups
        self.block_pool.touch(self.block_pool.blocks[block] for group in groups for block in group if block)
        return SimpleNamespace(get_block_ids=lambda: groups)

    def free(self, request):
        """The request has finished or was preempted."""
        groups = self._of.pop(request.request_id)
        self.block_pool.free_blocks(
            self.block_pool.blocks[block] for group in groups for block in group if block
        )

    def get_block_ids(self, request_id):
        return self._of.get(request_id, ([],))


class Lookups(LookupClient):
    """A lookup client over a set of names."""

    def __init__(self, metrics, database=None):
        database = database or ChunkedTokenDatabase(METADATA.namespace(CacheConfig(chunk_size=CHUNK)))
        cache = SimpleNamespace(find=self._answer)
        super().__init__(database, metrics, cache=cache)
        self.there = set()
        self.leading = 0
        """How many chunks are there of the layers that need all of them, if more than can be loaded."""
        self.asked = []
        """Of each lookup, how many chunks were at hand."""
        self.ended = []
        self.noted = set()
        """The chunks that the engine said it has stored."""
        self.reason = "never_stored"
        self.here = True
        self.ahead = 0
        """1 if the last of the chunks that are there has no KV of the draft model yet."""
        self.near = TierChunks()

    @property
    def available(self):
        return self.here

    def _answer(self, names, *, chunks_at_hand, session, timeout):
        self.asked.append(chunks_at_hand)
        if not self.here:
            raise ConnectionError("the server is lost")
        found = chunks_at_hand
        while found < len(names) and names[found] in self.there:
            found += 1
        found = max(chunks_at_hand, found - self.ahead)
        return Found(
            found, max(found, self.leading), "none" if found == len(names) else self.reason, self.near
        )

    def stored(self, names):
        self.noted |= set(names)

    def end(self, lookup_id):
        self.ended.append(lookup_id)

    def close(self):
        self.here = False


class Scene:
    """A scheduler's side over these, and what vLLM does with it."""

    def __init__(
        self,
        *layers,
        ranks=1,
        stores=True,
        dense=False,
        drafted_up_to=None,
        hash_mode="tokens",
        tracing=UNTRACED,
        hashes_media=True,
        **connector,
    ):
        """One layer group of full attention, unless `layers` says otherwise. A hand-off is waited for 2 s."""
        layers = layers or (PLAIN,)
        self.clock = Clock(100.0)
        self.metrics = CacheMetrics()
        self.manager = Manager()
        self.pool = self.manager.block_pool
        self.lookups, self.version = Lookups(self.metrics), WeightsVersion()
        node = NodeSettings(master="127.0.0.1:1", cache=CacheConfig(chunk_size=CHUNK, hash_mode=hash_mode))
        settings = Settings(node=node, connector=ConnectorConfig(**connector), handoff_wait_s=2.0, shards=0)
        self.adapters = Adapters()
        side = SchedulerSide(
            ChunkPlan(settings, layers, BLOCK, stores, ranks, dense, drafted_up_to, hashes_media),
            self.adapters,
            self.metrics,
            tracing=tracing,
            version=self.version,
            clock=self.clock,
        )
        self.lookups.ahead = max(one.ahead for one in layers)
        side.open([METADATA_OF_DRAFTER if one.drafts else METADATA for one in layers], self.lookups)
        self.side = side  # our requests and managers only look like vLLM's
        self.side.bind(self.manager)

    @property
    def reports(self):
        """The reports on the requests that have ended."""
        return [report for _, report in self.side.reports]

    def names(self, request):
        """Of all of its whole chunks."""
        return self.lookups._database.name_chunks(request.all_token_ids)

    def has(self, request, chunks=99):
        """The pool holds the first chunks of this prompt, and nothing else."""
        self.lookups.there = set(self.names(request)[:chunks])

    def ask(self, request, computed=0):
        """vLLM asks what can be loaded. `computed` tokens are in its own cache."""
        return self.side.matched_tokens(request, computed)

    def load(self, request, computed=0, *groups, taken=None):
        """vLLM asks, and allocates blocks for what can be loaded: these, or those from 10 on. Returns what it
        was answered."""
        external, later = self.ask(request, computed)
        if external:
            blocks = self.manager.allocate(request, *(groups or (blocks_of(request),)))
            self.side.allocated(request, blocks, external if taken is None else taken)
        return external, later

    def begin(self, request, *groups):
        """vLLM takes in a request for which nothing is loaded, and allocates these blocks, or those from 10
        on."""
        self.side.allocated(request, self.manager.allocate(request, *(groups or (blocks_of(request),))), 0)

    def step(self, states=None, **scheduled):
        """One step, in which each of these requests has so many tokens computed. vLLM hands over `states`
        with it."""
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_scheduled_tokens=dict(scheduled),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=states or {}),
        )
        step = self.side.begin_step(output)
        self.side.plan_streams(step)
        self.side.plan_stores(step, output)
        return step

    def stored(self, store, *outcomes):
        """A rank reports the end of a store; by default all of its chunks are new."""
        told = list(outcomes) or [StoreOutcome.NEW] * len(store.chunks.names)
        self.side.take_report(StepReport({store.job: (1, told)}))

    def loaded(self, loaded, request_id="a", seconds=0.0):
        """The workers report the end of a load."""
        self.side.take_report(StepReport(loads={request_id: (seconds, loaded)}))

    def finish(self, request):
        """The request ends. Returns the `kv_transfer_params` of its answer."""
        return self.side.finished(request)

    def troubles(self, op, reason):
        return self.metrics.totals().get(("troubles", op, reason), 0)


def blocks_of(request, first=10):
    return list(range(first, first - (-request.num_tokens // BLOCK)))


STREAM = {"do_remote_prefill": True, "pd_cache": {"stream": True}}


def announced(tokens, namespace="", **more):
    return {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": tokens, "namespace": namespace, **more}}
