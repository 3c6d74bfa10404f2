"""Parts of the connector that need vLLM's types, but no engine."""

import importlib
import inspect
import json
import math
import random
from contextlib import ExitStack, closing
from types import SimpleNamespace

import msgspec
import pytest
import torch

from launch.cli import example_file
from launch.discovery.directory import describe_node
from launch.engines.vllm_command import refused_flags, vllm_program
from launch.proxy.bodies import SAMPLING, tenant_salt
from pd_cache.chunks import BlockHasher, CacheMetadata, LayerGroup, MediaItem, describe_hashes
from pd_cache.cluster import ClusterConfig, MasterNode, PrefillNode, VllmEngineConfig, load_config
from pd_cache.config import CacheConfig
from pd_cache.errors import ConfigError, UnsupportedModelError
from pd_cache.events import EventEndpoints, EventSubscriber
from pd_cache.groups import LayerGroups, longest_prefix
from pd_cache.layout import KVLayout, PageKind
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import open_copier
from pd_cache.paged.base import plan_named
from pd_cache.reasons import Loaded, StoreOutcome
from pd_cache.runtime import own_folder
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.layers import (
    NO_DRAFT,
    DraftLayers,
    GroupTensors,
    KeptLayers,
    described,
    fitting_chunk,
    group_tensors,
    kept_layers,
    own_hit,
    parts_of,
)
from pd_cache.vllm.settings import read_settings
from pd_cache.vllm.steps import GroupChunks, LoadOp, StepReport, StoreOp
from pd_cache.vllm.steps import Step as Move
from pd_cache.vllm.worker import WorkerSide
from tests.support.names import group
from tests.support.pool import free_port
from tests.support.waiting import wait_for
from tests.vllm.layer_groups import layer_specs, planning, vllm_config
from transfer.errors import Status

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM's own imports warn of

CONFIG = """
transfer: {staging_size: 32MiB}
engine: {kind: vllm, model: /models/llama, args: {block-size: 32}}
nodes:
  - {name: master, role: master}
  - {name: prefill-0, role: prefill, port: 1, segment_size: 64MiB}
  - {name: prefill-1, role: prefill, port: 2, args: {tensor-parallel-size: 4}}
  - {name: decode-0, role: decode, port: 3, args: {tensor_parallel_size: 6}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


def layout(kind=PageKind.HEADS_FIRST, heads=8):
    return KVLayout(
        kind=kind, layers=2, blocks=4, block_size=32, pieces=heads, piece_bytes=64, dtype="bfloat16"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])  # sockets; ports of all addresses
def test_each_data_parallel_rank_of_vllm_publishes_where_the_nodes_record_says(host, tmp_path):
    from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

    port, *_ = free_port(), free_port(), free_port(), free_port()
    node = PrefillNode(name="p", host=host, port=5003, events_port=port, args={"data-parallel-size": 2})
    config = ClusterConfig(nodes=(MasterNode(name="m"), node), engine=VllmEngineConfig(model="m"))
    argv = vllm_program(config, node, tmp_path / "c.yaml", tmp_path / "n").argv
    (given,) = (json.loads(one.partition("=")[2]) for one in argv if one.startswith("--kv-events-config="))
    record = describe_node(config, node, f"http://{host}:5003")
    addresses, came = [(record.events, record.replays), *record.ranks], [[], []]
    with own_folder(), closing(EventSubscriber()) as subscriber, ExitStack() as stack:
        for rank in range(2):
            publisher = ZmqEventPublisher(rank, given["endpoint"], given["replay_endpoint"])
            stack.callback(publisher.shutdown)
            publisher.publish(KVEventBatch(ts=float(rank), events=[AllBlocksCleared()]))
        subscriber.follow({rank: (EventEndpoints(*addresses[rank]), came[rank].extend) for rank in range(2)})
        wait_for(lambda: all(came), "each rank's batch was replayed")
    assert [one.ts for (one, *_) in came] == [0.0, 1.0]


def test_the_groups_that_vllm_makes_of_deepseek_v4s_layers_are_found_in_either_version():
    assert len(planning().get_kv_cache_groups(vllm_config(), layer_specs(43))) == 5


def test_vllm_is_refused_to_sleep_beside_the_connector():
    from pd_cache.vllm.connector import PdCacheConnector

    assert PdCacheConnector.supports_sleep_mode(SimpleNamespace()) is False, "vLLM 0.33 asks the class"


def test_every_method_takes_what_vllms_own_of_that_name_takes():
    from pd_cache.adapters.vllm_tier import PdCacheTierManager
    from pd_cache.vllm.connector import PdCacheConnector

    for ours in (PdCacheConnector, PdCacheTierManager):
        for name in vars(ours):
            base = next((getattr(one, name) for one in ours.__mro__[1:] if name in vars(one)), None)
            if callable(base) and not name.startswith("__"):
                taken = [
                    list(inspect.signature(inspect.unwrap(one)).parameters)
                    for one in (base, getattr(ours, name))
                ]
                assert taken[1][: len(taken[0])] == taken[0], name


def test_hits_are_counted_by_the_tier_that_has_them():
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from pd_cache.adapters.vllm_tier import PdCacheTierManager
    from pd_cache.vllm.connector import PdCacheConnector

    connector = PdCacheConnector.__new__(PdCacheConnector)
    connector._scheduler = SimpleNamespace(
        track=lambda request: SimpleNamespace(by_tier=lambda tokens: (256, 0, tokens - 256))
    )
    split = connector.get_external_cache_hit_sources(SimpleNamespace(), 500)
    assert split == {CacheHitSource.HOST: 256, CacheHitSource.EXTERNAL_UNSPECIFIED: 244}
    assert connector.get_external_cache_hit_sources(SimpleNamespace(), 256) == {CacheHitSource.HOST: 256}
    assert PdCacheTierManager.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED, "the pool is no disk"


def test_the_node_is_named_or_the_only_one_of_its_role(file):
    named = read_settings({"config_file": str(file), "node": "prefill-0"}, "kv_both")
    assert named.node.segment_size == 64 << 20
    assert named.node.cache.hash_mode == "blocks"
    assert named.shards == 12, "the least common multiple of 1, 4 and 6"
    assert read_settings({"config_file": str(file)}, "kv_consumer").node.segment_size == 0


def test_the_cache_server_is_the_nodes_own_or_the_one_that_is_named(tmp_path):
    file = tmp_path / "cluster.yaml"
    changed = CONFIG.replace("port: 1, segment_size: 64MiB", "port: 1, cache_server: c").replace(
        "{tensor-p", "{x-p"
    )
    file.write_text(
        changed.replace("{tensor_p", "{x_p") + "  - {name: c, role: cache-server, url: 'ipc:///run/c'}\n"
    )
    given = {"config_file": str(file), "node": "prefill-0"}
    assert read_settings(given, "kv_both").server_url == "ipc:///run/c"
    assert read_settings({**given, "server_url": "ipc:///run/d"}, "kv_both").server_url == "ipc:///run/d"
    assert read_settings({"config_file": str(file), "node": "prefill-1"}, "kv_both").server_url is None


@pytest.mark.parametrize(
    "extra, message",
    [
        ({}, "needs a config_file or a server_url"),
        ({"server_url": "http://x"}, "server_url"),
        ({"server_url": "ipc:///x", "node": "prefill-0"}, "needs a config_file"),
        ({"config_file": "FILE", "nod": "x"}, "unknown field `nod`"),
        ({"config_file": "FILE", "node": "prefill-7"}, "there are: prefill-0, prefill-1, decode-0"),
        ({"config_file": "FILE"}, "say which this is"),
        ({"config_file": "/nowhere.yaml"}, "/nowhere.yaml: cannot be read"),
    ],
)
def test_a_bad_extra_config_is_refused_in_words(extra, message, file):
    given = {key: value.replace("FILE", str(file)) for key, value in extra.items()}
    with pytest.raises(ConfigError, match=message):
        read_settings(given, "kv_producer")


STATE = KVLayout(
    kind=PageKind.OPAQUE, layers=2, blocks=4, block_size=64, pieces=1, piece_bytes=4096, dtype="uint8"
)
HALVES = [(range(1), True), (range(1, 2), True)]
UNCUT = r"layers 0-2 keep cannot be cut.*Leave cache\.shards out"


@pytest.mark.parametrize(
    "kept, ranks, replicas, shards, expected",
    [
        (layout(), 1, 1, 0, [(range(1), True)]),
        (layout(), 1, 1, 4, [(range(4), True)]),
        (layout(), 2, 1, 0, HALVES),
        (layout(), 2, 1, 4, [(range(2), True), (range(2, 4), True)]),
        (layout(), 4, 2, 4, [(range(2), True), (range(2), False), (range(2, 4), True), (range(2, 4), False)]),
        (layout(), 3, 1, 4, "common multiple"),
        (layout(), 1, 1, 3, "8 KV heads cannot be cut into 3"),
        (layout(PageKind.HEADS_LAST), 1, 1, 2, "LBHNC"),
        (layout(PageKind.KV_OUTER), 2, 1, 4, "cannot be cut"),
        (layout(PageKind.MLA, heads=1), 4, 4, 8, [(range(1), True), *[(range(1), False)] * 3]),
        (layout(heads=1), 4, 4, 8, [(range(1), True), *[(range(1), False)] * 3]),
        (STATE, 2, 1, 0, HALVES),
        (STATE, 2, 1, 2, HALVES),
        (STATE, 2, 1, 4, UNCUT),
        (STATE, 1, 1, 4, UNCUT),
    ],
)
def test_each_rank_holds_its_shards_and_of_replicas_the_first_stores(kept, ranks, replicas, shards, expected):
    """One KV head stands for latents, whose tensors may look like it."""
    from pd_cache.vllm.model import place_of

    latent, state = kept.pieces == 1 and kept is not STATE, LayerGroup(layers="0-2", keeps="a state", tail=1)
    options = {"latent": latent, "group": state if kept is STATE else None}

    def place(rank, ranks, replicas):
        return place_of(
            "m", kept, "llama", rank=rank, ranks=ranks, replicas=replicas, shards=shards, **options
        )

    if isinstance(expected, str):
        with pytest.raises(UnsupportedModelError, match=expected):
            place(0, ranks, replicas)
        return
    places = [place(rank, ranks, replicas) for rank in range(ranks)]
    assert [(metadata.shards, stores) for metadata, stores in places] == expected
    if latent:
        assert {metadata for metadata, _ in places} == {place(0, 1, 1)[0]}, "nodes of any size share"


def further_spec(kind, block_size=16, window=64):
    """What vLLM keeps of a group of layers."""
    from vllm.v1 import kv_cache_interface as vllm

    attention = {"block_size": block_size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    if kind == "full":
        return vllm.FullAttentionSpec(**attention)
    if kind == "draft":
        return vllm.FullAttentionSpec(**{**attention, "num_kv_heads": 2})
    if kind == "window":
        return vllm.SlidingWindowSpec(**attention, sliding_window=window)
    if kind == "local":
        return vllm.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=64)
    if kind == "sink":
        return vllm.SinkFullAttentionSpec(**attention, sink_len=4)
    if kind == "ring":
        return vllm.CircularBufferSpec(**attention)
    if kind == "replayed":
        return vllm.SlidingWindowMLASpec(**attention, sliding_window=window, bounded_replay=True)
    if kind == "mixed":
        return vllm.UniformTypeKVCacheSpecs.from_specs({"a": further_spec("full"), "b": further_spec("sink")})
    return vllm.MambaSpec(
        block_size=block_size,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="none" if kind == "none" else "align",
        num_prefill_checkpoint_blocks=int(kind == "mamba"),
    )


@pytest.mark.parametrize(
    "changed, message",
    [
        ({}, None),
        ({"latent": True}, None),
        ({"latent": True, "chunked_prefill": False}, "ignores the KV of earlier steps"),
        ({"others": ["window", "state"]}, None),
        ({"others": ["local"]}, "ChunkedLocalAttentionSpec.*--disable-hybrid-kv-cache-manager"),
        ({"others": ["sink"]}, "layer 1 has a SinkFullAttentionSpec"),
        ({"others": ["ring"]}, "layer 1 has a CircularBufferSpec"),
        ({"others": ["replayed"]}, "layer 1 keeps KV that vLLM does not share between requests"),
        ({"others": ["mixed"]}, "layer b has a SinkFullAttentionSpec"),
        ({"others": ["none"]}, "mamba_cache_mode is not align"),
        ({"others": ["state", "mamba"]}, None),
        ({"others": ["state"], "match_unit": 4}, None),
        ({"others": ["state", "mamba"], "match_unit": 4}, "prefix_match_unit.*; leave it out"),
        ({"scratch": True}, "does not share between requests"),
        ({"ranks": 2}, "spreads a block's tokens over ranks"),
        ({"faults": True}, "enable_fault_tolerance: vLLM goes on without"),
        ({"sleeps": True}, "enable_sleep_mode: loads and stores would go on"),
        ({"non_causal": True}, "attend to later tokens"),
        ({"prefixes": False}, "does not reuse prefixes"),
        ({"prefixes": False, "attention_free": True}, None),
        ({"prefixes": False, "attention_free": True, "pools": True}, "does not reuse prefixes"),
        ({"draft": "ngram"}, None),
        ({"draft": "suffix"}, None),
        ({"draft": "eagle", "names": ["model.layers.0.attn", "model.layers.1.attn"]}, None),
        ({"draft": "mtp", "names": ["model.layers.0.attn", "mtp.layers.0.attn"]}, None),
        ({"draft": "draft_model", "names": ["model.layers.0.attn", "draft_model.model.layers.0.attn"]}, None),
        ({"draft": "eagle3", "names": ["model.layers.0.attn"]}, "look like its own 1 layers: model.layers.0"),
        ({"draft": "mtp", "names": ["model.layers.0.attn", "model.layers.0.mtp"]}, "look like its own 1"),
        ({"draft": "draft_model", "names": ["draft_model.layers.0"]}, "look like its own 1 layers"),
        ({"draft": "dflash", "names": ["model.layers.0.attn", "model.layers.1.self_attn.attn"]}, None),
        (
            {"draft": "extract_hidden_states"},
            "by extract_hidden_states: pd-cache does not know what its KV depends on; .* dspark, eagle, eagle3, mtp",
        ),
        ({"draft": "mtp", "use_gemma4_mtp": lambda: True}, "the KV of the model itself"),
        ({"draft": "mtp", "others": ["state"]}, "states with a draft model"),
        (
            {"draft": "eagle", "names": ["model.layers.0.attn", "model.layers.1.attn"], "stages": 2},
            "pipeline stages",
        ),
        ({"stages": 2}, None),
    ],
)
def test_a_model_is_refused_if_what_was_loaded_could_change_its_tokens(changed, message):
    """vLLM's CPU platform turns chunked prefill off where MLA cannot attend to the KV of earlier steps, which
    is without AMX."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

    from pd_cache.vllm.model import check_supported

    latent = changed.get("latent", False)
    spec = (MLAAttentionSpec if latent else FullAttentionSpec)(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.float32,
        non_causal=changed.get("non_causal", False),
    )
    ordinary = {
        "method": changed.get("draft"), "use_gemma4_mtp": lambda: False, "use_step3p5_mtp": lambda: False,
    }  # fmt: skip
    speculative = SimpleNamespace(**{name: changed.get(name, value) for name, value in ordinary.items()})
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="/models/m",
            use_mla=latent,
            is_prefix_caching_supported=changed.get("prefixes", True),
            is_attention_free=changed.get("attention_free", False),
            pooler_config=changed.get("pools"),
            enable_sleep_mode=changed.get("sleeps", False),
            get_num_layers=lambda parallel: 1,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changed.get("stages", 1),
            decode_context_parallel_size=changed.get("ranks", 1),
            prefill_context_parallel_size=1,
            enable_fault_tolerance=changed.get("faults", False),
        ),
        cache_config=SimpleNamespace(),
        speculative_config=speculative if "draft" in changed else None,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=changed.get("chunked_prefill", True)),
    )
    specs = [spec, *(further_spec(kind) for kind in changed.get("others", ()))]
    shared = not changed.get("scratch", False)
    names = changed.get("names")
    groups = [
        KVCacheGroupSpec(
            names or list(getattr(one, "kv_cache_specs", [str(at)])), one, enable_kv_transfer=shared
        )
        for at, one in enumerate(specs)
    ]
    cache = SimpleNamespace(kv_cache_groups=groups, hash_block_size=changed.get("match_unit"))
    if message is None:
        check_supported(config, cache)
        return
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        check_supported(config, cache)
    assert "/models/m" in str(refusal.value)


def test_the_layer_groups_of_an_engine_are_those_of_all_stages_and_the_ranks_of_a_stage_must_agree():
    from pd_cache.vllm.connector import Handshake, of_all_stages

    def told(layers, rank):
        kept = LayerGroup(layers=layers, keeps="every token", tail=0)
        return Handshake([CacheMetadata.of("m", layout(), world_size=2, rank=rank, group=kept)], rank, "vllm")

    cache = CacheConfig(chunk_size=64)
    stages = {(1, 1): told("2-3", 1), (0, 1): told("0-1", 1), (1, 0): told("2-3", 0), (0, 0): told("0-1", 0)}
    assert of_all_stages(stages, cache, "llama") == [*stages[0, 0].metadata, *stages[1, 0].metadata]
    with pytest.raises(UnsupportedModelError, match="llama: its ranks have different KV"):
        of_all_stages({**stages, (1, 1): told("2-4", 1)}, cache, "llama")
    with pytest.raises(UnsupportedModelError, match="llama: two of its layer groups have the same namespace"):
        of_all_stages({(stage, 0): told("0-1", 0) for stage in (0, 1)}, cache, "llama")


def test_if_streams_or_stores_raise_the_step_has_its_loads_and_the_engine_goes_on():
    from pd_cache.vllm.connector import PdCacheConnector

    class Raises:
        def begin_step(self, output):
            return Move(loads=[load])

        def plan_streams(self, step):
            raise RuntimeError("a stream")

        def plan_stores(self, step, output):
            raise RuntimeError("a store")

    load = LoadOp("request", [], [], "")
    connector = PdCacheConnector.__new__(PdCacheConnector)
    connector._metrics = CacheMetrics()
    connector._scheduler = Raises()
    assert connector.build_connector_meta(None).loads == [load]
    totals = connector._metrics.totals()
    assert [totals["troubles", op, "error_RuntimeError"] for op in ("stream", "store")] == [1, 1]


def test_a_scheduler_that_hears_nothing_of_its_workers_says_why():
    """As behind a MultiConnector whose first connector is another one."""
    from pd_cache.vllm.connector import PdCacheConnector

    connector = PdCacheConnector.__new__(PdCacheConnector)
    connector._scheduler = None
    connector.set_xfer_handshake_metadata_pp_aware({})
    connector._scheduler = SimpleNamespace()
    with pytest.raises(ConfigError, match="MultiConnector passes on only what its first connector reports"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})


def test_reports_of_ranks_add_up():
    new, before, lost = StoreOutcome.NEW, StoreOutcome.BEFORE, StoreOutcome.NOT
    one = StepReport(
        {1: (1, [new, new]), 2: (1, [new])},
        {"a": (1.0, Loaded(3)), "b": (1.0, Loaded(2, "damaged")), "c": (1.0, Loaded(3))},
    )
    two = StepReport(
        {1: (1, [before, lost])}, {"a": (2.0, Loaded(1, "evicted")), "b": (0.5, Loaded(0, "deadline"))}
    )
    for first, second in ((one, two), (two, one)):
        both = first.aggregate(second)
        assert both.jobs == {1: (2, [new, lost]), 2: (1, [new])}
        assert both.loads == {
            "a": (2.0, Loaded(1, "evicted")),
            "b": (1.0, Loaded(0, "deadline")),
            "c": (1.0, Loaded(3)),
        }, "the worst of each"


def test_statistics_of_several_steps_add_up_for_vllms_log():
    from pd_cache.vllm.stats import CacheStats

    first = CacheStats(
        {
            "troubles|store|queue_full": 2,
            "tokens|lookup|hit": 512,
            "op_seconds_sum|store": 2,
            "bytes|store": 6e9,
        }
    )
    line = first.aggregate(CacheStats({"troubles|store|queue_full": 1})).reduce()
    assert (line["store queue_full"], line["hit tokens"], line["store GB/s"]) == (3, 512, 3.0)


def test_another_vllm_is_a_warning_and_another_interface_an_error(caplog):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from pd_cache.vllm.connector import TESTED, IncompatibleVllmError, check_version

    check_version(TESTED[0] + "+cpu", KVConnectorBase_V1)
    assert not caplog.records
    check_version("0.33.1", KVConnectorBase_V1)
    assert "tested with vLLM 0.32.0; this is 0.33.1" in caplog.text
    with pytest.raises(
        IncompatibleVllmError, match=r"vLLM 0\.8\.0 has another connector interface.*bind_kv_cache_manager"
    ):
        check_version("0.8.0", object)


@pytest.mark.parametrize("seed", [None, "7"])
def test_block_hashes_without_vllm_are_those_of_vllm(seed, monkeypatch):
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(sha256)
    hasher = BlockHasher(16, describe_hashes("sha256", kv_cache_utils.get_none_hash_seed(), "of the file"))
    places = [(4, 5), (9, 2), (14, 20), (40, 8), (48, 40)]
    names = ["one", "one", "two", "one", "one"]  # `one` twice in a block, as different objects
    media = [MediaItem(name, *place) for name, place in zip(names, places, strict=True)]
    features = [
        SimpleNamespace(identifier="".join(name), mm_position=SimpleNamespace(offset=offset, length=length))
        for name, (offset, length) in zip(map(list, names), places, strict=True)
    ]
    for salt, items in ((None, []), ("tenant", []), (None, features), ("tenant", features)):
        request = SimpleNamespace(
            block_hashes=[], num_tokens=100, all_token_ids=list(range(100)), mm_features=items, cache_salt=salt,
            lora_request=None, prompt_embeds=None,
        )  # fmt: skip
        theirs = kv_cache_utils.get_request_block_hasher(16, sha256)(request)
        assert hasher.hashes(range(100), salt, media[: len(items)]) == theirs
        assert len(theirs) == 6


@pytest.fixture
def decode_settings(file):
    return read_settings({"config_file": str(file), "node": "decode-0"}, "kv_consumer")


def test_block_hashes_with_a_random_seed_are_refused(decode_settings, monkeypatch):
    from vllm.config import VllmConfig

    from pd_cache.vllm.model import fitted

    vllm_config = VllmConfig()
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    layers = [KeptLayers(0, 16)]
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="draws a random seed in every process"):
        fitted(decode_settings, vllm_config, layers, 16)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    seeded = fitted(decode_settings, vllm_config, layers, 16).node.cache.hash_seed
    vllm_config.cache_config.prefix_caching_hash_algo = "sha256"
    plain = fitted(decode_settings, vllm_config, layers, 16).node.cache.hash_seed
    assert len({seeded, plain, fitted(decode_settings, vllm_config, layers, 8).node.cache.hash_seed}) == 3


def test_loads_end_with_a_block_beside_routed_experts_which_vllm_keeps_for_blocks(decode_settings):
    from vllm.config import VllmConfig

    from pd_cache.vllm.model import fitted

    vllm_config = VllmConfig()
    for returned, recompute in ((False, "token"), (True, "block")):
        vllm_config.aux_output_config.enable_return_routed_experts = returned
        settings = fitted(decode_settings, vllm_config, [KeptLayers(0, 16)], 16)
        assert settings.connector.recompute == recompute


HITS = (
    [("full", 16, 0)],
    [("full", 16, 0), ("window", 16, 64)],
    [("full", 16, 0), ("window", 16, 65), ("window", 16, 200)],
    [("full", 32, 0), ("window", 16, 40), ("state", 64, 0)],
    [("full", 64, 0), ("state", 64, 0)],
    [("full", 16, 0), ("full", 32, 0), ("window", 32, 129), ("state", 16, 0)],
    [("window", 16, 100)],
    [("state", 64, 0)],
    [("full", 16, 0), ("draft", 16, 0)],
    [("full", 16, 0), ("window", 16, 65), ("draft", 32, 0)],
    [("full", 64, 0), ("state", 64, 0), ("draft", 64, 0)],
)
"""Of each group of a model: what it keeps, its blocks' size, and its window."""


def groups_of(shape):
    """As vLLM has them."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return [
        KVCacheGroupSpec([str(at)], further_spec(*one), is_eagle_group=one[0] == "draft")
        for at, one in enumerate(shape)
    ]


def kept_of(shape):
    return [
        KeptLayers(at, size, "full", drafts="next") if kind == "draft" else KeptLayers(at, size, kind, window)
        for at, (kind, size, window) in enumerate(shape)
    ]


@pytest.mark.parametrize("shape", HITS)
@pytest.mark.parametrize("chunk", [64, 192])
def test_a_prefix_is_as_long_as_vllms_own_coordinator_finds_it(shape, chunk):
    """400 random sets of objects for each, that is 8800 in all. Of a draft model's layers vLLM finds one
    block more than it takes, and we find each chunk by the name of the next."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
        ExternalCachedBlockPool,
        MooncakeStoreCoordinator,
    )

    kinds, groups = [kind for kind, _, _ in shape], groups_of(shape)
    theirs = MooncakeStoreCoordinator(
        groups, scheduler_block_size=chunk, hash_block_size=16, use_eagle="draft" in kinds
    )
    kept = kept_of(shape)
    ours = LayerGroups(
        [group(one.tail(chunk), chunk_size=chunk, layers=str(one.number), ahead=one.ahead) for one in kept]
    )
    rng = random.Random(f"{shape} {chunk}")
    for _ in range(400):
        chunks = rng.randrange(12)
        hashes = [rng.randbytes(32) for _ in range(chunks * chunk // 16)]
        likely = rng.choice((0.5, 0.8, 0.95, 1.0))
        there = [
            [rng.random() < likely or (kind == "draft" and not number) for number in range(chunks)]
            for kind in kinds
        ]
        exists = {
            (at, bytes(value))
            for at, (kind, size, _) in enumerate(shape)
            for block, value in enumerate(theirs.block_hashes_for_spec(hashes, groups[at].kv_cache_spec))
            if there[at][block * size // chunk] and (kind != "state" or (block + 1) * size % chunk == 0)
        }
        _, length = theirs.find_longest_cache_hit(hashes, chunks * chunk, ExternalCachedBlockPool(16, exists))
        assert (
            longest_prefix(
                ours, [Status.OK if one else Status.MISSING for part in there for one in part]
            ).chunks
            * chunk
            == length
        )


@pytest.mark.parametrize("shape", [*HITS, [("draft", 16, 0)]])
def test_what_vllms_own_cache_leaves_of_a_prompt_is_known(shape):
    """`connector.recompute: block` leaves as much. A coordinator of vLLM that has every block is asked."""
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig

    kinds, sizes, _ = zip(*shape, strict=True)
    hashed = math.gcd(*sizes)
    theirs = get_kv_cache_coordinator(
        KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups_of(shape)),
        max_model_len=4096,
        max_in_flight_tokens=256,
        use_eagle="draft" in kinds,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=hashed,
        allow_partial_hash_hits=False,
    )
    every = lambda value, groups: [theirs.block_pool.null_block] * len(groups)  # noqa: E731
    theirs.block_pool.get_cached_block = every
    kept = kept_of(shape)
    for tokens in range(1, 4 * math.lcm(*sizes) + 2):
        hashes = [bytes(32)] * (tokens // hashed)
        _, length, _ = theirs.find_longest_cache_hit(hashes, tokens - 1)
        assert own_hit(tokens, kept) == length, tokens


@pytest.mark.parametrize(
    "wanted, blocks, expected",
    [
        ("auto", [("full", 16)], 256),
        ("auto", [("full", 96)], 288),
        ("auto", [("full", 64), ("window", 32)], 256),
        ("auto", [("full", 192), ("state", 192)], 192),
        (512, [("full", 64), ("window", 64)], 512),
        (192, [("full", 192), ("state", 192)], 192),
        (256, [("full", 96)], "multiple of vLLM's block size 96, e.g. 192 or 288"),
        (100, [("full", 64), ("window", 48)], "multiple of vLLM's block size 48, 64, e.g. 192;"),
        (384, [("full", 192), ("state", 192)], "set it to 192, or to auto"),
    ],
)
def test_the_size_of_a_chunk_fits_all_groups_or_is_refused_with_one_that_does(wanted, blocks, expected):
    groups = [KeptLayers(at, size, kind) for at, (kind, size) in enumerate(blocks)]
    if isinstance(expected, int):
        assert fitting_chunk(wanted, groups) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        fitting_chunk(wanted, groups)


def test_what_a_namespace_says_of_a_group_tells_layers_windows_and_states_apart():
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    specs = [further_spec("window"), further_spec("full"), further_spec("state", 64)]
    groups = [
        KVCacheGroupSpec([f"model.layers.{at}.x", f"model.layers.{at + 3}.x"], spec)
        for at, spec in enumerate(specs)
    ]
    kept = kept_layers(SimpleNamespace(kv_cache_groups=groups))
    assert [one.number for one in kept] == [1, 0, 2], "full attention first"
    memory = torch.zeros(1 << 16, dtype=torch.int8)
    pages = torch.as_strided(memory, (8, 1, 1, 100), (128, 100, 100, 1))
    attention = torch.zeros(2, 8, 1, 16, 8)
    told = []
    for one in kept:
        names = groups[one.number].layer_names
        caches = dict(zip(names, [pages, pages] if one.kind == "state" else attention, strict=True))
        tensors = group_tensors(one, caches, names, 8, "m", 64)
        told.append(described(one, names, tensors, 64))
    assert [(one.layers, one.tail) for one in told] == [("1,4", 0), ("0,3", 1), ("2,5", 1)]
    assert [one.keeps for one in told] == [
        "every token",
        "the last 64 tokens",
        "a state of float32 [4, 4]: int8 [1, 1, 1, 100]",
    ]


def test_the_layers_of_a_draft_model_are_a_group_of_their_own_that_names_it():
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    own, drafting = ["model.layers.0.attn", "model.layers.1.attn"], ["model.layers.2.attn"]
    config = SimpleNamespace(
        kv_cache_groups=[
            KVCacheGroupSpec([*own, *drafting], further_spec("full")),
            KVCacheGroupSpec(["model.layers.3.attn"], further_spec("window")),
        ]
    )
    draft = DraftLayers(frozenset(drafting), "next")
    kept = kept_layers(config, draft)
    assert [(one.number, one.kind, one.drafts, one.ahead) for one in kept] == [
        (0, "full", "", 0),
        (1, "window", "", 0),
        (0, "full", "next", 1),
    ]
    assert [parts_of(one, config, draft) for one in kept] == [
        [(one, names)] for one, names in zip(kept, (own, ["model.layers.3.attn"], drafting), strict=True)
    ]
    assert [one.drafts for one in kept_layers(config)] == ["", ""]
    assert parts_of(kept[0], config, NO_DRAFT) == [(kept[0], [*own, *drafting])]
    told = described(kept[2], drafting, GroupTensors([], layout()), 64, "Head:0123")
    assert (told.layers, told.keeps, told.tail, told.ahead) == (
        "2",
        "every token, for drafts of Head:0123",
        0,
        1,
    )
    same = kept_layers(config, draft._replace(reads="same"))[2]
    assert (same.drafts, same.ahead) == ("same", 0)


def test_a_draft_model_is_its_weights_and_method_but_not_how_many_tokens_it_drafts(tmp_path):
    from pd_cache.vllm.model import drafted_up_to, drafter_identity

    def drafting(weights=b"w", method="eagle", tokens=3, positions=2048):
        folder = tmp_path / f"{weights.hex()}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.bin").write_bytes(weights)
        told = SimpleNamespace(to_dict=lambda: {"max_position_embeddings": positions})
        model = SimpleNamespace(
            model=str(folder),
            dtype="bf16",
            quantization=None,
            architectures=["Head"],
            hf_config=told,
            max_model_len=2048,
        )
        speculative = SimpleNamespace(
            method=method, draft_model_config=model, num_speculative_tokens=tokens, kv_cache_dtype=None
        )
        others = {
            "cache_config": SimpleNamespace(cache_dtype="auto"),
            "model_config": SimpleNamespace(max_model_len=4096),
        }
        return SimpleNamespace(speculative_config=speculative, **others)

    one = drafter_identity(drafting(), "")
    assert one.startswith("Head:")
    assert drafter_identity(drafting(tokens=5, positions=4096), "") == one
    others = [drafter_identity(drafting(weights=b"v"), ""), drafter_identity(drafting(method="mtp"), "")]
    assert len({one, *others, drafter_identity(drafting(), "a revision")}) == 4
    assert drafted_up_to(drafting()) == 2045, "the draft model's own limit, less what it drafts"


def test_states_and_split_blocks_move_as_opaque_pages_if_they_are_one_run_of_bytes():
    memory = torch.arange(4096, dtype=torch.int16)
    conv, ssm = memory.as_strided((8, 10), (64, 1)), memory.as_strided((8, 4, 4), (64, 4, 1), 12)

    def moved(tensors, size, kind="full"):
        return group_tensors(KeptLayers(0, size, kind), {"0": tensors}, ["0"], 8, "m", size)

    state = moved([conv, ssm], 64, "state")
    assert state.layout.page_bytes == state.layout.block_bytes == 2 * 28
    assert state.tensors[0][3].tolist() == list(memory[3 * 64 : 3 * 64 + 28].view(torch.uint8))
    split = torch.arange(16 * 2 * 16 * 4, dtype=torch.float32).view(16, 2, 16, 4)
    pages = moved(split, 32)
    assert (pages.layout.block_size, pages.layout.blocks) == (32, 8)
    assert torch.equal(pages.tensors[0][5], split[10:12].reshape(-1).view(torch.uint8))
    with pytest.raises(UnsupportedModelError, match=r"m: .* are not contiguous"):
        moved(split.as_strided((16, 2, 8, 4), (128, 64, 4, 1)), 32)
    with pytest.raises(UnsupportedModelError, match="lie apart"):
        moved([conv, memory.as_strided((8, 4), (32, 1))], 64, "state")
    with pytest.raises(UnsupportedModelError, match="does not hold 8 blocks"):
        moved([memory.as_strided((9, 4), (32, 1))], 64, "state")


def specs_of_model(model):
    """Returns the specs of a few layers of a model, by name, as vLLM's code for the model gives them, and the
    layout of its KV tensors."""
    from vllm.v1 import kv_cache_interface as vllm

    def latent(size, dtype=torch.bfloat16, **more):
        return vllm.MLAAttentionSpec(
            block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=dtype, **more
        )

    def heads(count, size=64, **more):
        attention = {
            "block_size": 16,
            "num_kv_heads": count,
            "head_size": size,
            "dtype": torch.bfloat16,
            **more,
        }
        return (vllm.SlidingWindowSpec if "sliding_window" in attention else vllm.FullAttentionSpec)(
            **attention
        )

    each = [f"model.layers.{number}.self_attn" for number in range(4)]
    indexer = latent(132, torch.uint8)
    if model == "DeepSeek V4":
        return layer_specs(4), "BLHNC"
    if model in ("DeepSeek V3.2", "GLM-5"):
        leads = [model == "DeepSeek V3.2" or number % 2 == 0 for number in range(4)]
        specs = {
            f"{name}.attn": latent(576, is_index_group_leader=lead)
            for name, lead in zip(each, leads, strict=True)
        }
        specs |= {f"{name}.indexer.k_cache": indexer for name, lead in zip(each, leads, strict=True) if lead}
        return specs, "LBNHC"
    if model == "DeepSeek V3.2, fp8":
        specs = {f"{name}.attn": latent(576, torch.uint8, state_content_bytes=656) for name in each}
        return specs | {f"{name}.indexer.k_cache": indexer for name in each}, "BLHNC"
    layers = {
        "Nemotron-NAS": [heads(count) for count in (8, 4, 8, 2)],
        "Gemma 4, one group": [heads(8), heads(2, 128), heads(8), heads(2, 128)],
        "MiniMax M3": [heads(4), heads(4), heads(4), indexer.copy_with_new_block_size(16)],
        "windows": [heads(count, sliding_window=32) for count in (8, 4, 8, 2)],
    }[model]
    return dict(zip(each, layers, strict=True)), "LBHNC"


class Copied:
    """A cache of a part of a layer group whose chunks are in a dictionary."""

    chunk_size = 256

    def __init__(self, kv, payloads):
        self.metrics, self.block_size = CacheMetrics(), kv.layout.block_size
        self._layout, self._copier, self._payloads = kv.layout, open_copier(kv.tensors, kv.layout), payloads

    def mark(self):
        return None

    def _planned(self, names, blocks):
        return zip(names, plan_named(names, blocks, self._layout, 256, loads=False, tail=0), strict=True)

    def store(self, names, blocks, **_):
        for name, chunk in self._planned(names, blocks):
            self._payloads[name] = torch.empty(self._layout.chunk_bytes(256), dtype=torch.uint8)
            self._copier.gather(chunk, self._payloads[name]).wait()
        return [StoreOutcome.NEW] * len(names)

    def load(self, names, blocks, **_):
        for name, chunk in self._planned(names, blocks):
            self._copier.scatter(chunk, self._payloads[name]).wait()
        return Loaded(len(names))


@pytest.mark.parametrize(
    "model, expected",
    [
        ("DeepSeek V3.2", {"0-3.self_attn.attn": 4, "0-3.self_attn.indexer.k_cache": 4}),
        ("DeepSeek V3.2, fp8", {"0-3.self_attn.attn": 4, "0-3.self_attn.indexer.k_cache": 4}),
        ("GLM-5", {"0,2.self_attn.attn": 4, "1,3": 4, "0,2.self_attn.indexer.k_cache": 4}),
        (
            "DeepSeek V4",
            {
                "0": 2,
                "1": 2,
                "2.window": 2,
                "3.window": 2,
                "2.kept": 1,
                "2.state": 2,
                "2.index": 1,
                "2.index_state": 2,
                "3.kept": 1,
                "3.state": 16,
            },
        ),
        ("Nemotron-NAS", {"0,2": 16, "1": 16, "3": 16}),
        ("Gemma 4, one group", {"0,2": 16, "1,3": 16}),
        ("MiniMax M3", {"0-2": 16, "3": 16}),
        ("windows", {"0,2": 16, "1": 16, "3": 16}),
    ],
)
def test_layers_with_pages_of_different_size_in_a_group_move_in_parts_byte_by_byte(model, expected):
    """The groups, their tensors and what the scheduler knows are made by vLLM. Expected: for each part, how
    many blocks of a chunk of 256 tokens are kept, the last ones."""
    from vllm.v1 import kv_cache_interface as vllm
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.kv_cache_layout import KVCacheLayout

    specs, layout = specs_of_model(model)
    groups, rng = planning().get_kv_cache_groups(vllm_config(layout), specs), random.Random(1)
    assert isinstance(groups[0].kv_cache_spec, vllm.UniformTypeKVCacheSpecs)
    # two chunks of each group, and as many blocks that nothing may touch
    counts = [2 * 256 // group.kv_cache_spec.block_size for group in groups]
    vllm_settings = vllm_config(layout)
    vllm_settings.cache_config.num_gpu_blocks_override = blocks = 2 * sum(counts)
    worker = planning().get_kv_cache_config_from_groups(vllm_settings, groups, 1 << 40)
    memory = [torch.zeros(worker.kv_cache_tensors[0].size, dtype=torch.int8) for _ in range(2)]
    memory[0].random_(-128, 128)
    caches = [{}, {}]
    pages = [{}, {}]
    for tensor in worker.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        content = spec.unpadded_page_size_bytes
        for raw, found, bare in zip(memory, caches, pages, strict=True):
            views = vllm.create_kv_cache_views(raw, spec, blocks, KVCacheLayout[layout], tensor)
            found |= dict(zip(tensor.layers, views, strict=True))
            for number, layer in enumerate(tensor.layers):
                start = tensor.offset + number * tensor.layer_stride
                bare[layer] = raw.as_strided((blocks, content), (tensor.block_stride, 1), start)
    kept, known = kept_layers(worker), kept_layers(generate_scheduler_kv_cache_config([worker]))
    assert [one._replace(latent=False) for one in kept] == [one._replace(latent=False) for one in known]
    told = {}
    of_layer = {}
    sides = [[], []]
    for kind in kept:
        parts = parts_of(kind, worker, NO_DRAFT)
        source, target = (
            [group_tensors(one, found, names, blocks, "m", 256) for one, names in parts] for found in caches
        )
        for kv, (one, names) in zip(source, parts, strict=True):
            others = [layer for layer in specs if layer not in names]
            told[described(one, names, kv, 256, others=others).layers] = 256 // kv.layout.block_size
            of_layer |= dict.fromkeys(names, 256 // kv.layout.block_size)
        payloads = [{} for _ in parts]
        for side, some in zip(sides, (source, target), strict=True):
            side.append([(Copied(*one), True) for one in zip(some, payloads, strict=True)])
    assert told == expected
    free = [rng.sample(range(blocks), blocks) for _ in range(2)]
    places = [[[ids.pop() for _ in range(counts[kind.number])] for kind in kept] for ids in free]
    here, there = (
        [GroupChunks(at, [b"a" * 16, b"b" * 16], ids) for at, ids in enumerate(some)] for some in places
    )
    with ExitStack() as stack:
        from_, to = (
            WorkerSide(side, load_timeout_s=60, device=torch.device("cpu"), version=WeightsVersion())
            for side in sides
        )
        for side in (from_, to):
            stack.callback(side.close, 60)
        from_.save(Move(stores=[StoreOp(at, chunks) for at, chunks in enumerate(here)]))
        stored = set()
        wait_for(
            lambda: (
                ((report := from_.take_report(Move())) and stored.update(report.jobs))
                or len(stored) == len(kept)
            )
        )
        bare = pages[1]
        to.start(Move(loads=[LoadOp("a", there, [])]))
        wait_for(lambda: to.take_ended_loads(Move(), set()).finished)
    for kind, source_ids, target_ids in zip(kept, *places, strict=True):
        per_chunk = len(source_ids) // 2
        for layer in groups[kind.number].layer_names:
            told_of = of_layer[layer]
            for at, (source_id, target_id) in enumerate(zip(source_ids, target_ids, strict=True)):
                if at % per_chunk >= per_chunk - told_of:
                    assert torch.equal(bare[layer][target_id], pages[0][layer][source_id]), (layer, at)
                    bare[layer][target_id] = 0
    assert not bool(memory[1].any()), "nothing else is touched"


@pytest.mark.parametrize("name", ["cluster", "rdma"])
def test_vllms_own_parser_takes_the_flags_of_a_recipe(name, monkeypatch, capsys):
    """In this process, which has imported vLLM: another one would take a dozen seconds for it."""

    def parse(command, **_):
        _, _, _, code, *given = command
        monkeypatch.setattr("sys.argv", ["-c", *given])
        exec(code, {})  # noqa: S102 - our own
        return SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)

    importlib.import_module("vllm.entrypoints.cli.serve")  # it runs programs itself
    monkeypatch.setattr("launch.engines.vllm_command.subprocess.run", parse)
    config = load_config(example_file(name))
    node = config.by_role("decode")[0]
    assert refused_flags(config, [node]) == {}
    mistyped = msgspec.structs.replace(node, args={**node.args, "max-model-lne": 5})
    refused = refused_flags(config, [mistyped, msgspec.structs.replace(node, name="good")])
    assert refused == {node.name: "it refuses its flags: unrecognized arguments: --max-model-lne=5"}


def test_the_proxys_hops_leave_out_every_field_that_says_how_to_sample():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.sampling_params import SamplingParams

    fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert fields.intersection(SamplingParams.__struct_fields__) - {"max_tokens"} <= SAMPLING


def test_vllm_takes_a_tenants_salt():
    from vllm.entrypoints.generate.base.protocol import validate_cache_salt

    validate_cache_salt(tenant_salt("@/\\\0" * 1000, 63 * "x"))
