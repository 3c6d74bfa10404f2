"""Every storage backend, and every wrapper around each, built alike for the suites that all of them pass."""

import re
from contextlib import contextmanager

from pd_cache.config import DiskTier, LocalTier
from pd_cache.metrics import CacheMetrics
from pd_cache.tiers.disk import LocalDiskBackend
from pd_cache.tiers.hybrid import HybridBackend, Tier
from pd_cache.tiers.local import LocalBackend
from pd_cache.tiers.memory import TRAILER_BYTES, ObjectMemory
from pd_cache.tiers.mooncake import MooncakeBackend
from pd_cache.tiers.pipelined import PipelinedBackend
from tests.support.waiting import wait_for
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import Timeouts
from transfer.staging import StagingPool
from transfer.store import staging_pool

TIMEOUTS = Timeouts(exist_ms=20_000, get_ms=30_000, put_ms=30_000, close_ms=20_000)

BASES = ("local", "disk", "mooncake")
CHAINS = ("local+disk", "local+mooncake", "disk+mooncake", "local+disk+mooncake")
KINDS = (
    *BASES,
    "pipelined(disk)",
    "hybrid(local)",
    *(f"hybrid({chain})" for chain in CHAINS),
    "pipelined(hybrid(local+disk+mooncake))",
)


class _KeptMemory(ObjectMemory):
    def close(self):
        return


class SharedPoolBackend(MooncakeBackend):
    """A pool client that many subjects use one after another; opening and closing one takes a second."""

    def __init__(self, settings, payload_bytes, slots):
        super().__init__(settings, pool_memory(settings, payload_bytes, slots))
        self.memory = _KeptMemory(self.staging, payload_bytes)
        self.wait_available(60)

    def close(self):
        return

    def really_close(self):
        super().close()


class Subject:
    """A backend under test, with what it is made of."""

    def __init__(self, backend, bases, metrics):
        self.backend = backend
        self.bases = bases
        self.metrics = metrics

    def put(self, values, *, sized=False):
        """Put all of them at once; their statuses. `sized`: payloads of their own sizes."""
        staged = []
        for value in values.values():
            memory = self.backend.stage(payload_bytes=len(value) if sized else None, end=end_in(60))
            assert memory is not None, "no memory came free"
            memory.payload[:] = value
            staged.append(memory)
        return self.backend.batched_put(list(values), staged).results()

    def get(self, keys):
        """The payload of each key, or the reason why there is none. What is damaged is read again, as a load
        does."""
        outcomes = []
        for key, fetched in zip(keys, self.backend.batched_get(keys), strict=True):
            reason = self.backend.check(fetched)
            outcomes.append(reason if fetched.payload is None or reason else bytes(fetched.payload))
            there = fetched.payload is not None
            fetched.release()
            fetched.release()  # idempotent
            if there and reason:
                again = self.get([key])[0]  # until it is removed
                outcomes[-1] = reason if isinstance(again, str) else again
        return outcomes

    def has(self, key):
        return self.backend.batched_contains([key]) == [Status.OK]

    def count(self, name, **labels):
        """The sum of a counter's samples with these labels."""
        return count(self.metrics, name, **labels)

    def plant(self, key, damage, raw_client):
        """Replace the object in every tier that has it, behind the backends' backs."""
        for base in self.bases.values():
            plant(base, key, damage, raw_client)

    def check_integrity(self):
        """Every slot is free, or one of the local tier's."""
        pool = self.backend.memory.pool
        pool.check_integrity()
        for base in self.bases.values():
            if isinstance(base, LocalBackend | LocalDiskBackend):
                base.index.check_integrity()


def count(metrics, name, **labels):
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def pool_memory(settings, payload, slots=0):
    """Memory for a client of the pool, with so many slots more than for its transfers."""
    size = payload + TRAILER_BYTES
    reserve = slots * StagingPool.stride_of(size)
    return ObjectMemory(staging_pool(settings.transfer, size, reserve=reserve), payload)


def make_memory(payload, slots):
    stride = StagingPool.stride_of(payload + TRAILER_BYTES)
    return ObjectMemory(StagingPool(slots * stride, payload + TRAILER_BYTES, prefaulted=False), payload)


def make_local(memory, objects, *, policy="lru", metrics=None):
    """A local tier for so many objects."""
    capacity = objects * StagingPool.stride_of(memory.object_bytes)
    counts = (metrics or CacheMetrics()).tier("local")
    return LocalBackend(memory, LocalTier(capacity=capacity, policy=policy), TIMEOUTS, counts)


def make_disk(memory, path, objects, *, metrics=None, timeouts=TIMEOUTS, **options):
    """A disk tier for so many objects; it may not be open yet."""
    capacity = objects * StagingPool.stride_of(memory.object_bytes)
    tier = DiskTier(path=str(path), capacity=capacity, **{"threads": 2, "retry_s": 0.1, **options})
    return LocalDiskBackend(memory, tier, timeouts, (metrics or CacheMetrics()).tier("disk"))


def make_subject(
    kind, payload, folder, pool, *, objects=64, slots=16, policy="lru", blocking=True, promote="always"
):
    """The backend that `kind` names. `objects`: capacity of each local and disk tier; `slots`: of the memory
    besides it."""
    wrappers = re.findall(r"(pipelined|hybrid)\(", kind)
    names = kind.replace(")", "").split("(")[-1].split("+")
    metrics = CacheMetrics()
    if "mooncake" in names:
        assert pool is not None
        memory = pool.memory
    else:
        memory = make_memory(payload, slots + objects)
    bases = {}
    for name in names:
        if name == "mooncake":
            assert pool is not None
            bases[name] = pool
        elif name == "disk":
            bases[name] = make_disk(memory, folder, objects, metrics=metrics, policy=policy)
        else:
            bases[name] = make_local(memory, objects, policy=policy, metrics=metrics)
    backend = bases[names[0]]
    for wrapper in reversed(wrappers):
        if wrapper == "pipelined":
            backend = PipelinedBackend(backend, depth=2)
        else:
            last = names[-1]
            tiers = [
                Tier(base, metrics.tier(name), blocking or name == last, promote)
                for name, base in bases.items()
            ]
            backend = HybridBackend(tiers)
    try:
        backend.wait_available(60)
    except BaseException:
        backend.close()
        raise
    return Subject(backend, bases, metrics)


@contextmanager
def making(folder, payload, client=None):
    """Yields a function that makes subjects, over a pool client. All are closed at the end, and then all
    memory must be free."""
    subjects = []

    def make(kind, **options):
        subjects.append(make_subject(kind, payload, folder / str(len(subjects)), client, **options))
        return subjects[-1]

    try:
        yield make
    finally:
        for subject in subjects:
            subject.backend.close()
            subject.backend.close()
            wait_for(lambda one=subject: one.backend.memory.pool.in_use == 0, "all memory free after close")
            subject.backend.memory.pool.check_integrity()


def plant(base, key, damage, raw_client):
    """Replace what a base backend holds under a key by damaged bytes, by raw access; nothing where it holds
    nothing."""
    if isinstance(base, MooncakeBackend):
        if good := raw_client.get(key):
            assert raw_client.upsert(key, damage(good)) == 0
        return
    if isinstance(base, LocalDiskBackend):
        from pd_cache.tiers.disk import PAGE, digest_of

        pin = base.index.pin(digest_of(key))
        if pin is None:
            return
        file = base.folder.path_of(pin.resource)
        raw = file.read_bytes()
        changed = damage(raw[: base.memory.object_bytes])
        whole = len(changed) >= base.memory.object_bytes
        file.write_bytes(changed.ljust(-(-len(changed) // PAGE) * PAGE, b"\0") if whole else changed)
        base.index.unpin(pin)
        return
    held = base.index.pin(key)
    if held is None:
        return
    size = base.memory.object_bytes
    view = held.resource.slot.view
    view[:size] = damage(bytes(view[:size]))[:size].ljust(size, b"\0")
    base.index.unpin(held)
