"""The CUDA copier against the CPU copier as the oracle.

Without a GPU, Triton's interpreter runs the kernel on CPU tensors, and ptxas compiles it for real ones.
Triton reads `TRITON_INTERPRET` where the kernel is decorated, and interpreting adds names to the kernel's
module. So the fixture `interpreted` executes a private copy of the module under that variable: the module
that everyone else imports, before or after, stays as it is, and unlike in a subprocess tracebacks and
fixtures work.
"""

import importlib.util
import math
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pd_cache.errors import PdCacheError
from pd_cache.layout import KVLayout, PageKind, checksum
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import host_pin, open_copier
from pd_cache.paged.base import plane_bytes
from pd_cache.paged.cpu import CpuPagedCopier
from pd_cache.reasons import Loaded, StoreOutcome
from pd_cache.server.clients import MappedTensors, Worker
from pd_cache.server.fence import Fence, FenceView
from pd_cache.server.memory import close_all, share_tensors
from pd_cache.server.protocol import Register, Retrieve, Store
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StoreOp
from pd_cache.vllm.worker import WorkerSide
from tests.support.needs import NO_GPU
from tests.support.waiting import PATIENCE_S, together, wait_for
from transfer.staging import StagingPool

triton = pytest.importorskip("triton", reason="triton is not installed")

from pd_cache.paged import cuda, xxh3  # noqa: E402
from pd_cache.versions import WeightsVersion  # noqa: E402

# Triton 3.9 announces, at the first compilation, a change in how it fuses floating-point operations; the
# kernel has none
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")

BLOCKS = 9
LAYERS = 3
CHUNK_BLOCKS = 4


@dataclass(frozen=True)
class Case:
    """A cache, by the last dimensions of its tensors, and how its layers are placed.

    `separate`: an allocation a layer. `together`: one allocation, evenly spaced. `scattered`: one allocation,
    one element off its start, uneven gaps between layers and a gap of one element after each block.
    """

    kind: PageKind
    block_size: int
    heads: int
    dim: int
    dtype: torch.dtype
    placement: str

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind.value}-{self.block_size}x{self.heads}x{self.dim}-{dtype}-{self.placement}"

    @property
    def shape(self):
        return {
            PageKind.HEADS_FIRST: (BLOCKS, self.heads, self.block_size, self.dim),
            PageKind.KV_OUTER: (2, BLOCKS, self.block_size, self.heads, self.dim),
            PageKind.KV_INNER: (BLOCKS, 2, self.block_size, self.heads, self.dim),
            PageKind.MLA: (BLOCKS, self.block_size, self.dim),
        }[self.kind]


CASES = [
    Case(PageKind.HEADS_FIRST, 5, 3, 1, torch.bfloat16, "separate"),  # pieces of 2 bytes
    Case(PageKind.HEADS_FIRST, 4, 2, 3, torch.bfloat16, "together"),  # pieces of 6 bytes in pages of 48
    Case(PageKind.HEADS_FIRST, 3, 2, 24, torch.bfloat16, "scattered"),  # pieces of 48 bytes, 2 bytes off
    Case(PageKind.HEADS_FIRST, 16, 2, 64, torch.float32, "together"),  # more than one part a page
    Case(PageKind.KV_OUTER, 5, 1, 3, torch.float32, "scattered"),
    Case(PageKind.KV_OUTER, 16, 2, 4, torch.bfloat16, "together"),
    Case(PageKind.KV_INNER, 3, 1, 3, torch.bfloat16, "separate"),
    Case(PageKind.KV_INNER, 5, 3, 7, torch.uint8, "scattered"),
    Case(PageKind.MLA, 1, 1, 4, torch.bfloat16, "separate"),  # a page is one element
    Case(PageKind.MLA, 3, 1, 257, torch.int64, "scattered"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_chunk = pytest.mark.parametrize(
    "left_out", [[], [0, -1]], ids=["all", "without the first and the last"]
)


class Cache:
    """The tensors of a case, and the allocations that they lie in: comparing those also finds bytes written
    astray."""

    def __init__(self, case, allocations):
        self.case = case
        self.allocations = allocations
        self.layers = [self._layer(index) for index in range(LAYERS)]
        self.layout = KVLayout.from_tensors(self.layers, case.kind)

    @classmethod
    def random(cls, case):
        generator = torch.Generator().manual_seed(7)
        count = LAYERS if case.placement == "separate" else 1
        elements = 64 + (math.prod(case.shape) + 2 * BLOCKS) * LAYERS // count
        nbytes = elements * case.dtype.itemsize
        return cls(
            case,
            [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for _ in range(count)],
        )

    def copy(self, device="cpu"):
        return Cache(self.case, [allocation.to(device, copy=True) for allocation in self.allocations])

    def assert_same(self, other):
        for mine, theirs in zip(self.allocations, other.allocations, strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu())

    def _layer(self, index):
        shape, scattered = self.case.shape, self.case.placement == "scattered"
        outer = self.case.kind is PageKind.KV_OUTER
        strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        if scattered:
            strides[outer] += 1
        if outer:
            strides[0] = BLOCKS * strides[1]
        span = strides[0] * shape[0]
        offset = 1 + index * span + 5 * index * index if scattered else index * span
        if self.case.placement == "separate":
            offset = 0
        allocation = self.allocations[index if self.case.placement == "separate" else 0]
        return allocation.view(self.case.dtype).as_strided(shape, strides, offset)


def chunk_of(*, seed=3):
    """`CHUNK_BLOCKS` blocks in no order."""
    return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed))[:CHUNK_BLOCKS]


def empty_payload(layout, *, pinned=False):
    nbytes = CHUNK_BLOCKS * layout.block_bytes
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)


def random_payload(layout, *, pinned=False):
    payload = empty_payload(layout, pinned=pinned)
    return payload.copy_(torch.randint(0, 256, payload.shape, dtype=torch.uint8))


def gathered_on_cpu(cache, chunk):
    out = empty_payload(cache.layout)
    CpuPagedCopier(cache.copy().layers, cache.layout).gather(chunk, out).wait()
    return out


def scattered_on_cpu(cache, chunk, payload):
    result = cache.copy()
    CpuPagedCopier(result.layers, result.layout).scatter(chunk, payload).wait()
    return result


# --- the kernel, interpreted --------------------------------------------------------------------------------


def in_the_interpreter(module):
    spec = importlib.util.spec_from_file_location(f"interpreted_{module.__name__}", module.__spec__.origin)
    private = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(private)
    return private


@pytest.fixture(scope="module")
def interpreted():
    return in_the_interpreter(cuda)


@pytest.fixture(scope="module")
def interpreted_xxh3():
    return in_the_interpreter(xxh3)


@every_case
@every_chunk
def test_the_interpreted_kernel_gathers_and_scatters_as_the_cpu_copier(interpreted, case, left_out):
    """Zeros for blocks that are left out, and nothing for them."""
    cache = Cache.random(case)
    chunk, out, payload = chunk_of(), random_payload(cache.layout), random_payload(cache.layout)
    chunk[left_out] = -1
    before, expected = cache.copy(), scattered_on_cpu(cache, chunk, payload)
    mover = interpreted.PageMover(plane_bytes(cache.layers, cache.layout), cache.layout)

    mover.move(chunk, out, gather=True)
    assert torch.equal(out, gathered_on_cpu(before, chunk))
    cache.assert_same(before)

    mover.move(chunk, payload, gather=False)
    cache.assert_same(expected)


def test_layers_of_different_block_strides_are_each_followed(interpreted):
    roomy = torch.arange(2 * BLOCKS * 12, dtype=torch.int16).view(BLOCKS, 2, 4, 3)[:, 0]
    layers = [torch.arange(BLOCKS * 12, dtype=torch.int16).view(BLOCKS, 4, 3), roomy]
    layout = KVLayout.from_tensors(layers)
    blocks = torch.tensor([8, 0, 5, 1])
    out = empty_payload(layout)

    interpreted.PageMover(plane_bytes(layers, layout), layout).move(blocks, out, gather=True)

    assert torch.equal(
        out.view(torch.int16).view(2, CHUNK_BLOCKS, 4, 3), torch.stack([x[blocks] for x in layers])
    )


SIZES = [248, 256, 1016, 1024, 1032, 1088, 2048, 2056, 64 * 1024, 64 * 1024 + 8, 130 * 1024 - 8, 100_352]
"""Bytes: around a block, a stripe, and as many blocks as the kernels take together."""


def hashed(hasher, payload):
    return hasher.merge(hasher.mix(hasher.add_up(payload)).cpu())


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_interpreted_hash_is_that_of_the_host_and_depends_on_the_last_byte(interpreted_xxh3, nbytes):
    payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    hasher = interpreted_xxh3.Xxh3(nbytes, payload.device)
    assert hashed(hasher, payload) == checksum(payload.numpy().data)
    payload[-1] ^= 1
    assert hashed(hasher, payload) == checksum(payload.numpy().data)


def test_the_hash_takes_whole_words_of_the_long_form():
    assert [n for n in (0, 8, 232, 240, 241, 247, 248, 249, 256) if xxh3.Xxh3.takes(n)] == [248, 256]


# --- the kernel, compiled -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    "element, elements, lanes", [("*i64", 640, 1024), ("*i32", 3, 8), ("*i16", 1, 4), ("*u8", 1, 4)]
)
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(
    tmp_path, monkeypatch, gather, element, elements, lanes
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"GATHER": gather, "ELEMENTS": elements, "LANES": lanes}
    signature = {"planes": "*i64", "blocks": "*i64", "chunk": element, "count": "i32"}
    source = ASTSource(cuda._move, signature | dict.fromkeys(constants, "constexpr"), constants)

    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))

    assert compiled.asm["cubin"]


def test_the_hash_compiles_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    words = dict.fromkeys(("words", "secret", "sums"), "*i64") | {
        "blocks": "i32",
        "stripes": "i32",
        "last": "i64",
        "ROWS": "constexpr",
    }
    sums = dict.fromkeys(("sums", "secret", "lanes"), "*i64") | {"blocks": "i32", "AHEAD": "constexpr"}
    for source in (ASTSource(xxh3._add_up, words, {"ROWS": 16}), ASTSource(xxh3._mix, sums, {"AHEAD": 64})):
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_pinning_without_a_device_says_so():
    with pytest.raises(PdCacheError, match="finds no CUDA device"):
        cuda.pin_host_memory(4096, 4096)


# --- who waits for whom, on streams that only note it -------------------------------------------------------


class Stream:
    """Notes behind which work it is: steps of the model, and kernels."""

    def __init__(self, device=torch.device("cpu")):  # noqa: B008
        self.device = device
        self.behind = set()

    def wait_stream(self, other):
        self.behind |= other.behind

    wait_event = wait_stream

    def synchronize(self):
        pass


class Event(Stream):
    def __init__(self, blocking=False):
        super().__init__()

    def record(self, stream):
        self.behind = set(stream.behind)

    @classmethod
    def from_ipc_handle(cls, device, handle):
        event = cls()
        event.behind = {handle.decode()}
        return event


class Streams:
    """In place of torch's: `default` is current on a thread until it takes another."""

    def __init__(self, patch):
        self.default = Stream()
        self._current = threading.local()
        for name, what in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", self.stream),
            ("set_stream", self.set),
            ("current_stream", self.current),
        ):
            patch.setattr(torch.cuda, name, what)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def current(self, device=None):
        return getattr(self._current, "stream", self.default)

    def set(self, stream):
        self._current.stream = stream

    @contextmanager
    def stream(self, stream):
        before = self.current()
        self.set(stream)
        yield
        self.set(before)


class Copying:
    """A cache whose copies begin when the gate is open."""

    chunk_size, block_size = CHUNK_BLOCKS, 1

    def __init__(self, copier, mark):
        self.metrics, self.gate, self.mark = CacheMetrics(), threading.Event(), mark
        self._copier = copier

    def load(self, names, blocks, **_):
        assert self.gate.wait(PATIENCE_S)
        self._copier.scatter(torch.tensor(blocks), random_payload(self._copier.layout)).wait()
        return Loaded(len(names))

    def store(self, names, blocks, *, after, label):
        assert self.gate.wait(PATIENCE_S)
        after()
        self._copier.gather(torch.tensor(blocks), empty_payload(self._copier.layout)).wait()
        return [StoreOutcome.NEW] * len(names)


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


@pytest.fixture
def kernels(streams, interpreted, monkeypatch):
    """What was copied, and behind what."""
    found, move = [], interpreted.PageMover.move
    interpreting = threading.Lock()  # Triton's interpreter is for one thread at a time

    def noted(mover, blocks, payload, *, gather):
        found.append(("gather" if gather else "scatter", set(streams.current().behind)))
        streams.current().behind.add("kernel")
        with interpreting:
            move(mover, blocks, payload, gather=gather)

    monkeypatch.setattr(interpreted.PageMover, "move", noted)
    return found


def test_a_store_is_behind_its_own_step_and_a_load_behind_none_and_the_model_behind_neither(
    interpreted, streams, kernels
):
    cache = Cache.random(Case(PageKind.MLA, 1, 1, 4, torch.bfloat16, "separate"))
    copiers = [interpreted.CudaPagedCopier(cache.layers, cache.layout) for _ in range(3)]
    caches = [Copying(copier, lambda: interpreted.mark(torch.device("cuda", 0))) for copier in copiers]
    side = WorkerSide(
        [[(one, True)] for one in caches],
        load_timeout_s=60.0,
        device=torch.device("cuda", 0),
        version=WeightsVersion(),
    )
    parts = [GroupChunks(group, [b"n"], list(range(CHUNK_BLOCKS))) for group in range(3)]
    streams.default.behind.add("step 1")
    side.save(Step(stores=[StoreOp(0, parts[0])]))
    side.start(Step(loads=[LoadOp("a", parts[1:], [])]))  # the second group's on another thread
    streams.default.behind.add("step 2")
    for one in caches:
        one.gate.set()
    wait_for(lambda: len(kernels) == 3, "all were copied")
    assert side.close(PATIENCE_S)
    assert sorted(kernels) == [("gather", {"step 1"}), ("scatter", set()), ("scatter", set())]
    assert streams.default.behind == {"step 1", "step 2"}


def test_a_servers_store_is_behind_its_engines_event_on_any_thread_and_no_other_move_is(
    interpreted, streams, kernels
):
    """One thread begins all moves, and makes each wait for its event. Their turns are on other threads."""

    runs = []
    with ExitStack() as stack:
        for kind, event in ((Store, b"step 1"), (Retrieve, b""), (Store, b"step 2")):
            cache = Cache.random(Case(PageKind.MLA, 1, 1, 4, torch.bfloat16, "separate"))
            shared, fence = share_tensors(cache.layers), stack.enter_context(closing(Fence()))
            view = FenceView(fence.descriptor)
            tensors = MappedTensors(Register(shared.storages, shared.tensors), shared.descriptors, view)
            stack.callback(tensors.unmap, 0)
            close_all(shared.descriptors)
            tensors.device = torch.device("cuda", 0)
            tensors._copiers = [interpreted.CudaPagedCopier(cache.layers, cache.layout)]
            database = SimpleNamespace(
                chunk_size=CHUNK_BLOCKS, keys=lambda *_: ["key"], namespace=SimpleNamespace(tail=0)
            )
            model = SimpleNamespace(database=database, shards=[[0]])
            slot, ticket = fence.admit(loads=kind is Retrieve) or (0, 0)
            request = kind("", (bytes(16),), tuple(range(CHUNK_BLOCKS)), slot, ticket, 1, event)
            payload = memoryview(bytearray(random_payload(cache.layout).numpy().tobytes()))
            run = Worker(model, 0, tensors).begin(request, math.inf)
            verb = "scatter" if kind is Retrieve else "gather"

            def move(run=run, verb=verb, payload=payload):
                with run.lend() as (copier,):
                    getattr(copier, verb)(*run.place(0, payload)).wait()

            runs.append(move)
        together(*runs)
    assert sorted(kernels) == [("gather", {"step 1"}), ("gather", {"step 2"}), ("scatter", set())]
    assert not streams.default.behind


def test_memory_is_page_locked_and_unlocked_in_the_device_of_the_thread_that_chose_it(monkeypatch):
    current, calls = [1], []

    @contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    def called(name):
        return lambda *_: calls.append((name, current[0])) or 0

    runtime = SimpleNamespace(cudaHostRegister=called("lock"), cudaHostUnregister=called("unlock"))
    for name, what in (
        ("is_available", lambda: True),
        ("cudart", lambda: runtime),
        ("current_device", lambda: current[0]),
        ("device", device),
    ):
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    pin = host_pin()
    current[0] = 0  # as on any other thread
    pin(4096, 4096)()
    assert calls == [("lock", 1), ("unlock", 1)]


# --- on a GPU -----------------------------------------------------------------------------------------------


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)(test))


WIDE = Case(PageKind.HEADS_FIRST, 16, 8, 256, torch.bfloat16, "together")
AWHILE = 200_000_000
"""Cycles for `torch.cuda._sleep`: a tenth of a second, so that whoever fails to wait is sure to be early."""


@pytest.fixture
def wide():
    """A cache on the CPU, the same on the GPU, and the copier of the latter."""
    cache = Cache.random(WIDE)
    device = cache.copy("cuda")
    copier = cuda.CudaPagedCopier(device.layers, device.layout)
    yield cache, device, copier
    copier.close()


@on_gpu
@every_case
@every_chunk
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_gpu_copies_equal_the_cpu_copier_and_return_the_checksum(case, left_out, pinned):
    cache = Cache.random(case)
    chunk, payload = chunk_of(), random_payload(cache.layout, pinned=pinned)
    device, out = cache.copy("cuda"), empty_payload(cache.layout, pinned=pinned)
    copier = open_copier(device.layers, device.layout)
    assert isinstance(copier, cuda.CudaPagedCopier)

    chunk[left_out] = -1
    assert copier.gather(chunk, out).wait() == checksum(out.numpy().data)
    assert torch.equal(out, gathered_on_cpu(cache, chunk))
    device.assert_same(cache)

    assert copier.scatter(chunk, payload).wait() == checksum(payload.numpy().data)
    device.assert_same(scattered_on_cpu(cache, chunk, payload))
    copier.close()


@on_gpu
@pytest.mark.parametrize("nbytes", SIZES)
def test_gpu_hashes_equal_those_of_the_host(nbytes):
    payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert hashed(xxh3.Xxh3(nbytes, torch.device("cuda")), payload.cuda()) == checksum(payload.numpy().data)


@on_gpu
def test_gpu_a_checksum_is_of_what_was_copied_and_not_of_what_staging_memory_holds_later(wide):
    _, _, copier = wide
    chunk, source = chunk_of(), random_payload(copier.layout, pinned=True)
    sent = checksum(source.numpy().data)
    pending = copier.scatter(chunk, source)
    torch.cuda.synchronize()
    source.zero_()
    assert pending.wait() == sent

    out = empty_payload(copier.layout, pinned=True)
    pending = copier.gather(chunk, out)
    torch.cuda.synchronize()
    out.zero_()
    assert pending.wait() == sent


@on_gpu
def test_gpu_staging_pinned_by_us_makes_the_round_trip(wide):
    cache, device, copier = wide
    chunk = chunk_of()
    pool = StagingPool(4 << 20, CHUNK_BLOCKS * cache.layout.block_bytes, pin=cuda.pin_host_memory)
    slot = pool.lease(0.0)
    staging = torch.frombuffer(slot.view, dtype=torch.uint8)
    assert staging.is_pinned()

    copier.gather(chunk, staging).wait()
    assert torch.equal(staging, gathered_on_cpu(cache, chunk))

    staging.bitwise_not_()
    copier.scatter(chunk, staging).wait()
    device.assert_same(scattered_on_cpu(cache, chunk, staging))

    slot.release()
    pool.close()
    assert not staging.is_pinned()


@on_gpu
def test_gpu_undoing_a_pin_twice_is_harmless_and_a_refused_pin_leaves_the_device_usable():
    pool = StagingPool(1 << 20, 1 << 20)
    undo = cuda.pin_host_memory(pool.address, pool.nbytes)
    with pytest.raises(PdCacheError, match="CUDA refused to page-lock"):
        cuda.pin_host_memory(pool.address, pool.nbytes)
    assert torch.ones(1, device="cuda").add(1).item() == 2
    undo()
    undo()
    cuda.pin_host_memory(pool.address, pool.nbytes)()
    pool.close()


@on_gpu
def test_gpu_gather_sees_what_the_calling_stream_still_has_to_write(wide):
    cache, device, copier = wide
    out = empty_payload(cache.layout, pinned=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(AWHILE)
        device.allocations[0].fill_(9)
        done = copier.gather(chunk_of(), out)
    done.wait()
    assert bool((out == 9).all())


@on_gpu
def test_gpu_scatter_lets_earlier_readers_finish_and_later_ones_see_it(wide):
    cache, device, copier = wide
    chunk, payload = chunk_of(), random_payload(cache.layout, pinned=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(AWHILE)
        before = device.allocations[0].clone()
        done = copier.scatter(chunk, payload)
        after = device.allocations[0].clone()  # no wait() between
    stream.synchronize()
    done.wait()
    assert torch.equal(before.cpu(), cache.allocations[0])
    assert torch.equal(after.cpu(), scattered_on_cpu(cache, chunk, payload).allocations[0])


@on_gpu
def test_gpu_calls_return_before_the_copy_has_ended(wide):
    cache, _, copier = wide
    chunk, out = chunk_of(), empty_payload(cache.layout, pinned=True)
    copier.gather(chunk, out).wait()  # the kernel is compiled by now
    copier.scatter(chunk, out).wait()
    source = random_payload(cache.layout, pinned=True)
    # torch keeps these for the indices and the checksums of the calls below: page-locking anew may wait for
    # the device
    spare = [torch.zeros(count, dtype=torch.int64, pin_memory=True) for count in 4 * [CHUNK_BLOCKS] + 4 * [8]]
    del spare
    torch.cuda._sleep(AWHILE)
    start = time.perf_counter()
    completions = [copier.gather(chunk, out), copier.scatter(chunk, source)]
    called = time.perf_counter() - start
    for completion in completions:
        completion.wait()
    assert called < (time.perf_counter() - start) / 2


@on_gpu
def test_gpu_many_gathers_in_flight_share_one_bounce_buffer(wide):
    cache, _, copier = wide
    chunks = [chunk_of(seed=seed) for seed in range(1, 17)]
    outs = [empty_payload(cache.layout, pinned=True) for _ in chunks]
    for completion in [copier.gather(chunk, out) for chunk, out in zip(chunks, outs, strict=True)]:
        completion.wait()
    for chunk, out in zip(chunks, outs, strict=True):
        assert torch.equal(out, gathered_on_cpu(cache, chunk))


@on_gpu
def test_gpu_threads_gather_and_scatter_side_by_side(wide):
    """One thread a block, some in inference mode: each overwrites its block over and over and reads it
    back."""
    cache, _, copier = wide
    nbytes = cache.layout.block_bytes
    wrong = []

    def work(block):
        chunk = torch.tensor([block])
        with torch.inference_mode(block % 2 == 0):
            for turn in range(20):
                source = torch.full((nbytes,), (block * 20 + turn) % 251, dtype=torch.uint8).pin_memory()
                out = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
                copier.scatter(chunk, source).wait()
                copier.gather(chunk, out).wait()
                if not torch.equal(out, source):
                    wrong.append(block)

    together(*(partial(work, block) for block in range(BLOCKS)))
    assert wrong == []


@on_gpu
def test_gpu_a_closed_copier_has_given_its_bounce_buffers_back(wide):
    cache, _, copier = wide
    out = empty_payload(cache.layout, pinned=True)
    held = torch.cuda.memory_allocated()
    copier.gather(chunk_of(), out)
    copier.close()
    copier.close()
    torch.cuda.empty_cache()  # torch looks only now which memory no stream uses any more
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(out, gathered_on_cpu(cache, chunk_of()))
