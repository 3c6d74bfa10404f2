"""Several tiers as one: who is asked, what is promoted, who is waited for; and the engine over such tiers."""

import contextlib
import random
import threading

import pytest

from pd_cache.config import CacheConfig, DiskTier, LocalTier, MooncakeTier, NodeSettings
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import TierChunks
from pd_cache.tiers import open_backend
from pd_cache.tiers.disk import LocalDiskBackend
from pd_cache.tiers.hybrid import HybridBackend, Tier
from pd_cache.tiers.local import LocalBackend
from pd_cache.tiers.mooncake import MooncakeBackend
from tests.support.backends import Subject, count, make_disk, make_local, make_memory, making
from tests.support.waiting import together, wait_for
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import TransferSettings

OK, MISSING, TIER_OFF = Status.OK, Status.MISSING, Status.TIER_OFF

PAYLOAD = 5000


def value(n):
    return random.Random(str(n)).randbytes(PAYLOAD)


def put(subject, *keys):
    """Puts the value of each key."""
    return subject.put({key: value(key) for key in keys})


@pytest.fixture
def make(tmp_path):
    with making(tmp_path, PAYLOAD) as make_one:
        yield lambda **options: make_one("hybrid(local+disk)", **options)


def holds(subject, tier, key):
    return subject.bases[tier].batched_contains([key]) == [OK]


def switch_off_disk(subject):
    subject.bases["disk"].state = TIER_OFF  # the keeper does not hear of it


def only_on_disk(subject, *keys):
    put(subject, *keys)
    assert subject.bases["local"].batched_remove(list(keys)) == [OK] * len(keys)


# --- promotion ----------------------------------------------------------------------------------------------


def test_a_chunk_read_from_a_later_tier_is_put_into_the_first_without_a_copy(make):
    subject = make()
    only_on_disk(subject, "k")
    (fetched,) = subject.backend.batched_get(["k"])
    assert not holds(subject, "local", "k"), "it might be damaged"
    assert subject.backend.check(fetched) == ""
    local = subject.bases["local"]
    (again,) = local.batched_get(["k"])
    fetched.payload[:1] = b"!"  # the same memory
    assert bytes(again.payload[:1]) == b"!"
    fetched.release()
    again.release()


@pytest.mark.parametrize("promote, promoted", [("second_hit", [False, True, True]), ("never", [False] * 3)])
def test_a_chunk_is_promoted_when_its_tier_says_so(make, promote, promoted):
    subject = make(promote=promote)
    only_on_disk(subject, "k")
    for expected in promoted:
        assert subject.get(["k"]) == [value("k")]
        assert holds(subject, "local", "k") == expected
    assert subject.count("pd_cache_tier_hits_total", tier="local") == promoted[:-1].count(True)


def test_a_promotion_makes_room_but_never_from_what_is_being_read(make):
    subject = make(objects=2)
    put(subject, *"ab")
    put(subject, "c")
    held = list(subject.backend.batched_get(["b", "c"]))
    assert [bytes(one.payload) for one in held if one.payload is not None] == [value("b"), value("c")]
    assert subject.get(["b"]) == [value("b")]
    for one in held:
        one.release()
    assert len(subject.bases["local"].index) == 2


# --- who is asked -------------------------------------------------------------------------------------------


class Asked:
    """What a backend was asked, by method."""

    def __init__(self, backend, monkeypatch, *methods):
        self.calls = []
        for name in methods:
            monkeypatch.setattr(backend, name, self._spy(name, getattr(backend, name)))

    def _spy(self, name, real):
        def call(keys, *arguments, **options):
            self.calls.append((name, list(keys)))
            return real(keys, *arguments, **options)

        return call


def test_a_tier_that_leaves_out_keys_is_an_error(make, monkeypatch):
    subject = make()
    put(subject, "a")
    monkeypatch.setattr(subject.bases["local"], "batched_fetch", lambda keys, **_: (one for one in ()))
    with pytest.raises(ValueError, match="tier local gave no outcome for 1 keys"):
        next(subject.backend.batched_get(["a"]))


def test_later_tiers_are_asked_once_and_only_for_what_earlier_ones_lack(make, monkeypatch):
    subject = make()
    put(subject, *"abcd")
    subject.bases["local"].batched_remove(["b", "d"])
    asked = Asked(subject.bases["disk"], monkeypatch, "batched_contains", "batched_fetch")
    assert subject.backend.batched_contains(["a", "b", "c", "x", "d"]) == [
        OK, OK, OK, MISSING, OK,
    ]  # fmt: skip
    assert asked.calls == [("batched_contains", ["b", "x", "d"])]
    assert subject.backend.near(["a", "b", "c", "x", "d"]) == TierChunks(memory=2, disk=2)
    asked.calls.clear()
    assert subject.backend.batched_contains(["a", "c"]) == [OK] * 2
    assert asked.calls == []
    assert subject.get(["a", "b", "c"]) == [value(key) for key in "abc"]
    assert asked.calls == [("batched_fetch", ["b"])]


def test_a_tier_that_is_off_is_passed_over_and_its_absence_is_no_plain_miss(make, monkeypatch):
    subject = make()
    only_on_disk(subject, "k")
    switch_off_disk(subject)
    assert subject.backend.batched_contains(["k"]) == [TIER_OFF]
    assert subject.get(["k"]) == ["tier_off"]
    assert subject.backend.available, "memory still is"
    assert put(subject, "new") == [TIER_OFF], "it blocks, and is the last"
    assert subject.get(["new"]) == [value("new")]
    assert subject.count("pd_cache_tier_dropped_writes_total", tier="disk", reason="tier_off") == 1


def test_a_put_is_wanted_where_the_last_tier_lacks_the_key_or_cannot_tell_and_nobody_else_has_it(
    make, monkeypatch
):
    subject = make()
    put(subject, "both", "memory", "disk")
    subject.bases["disk"].batched_remove(["memory"])
    subject.bases["local"].batched_remove(["disk"])
    keys = ["both", "memory", "disk", "none"]
    assert subject.backend.batched_contains(keys) == [OK, OK, OK, MISSING]
    assert subject.backend.batched_wants(keys) == [OK, MISSING, OK, MISSING]
    switch_off_disk(subject)
    assert subject.backend.batched_wants(keys) == [
        TIER_OFF,
        TIER_OFF,
        MISSING,
        MISSING,
    ]


def test_alternating_tiers_and_little_memory_never_wait_for_one_another(make):
    subject = make(promote="never", slots=3, objects=32)
    keys = [f"k{n}" for n in range(24)]
    for key in keys:
        put(subject, key)
    subject.bases["local"].batched_remove(keys[1::2])
    expected = [value(key) for key in keys]
    outcomes = []
    together(*[lambda: outcomes.append(subject.get(keys))] * 4)
    assert outcomes == [expected] * 4


def named(calls, method):
    return [keys for name, keys in calls if name == method]


@pytest.mark.parametrize("kept", [0, 2, 3], ids=["a wiped folder", "every other file", "two of three files"])
def test_a_tier_that_lost_files_is_given_each_key_a_constant_number_of_times(make, monkeypatch, kept):
    subject = make(promote="never", objects=64)
    keys = [f"k{n}" for n in range(64)]
    for start in range(0, len(keys), 8):
        put(subject, *keys[start : start + 8])
    local, disk = subject.bases["local"], subject.bases["disk"]
    lost = [key for n, key in enumerate(keys) if not kept or n % kept == 0]
    # known to the index when it is asked, and gone when they are read
    local.batched_remove(lost)
    monkeypatch.setattr(local, "batched_contains", lambda asked, *_: [OK] * len(asked))
    first, second = (Asked(one, monkeypatch, "batched_contains", "batched_fetch") for one in (local, disk))
    assert subject.get(keys) == [value(key) for key in keys]
    assert len(named(first.calls, "batched_contains")) == 1
    assert sum(map(len, named(first.calls, "batched_fetch"))) <= 4 * len(keys)
    assert [key for asked in named(second.calls, "batched_fetch") for key in asked] == lost, "each once"
    assert subject.count("pd_cache_tier_misses_total", tier="local", reason="missing") == len(lost)
    if not kept:
        assert len(second.calls) == 1, "what is lost in a row is read in one go"


# --- writing behind -----------------------------------------------------------------------------------------


def make_behind(tmp_path, backlog):
    """Memory that is waited for, and a disk that is not."""
    metrics, memory = CacheMetrics(), make_memory(PAYLOAD, 40)
    local, disk = make_local(memory, 16, metrics=metrics), make_disk(memory, tmp_path, 16, metrics=metrics)
    disk.wait_available(60)
    hybrid = HybridBackend(
        [Tier(local, metrics.tier("local")), Tier(disk, metrics.tier("disk"), blocking=False)],
        backlog=backlog,
    )
    return Subject(hybrid, {"local": local, "disk": disk}, metrics)


def test_a_store_waits_for_a_blocking_disk_that_is_slower_before_it_takes_memory(tmp_path, faults):
    metrics, memory = CacheMetrics(), make_memory(PAYLOAD, 16)
    disk = make_disk(memory, tmp_path, 40, metrics=metrics)
    disk.wait_available(60)
    hybrid = HybridBackend([Tier(disk, metrics.tier("disk"), blocking=True)])
    faults.go_on.clear()
    outcomes = []
    try:
        while (staged := hybrid.stage(end=0.0)) is not None:
            outcomes.append(hybrid.batched_put([f"k{len(outcomes)}"], [staged]))
        assert len(outcomes) == memory.pool.in_use == 5, "one more than half of what writes may hold"
        threading.Timer(0.05, faults.go_on.set).start()
        last = hybrid.stage(end=end_in(20.0))
        assert last is not None, "it waited for the disk"
        last.release()
        assert [outcome.results() for outcome in outcomes] == [[OK]] * 5
    finally:
        faults.go_on.set()
        hybrid.close()


def test_a_put_does_not_wait_for_a_tier_that_writes_behind_and_what_exceeds_the_backlog_is_dropped_and_counted(
    tmp_path, faults
):
    subject = make_behind(tmp_path, backlog=3)
    try:
        faults.go_on.clear()
        assert subject.put({f"k{n}": value(n) for n in range(2)}) == [OK] * 2
        assert subject.put({f"k{n}": value(n) for n in range(2, 5)}) == [OK] * 3
        assert not holds(subject, "disk", "k0")
        assert subject.get(["k0"]) == [value(0)]
        assert subject.count("pd_cache_tier_dropped_writes_total", tier="disk", reason="overloaded") == 2
        faults.go_on.set()
        wait_for(lambda: [holds(subject, "disk", f"k{n}") for n in range(5)] == [True] * 3 + [False] * 2)
    finally:
        faults.go_on.set()
        subject.backend.close()


# --- composed from the settings -----------------------------------------------------------------------------


def test_tiers_are_composed_in_the_order_of_the_settings(pool, tmp_path):
    tiers = (
        LocalTier(capacity="1MiB", policy="s3fifo"),
        DiskTier(path=str(tmp_path), capacity="1MiB", blocking=False, promote="second_hit"),
        MooncakeTier(),
    )
    backend = open_backend(pool.settings(CacheConfig(tiers=tiers)), PAYLOAD)
    try:
        assert isinstance(backend, HybridBackend)
        kinds = [type(tier.backend) for tier in backend.tiers]
        assert kinds == [LocalBackend, LocalDiskBackend, MooncakeBackend]
        assert [(tier.blocking, tier.promote) for tier in backend.tiers] == [
            (True, "always"), (False, "second_hit"), (True, "always"),
        ]  # fmt: skip
        assert len({id(tier.backend.memory.pool) for tier in backend.tiers}) == 1
        staging = (16 << 20) // 8192
        assert backend.memory.pool.slots == staging + (1 << 20) // 8192, (
            "the local tier's budget comes on top"
        )
    finally:
        backend.close()


def test_the_pool_alone_is_not_wrapped_and_reads_further_batches_while_the_first_is_used(pool, monkeypatch):
    alone = open_backend(pool.settings(CacheConfig(tiers=(MooncakeTier(),))), PAYLOAD)
    try:
        assert isinstance(alone, MooncakeBackend)
        begun, start = [], alone.store.start_get
        monkeypatch.setattr(
            alone.store, "start_get", lambda *args, **more: begun.append(1) or start(*args, **more)
        )
        with contextlib.closing(
            alone.batched_get([f"k{index}" for index in range(3 * alone.batch_size)])
        ) as reader:
            assert next(reader).payload is None, "nothing is there"
            assert len(begun) == 3
    finally:
        alone.close()


def test_local_tiers_alone_need_no_pool_but_staging_for_one_chunk(tmp_path):
    disks = tuple(DiskTier(path=str(tmp_path / name), capacity="1MiB") for name in "ab")
    config = CacheConfig(tiers=(LocalTier(capacity="1MiB"), *disks))
    metrics = CacheMetrics()
    staging = TransferSettings(staging_size="1MiB")
    backend = open_backend(
        NodeSettings(master="nobody:1", cache=config, transfer=staging), PAYLOAD, metrics=metrics
    )
    try:
        backend.wait_available(60)
        subject = Subject(backend, {}, metrics)
        assert put(subject, "k") == [OK]
        assert subject.get(["k"]) == [value("k")]
        wait_for(lambda: count(metrics, "pd_cache_tier_bytes", tier="disk-1") == 8192)
    finally:
        backend.close()
    small = TransferSettings(staging_size=100)
    with pytest.raises(ValueError, match="holds no slot"):
        open_backend(NodeSettings(master="nobody:1", cache=config, transfer=small), PAYLOAD)


@pytest.mark.parametrize("blocking", [True, False], ids=["is away", "has a full backlog"])
def test_chunks_that_a_local_tier_keeps_while_the_pool_takes_none_do_not_keep_the_memory_for_puts(blocking):
    tiers = (LocalTier(capacity="1MiB"), MooncakeTier(blocking=blocking))
    away = NodeSettings(
        master="127.0.0.1:1",
        cache=CacheConfig(tiers=tiers),
        transfer=TransferSettings(staging_size=16 * 8192, prefault=False),
    )
    backend = open_backend(away, PAYLOAD)
    try:
        backend._behind._limit = 0
        for n in range(64):
            staged = backend.stage(end=0.0)
            assert staged is not None, f"{n} chunks in the local tier count as on their way to the pool"
            backend.batched_put([f"k{n}"], [staged]).results()
    finally:
        backend.close()


# --- figures ------------------------------------------------------------------------------------------------


def levels(metrics):
    names = ("staging_bytes", "staging_used_bytes", "pool_up")
    values = {name: metrics.registry.get_sample_value(f"pd_cache_{name}") for name in names}
    return {name: value for name, value in values.items() if value is not None}


def test_metrics_say_how_much_staging_memory_is_in_use_besides_what_local_tiers_keep_and_whether_the_pool_is_up(
    pool,
):
    metrics = CacheMetrics()
    tiers = (LocalTier(capacity="1MiB"), MooncakeTier())
    backend = open_backend(pool.settings(CacheConfig(tiers=tiers)), PAYLOAD, metrics=metrics)
    try:
        backend.wait_available(60)
        staging = (16 << 20) // 8192 * 8192
        assert levels(metrics) == {"staging_bytes": staging, "staging_used_bytes": 0, "pool_up": 1}
        staged = backend.stage()
        assert levels(metrics)["staging_used_bytes"] == 8192
        assert backend.tiers[0].backend.batched_put(["kept"], [staged]).results() == [OK]
        assert levels(metrics)["staging_used_bytes"] == 0, "the local tier keeps it"
    finally:
        backend.close()
    assert levels(metrics) == {}, "a closed backend has no levels"
