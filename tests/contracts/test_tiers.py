"""What every storage backend, and every wrapper around each, does alike."""

import random
import struct
import threading
import uuid
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from pd_cache.tiers.local import LocalBackend
from pd_cache.tiers.memory import SELF_SIZED, TRAILER_BYTES, seal
from pd_cache.tiers.mooncake import MooncakeBackend
from tests.support.backends import (
    KINDS,
    SharedPoolBackend,
    Subject,
    make_subject,
    making,
    plant,
    pool_memory,
)
from tests.support.waiting import beside, together, wait_for
from transfer.deadlines import end_in
from transfer.errors import Status

OK, MISSING, CLOSED = Status.OK, Status.MISSING, Status.CLOSED

PAYLOAD = 2 * 4096 - TRAILER_BYTES
"""Bytes; an object fills its pages to the last byte."""
MISSES = {"missing", "busy", "lease_expired", "transfer_failed"}
"""How a key may read that somebody else writes or removes at the same time."""


@pytest.fixture(scope="module")
def client(pool):
    one = SharedPoolBackend(pool.settings(transfer={"staging_size": "256MiB"}), PAYLOAD, slots=80)
    try:
        yield one
    finally:
        one.really_close()


@pytest.fixture
def make(client, tmp_path):
    with making(tmp_path, PAYLOAD, client) as make_one:
        yield make_one


@pytest.fixture(params=KINDS)
def subject(request, make):
    return make(request.param)


@pytest.fixture
def key():
    """One that no other test uses."""
    return f"pdc1/{uuid.uuid4().hex}/0"


def value(seed):
    return random.Random(str(seed)).randbytes(PAYLOAD)


def put(subject, *keys):
    """Stores a value under each key. Returns the values."""
    values = {key: value(key) for key in keys}
    assert subject.put(values) == [OK] * len(keys)
    return list(values.values())


def test_payloads_have_one_of_a_few_sizes(subject, key):
    largest = subject.backend.payload_bytes
    small = value("small")[: largest // 3]
    assert subject.put({f"{key}-small": small, f"{key}-none": b""}, sized=True) == [OK] * 2
    large = put(subject, f"{key}-large")
    assert subject.get([f"{key}-large"]) == large
    (nothing,) = subject.backend.batched_get([f"{key}-none"], payload_bytes=0)
    assert (subject.backend.check(nothing), nothing.payload) == ("", b"")
    nothing.release()
    (fetched,) = subject.backend.batched_get([f"{key}-small"], payload_bytes=len(small))
    assert bytes(fetched.payload or b"") == small
    fetched.release()
    (other,) = subject.backend.batched_get([f"{key}-small"], payload_bytes=len(small) + 8)
    assert other.payload is None, other.reason
    other.release()
    for wrong in (largest + 1, -1):
        with pytest.raises(ValueError, match="payloads have at most"):
            subject.backend.stage(payload_bytes=wrong)


def test_a_payload_that_begins_with_its_size_is_read_by_one_who_does_not_know_it(subject, key):
    payloads = {
        f"{key}-{size}": struct.pack("<Q", size) + value(size)[: size - 8] for size in (8, 100, 4096, PAYLOAD)
    }
    assert subject.put(payloads, sized=True) == [OK] * 4
    for _ in range(2):  # the second time, tiers before the last may have it
        fetches = subject.backend.batched_get([*payloads, f"{key}-none"], payload_bytes=SELF_SIZED)
        for fetched, payload in zip(fetches, [*payloads.values(), None], strict=True):
            assert fetched.payload == payload
            assert subject.backend.check(fetched) == ("missing" if payload is None else "")
            fetched.release()
    with pytest.raises(ValueError):
        subject.backend.stage(payload_bytes=SELF_SIZED)
    for wrong in (0, 7, 99, 101, PAYLOAD + 1, 2**63, 2**64 - 1):
        assert subject.put({f"{key}-{wrong}": struct.pack("<Q", wrong) + bytes(92)}, sized=True) == [OK]
        (fetched,) = subject.backend.batched_get([f"{key}-{wrong}"], payload_bytes=SELF_SIZED)
        assert fetched.payload is None
        assert subject.backend.check(fetched) in ("truncated", "foreign")
        fetched.release()


def test_memory_from_elsewhere_or_of_another_number_than_keys_is_refused(subject, key, make):
    foreign = make("local").backend.stage(end=end_in(60))
    own = subject.backend.stage(end=end_in(60))
    for staged in ([foreign], [own, own], []):
        with pytest.raises(ValueError, match="lent by `stage`"):
            subject.backend.batched_put([key], staged)
    foreign.release()
    own.release()


def test_a_reader_that_stops_early_leaves_nothing_held(subject, key):
    keys = [f"{key}-{n}" for n in range(10)]
    put(subject, *keys)
    held = subject.backend.memory.pool.in_use
    for taken in (0, 1, 4):
        fetches = subject.backend.batched_get(keys)
        for _ in range(taken):
            next(fetches).release()
        fetches.close()
    wait_for(
        lambda: subject.backend.memory.pool.in_use <= held + promoted(subject), "what was in flight came back"
    )
    subject.check_integrity()


def promoted(subject):
    """Slots that the local tier keeps objects in."""
    return len(local.index) if isinstance(local := subject.bases.get("local"), LocalBackend) else 0


ODD_KEYS = (
    " ", "/", "..", "../../etc/passwd", "a\nb", "nul\0nul", "%2e", "lock", "tmp", "ключ-鍵-🔑", "CaSe", "case", "x" * 300,
    "y" * 65_536, "a/b/c", "'\"\\$(true)`", "-rf",
)  # fmt: skip


def test_odd_keys_are_keys_like_any_other(subject):
    prefix = uuid.uuid4().hex
    keys = [prefix + odd for odd in ODD_KEYS]
    for start in range(0, len(keys), 6):
        put(subject, *keys[start : start + 6])
    assert subject.get(keys) == [value(name) for name in keys]


# --- bad data -----------------------------------------------------------------------------------------------


def flipped_bit(raw):
    return bytes([raw[0] ^ 1]) + raw[1:]


def somebody_elses(raw):
    buffer = memoryview(bytearray(raw))
    seal("another key", buffer, len(raw) - TRAILER_BYTES)
    return bytes(buffer)


DAMAGES = {
    flipped_bit: "corrupt",
    somebody_elses: "foreign",
    lambda raw: raw[:-100]: "truncated",
    lambda raw: raw[-TRAILER_BYTES:]: "truncated",
    lambda raw: raw[:-TRAILER_BYTES] + raw[-TRAILER_BYTES:].replace(b"PDC1\1", b"PDC1\2"): "other_version",
    lambda raw: bytes(len(raw)): "foreign",
    lambda raw: raw + raw: "other_size",
}
"""How an object is changed, and the status that a read then has. Files and memory have room for one
object."""


@pytest.mark.parametrize("kind", KINDS)
def test_planted_bad_data_reads_as_a_miss_with_its_reason(make, kind, key, raw_client_of_module):
    subject = make(kind)
    for number, (damage, reason) in enumerate(DAMAGES.items()):
        if reason == "other_size" and kind != "mooncake":
            continue
        good, bad, last = keys = [f"{key}-{number}/{n}" for n in range(3)]
        put(subject, *keys)
        subject.plant(bad, damage, raw_client_of_module)
        missed = subject.count("pd_cache_tier_misses_total")
        first, found, third = subject.get(keys)
        assert (first, third) == (value(good), value(last))
        assert found == reason or (kind != "mooncake" and found in DAMAGES.values())
        # every tier before the last said so to the counters, the last one to the caller
        assert len(subject.bases) == 1 or subject.count("pd_cache_tier_misses_total") > missed
        subject.check_integrity()


def hits(subject):
    """How many objects each tier had, the first tier first."""
    return [subject.count("pd_cache_tier_hits_total", tier=tier) for tier in subject.bases]


def test_a_damaged_object_in_one_tier_is_read_from_the_next_and_mended(make, key):
    subject = make("hybrid(local+disk+mooncake)")
    keys = [f"{key}-{n}" for n in range(6)]
    values = put(subject, *keys)
    plant(subject.bases["local"], keys[1], flipped_bit, None)
    plant(subject.bases["local"], keys[4], lambda raw: bytes(len(raw)), None)
    plant(subject.bases["disk"], keys[4], lambda raw: raw[:-100], None)
    assert subject.get(keys) == values
    for tier, reason in (("local", "corrupt"), ("local", "foreign"), ("disk", "truncated")):
        assert subject.count("pd_cache_tier_misses_total", tier=tier, reason=reason) == 1
    assert hits(subject) == [4, 1, 1]
    assert subject.get(keys) == values
    assert hits(subject) == [10, 1, 1], "what was read was put back"


@pytest.mark.parametrize("chain", ["local+mooncake", "disk+mooncake"])
def test_the_pools_damaged_object_is_replaced_from_a_tier_whose_copy_is_good(
    make, chain, key, raw_client_of_module
):
    subject = make(f"hybrid({chain})")
    pool = Subject(subject.bases["mooncake"], {}, subject.metrics)
    keys = [f"{key}-{n}" for n in range(4)]
    values = put(subject, *keys)
    plant(subject.bases["mooncake"], keys[2], flipped_bit, raw_client_of_module)
    assert subject.get(keys) == values, "the good copy wins"
    assert pool.get(keys) == [*values[:2], "corrupt", values[3]], "another node finds the damage"
    assert subject.backend.batched_wants(keys) == [OK, OK, MISSING, OK]
    put(subject, keys[2])
    assert pool.get(keys) == values


def test_a_chunk_that_is_damaged_in_every_tier_is_wanted_again_and_healed(make, key, raw_client_of_module):
    subject = make("hybrid(local+disk+mooncake)")
    keys = [f"{key}-{n}" for n in range(3)]
    values = put(subject, *keys)
    subject.plant(keys[1], flipped_bit, raw_client_of_module)
    assert subject.get(keys) == [values[0], "corrupt", values[2]]
    assert subject.backend.batched_contains(keys) == [OK, MISSING, OK]
    assert subject.backend.batched_wants(keys) == [OK, MISSING, OK]
    put(subject, keys[1])
    assert subject.get(keys) == values
    assert hits(subject)[-1] == 0
    for base in subject.bases.values():
        assert Subject(base, {}, subject.metrics).get(keys) == values, "in every tier"


@pytest.fixture(scope="module")
def raw_client_of_module(pool):
    with pool.bare_client() as client:
        yield client


# --- budgets ------------------------------------------------------------------------------------------------

OWN_BUDGET = tuple(kind for kind in KINDS if "mooncake" not in kind)


@pytest.mark.parametrize("kind", OWN_BUDGET)
def test_a_budget_smaller_than_one_value_holds_nothing_and_says_so(make, kind, key):
    subject = make(kind, objects=0)
    assert subject.put({key: value(0)}) == [Status.NO_SPACE]
    assert subject.get([key]) == ["missing"]
    assert not subject.has(key)
    if kind == "hybrid(local)":
        assert subject.count("pd_cache_tier_dropped_writes_total", tier="local", reason="no_space") >= 1


@pytest.mark.parametrize("kind", ["local", "hybrid(local)", "pipelined(local)"])
def test_what_a_reader_holds_is_never_evicted(make, kind, key):
    subject = make(kind, objects=4)
    (there,) = put(subject, key)
    (held,) = subject.backend.batched_get([key])
    for n in range(20):
        put(subject, f"{key}-{n}")
    assert subject.has(key)
    assert bytes(held.payload) == there
    assert subject.backend.batched_remove([key]) == [Status.BUSY]
    held.release()
    for n in range(20, 40):
        put(subject, f"{key}-{n}")
    assert not subject.has(key)


# --- closing ------------------------------------------------------------------------------------------------


@pytest.fixture
def make_own(make, pool, tmp_path):
    """As `make`, with a pool client of its own, which closes with its subject."""
    opened = []

    def make_one(kind):
        if "mooncake" not in kind:
            return make(kind)
        config = pool.settings(transfer={"staging_size": "2MiB"})
        opened.append(MooncakeBackend(config, pool_memory(config, PAYLOAD, 128)))
        return make_subject(kind, PAYLOAD, tmp_path / f"own-{len(opened)}", opened[-1])

    try:
        yield make_one
    finally:
        for one in opened:
            one.close()


CLOSABLE = (
    "mooncake",
    "local",
    "disk",
    "pipelined(disk)",
    "hybrid(local+disk)",
    "pipelined(hybrid(local+disk+mooncake))",
)


@pytest.mark.parametrize("kind", CLOSABLE)
def test_after_close_every_call_answers_at_once_and_finds_nothing(make_own, kind, key):
    subject = make_own(kind)
    (there,) = put(subject, key)
    (held,) = subject.backend.batched_get([key])
    staged = subject.backend.stage(end=end_in(60))
    subject.backend.close()
    assert not subject.backend.available
    assert bytes(held.payload) == there, "what a reader holds stays its own until it lets go"
    held.release()
    assert subject.backend.batched_contains([key]) == [CLOSED]
    assert subject.get([key, f"{key}-1"]) == ["closed", "closed"]
    assert subject.backend.batched_put([f"{key}-2"], [staged]).results() == [CLOSED]
    assert subject.backend.batched_remove([key]) == [CLOSED]
    assert subject.backend.stage(end=0.0) is None
    assert subject.backend.annotate("note", b"x") is CLOSED
    subject.backend.close()


@pytest.mark.parametrize("kind", CLOSABLE)
def test_close_while_others_write_and_read_ends_all_of_them(make_own, kind, key):
    subject = make_own(kind)
    statuses = []
    read = []
    stop = threading.Event()
    working = threading.Barrier(5)

    def write():
        working.wait(60)
        for n in range(100_000):
            staged = subject.backend.stage(end=end_in(0.2))
            if staged is None:
                if stop.is_set():
                    return
                continue
            staged.payload[:] = value(n % 8)
            statuses.extend(subject.backend.batched_put([f"{key}-{n % 8}"], [staged]).results())

    def reader():
        working.wait(60)
        while not stop.is_set():
            read.extend(enumerate(subject.get([f"{key}-{n}" for n in range(8)])))

    with beside(write, write, reader, reader):
        working.wait(60)
        wait_for(lambda: len(statuses) > 20 and len(read) > 20)
        stop.set()
        subject.backend.close()
    assert set(statuses) <= {OK, CLOSED, Status.NO_SPACE, Status.OVERLOADED}
    for n, outcome in read:
        assert outcome == value(n) or outcome in MISSES | {"closed", "no_staging"}
    wait_for(lambda: subject.backend.memory.pool.in_use == 0, "all memory free after close")


# --- at the same time ---------------------------------------------------------------------------------------


def test_one_key_put_read_and_removed_by_many_at_once_is_whole_or_not_there(subject, key):
    content = value("one")
    allowed = {
        "put": (lambda: subject.put({key: content}), {OK, Status.BUSY}),
        "get": (lambda: subject.get([key]), MISSES | {content}),
        "remove": (lambda: subject.backend.batched_remove([key]), {OK, MISSING, Status.BUSY}),
    }

    def repeat(what):
        call, expected = allowed[what]
        for _ in range(60):
            assert set(call()) <= expected

    together(*(partial(repeat, what) for what in ("put", "put", "get", "get", "remove")))
    subject.check_integrity()


# --- against a dictionary -----------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """A backend beside a dictionary. Its small key space makes keys meet; `new` gives each example keys of
    its own."""

    new: Callable[[], Subject]
    whole = True
    """Whether the backend's budget holds all keys; otherwise any of them may be gone."""

    @initialize()
    def start(self):
        self.subject = type(self).new()
        self.prefix = uuid.uuid4().hex
        self.model = {}

    def name(self, n):
        return f"{self.prefix}/{n}"

    @rule(chosen=st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True))
    def put(self, chosen):
        values = {self.name(n): value(n) for n in chosen}
        assert self.subject.put(values) == [OK] * len(chosen)
        self.model.update(values)

    @rule(chosen=st.lists(st.integers(0, 11), max_size=8, unique=True))
    def get(self, chosen):
        names = [self.name(n) for n in chosen]
        for name, outcome in zip(names, self.subject.get(names), strict=True):
            expected = self.model.get(name, "missing")
            assert outcome == expected or (not self.whole and outcome == "missing")

    @rule(chosen=st.lists(st.integers(0, 11), max_size=12), wants=st.booleans())
    def contains(self, chosen, wants):
        names, backend = [self.name(n) for n in chosen], self.subject.backend
        statuses = backend.batched_wants(names) if wants else backend.batched_contains(names)
        for name, status in zip(names, statuses, strict=True):
            expected = OK if name in self.model else MISSING
            assert status is expected or (not self.whole and status is MISSING)

    @rule(chosen=st.lists(st.integers(0, 11), max_size=2, unique=True))
    def remove(self, chosen):
        names = [self.name(n) for n in chosen]
        for name, status in zip(names, self.subject.backend.batched_remove(names), strict=True):
            if status is Status.BUSY:
                assert "mooncake" in self.subject.bases, "only the pool's leases outlive a read"
                # gone from the other tiers, or not: the pool answers for it
                assert name in self.model
                continue
            if self.whole:
                assert (status is OK) == (name in self.model)
            self.model.pop(name, None)

    @rule()
    def check(self):
        self.subject.check_integrity()
        pool, held = self.subject.backend.memory.pool, promoted(self.subject)
        wait_for(lambda: pool.in_use == held, "what was in flight coming back")

    def teardown(self):
        if hasattr(self, "subject"):
            self.subject.backend.close()


SMALL_BUDGET = {"local": "lfu", "disk": "s3fifo", "hybrid(local+disk)": "lru"}
"""Kinds that are also tried with a budget that is too small for all keys, and their policy."""


@pytest.mark.parametrize("kind, policy", [*((kind, "") for kind in KINDS), *SMALL_BUDGET.items()])
def test_it_behaves_like_a_dictionary_that_forgets_if_its_budget_is_small(make, kind, policy):
    options = {"objects": 8, "policy": policy} if policy else {}
    machine = type(
        "Machine", (Model,), {"new": staticmethod(lambda: make(kind, **options)), "whole": not policy}
    )
    examples = settings(
        max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=examples)
