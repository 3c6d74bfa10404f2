"""pd-cache under SGLang's HiCache: its own factory, host pools, page hashes and storage threads, on a CPU."""

import threading
import time
import uuid
from types import SimpleNamespace

import pytest
import torch

from pd_cache.errors import ConfigError, LayoutError
from tests.support.adapters import impatient, options_of
from tests.support.made import made
from tests.support.sglang_host import (
    PAGES,
    TOKENS,
    mha_pool,
    mla_pool,
    need_sglang,
    open_backend,
    storage_config,
)
from tests.support.waiting import wait_for

pytestmark = pytest.mark.filterwarnings("ignore")  # what SGLang's own imports warn of

MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")


@pytest.fixture(autouse=True, scope="module")
def _sglang():
    need_sglang()


@pytest.fixture
def salt():
    return uuid.uuid4().hex


@pytest.fixture
def opened(pool, salt):
    """Opens backends under host pools, in one namespace; all are closed after the test."""

    def open_one(host, *, namespace=salt, **changes):
        backend = open_backend(pool.settings(), host, salt=namespace, **changes)
        backend.cache.wait_available(60)
        return backend

    def close_twice(backend):
        backend.close()
        backend.close()

    yield from made(open_one, close_twice)


def filled(host, seed):
    """The same host pool, with random bytes in all of its pages."""
    torch.manual_seed(seed)
    raw = host.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8))
    return host


def raw(host):
    """All bytes of a host pool: random numbers may be none, and those equal nothing."""
    return host.kv_buffer.contiguous().view(torch.uint8).numpy().tobytes()


def at(*pages):
    """The indices of these pages."""
    return torch.cat([torch.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])


def page(host, number):
    """A page's bytes, as SGLang itself reads them."""
    return host.get_data_page(number * TOKENS, flat=True).contiguous().view(torch.uint8).numpy().tobytes()


def hashes(tokens, **namespace):
    """The hashes by which SGLang itself names a prompt's pages."""
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(token_ids=array("q", tokens), **{"extra_key": None, **namespace})
    return list(get_storage_hash_str(key, None, page_size=TOKENS))


@pytest.mark.parametrize(
    "make, layout",
    [*((mha_pool, one) for one in MHA), *((mla_pool, one) for one in MLA)],
    ids=[*(f"mha-{one}" for one in MHA), *(f"mla-{one}" for one in MLA)],
)
def test_pages_of_one_host_pool_are_loaded_into_other_pages_of_another(make, layout, opened):
    latent = make is mla_pool
    one, other = filled(make(layout), 1), filled(make(layout), 2)
    writer, reader = (opened(host, is_mla_model=latent) for host in (one, other))
    keys = [f"{number:064x}" for number in range(5)]
    before = [page(other, number) for number in range(PAGES)]
    assert writer.batch_set_v1(keys, at(0, 1, 2, 3, 4)) == [True] * 5
    assert reader.batch_exists(keys) == 5
    assert reader.batch_get_v1(keys, at(9, 3, 12, 7, 0)) == [True] * 5
    moved = {9: 0, 3: 1, 12: 2, 7: 3, 0: 4}
    for number in range(PAGES):
        assert page(other, number) == (page(one, moved[number]) if number in moved else before[number])


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "another salt"},
        {"options": {"extra_backend_tag": "another tenant"}},
        {"model_name": "a fine-tuned one"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"layout": "page_first_direct"},
        {"dtype": torch.float16},
        {"heads": 4, "width": 4},
        {"layers": 4},
    ],
    ids=lambda change: ",".join(map(str, change)),
)
def test_what_would_mean_other_bytes_is_another_name(change, opened):
    """SGLang's own keys have the ranks and a model's name only (sglang#33268)."""
    shape = {key: change[key] for key in ("layout", "dtype", "heads", "width", "layers") if key in change}
    rest = {key: value for key, value in change.items() if key not in shape}
    writer = opened(filled(mha_pool("page_first"), 1))
    assert writer.batch_set_v1(["a"], at(0)) == [True]
    host = filled(mha_pool(**{"layout": "page_first", **shape}), 2)
    before = page(host, 0)
    reader = opened(host, **rest)
    assert reader.batch_exists(["a"]) == 0
    assert reader.batch_get_v1(["a"], at(0)) == [False]
    assert page(host, 0) == before


def test_engines_share_if_sglang_resolved_their_arguments_alike(opened):
    """The pool's own type is uint8 for both kinds of fp8, and what the user wrote may have been `auto`."""
    from sglang.srt.runtime_context import get_context

    def of(kind):
        with get_context().override_server_args(kv_cache_dtype=kind):
            return opened(filled(mha_pool("page_first", dtype=torch.uint8), 1))

    assert of("fp8_e4m3").batch_set_v1(["a"], at(0)) == [True]
    assert of("fp8_e4m3").batch_exists(["a"]) == 1
    assert of("fp8_e5m2").batch_exists(["a"]) == 0


def test_ranks_share_latents_and_nothing_else(opened):
    """Of an MLA model, rank 0 writes the latents for all ranks. A draft model with heads keeps other bytes on
    each rank."""
    ranks = []
    for rank in range(2):
        backend = opened(filled(mla_pool("page_first"), rank), is_mla_model=True, tp_rank=rank, tp_size=2)
        backend.register_mem_host_pool_v2(filled(mha_pool("page_first"), 10 + rank), "draft")
        ranks.append(backend)
    assert ranks[0].batch_set_v1(["a"], at(0)) == [True]
    draft = transfer("draft", ["a"], at(0))
    assert ranks[0].batch_set_v2([draft]) == {"draft": [True]}
    assert ranks[1].batch_get_v1(["a"], at(3)) == [True]
    assert ranks[1].batch_get_v2([draft]) == {"draft": [False]}


def transfer(name, keys, indices=None, policy="all_pages"):
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    return PoolTransfer(
        name=PoolName(name), keys=keys, host_indices=indices, hit_policy=PoolHitPolicy(policy)
    )


def test_a_hybrid_models_prefix_ends_where_all_of_its_pools_can_be_restored(opened):
    """Full attention has pages 0 to 5, the indexer 0 to 4, the sliding window pages 1, 2 and 4, of which a
    prefix needs the last two."""
    host, window, indexer = (filled(mha_pool("page_first", layers=layers), layers) for layers in (3, 2, 1))
    backend = opened(host)
    backend.register_mem_host_pool_v2(host, "kv")
    backend.register_mem_host_pool_v2(window, "swa")
    backend.register_mem_host_pool_v2(indexer, "indexer")
    backend.on_host_pools_registered()
    keys = [f"{number:064x}" for number in range(8)]
    assert backend.batch_set_v1(keys[:6], at(*range(6))) == [True] * 6
    stored = backend.batch_set_v2(
        [
            transfer("swa", [keys[1], keys[2], keys[4]], at(1, 2, 4)),
            transfer("indexer", keys[:5], at(*range(5))),
        ]
    )
    assert stored == {"swa": [True] * 3, "indexer": [True] * 5}
    asked = [transfer("swa", keys[:2], policy="trailing_pages"), transfer("indexer", keys)]
    found = backend.batch_exists_v2(keys, asked)
    assert found.kv_hit_pages == 3
    assert found.extra_pool_hit_pages == {"kv": 6, "swa": 3, "indexer": 5}
    assert found.restorable_prefix_pages == [3]
    before = page(window, 7)
    loaded = backend.batch_get_v2(
        [transfer("swa", keys[1:4], at(5, 6, 7)), transfer("indexer", keys[:2], at(6, 7))]
    )
    assert loaded == {"swa": [True, True, False], "indexer": [True, True]}
    assert (page(window, 5), page(window, 6), page(window, 7)) == (page(window, 1), page(window, 2), before)
    assert backend.batch_get_v2([transfer("mamba", keys[:1], at(0))]) == {"mamba": [False]}


def test_requests_of_another_salt_or_adapter_find_nothing(opened):
    """SGLang's page hashes cover them since 0.5.23 at the latest (sglang#26747, #37160); an SGLang whose
    hashes do not is refused."""
    backend = opened(filled(mha_pool("page_first"), 1))
    tokens = list(range(2 * TOKENS))
    assert backend.batch_set_v1(hashes(tokens, cache_salt="tenant a"), at(0, 1)) == [True] * 2
    assert backend.batch_exists(hashes(tokens, cache_salt="tenant a")) == 2
    for other in (
        {"cache_salt": "tenant b"},
        {},
        {"extra_key": "tenant a"},
        {"extra_key": "lora", "cache_salt": "tenant a"},
    ):
        assert backend.batch_exists(hashes(tokens, **other)) == 0


def test_an_sglang_whose_hashes_leave_out_salts_is_refused(pool, salt, monkeypatch):
    monkeypatch.delattr("sglang.srt.mem_cache.utils.storage_namespace_seed")
    with pytest.raises(ConfigError, match="sglang#26747"):
        open_backend(pool.settings(), mha_pool("page_first"), salt=salt)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"masters": "x"}, "masters.*allowed: .*master"),
        ({"revision": ""}, "its weights cannot be identified"),
        ({"interface_v1": 0}, "SGLang copies each page twice"),
    ],
)
def test_options_that_are_wrong_say_so_when_the_backend_is_made(extra, message, pool, salt):
    with pytest.raises(ConfigError, match=message):
        open_backend(pool.settings(), mha_pool("page_first"), salt=salt, options=extra)


def test_a_host_pool_that_cannot_be_addressed_page_by_page_is_refused_when_it_is_registered(pool, salt):
    with pytest.raises(LayoutError, match=r"page_unified.*Use --hicache-mem-layout page_first"):
        open_backend(pool.settings(), mha_pool("page_unified"), salt=salt)


def test_sglangs_own_keys_of_the_extra_config_are_left_to_sglang(pool, salt):
    """Its server takes them out before it makes a backend; its offload manager of decode nodes does not."""
    own = {"prefetch_threshold": 256, "prefetch_timeout_base": 1.0, "hicache_storage_pass_prefix_keys": False}
    open_backend(pool.settings(), mha_pool("page_first"), salt=salt, options=own).close()


def test_all_pools_of_one_call_have_one_deadline(opened, monkeypatch):
    host = filled(mha_pool("page_first"), 1)
    backend = opened(host)
    backend.register_mem_host_pool_v2(host, "swa")
    backend.register_mem_host_pool_v2(host, "indexer")
    given = []

    def late(names, *_, timeout):
        given.append(timeout)
        clock[0] += 2
        return ["timeout"] * len(names)

    clock = [100.0]
    monkeypatch.setattr(backend, "_seconds", 3.0)
    monkeypatch.setattr(backend._names, "read_into", late)
    for module in ("pd_cache.adapters.sglang_hicache", "transfer.deadlines"):
        ours = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter)
        monkeypatch.setattr(f"{module}.time", ours)
    asked = [transfer(name, ["a"], at(0)) for name in ("swa", "indexer")]
    assert backend.batch_get_v2(asked) == {"swa": [False], "indexer": [False]}
    assert given == [3.0, 1.0]


def test_indices_that_are_no_pages_move_nothing_and_raise_nothing(opened):
    host = filled(mha_pool("page_first"), 1)
    backend = opened(host)
    assert backend.batch_set_v1(["a"], at(0)) == [True]
    before = raw(host)
    for wrong in (at(0)[:-1], at(PAGES), at(0) - TOKENS, at(0, 1), at(0) + 1, at(0)[[0, 1, 3, 2]], None):
        assert backend.batch_get_v1(["a"], wrong) == [False]
        assert backend.batch_set_v1(["b"], wrong) == [False]
    assert raw(host) == before


def test_a_transfer_that_is_late_never_writes_into_a_page_that_belongs_to_another_prompt(make_pool, salt):
    """The store node stops, the load is given up at its deadline, SGLang gives the pages to another prompt,
    and the node goes on."""
    pool = make_pool().start()
    host = filled(mha_pool("page_first"), 1)
    backend = open_backend(impatient(pool.settings()), host, salt=salt)
    try:
        backend.cache.wait_available(60)
        keys = [f"{number:064x}" for number in range(8)]
        wait_for(
            lambda: backend.batch_set_v1(keys, at(*range(8))) == [True] * 8,
            "the pool, which has just started",
        )
        with pool.nodes["store-0"].stopped():
            assert backend.batch_get_v1(keys, at(*range(8, 16))) == [False] * 8
            filled(host, 3)
            others = [page(host, number) for number in range(8, 16)]
        wait_for(lambda: backend.batch_get_v1(keys, at(*range(8))) == [True] * 8, "a load after the pause")
        assert [page(host, number) for number in range(8, 16)] == others
    finally:
        backend.close()


def test_a_process_that_clears_the_storage_finds_only_what_it_has_stored_since_and_others_find_all_they_did(
    opened,
):
    one, other = (opened(filled(mha_pool("page_first"), n)) for n in range(2))
    assert one.batch_set_v1(["a"], at(0)) == [True]
    assert other.batch_exists(["a"]) == 1
    assert other.clear() is True
    assert other.batch_exists(["a"]) == 0
    assert other.batch_get_v1(["a"], at(1)) == [False]
    assert one.batch_exists(["a"]) == 1
    assert other.batch_set_v1(["a"], at(0)) == [True]
    assert other.batch_exists(["a"]) == 1
    assert one.clear() is True
    assert one.batch_exists(["a"]) == 0


def test_storage_metrics_are_counted_as_sglang_reads_them(opened):
    backend = opened(filled(mha_pool("page_first"), 1), enable_storage_metrics=True)
    backend.batch_set_v1(["a", "b"], at(0, 1))
    backend.batch_get_v1(["a", "hole"], at(2, 3))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [1])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert backend.get_stats().backup_pgs == []


RANKS = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dcp_rank")
SIZES = ("tp_size", "pp_size", "attn_tp_size", "attn_dcp_size")


class Controller:
    """SGLang's own controller of a host pool with its storage threads, and the part of its scheduler that
    hands pages to them."""

    def __init__(self, host, extra):
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.runtime_context import get_parallel

        device = MHATokenToKVPool(
            size=PAGES * TOKENS,
            page_size=TOKENS,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=8,
            layer_num=3,
            device="cpu",
            enable_memory_saver=False,
        )
        self.host = host
        self.its = HiCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            host,
            TOKENS,
            None,
            threading.Event(),
            io_backend="direct",
        )
        alone = {**dict.fromkeys(RANKS, 0), **dict.fromkeys(SIZES, 1)}
        with get_parallel().override(**alone):  # a server would have said so
            self.its.attach_storage_backend("dynamic", model_name="model", storage_backend_extra_config=extra)
        self.its.storage_backend.cache.wait_available(60)

    def back_up(self, tokens, pages):
        """Hands a prompt's pages to the backup thread. Returns how many tokens it stored."""
        indices = self.host.alloc(pages * TOKENS)
        self.its.write_storage(indices, tokens, hash_value=hashes(tokens))
        done = self.its.ack_backup_queue.get(timeout=60)
        return int(done.completed_tokens)

    def prefetch(self, tokens):
        """Has the prefetch threads look a prompt up and load it. Returns how many tokens were loaded, and
        where."""
        from array import array

        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.its.prefetch("request", RadixKey(token_ids=array("q", tokens), extra_key=None))
        operation = self.its.prefetch_hit_queue.get(timeout=60)
        operation.host_indices = self.host.alloc(max(operation.storage_hit_count, TOKENS))
        self.its.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = self.its.ack_prefetch_queue.get(timeout=60)
            loaded = ack.completed_tokens or loaded
            if ack.completed_req:
                return loaded, operation.host_indices

    def close(self):
        self.its.detach_storage_backend()


def test_sglangs_own_storage_threads_back_up_a_prompt_and_another_engine_prefetches_it(pool, salt):
    """Everything of SGLang but its model and its copies from and to a GPU, which need its CUDA kernels."""
    extra = storage_config(options_of(pool.settings(), salt)).extra_config
    one, other = (Controller(filled(mha_pool("page_first"), n), dict(extra)) for n in range(2))
    try:
        tokens = list(range(1000, 1000 + 6 * TOKENS))
        assert one.back_up(tokens[: 5 * TOKENS], 5) == 5 * TOKENS
        other.host.alloc(3 * TOKENS)  # so that the pages lie elsewhere
        loaded, indices = other.prefetch(tokens)
        assert loaded == 5 * TOKENS
        for number in range(5):
            assert page(other.host, int(indices[number * TOKENS]) // TOKENS) == page(one.host, number)
        assert other.prefetch([7, *tokens[1:]])[0] == 0
    finally:
        one.close()
        other.close()
