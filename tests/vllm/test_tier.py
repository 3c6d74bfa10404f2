"""The secondary tier under vLLM's own tiering manager and primary tier, without an engine."""

import uuid

import pytest

from pd_cache.errors import ConfigError
from tests.support.adapters import options_of
from tests.support.made import made
from tests.support.vllm_tier import offloading_config
from tests.support.waiting import wait_for

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM's own imports warn of

CHUNKS = 8
ROW = 8192


class Tiered:
    """vLLM's tiering manager over its shared memory, with our tier below, made by vLLM's own spec and
    factory."""

    def __init__(self, options):
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        tier = {
            "type": "PdCacheTierManager",
            "module_path": "pd_cache.adapters.vllm_tier",
            "revision": "r",
            **options,
        }
        config = offloading_config(
            ROW,
            engine_id=uuid.uuid4().hex,
            extra_config={"cpu_bytes_to_use": CHUNKS * ROW, "secondary_tiers": [tier]},
        )
        self.spec = TieringOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self._requests = 0

    def request(self):
        from vllm.v1.kv_offload.base import ReqContext

        self._requests += 1
        context = ReqContext(req_id=f"request {self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self, *new):
        """The end of a step of vLLM's scheduler."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext([one.req_id for one in new], []))

    def settle(self):
        """Steps until nothing is under way."""

        def settled():
            self.step()
            return not self.manager.has_pending_work()

        wait_for(settled, "the end of all transfers")

    def reset(self):
        """As the scheduler does when it resets its caches; no worker has anything under way."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33
            self.manager.on_reset_flushed()

    def row(self, chunk):
        return self.manager.primary_tier.get_kv_memoryview().cast("B")[chunk * ROW : (chunk + 1) * ROW]

    def store(self, values, context=None):
        """As if a GPU had computed these chunks and copied them to the primary tier."""
        context = context or self.request()
        prepared = self.manager.prepare_store(list(values), context)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.row(int(chunk))[:] = values[key]
        self.manager.complete_store(prepared.keys_to_store, context)
        self.settle()
        self.manager.on_request_finished(context)

    def load(self, keys):
        """Looks chunks up as the scheduler does for a waiting request, step by step, and reads those that are
        hits."""
        from vllm.v1.kv_offload.base import LookupResult

        context, found = self.request(), [LookupResult.RETRY] * len(keys)

        def answered():
            found[:] = [self.manager.lookup(key, context) for key in keys]
            self.step(context)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found)

        wait_for(answered, "an answer to each lookup")
        hits = [key for key, one in zip(keys, found, strict=True) if one is LookupResult.HIT]
        values = {}
        if hits:
            chunks = self.manager.prepare_load(hits, context).chunk_ids
            values = {key: bytes(self.row(int(chunk))) for key, chunk in zip(hits, chunks, strict=True)}
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return [values.get(key) for key in keys]

    def close(self):
        self.manager.shutdown()


@pytest.fixture
def salt():
    return uuid.uuid4().hex


@pytest.fixture
def opened(vllm_pool, salt):
    """Opens managers with our tier, in one namespace; all are shut down after the test."""

    def open_one(**options):
        one = Tiered({**options_of(vllm_pool.settings(), salt), **options})
        one.tier.cache.wait_available(60)
        return one

    yield from made(open_one, Tiered.close)


def chunk(number):
    """The key of a chunk: a block hash and the index of its group."""
    return number.to_bytes(32, "big") + (0).to_bytes(4, "big")


def values(*numbers):
    return {chunk(number): bytes([number]) * ROW for number in numbers}


def test_chunks_cascade_to_the_pool_and_another_engine_promotes_them(opened):
    one, other = opened(), opened()
    stored = values(1, 2, 3)
    one.store(stored)
    assert other.load([chunk(1), chunk(9), chunk(3), chunk(2)]) == [
        stored[chunk(1)], None, stored[chunk(3)], stored[chunk(2)]
    ]  # fmt: skip
    assert other.load([chunk(1)]) == [stored[chunk(1)]], "it is in its own primary tier now"


def test_a_damaged_chunk_is_missing_and_those_beside_it_are_loaded(opened, vllm_pool):
    """The job fails in part: vLLM keeps what was loaded, and does not ask for ever for what was not
    (vllm#49176)."""
    one, other = opened(), opened()
    one.store(values(1))
    before = vllm_pool.keys()
    one.store(values(2))
    (damaged,) = vllm_pool.keys() - before
    one.store(values(3))
    vllm_pool.damage(damaged)
    assert other.load([chunk(1), chunk(2), chunk(3)]) == [values(1)[chunk(1)], None, values(3)[chunk(3)]]


def test_a_prompt_longer_than_the_primary_tier_is_loaded_as_far_as_there_is_room(opened):
    """vLLM itself would load its last chunks over its first ones, and those again, without end."""
    one, other = opened(), opened()
    for number in range(CHUNKS + 4):
        one.store(values(number))
    loaded = other.load([chunk(number) for number in range(CHUNKS + 4)])
    assert loaded == [*(values(n)[chunk(n)] for n in range(CHUNKS)), *[None] * 4]


def test_a_reset_of_vllms_caches_hides_from_the_engine_what_was_stored_before(opened):
    """vLLM keeps what is in secondary tiers through a reset, also if the weights have changed. This tier
    begins a version of its own."""
    one, other = opened(), opened()
    one.store(values(1))
    one.reset()
    assert one.load([chunk(1)]) == [None]
    assert other.load([chunk(1)]) == [values(1)[chunk(1)]], "its weights have not changed"
    one.store(values(2))
    assert one.load([chunk(2)]) == [values(2)[chunk(2)]]
    assert other.load([chunk(2)]) == [None]


def test_a_request_that_began_before_a_reset_stores_nothing_after_it(opened, vllm_pool):
    one = opened()
    before = one.request()
    one.reset()
    there = vllm_pool.keys()
    one.store(values(1), before)
    assert vllm_pool.keys() == there
    one.store(values(2))
    assert vllm_pool.keys() > there


@pytest.mark.parametrize(
    "options, message",
    [
        ({"masters": "x"}, "masters.*allowed: .*master"),
        ({"locality": "HERE"}, "locality"),
        ({"revision": ""}, "its weights cannot be identified"),
    ],
)
def test_options_that_are_wrong_say_so_when_vllm_starts(options, message, vllm_pool, salt):
    with pytest.raises(ConfigError, match=message):
        Tiered({**options_of(vllm_pool.settings(), salt), **options})


def test_weights_ranks_and_layout_are_part_of_the_namespace():
    import dataclasses

    from pd_cache.adapters.vllm_tier import namespace_of

    config = offloading_config(ROW)
    parallel = config.parallel

    def named(config=config, **changes):
        given = {"row_bytes": ROW, "blocks_per_chunk": 1, "revision": "r", "salt": "", **changes}
        return namespace_of(config, **given)

    others = [
        named(dataclasses.replace(config, parallel=dataclasses.replace(parallel, tp_size=2))),
        named(dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))),
        named(dataclasses.replace(config, model=dataclasses.replace(config.model, name="a fine-tuned one"))),
        named(dataclasses.replace(config, canonical_layout=True)),
        named(dataclasses.replace(config, kv_cache_layout="HND")),
        named(dataclasses.replace(config, groups=config.groups * 2)),
        named(row_bytes=2 * ROW),
        named(blocks_per_chunk=2),
        named(revision="s"),
        named(salt="t"),
    ]
    assert len({named(), *others}) == len(others) + 1
    agnostic = [
        dataclasses.replace(
            config,
            parallel=dataclasses.replace(parallel, tp_size=size, is_parallelism_agnostic=True),
            canonical_layout=canonical,
        )
        for canonical in (True, False)
        for size in (1, 2)
    ]
    canonical_1, canonical_2, direct_1, direct_2 = map(named, agnostic)
    assert canonical_1 == canonical_2
    assert direct_1 != direct_2, "the shares of the ranks lie one after another, each with all layers"
