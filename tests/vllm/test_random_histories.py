"""vLLM's own scheduler and block pool, and both sides of the connector, over a model of hashes and a pool
that fails at random.

After each step, every block of vLLM's prefix cache must hold the KV of its tokens, and so must each chunk
that is stored. Every token of every answer must follow from those before it. Requests share beginnings, and
are aborted (even within a step), preempted and drafted for. Loads fail in any layer, come late or bring
chunks of weights that have changed; some are declined, or all but a chunk of them. A reset changes the
weights: from then on only KV of the new ones is right, and requests that had begun before may answer what
they like.
"""

import math
import random
import threading
import time
from typing import Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml

from bench.lib.small_models import write_model
from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, LayerGroup, stride_hashes
from pd_cache.groups import LayerGroups, longest_prefix
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, StoreOutcome
from pd_cache.versions import Naming, WeightsVersion
from pd_cache.vllm.costs import NotWorth
from pd_cache.vllm.layers import NO_DRAFT, kept_layers, parts_of
from pd_cache.vllm.steps import Step
from pd_cache.vllm.worker import WorkerSide
from tests.pd_cache.vllm.histories import STREAM, Lookups
from tests.vllm.hashing_model import (
    BLOCK,
    VOCABULARY,
    Layer,
    advanced,
    attended,
    computed,
    embedded,
    kv,
    token,
)
from tests.vllm.layer_groups import planning, vllm_config
from transfer.errors import Status

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn

REQUESTS = 40
_MOST_STEPS = 20_000


class Setting(NamedTuple):
    """The settings of a history."""

    policy: Literal["recompute", "fail"] = "recompute"
    recompute: Literal["token", "block"] = "token"
    per_chunk: int = 2
    """Blocks of a chunk."""
    fail: float = 0.5
    """The share of loads that fail."""
    blocks: int = 40
    step_tokens: int = 64
    requests: int = 4
    """How many run at the same time."""
    prefix_cache: bool = True
    drafts: bool = False
    declines: float = 0.0
    """The share of loads that are not worth their time."""
    resets: float = 0.0
    """The share of steps with a reset before them."""
    streams: float = 0.0
    """The share of prompts that another node computes, and that are streamed meanwhile."""
    stream_s: float = 600.0
    """How long a stream may last."""
    layers: tuple = (Layer(),) * 3
    retention: int | None = None
    """vLLM's `prefix_cache_retention_interval`."""
    hybrid: bool = True
    """False for `--disable-hybrid-kv-cache-manager`."""
    match_unit: int | None = None
    """vLLM's `prefix_match_unit`."""
    patient: bool = False
    """Whether streams are cancelled only when the request that is to be answered has its first token, prompts
    may need nearly all blocks, and nothing is aborted: whoever waits for another for ever is seen."""


class FailingCache:
    """The worker's cache of a part of a layer group. A load brings all, or fails in one of the layers. Called
    on the worker's threads."""

    def __init__(self, history, part, names):
        self._history = history
        self.layers = [history.names.index(name) for name in names]
        self.kept = part.kept_blocks(history.chunk)
        self.chunk_size, self.block_size = history.chunk, history.chunk // self.kept
        self._words = 1 if part.kind == "state" else part.block_size
        self.space = history.metadata_of(part, names)
        self._rng = random.Random(history.rng.random())
        self.metrics = CacheMetrics()

    def mark(self):
        return None

    def right(self, name):
        """Returns what a chunk has to hold of each layer. Call it with the lock held."""
        return [self._history.right_chunks[name][layer][-self.kept * self._words :] for layer in self.layers]

    def store(self, names, blocks, *, after=None, label=""):
        history, outcomes = self._history, []
        for at, name in enumerate(names):
            places = blocks[at * self.kept : (at + 1) * self.kept]
            with history.lock:
                if label != history.label:
                    outcomes.append(StoreOutcome.NOT)
                elif (name, self.layers[0]) in history.pool:
                    outcomes.append(StoreOutcome.BEFORE)
                else:
                    stored = [right.copy() for right in self.right(name)]
                    for layer, data in zip(self.layers, stored, strict=True):
                        for place, block in enumerate(places):
                            here = slice(place * self._words, (place + 1) * self._words)
                            if block >= 0 and not np.array_equal(history.pages[layer][block], data[here]):
                                history.wrong.append(f"stored a chunk with wrong bytes, from blocks {places}")
                            if block < 0:  # vLLM has no such block any more
                                data[here] = 0
                    history.pool[name, self.layers[0]] = stored
                    outcomes.append(StoreOutcome.NEW)
        return outcomes

    def load(self, names, blocks, *, session, label="", timeout):
        history, rng = self._history, self._rng
        good, why = len(names), "none"
        if rng.random() < history.setting.fail:
            good, why = rng.randrange(len(names)), rng.choice(["evicted", "damaged", "deadline", "error"])
        with history.lock:
            if why == "evicted":
                for name in names[good:]:
                    history.pool.pop((name, self.layers[0]), None)
            chunks = [history.pool.get((name, self.layers[0])) for name in names]
        if None in (there := [None if chunk is None else True for chunk in chunks])[:good]:
            good, why = there.index(None), "evicted"
        damaged = rng.randrange(len(self.layers))
        for number, layer in enumerate(self.layers):
            time.sleep(rng.choice([0, 0, 0.001]))
            if number >= damaged and why == "deadline":
                return Loaded(0, "deadline")
            if number >= damaged and why == "error":
                raise RuntimeError("this load fails")
            for at, chunk in enumerate(chunks):
                for place, block in enumerate(blocks[at * self.kept : (at + 1) * self.kept]):
                    if block >= 0 and (chunk is None or (at >= good and number >= damaged)):
                        history.pages[layer][block] = rng.getrandbits(63)
                    elif block >= 0 and chunk is not None:
                        own = chunk[number][place * self._words : (place + 1) * self._words]
                        history.pages[layer][block] = own
        with history.lock:
            if label != history.label:
                return Loaded(0, "reset")
        history.loaded += good == len(names)
        history.streamed += "-stream" in session and good == len(names)
        return Loaded(good, "none" if good == len(names) else "damaged")


class RandomLookups(Lookups):
    """Finds what is in the pool of a history, and now and then less."""

    def __init__(self, history):
        databases = [ChunkedTokenDatabase(part.space.namespace(history.cache)) for part in history.parts]
        super().__init__(CacheMetrics(), databases[0])
        self._groups = LayerGroups(databases)
        self._history = history

    def _answer(self, names, *, chunks_at_hand, session, timeout):
        history, asked = self._history, names[chunks_at_hand:]
        if history.rng.random() < 0.1:
            asked = asked[: history.rng.randint(0, len(asked))]
        with history.lock:
            there = [(name, part.layers[0]) in history.pool for part in history.parts for name in asked]
            found = longest_prefix(self._groups, [Status.OK if one else Status.MISSING for one in there])
            if history.version.label is None:
                return Found(chunks_at_hand, chunks_at_hand, "never_stored")
        end = chunks_at_hand + found.chunks
        return Found(end, chunks_at_hand + found.leading, "none" if end == len(names) else "never_stored")


class History:
    """An engine, its requests, and what is right."""

    def __init__(self, setting, seed, model, folder):
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

        self.setting = setting
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.pool = {}
        """By the chunk's name and the first layer of the part."""
        self.label = ""
        self.loaded = 0
        """Loads that brought all of their chunks."""
        self.wrong = []
        self.names = [f"model.layers.{number}" for number in range(len(setting.layers))]
        self.pages = []
        for layer in setting.layers:
            own = np.zeros((setting.blocks, layer.words), dtype=np.uint64)
            self.pages.append(own if layer.source is None else self.pages[layer.source])
        self.right_blocks = {}
        """By the hash of a block of vLLM's prefix cache, what all layers have to hold of the last `BLOCK`
        tokens up to the block's end."""
        self.right_chunks = {}
        """What each chunk has to hold, by its name."""
        self.tables = {}
        """The blocks of each request in each of vLLM's groups, as a worker knows them."""
        self.columns = {}
        """Of each request: where in its tables the block of its state is, and how many tokens of its last
        step count."""
        self._known = {}
        self.weights = 0
        self._begun = {}
        """The weights with which each request began."""
        self._requests = {}
        self._aborted = set()
        self._elsewhere = []
        """Requests whose prompts another node computes."""
        self._cancelled = []
        """Streams whose proxy is about to cancel them."""
        self.streamed = 0
        chunk = setting.per_chunk * BLOCK
        tree = {
            "cache": {"chunk_size": chunk},
            "engine": {"kind": "vllm", "model": str(model)},
            "handoff": {"wait_ms": 20},
            "connector": {"load": "auto", "recompute": setting.recompute, "store_generated": True},
            "nodes": [
                {"name": "master", "role": "master", "port": 1},
                {"name": "a", "role": "prefill", "port": 2},
            ],
        }
        file = folder / f"{seed}.yaml"
        file.write_text(yaml.safe_dump(tree))
        drafts = (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
            if setting.drafts
            else None
        )
        config = EngineArgs(
            model=str(model),
            max_model_len=1024,
            dtype="float32",
            enforce_eager=True,
            async_scheduling=False,
            enable_prefix_caching=setting.prefix_cache,
            max_num_batched_tokens=setting.step_tokens,
            max_num_seqs=setting.requests,
            speculative_config=drafts,
            kv_transfer_config=KVTransferConfig(
                kv_connector="PdCacheConnector",
                kv_connector_module_path="pd_cache.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy=setting.policy,
                kv_connector_extra_config={"config_file": str(file), "node": "a"},
            ),
        ).create_engine_config()
        config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK, setting.blocks
        config.cache_config.mamba_cache_mode = "align"
        named = list(zip(self.names, setting.layers, strict=True))
        page = max(layer.spec().page_size_bytes for layer in setting.layers)
        specs = {name: layer.spec(page, 3 * setting.drafts) for name, layer in named if layer.source is None}
        plan = vllm_config()
        plan.scheduler_config.disable_hybrid_kv_cache_manager = not setting.hybrid
        groups = planning().get_kv_cache_groups(plan, specs)
        self.hashed = setting.match_unit or math.gcd(*(layer.block for layer in setting.layers))
        ours = KVCacheConfig(
            setting.blocks,
            [],
            groups,
            prefix_cache_retention_interval=setting.retention,
            hash_block_size=self.hashed,
        )
        theirs = generate_scheduler_kv_cache_config([ours])
        sources = {name: self.names[layer.source] for name, layer in named if layer.source is not None}
        add_kv_sharing_layers_to_kv_cache_groups(sources, groups)
        self.groups = [[self.names.index(name) for name in group.layer_names] for group in groups]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(self.hashed, sha256)
        manager = StructuredOutputManager(config)
        retained = max(layer.retained for layer in setting.layers)
        with patch.object(type(config), "num_prefill_lookahead_tokens", retained and retained + 1):
            self.vllm = Scheduler(config, theirs, manager, block_size=BLOCK, hash_block_size=self.hashed)
        side = self.vllm.connector._scheduler
        side.streams.longest_s = setting.stream_s
        side.costs.not_worth = self._not_worth
        self.metrics = side.metrics
        self.chunk, self.cache = chunk, self.vllm.connector._settings.node.cache
        by_group = [
            [FailingCache(self, *part) for part in parts_of(kept, ours, NO_DRAFT)]
            for kept in kept_layers(ours)
        ]
        self.parts = [part for parts in by_group for part in parts]
        side.open([part.space for part in self.parts], RandomLookups(self))
        self.version = self.vllm.connector._version
        self.worker = WorkerSide(
            [[(part, True) for part in parts] for parts in by_group],
            load_timeout_s=60,
            device=torch.device("cpu"),
            version=WeightsVersion(),
        )

    def _not_worth(self, *_):
        probe = self.rng.random() < 0.3
        return NotWorth(2.0, 1.0, probe) if self.rng.random() < self.setting.declines else None

    def metadata_of(self, part, names):
        """Returns what a worker says about a part of a layer group."""
        kept = LayerGroup(layers=",".join(names), keeps=part.kind, tail=part.tail(self.chunk))
        size = self.chunk // part.kept_blocks(self.chunk)
        return CacheMetadata(
            model="m", kv_dtype="f", page_format="p", layers=1, block_size=size, page_bytes=64, group=kept
        )

    def has(self, name):
        """Returns whether the pool has all parts of a chunk. Call it with the lock held."""
        return all((name, part.layers[0]) in self.pool for part in self.parts)

    def run(self):
        """Lets requests come until all have ended. Raises AssertionError for anything that is wrong."""
        made = steps = 0
        rng, blocks = self.rng, self.vllm.kv_cache_manager.block_pool
        while (
            made < REQUESTS
            or self._elsewhere
            or self.vllm.requests
            or self.vllm.connector.has_pending_push_work()
        ):
            while made < REQUESTS and len(self.vllm.requests) < 12 and rng.random() < 0.4:
                self._begin_request(f"request-{made}")
                made += 1
            self._compute_elsewhere()
            if self.vllm.requests and not self.setting.patient and rng.random() < 0.02:
                self._abort()
            if rng.random() < 0.35:  # others need the memory
                free = [one for one in blocks.blocks if one.ref_cnt == 0 and one.block_hash is not None]
                blocks.evict_blocks({one.block_id for one in free if rng.random() < 0.6})
            with self.lock:
                for key in [key for key in self.pool if rng.random() < 0.03]:
                    del self.pool[key]
            if rng.random() < self.setting.resets:
                with self.lock:
                    self.begin_version()
                    assert self.vllm.connector.reset_cache()
            if self.version.label is None and rng.random() < 0.5:
                self.version.name(Naming(label=self.label, ids=(self.version.state.id,)))
            self._step()
            assert not self.wrong
            steps += 1
            assert steps < _MOST_STEPS, [(one.request_id, one.status) for one in self.vllm.requests.values()]
        assert not [one for one in blocks.blocks if one.ref_cnt and not one.is_null], (
            "every block is given back"
        )

    def _begin_request(self, request_id):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        rng, prompt = self.rng, []
        if self._requests and rng.random() < 0.75:
            others = list(rng.choice(list(self._requests.values())).all_token_ids)
            prompt = others[: rng.choice([len(others), rng.randint(1, len(others))])]
        more = rng.choice(
            [0, 1, rng.randint(1, 500 if self.setting.patient else 150), BLOCK * rng.randint(1, 8)]
        ) or 20 * (not prompt)
        prompt += [rng.randrange(VOCABULARY) for _ in range(more)]
        params = SamplingParams(max_tokens=rng.choice([1, 1, 2, 5, 20]), ignore_eos=True, temperature=0)
        room = (self.setting.blocks - 2) * BLOCK - 24
        most = min(900 if self.setting.patient else 300, room)
        prompt = prompt[:most]
        request = Request(request_id, prompt, params, None, block_hasher=self._hasher)
        if rng.random() < self.setting.streams:
            told = {"kv_transfer_params": STREAM}
            one = SamplingParams(max_tokens=1, temperature=0, extra_args=told)
            self._elsewhere.append(request)
            self._learn(request)
            # more than one, as if several proxies sent the same prompt, a part of it, or one that goes on
            for number in range(rng.choice([1, 1, 2, 4])):
                longer = [*prompt, *(rng.randrange(VOCABULARY) for _ in range(60))][:most]
                some = (
                    rng.choice([prompt, prompt[: rng.randint(1, len(prompt))], longer]) if number else prompt
                )
                self._add(Request(f"{request_id}-stream{number}", some, one, None, block_hasher=self._hasher))
        else:
            self._add(request)

    def _add(self, request):
        self._requests[request.request_id] = request
        self._begun[request.request_id] = self.weights
        self._learn(request)
        self.vllm.add_request(request)

    def _compute_elsewhere(self):
        """Lets other nodes store chunks, end or fail, and proxies cancel streams before or after the request
        that is to be answered comes."""
        rng, chunk = self.rng, self.setting.per_chunk * BLOCK
        for request in list(self._elsewhere):
            names = stride_hashes(request.block_hashes, chunk // self.hashed)[: request.num_tokens // chunk]
            with self.lock:
                missing = [name for name in names if not self.has(name)]
                for name in missing[: rng.choice([0, 0, 1, 2])]:
                    for part in self.parts:
                        self.pool[name, part.layers[0]] = part.right(name)
            if missing and rng.random() > 0.03:
                continue
            self._elsewhere.remove(request)
            self._cancelled += [
                one for one in self._requests if one.startswith(f"{request.request_id}-stream")
            ]
            if not missing or rng.random() < 0.5:  # then some of them never come
                tokens = {"prefix_tokens": len(names) * chunk}
                request.kv_transfer_params = {"do_remote_prefill": True, "pd_cache": tokens}
            if rng.random() < 0.5:
                self._cancel()
            self._add(request)
        if rng.random() < 0.2:
            self._cancel()

    def _cancel(self):
        from vllm.v1.request import RequestStatus

        for request_id in list(self._cancelled):
            request = self._requests.get(request_id.partition("-stream")[0])
            if self.setting.patient and not (
                request and (request.num_output_tokens or request.is_finished())
            ):
                continue
            self._cancelled.remove(request_id)
            if request_id in self.vllm.requests:
                self._aborted.add(request_id)
                self.vllm.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def begin_version(self):
        """Changes the weights, and with them what is right. Call it with the lock held: stores compare with
        what is right in their label."""
        self.pool.clear()
        self.label += "x"
        self.weights += 1
        self._known.clear()
        for request in self._requests.values():
            self._learn(request)

    def _abort(self):
        from vllm.v1.request import RequestStatus

        request_id = self.rng.choice(list(self.vllm.requests))
        self._aborted.add(request_id)
        self.vllm.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _learn(self, request):
        """Notes what the request's whole blocks and chunks have to hold."""
        count, size = len(request.block_hashes), self.hashed
        if count == self._known.get(request.request_id):
            return
        self._known[request.request_id] = count
        right, _ = computed(list(request.all_token_ids)[: count * size], self.weights, self.setting.layers)
        names = stride_hashes(request.block_hashes, self.chunk // size)
        with self.lock:
            for at, one in enumerate(request.block_hashes):
                self.right_blocks[bytes(one)] = right[:, max(0, (at + 1) * size - BLOCK) : (at + 1) * size]
            for at, name in enumerate(names):
                self.right_chunks[name] = right[:, at * self.chunk : (at + 1) * self.chunk]

    def _step(self):
        from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

        output = self.vllm.schedule()
        step = output.kv_connector_metadata
        assert isinstance(step, Step)
        sampled = self._compute(output, step)
        ended = self.worker.take_ended_loads(step, output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=ended.finished,
            failed_recving=ended.failed,
            invalid_block_ids=ended.bad_blocks,
            kv_connector_worker_meta=self.worker.take_report(step),
        )
        if self.vllm.requests and not self.setting.patient and self.rng.random() < 0.05:
            self._abort()
        before = set(self.vllm.requests)
        places = {request_id: place for place, request_id in enumerate(sampled)}
        self.vllm.update_from_output(
            output, ModelRunnerOutput(list(sampled), places, list(sampled.values()), kv_connector_output=told)
        )
        for request_id in before - set(self.vllm.requests) - self._aborted:
            self._check_answer(self._requests[request_id])
        if self.setting.drafts and (running := [one for one in sampled if one in self.vllm.requests]):
            self.vllm.update_draft_token_ids(DraftTokenIds(running, [self._draft(one) for one in running]))
        # those that have just ended, too: vLLM 0.33 keeps the block that their last accepted drafts fill
        for request_id in before:
            self._learn(self._requests[request_id])
        self._check_prefix_cache()

    def _compute(self, output, step):
        """Does what vLLM's worker does. Returns the tokens of each request, none if its prompt is not all
        computed."""
        starts = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.tables |= {one.req_id: [list(ids) for ids in one.block_ids] for one in output.scheduled_new_reqs}
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [[] for _ in self.groups]
            for table, ids in zip(self.tables[request_id], more or (), strict=bool(more)):
                table += ids
        for request_id in {
            *output.finished_req_ids,
            *cached.resumed_req_ids,
            *(output.preempted_req_ids or ()),
        }:
            self.columns.pop(request_id, None)
        for page in self.pages:
            page[output.new_block_ids_to_zero or []] = 0
            for source, target in output.kv_cache_block_copies or ():
                page[target] = page[source]
        self.worker.start(step)
        parts = [
            _Part(
                self,
                request_id,
                starts[request_id],
                count,
                output.scheduled_spec_decode_tokens.get(request_id, []),
            )
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        for layer in range(len(self.pages)):
            for part in parts:
                part.write(layer)
            for part in parts:
                part.attend(layer)
        self.worker.save(step)
        return {part.request.request_id: part.sampled() for part in parts}

    def _draft(self, request_id):
        tokens, drafted = list(self._requests[request_id].all_token_ids), []
        for _ in range(self.rng.randrange(4)):
            right = token(computed(tokens + drafted, self.weights, self.setting.layers)[1][-1])
            drafted.append(right if self.rng.random() < 0.7 else self.rng.randrange(VOCABULARY))
        return drafted

    def _check_answer(self, request):
        from vllm.v1.request import RequestStatus

        if request.status is RequestStatus.FINISHED_ERROR:
            assert self.setting.policy == "fail"
            return
        if self._begun[request.request_id] != self.weights:
            return
        tokens, start = list(request.all_token_ids), request.num_prompt_tokens
        _, hidden = computed(tokens, self.weights, self.setting.layers)
        assert tokens[start:] == [token(one) for one in hidden[start - 1 : -1]], request.request_id

    def _check_prefix_cache(self):
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        for block in self.vllm.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                right = self.right_blocks[bytes(get_block_hash(block.block_hash))]
                for layer in self.groups[get_group_id(block.block_hash)]:
                    page = self.pages[layer][block.block_id]
                    # with a `prefix_match_unit`, vLLM also shares blocks that are not full
                    page = page[: (block.block_hash_num_tokens - 1) % len(page) + 1]
                    assert np.array_equal(right[layer][-len(page) :], page), (
                        f"block {block.block_id} is shared"
                    )


class _Part:
    """What a step computes of one request."""

    def __init__(self, history, request_id, start, count, drafted):
        self.request = history._requests[request_id]
        self._history = history
        self._layers, self._pages = history.setting.layers, history.pages
        self._drafted = drafted
        self._start, self._end = start, start + count
        # vLLM fills places of drafts that it does not have with -1
        tokens = [*self.request.all_token_ids, *(max(one, 0) for one in drafted)][start : self._end]
        self._hidden = embedded(tokens, start, history.weights)
        self._rest = self.request.num_tokens + len(drafted) - self._end
        tables = history.tables[request_id]
        self._table = {
            layer: np.array(tables[number])
            for number, layers in enumerate(history.groups)
            for layer in layers
        }
        places = np.arange(self._end)
        self._where = [
            (places, places)
            if kept.state
            else (self._table[layer][places // kept.block], places % kept.block)
            for layer, kept in enumerate(self._layers)
        ]
        self._begin_states()

    def write(self, layer):
        blocks, offsets = (one[-len(self._hidden) :] for one in self._where[layer])
        if self._layers[layer].source is None and not self._layers[layer].state:
            self._pages[layer][blocks, offsets] = kv(self._hidden, layer)

    def attend(self, layer):
        blocks, offsets = self._where[layer]
        if self._layers[layer].state:
            self._advance(layer)
        else:
            self._hidden = attended(self._hidden, self._pages[layer][blocks, offsets], self._layers[layer])

    def sampled(self):
        accepted = []
        if not self._rest:
            for at, hidden in enumerate(self._hidden[len(self._hidden) - len(self._drafted) - 1 :]):
                accepted.append(token(hidden))
                if at < len(self._drafted) and self._drafted[at] != accepted[-1]:
                    break
        self._keep_states(max(1, len(accepted)))
        return accepted

    # --- states, as in vLLM's `v1/worker/mamba_utils.py` ----------------------------------------------------

    def _begin_states(self):
        """Copies the states of the last step to the blocks of this one (`preprocess_mamba`)."""
        before, accepted = self._history.columns.get(self.request.request_id, ((self._start - 1) // BLOCK, 1))
        self._column = -(-self._end // BLOCK) - 1
        if before not in (-1, self._column):
            self._copy(before + accepted - 1, self._column)
            accepted = 1
        self._first = self._column + accepted - 1
        """Where the states are that this step goes on with."""

    def _advance(self, layer):
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        table, page, history = self._table[layer], self._pages[layer], self._history
        before = page[table[self._first], 0] if self._start else np.uint64(0)
        own = kv(self._hidden, layer)
        self._hidden, states = advanced(self._hidden, own, self._start, before)
        for at in range(len(self._drafted) + 1):
            page[table[self._column + at], 0] = states[len(states) - len(self._drafted) - 1 + at]
        if self._layers[layer].state == "anywhere":
            (offset,), (column,) = compute_mamba_prefill_checkpoints(
                [self._end],
                [self._end - self._start],
                hash_block_size=history.hashed,
                mamba_block_size=BLOCK,
                checkpoint_alignment=1,
                drop_eagle_block=False,
                cache_hit_alignment_tokens=history.setting.match_unit or BLOCK,
            )
            if offset:
                page[table[column], 0] = states[offset - 1]

    def _keep_states(self, accepted):
        """Keeps the states at a block's end behind which drafts were accepted
        (`postprocess_mamba_fused_kernel`)."""
        running = self._end - len(self._drafted)
        aligned = (running + accepted - 1) // BLOCK * BLOCK
        if aligned >= running:
            target = aligned // BLOCK - 1
            self._copy(self._column + aligned - running, target)
            if target == self._column:
                accepted = 1
        self._history.columns[self.request.request_id] = (self._column, accepted)

    def _copy(self, source, target):
        for layer, kept in enumerate(self._layers):
            if kept.state:
                table = self._table[layer]
                self._pages[layer][table[target]] = self._pages[layer][table[source]]


STATE, MAMBA = Layer(state="at steps' ends"), Layer(state="anywhere")
STATES = {"fail": 0.2, "blocks": 150, "per_chunk": 1, "resets": 0.02}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"), hidden=64, layers=3, heads=1, kv_heads=1)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(blocks=300, step_tokens=32, requests=8),
        Setting(blocks=24, per_chunk=1, recompute="block", resets=0.02),
        Setting(per_chunk=3, fail=0.9, step_tokens=512, requests=8),
        Setting(policy="fail", blocks=80, fail=0.2),
        Setting(drafts=True, blocks=80, requests=2),
        Setting(prefix_cache=False, fail=0.2),
        Setting(per_chunk=3, blocks=300, recompute="block", declines=0.5),
        Setting(fail=0.2, blocks=80, drafts=True, resets=0.05),
        Setting(fail=0.1, blocks=200, requests=3, resets=0.04),
        Setting(fail=0.1, blocks=200, streams=0.6, declines=0.3),
        Setting(fail=0.1, blocks=32, per_chunk=1, streams=0.8, patient=True),
        Setting(fail=0.3, blocks=100, per_chunk=1, streams=0.7, resets=0.03, stream_s=0.05),
        # DeepSeek V3.2, or unequal heads: a group in parts
        Setting(fail=0.3, blocks=100, streams=0.3, resets=0.02, layers=(Layer(heads=2), Layer(), Layer())),
        # Gemma 3, gpt-oss: windows longer and shorter than a chunk
        Setting(
            fail=0.2,
            blocks=150,
            declines=0.4,
            resets=0.02,
            layers=(Layer(), Layer(40), Layer(40)),
            retention=0,
        ),
        Setting(fail=0.2, blocks=150, per_chunk=4, layers=(Layer(20), Layer(), Layer(20)), recompute="block"),
        # DeepSeek V4: windows of compressors, with blocks of their own
        Setting(
            fail=0.2,
            blocks=400,
            layers=(Layer(latent=True), Layer(8, 4, 1, True), Layer(32, 8, 1, True)),
            retention=0,
        ),
        Setting(
            fail=0.2,
            blocks=400,
            per_chunk=1,
            layers=(Layer(latent=True), Layer(8, 4, 2, True), Layer(8, 4, 1, True)),
        ),
        pytest.param(Setting(**STATES, layers=(STATE, STATE, Layer())), id="Qwen3-Next, MiniMax"),
        pytest.param(
            Setting(**STATES, layers=(STATE, STATE, Layer()), drafts=True), id="Qwen3-Next with drafts"
        ),
        pytest.param(Setting(**STATES, layers=(MAMBA, MAMBA, Layer())), id="Nemotron-H, Jamba"),
        pytest.param(Setting(**STATES, layers=(MAMBA, Layer(), MAMBA, Layer()), retention=0), id="Falcon-H1"),
        pytest.param(Setting(**STATES, layers=(STATE, STATE, STATE, Layer(latent=True))), id="Kimi Linear"),
        pytest.param(
            Setting(**STATES, layers=(STATE, STATE, Layer()), match_unit=4), id="Qwen3-Next with a match unit"
        ),
        pytest.param(Setting(**STATES, layers=(MAMBA,) * 3), id="Mamba-2"),
        # the tokens that are retained before a window are in a block of their own
        pytest.param(
            Setting(fail=0.2, blocks=150, per_chunk=1, layers=(Layer(17, retained=2), Layer(), Layer())),
            id="MiMo V2 with three MTP modules",
        ),
        # vLLM disables the hybrid manager for Llama 4
        pytest.param(
            Setting(fail=0.2, blocks=100, hybrid=False, layers=(Layer(local=48), Layer(local=48), Layer())),
            id="Llama 4",
        ),
        pytest.param(
            Setting(fail=0.2, blocks=150, layers=(Layer(), Layer(24, heads=2), Layer(24, heads=2))),
            id="Step 3.5",
        ),
        pytest.param(
            Setting(fail=0.2, blocks=150, layers=(Layer(24), Layer(), Layer(24, source=0), Layer(source=1))),
            id="Gemma 3n",
        ),
    ],
    ids=lambda setting: ",".join(
        str(value) for value in setting._replace(layers=[one[:2] for one in setting.layers])
    ),
)
def test_whatever_becomes_of_loads_every_block_chunk_and_token_is_right(setting, tiny, tmp_path):
    loaded = streamed = declined = seed = 0
    while (
        seed < 2 or not loaded or (setting.streams and not streamed) or (setting.declines and not declined)
    ):  # what becomes of a load depends on threads, too
        assert seed < 30, "no load brought all of its chunks"
        history = History(setting, seed, tiny, tmp_path)
        try:
            history.run()
        finally:
            assert history.worker.close(60)
        loaded += history.loaded
        streamed += history.streamed
        declined += history.metrics.totals().get(("loads_declined_tokens",), 0)
        seed += 1
