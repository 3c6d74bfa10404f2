"""ObjectCache by itself: sizes, tensors, parts, tiers. What all adapters do alike is in
tests/contracts/test_adapters.py."""

import asyncio
import os
import random
import threading
import uuid
from functools import partial

import msgspec
import pytest
import torch

from pd_cache import AsyncObjectCache, CacheConfig, DiskTier, MooncakeTier, ObjectCache
from pd_cache.objects.object_cache import Deadline, ObjectOutcome
from pd_cache.objects.values import PartHeader, Scattered, TensorForm, head_key, key_prefix, part_key
from pd_cache.tiers.memory import TRAILER_BYTES, seal
from tests.support.made import made
from tests.support.waiting import together, wait_for
from transfer.errors import Status

OK = Status.OK

PART = 4096
MOST = 40_000
POOL = (MooncakeTier(),)


@pytest.fixture(scope="module")
def shared(pool):
    with ObjectCache.open(pool.settings(), "shared", part_bytes=PART, most_bytes=MOST) as cache:
        cache.wait_available(60)
        yield cache


@pytest.fixture
def name():
    """One that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture
def make(pool):
    def make_one(tiers=POOL):
        settings = pool.settings(CacheConfig(tiers=tiers))
        cache = ObjectCache.open(settings, "shared", part_bytes=PART, most_bytes=MOST)
        cache.wait_available(60)
        return cache

    yield from made(make_one, ObjectCache.close)


def some(count):
    return random.Random(count).randbytes(count)


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 5, MOST])
def test_values_of_any_size_up_to_the_bound(shared, name, count):
    assert shared.put(name, some(count)) is OK
    assert shared.get(name) == some(count)
    into = bytearray(count)
    assert shared.read_into([name], [into]) == [""]
    assert into == some(count)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(50, 60).to(torch.bfloat16).T,
        torch.tensor(3),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(9, 9)[::2, 1:5],
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.randn(6)[::7],
        torch.randn(5, 8)[2:3, ::9],
        torch.randn(5, 8)[:0, ::2],
    ],
    ids=lambda one: f"{one.dtype}{list(one.shape)}",
)
def test_tensors_come_back_as_they_were(shared, name, tensor):
    assert shared.put(name, tensor) is OK
    found = shared.get_tensor(name)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    plain = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
    assert torch.equal(found.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))
    into = torch.zeros_like(
        tensor[..., None].expand(*tensor.shape, 2), memory_format=torch.contiguous_format
    )[..., :1]
    if tensor.numel() < 2:  # contiguous, as torch says, whatever its strides
        assert shared.read_into([name], [into]) == [""]
        assert torch.equal(into[..., 0], tensor)


def test_a_tensor_can_be_read_as_bytes_and_into_a_tensor_but_bytes_are_no_tensor(shared, name):
    tensor = torch.arange(1000, dtype=torch.int32)
    shared.put_many([f"{name} t", f"{name} b"], [tensor, b"abc"])
    assert shared.get(f"{name} t") == tensor.numpy().tobytes()
    into = torch.zeros(10, 100, dtype=torch.int32)
    assert shared.read_into([f"{name} t"], [into]) == [""]
    assert torch.equal(into.reshape(-1), tensor)
    assert shared.get_tensor(f"{name} b") is None


def test_memory_of_other_sizes_or_forms_is_a_miss(shared, name):
    form, other = (TensorForm.of_many([shape], [torch.int8]) for shape in [(2, 50), (50, 2)])
    shared.put_many([name], [some(100)], forms=[form])
    assert shared.read_into([name], [bytearray(99)]) == ["other_size"]
    assert shared.read_into([name], [bytearray(100)], forms=[other]) == ["other_form"]
    assert shared.read_into([name], [bytearray(100)], forms=[None]) == ["other_form"]
    assert shared.read_into([name], [bytearray(100)], forms=[form]) == [""]
    assert shared.read_into([name], [bytearray(100)]) == [""], "who does not ask does not care"


LENGTHS = ([1], [0, 5, 0], [PART], [PART - 1, 1, 1], [400, 900, 3, 9000, 0, 7], [1000] * 12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_scattered_value_is_its_pieces_one_after_another_whatever_the_parts_are(shared, name, lengths):
    given = [some(length) for length in lengths]
    whole = b"".join(given)
    assert shared.put(name, Scattered([memoryview(piece) for piece in given])) is OK
    assert shared.get(name) == whole
    for other in LENGTHS:
        memory = [bytearray(length) for length in other]
        fits = sum(other) == len(whole)
        assert shared.read_into([name], [Scattered([memoryview(piece) for piece in memory])]) == [
            "" if fits else "other_size"
        ]
        assert b"".join(memory) == (whole if fits else bytes(sum(other)))


def test_text_and_bytes_are_two_names_and_any_text_is_one(shared, name):
    names = [name, name.encode(), name + "\ud800 ü \0", name + "x" * 100_000]
    shared.put_many(names, [b"text", b"bytes", b"odd", b"long"])
    assert [one.value for one in shared.get_many(names)] == [b"text", b"bytes", b"odd", b"long"]


def test_a_name_that_occurs_twice_is_read_and_stored_as_often(shared, name):
    names = [f"{name} 1", f"{name} 2", f"{name} 1", f"{name} 1"]
    assert shared.put_many(names, [b"one", b"two", b"one", b"one"]) == [OK] * 4
    assert shared.get_many(names) == [ObjectOutcome(one) for one in (b"one", b"two", b"one", b"one")]


# --- names stand for contents -------------------------------------------------------------------------------


def test_the_first_value_of_a_name_stays_until_it_is_removed(shared, name):
    assert shared.put(name, b"first") is OK
    assert shared.exists(name), "which leases it"
    assert shared.put(name, b"second") is OK
    assert shared.get(name) == b"first"
    assert shared.remove(name) is OK
    assert (shared.exists(name), shared.get(name)) == (False, None)
    assert shared.remove(name) is Status.MISSING
    assert shared.put(name, b"second") is OK
    assert shared.get(name) == b"second"


def test_two_long_values_put_under_one_name_at_once_never_mix(make, name):
    one, other = make(), make()
    long = [some(5 * PART + n) for n in (1, 2)]
    for turn in range(15):
        begin = threading.Barrier(2)

        def put(cache, value, turn=turn, begin=begin):
            begin.wait(60)
            cache.put(f"{name} {turn}", value)

        together(*(partial(put, *pair) for pair in zip((one, other), long, strict=True)))
        assert one.get(f"{name} {turn}") in (*long, None)
        assert one.put(f"{name} {turn}", long[0]) is OK
        assert other.get(f"{name} {turn}") in long


def test_a_long_value_of_which_a_part_is_gone_is_a_miss_and_the_next_put_stores_it_again(pool, shared, name):
    value, before = some(4 * PART), pool.keys()
    shared.put(name, value)
    (part,) = (key for key in pool.keys() - before if key.endswith("/2"))
    pool.remove(part)
    assert shared.exists(name), "the head is there"
    assert shared.get_many([name]) == [ObjectOutcome(None, "incomplete")]
    assert not shared.exists(name)
    assert shared.put(name, value) is OK
    assert shared.get(name) == value


def test_a_damaged_value_is_a_miss_with_its_reason_once_and_then_missing(pool, shared, name):
    before = pool.keys()
    shared.put(name, some(1000))
    (key,) = pool.keys() - before
    pool.damage(key)
    assert shared.get_many([name]) == [ObjectOutcome(None, "corrupt")]
    assert shared.get_many([name]) == [ObjectOutcome(None, "missing")]


@pytest.mark.parametrize("form", ["float32:0,9999999999999999999", "float32:4294967296,4294967296", "nn:0"])
def test_a_planted_form_that_is_no_tensor_is_a_miss_and_never_raises(pool, shared, name, form):
    planted, key = TensorForm.parsed(form.encode()), head_key(key_prefix("shared", PART), name)
    payload = PartHeader.of(0, 0, 0, PART, planted).packed()
    sealed = bytearray(len(payload) + TRAILER_BYTES)
    sealed[: len(payload)] = payload
    seal(key, memoryview(sealed), len(payload))
    with pool.bare_client() as client:
        assert client.put(key, bytes(sealed)) == 0
    assert shared.get_tensor(name) is None
    assert shared.get_many([name]) == [ObjectOutcome(b"")]


def test_after_its_deadline_a_read_of_thousands_of_parts_ends(shared, name, monkeypatch):
    cache = ObjectCache(shared.backend, "small parts", part_bytes=8)
    value, deadline, asked = some(8 * 500), Deadline(None), 0
    assert cache.put(name, value) is OK
    reads = cache.backend.batched_get

    def cut_soon(keys, **options):
        nonlocal asked
        for fetched in reads(keys, **options):
            asked += 1
            if asked == 10:
                deadline.cut()
            yield fetched

    monkeypatch.setattr(cache.backend, "batched_get", cut_soon)
    assert cache.get_many([name], timeout=deadline) == [ObjectOutcome(None, "timeout")]
    assert asked == 10
    monkeypatch.undo()
    assert cache.get(name) == value


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, complaint",
    [
        (lambda cache: cache.put("a", bytes(MOST + 1)), "up to 40000 bytes"),
        (lambda cache: cache.put("a", "text"), "got str"),
        (lambda cache: cache.put("a", 5), "got int"),
        (lambda cache: cache.put(5, b""), "must be str or bytes, got int"),
        (lambda cache: cache.put("a", torch.eye(3).to_sparse()), "dense"),
        (lambda cache: cache.put("a", torch.empty(3, device="meta")), "have data, got .* on meta"),
        (lambda cache: cache.put("a", torch.zeros([1] * 12)), "9 dimensions"),
        (
            lambda cache: ObjectCache(cache.backend, b"name", part_bytes=1),
            "namespace must be a str, got bytes",
        ),
        (lambda cache: cache.put("a", memoryview(bytes(8))[::2]), "contiguous"),
        (lambda cache: cache.put_many(["a"], []), "one value for each name"),
        (lambda cache: cache.put_many("ab", [b"", b""]), "a sequence of names"),
        (lambda cache: cache.put_many(["a"], [b""], forms=[]), "one form for each name"),
        (lambda cache: cache.read_into(["a"], []), "one buffer for each name"),
        (lambda cache: cache.read_into(["a"], [b"abc"]), "writable"),
        (
            lambda cache: cache.read_into(["a"], [Scattered([memoryview(bytearray(2)), memoryview(b"no")])]),
            "writable",
        ),
        (lambda cache: cache.read_into(["a"], [torch.zeros(4, 4).T]), "contiguous"),
        (lambda cache: cache.read_into(["a"], ["abc"]), "got str"),
    ],
)
def test_mistakes_of_the_caller_raise_before_anything_moves(shared, call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(shared)


@pytest.mark.parametrize(
    "options, message",
    [({"part_bytes": 0}, "part_bytes"), ({"part_bytes": 1 << 40}, "staging"), ({"most_bytes": -1}, "most_bytes"), ({"most_bytes": 1 << 60}, "most_bytes")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(pool, options, message):
    with pytest.raises(ValueError, match=message):
        ObjectCache.open(pool.settings(), "x", **options)


# --- memory -------------------------------------------------------------------------------------------------


def test_many_more_values_than_staging_memory_holds(pool, name):
    settings = pool.settings(transfer={"staging_size": 8 * 8192})
    with ObjectCache.open(settings, "shared", part_bytes=PART) as cache:
        cache.wait_available(60)
        names, values = [f"{name} {n}" for n in range(60)], [some(3 * PART + n) for n in range(60)]
        assert cache.put_many(names, values) == [OK] * 60
        assert [one.value for one in cache.get_many(names)] == values
        wait_for(lambda: cache.backend.memory.pool.in_use == 0, "all memory free")


def test_with_disk_alone_no_pool_is_needed(tmp_path, pool, name):
    settings = msgspec.structs.replace(
        pool.settings(CacheConfig(tiers=(DiskTier(path=str(tmp_path), capacity="1MiB"),))),
        master="none:1",
    )
    for turn in range(2):
        with ObjectCache.open(settings, "shared", part_bytes=PART) as cache:
            cache.wait_available(60)
            assert cache.get(name) == (b"kept" if turn else None)
            assert cache.put(name, b"kept") is OK
            wait_for(lambda cache=cache: cache.get(name) == b"kept", "the write behind")


# --- asyncio ------------------------------------------------------------------------------------------------


def test_one_call_too_many_is_refused_and_a_cancelled_one_holds_nothing(make, name):
    cache = make()
    go, busy = threading.Event(), threading.Event()

    class Slow:
        available = True

        def get_many(self, names, timeout):
            busy.set()
            go.wait(60)
            return cache.get_many(names, timeout=timeout)

        def close(self):
            cache.close()

    async def use():
        slow = AsyncObjectCache(Slow(), threads=1, most_waiting=2)
        first, second = (asyncio.create_task(slow.get_many([name])) for _ in range(2))
        while not busy.is_set():
            await asyncio.sleep(0.01)
        assert await slow.get_many([name]) == [ObjectOutcome(None, "overloaded")]
        assert await slow.get_many([name], timeout=0.01) == [ObjectOutcome(None, "overloaded")]
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go.set()
        assert await first == [ObjectOutcome(None, "missing")]
        await slow.close()
        await slow.close()
        assert await slow.get_many([name]) == [ObjectOutcome(None, "closed")]

    asyncio.run(use())


def test_what_the_caller_changes_after_it_cancelled_a_put_is_in_no_value(shared, name, monkeypatch):
    value, staged, when = bytearray(b"a" * (4 * PART)), 0, 0
    stage = shared.backend.stage
    reached, go_on = threading.Event(), threading.Event()

    def stage_slowly(**options):
        nonlocal staged
        staged += 1
        if staged == when:
            reached.set()
            go_on.wait(60)
        return stage(**options)

    async def use():
        cache = AsyncObjectCache(ObjectCache(shared.backend, "shared", part_bytes=PART), threads=1)
        put = asyncio.create_task(cache.put(f"{name} {when}", value))
        assert await asyncio.to_thread(reached.wait, 60)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        value[:] = b"b" * len(value)
        go_on.set()
        found = await cache.get(f"{name} {when}")  # on the thread that the put was on
        await asyncio.to_thread(cache._threads.close, 60)
        return found

    monkeypatch.setattr(shared.backend, "stage", stage_slowly)
    for when in range(1, 5):  # before each part, and last the head  # noqa: B007 - the functions above use it
        value[:], staged = b"a" * len(value), 0
        reached.clear()
        go_on.clear()
        assert asyncio.run(use()) is None


def test_a_loop_puts_and_gets_many_at_once(make, name):
    async def use():
        async with AsyncObjectCache(make()) as cache:
            put = await asyncio.gather(*(cache.put(f"{name} {n}", some(n)) for n in range(40)))
            assert put == [OK] * 40
            assert await asyncio.gather(*(cache.get(f"{name} {n}") for n in range(40))) == [
                some(n) for n in range(40)
            ]
            assert await cache.exists(f"{name} 3")
            await cache.put(f"{name} t", torch.arange(3))
            tensor = await cache.get_tensor(f"{name} t")
            assert tensor.tolist() == [0, 1, 2]
            assert await cache.remove(f"{name} 3") is OK
            with pytest.raises(ValueError, match="got int"):
                await cache.put(f"{name} t", 5)

    asyncio.run(use())


# --- the format ---------------------------------------------------------------------------------------------


def test_bytes_of_others_are_no_header_and_never_raise():
    rng = random.Random(5)
    good = PartHeader.of(3 * PART, 7, 1, PART, None).packed()
    assert PartHeader.parsed(good, PART + 65) is None, "an object that is longer than it says"
    for _ in range(20_000):
        raw = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        header = PartHeader.parsed(bytes(raw), PART + 64)
        if header is not None:
            assert 0 <= header.data.start <= header.data.stop <= header.value_bytes
            assert header.offset == 64
            assert header.data.stop - header.data.start == PART
    for size in range(200):
        assert PartHeader.parsed(rng.randbytes(size), size) is None


def test_keys_and_headers_stay_byte_for_byte():
    head, of_bytes = (head_key(key_prefix("a", 1), name) for name in ("a", b"a"))
    assert head == "pdo1/22dae4edae526bb1/c61e40a773d056b4f795e355d775b95a"
    assert of_bytes == "pdo1/22dae4edae526bb1/ed9cf226fc429ef5bc094450f87ed18b"
    header = PartHeader.of(5000, 7, 0, PART, TensorForm("float32", (1250,)))
    assert part_key(head, header.checksum, 1) == f"{head}/0000000000000007/1"
    fields = "8010000000000000 8813000000000000 0700000000000000 00000000 00100000 50445631 0100 0c00"
    assert header.packed() == bytes.fromhex(fields).ljust(64, b"\0") + b"float32:1250".ljust(64, b"\0")


def test_in_a_forked_child_everything_is_a_miss_and_close_returns(shared, name):
    shared.put(name, b"value")
    child = os.fork()
    if not child:  # nothing that pytest has registered may run in it
        lost = (
            shared.get(name) is None
            and shared.put(name, b"") is Status.CLOSED
            and shared.exists_many([name]) == [Status.CLOSED]
            and not shared.available
        )
        shared.close()
        os._exit(0 if lost else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared.get(name) == b"value"
