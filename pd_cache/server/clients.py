"""The KV tensors that clients have lent the server, and their stores and retrieves.

The server maps a worker's KV tensors (`MappedTensors`) when the worker registers, and touches them as the
fence allows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pd_cache.errors import LayoutError
from pd_cache.layout import KVLayout, PageKind, shard_tensors
from pd_cache.lookup import PrefixLookup
from pd_cache.mover import ChunkRun, plan_run
from pd_cache.paged import open_copier
from pd_cache.paged.base import PagedCopier
from pd_cache.reasons import Loaded, TierChunks
from pd_cache.server.fence import AbandonedError, FenceView
from pd_cache.server.lookups import Sessions
from pd_cache.server.memory import SharingError, import_cuda, on_device, own_stream, wait_for_event
from pd_cache.server.models import EngineGroup, Model, ServedModels
from pd_cache.server.protocol import (
    Answer,
    BlockRequest,
    CudaStorage,
    Done,
    Hello,
    RefusalError,
    Register,
    Retrieve,
    Stored,
    TensorView,
)
from transfer.staging import prefault

log = logging.getLogger(__name__)

_UNMAP_S = 5.0
TURN_BYTES = 1 << 30
"""The bytes that a store or retrieve moves before the next operation has its turn: about a second's work."""


class MappedTensors:
    """Maps an engine's KV tensors. `unmap` gives the memory back as soon as nothing uses it."""

    def __init__(
        self,
        request: Register,
        descriptors: Sequence[int],
        fence: FenceView,
        shards_per_rank: int = 1,
        block_size: int = 0,
    ) -> None:
        """Maps the memory of the descriptors and of the handles. The descriptors have the order of the CPU
        storages, and stay the caller's.

        `shards_per_rank` is how many shards of each chunk the tensors hold. `block_size` is the engine's: the
        shape of opaque pages does not show it. Takes over `fence`, which guards every copy. Raises
        SharingError or LayoutError, with nothing left open, if the parts do not fit together.
        """
        self.fence = fence
        self._maps: list[mmap.mmap] = []
        self._lock = threading.Condition()
        self._users = 0
        self._closed = False
        self._copiers: list[PagedCopier] = []
        """A copier for each shard."""
        try:
            tensors = self._map(request, list(descriptors))
            kind = PageKind(request.layout_kind) if request.layout_kind else None
            self.layout = KVLayout.from_tensors(tensors, kind, block_size=block_size)
            self.device = tensors[0].device
            shard_layout = self.layout.shard(shards_per_rank)
            for views in shard_tensors(tensors, shards_per_rank):
                self._copiers.append(open_copier(views, shard_layout))
        except BaseException as error:
            tensors = views = []
            self._release()
            if isinstance(error, ValueError) and not isinstance(error, LayoutError):
                raise SharingError(str(error)) from None
            raise

    @contextlib.contextmanager
    def copiers(
        self,
        request: BlockRequest,
        end: float,
        on_stream: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Iterator[Sequence[PagedCopier]]:
        """Yields the copier of each shard, for the blocks of a load or store, on its stream. The memory stays
        mapped while the block runs.

        Raises AbandonedError after `unmap`, after `end`, and if the engine has given up the load or store.
        """
        with self._lock:
            if self._closed or time.monotonic() > end:
                raise AbandonedError
            self._users += 1
        try:
            passing = self.fence.writing if isinstance(request, Retrieve) else self.fence.reading
            with passing(request.slot, request.ticket), on_stream():
                yield self._copiers
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._release()
                    self._lock.notify_all()

    def unmap(self, timeout: float) -> bool:
        """Stops new copies, and waits up to `timeout` seconds for running copies. Returns True if the memory
        is then unmapped.

        Otherwise, the thread that still copies unmaps it later.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                if not self._users:
                    self._release()
            return self._lock.wait_for(lambda: not self._users, timeout)

    def _map(self, request: Register, descriptors: list[int]) -> list[Tensor]:
        bases: list[Tensor] = []
        for storage in request.storages:
            if isinstance(storage, CudaStorage):
                bases.append(import_cuda(storage))
                continue
            self._maps.append(mmap.mmap(descriptors.pop(0), storage.nbytes))
            base = torch.frombuffer(self._maps[-1], dtype=torch.uint8)
            prefault(base.data_ptr(), storage.nbytes)
            bases.append(base)
        return [_view(view, bases) for view in request.tensors]

    def _release(self) -> None:
        while self._copiers:
            self._copiers.pop().close()
        maps, self._maps = self._maps, []
        for memory in maps:
            # a traceback may still hold a view; the memory is unmapped when the view is gone
            with contextlib.suppress(BufferError):
                memory.close()
        self.fence.close()


def _view(view: TensorView, bases: list[Tensor]) -> Tensor:
    dtype = getattr(torch, view.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SharingError(f"{view.dtype!r} is not a torch dtype")
    try:
        base = bases[view.storage]
        typed = base[: base.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return torch.as_strided(typed, view.shape, view.stride, view.offset)
    except (IndexError, RuntimeError) as error:  # torch checks that the tensor ends within its storage
        raise SharingError(
            f"{view} does not lie in the {len(bases)} storages that were lent: {error}"
        ) from None


class Worker(NamedTuple):
    """A registration: a worker's mapped tensors. The server touches them only as their fence allows."""

    model: Model
    rank: int
    tensors: MappedTensors

    def begin(self, request: BlockRequest, end: float) -> ChunkRun:
        """Returns the chunks of a request. No copy begins after `end`.

        Raises RefusalError, before anything moves, if the request does not fit the layout.
        """
        # the request has a stream of its own, so that only its copies wait for the engine's event; its turns
        # may run on different threads
        lend = functools.partial(self.tensors.copiers, request, end, own_stream(self.tensors.device))
        try:
            run = plan_run(
                self.model.database,
                self.tensors.layout,
                request.names,
                request.blocks,
                self.model.shards[self.rank],
                lend,
                request.label,
                loads=isinstance(request, Retrieve),
            )
        except ValueError as error:
            raise RefusalError("invalid", str(error)) from None
        if request.event:
            with lend():  # an engine that has given up the request has no event any more
                wait_for_event(self.tensors.device, request.event)
        return run


class EngineClient:
    """A client that has sent `Hello`."""

    def __init__(self, hello: Hello, groups: Sequence[EngineGroup]) -> None:
        """`groups`: the engine groups of the client's tensors or lookups."""
        self.hello = hello
        self.groups = tuple(groups)
        self.worker: Worker | None = None
        self.models: Sequence[Model] = ()
        """The models of the client's groups at its last lookup."""
        self.prefix: PrefixLookup | None = None
        self.gone = False
        self.registering = threading.Lock()

    def register(self, request: Register, descriptors: Sequence[int], models: ServedModels) -> Answer:
        """Maps the client's tensors. Replaces an earlier registration.

        `descriptors` are those of the fence and of the CPU storages. Raises RefusalError, with nothing left
        open, if the tensors cannot be served.
        """
        if self.hello.kind != "worker":
            raise RefusalError(
                "invalid", f"only a worker registers KV tensors; this client is a {self.hello.kind}"
            )
        if not descriptors:
            raise RefusalError("invalid", "no file descriptors came with the registration")
        with self.registering:
            self._unmap(_UNMAP_S)
            try:
                self._map(request, descriptors, models)
            except (SharingError, LayoutError) as error:
                raise RefusalError("mismatch", str(error)) from None
        if self.gone:  # it left while the lock was taken
            self.leave()
        return Done()

    def unregister(self) -> Answer:
        """Unmaps the client's tensors. Raises RefusalError if a copy outlives the wait for it."""
        with self.registering:
            if not self._unmap(_UNMAP_S):
                raise RefusalError(
                    "busy", "a copy is still running; the server unmaps the memory when it ends"
                )
        return Done()

    def leave(self) -> None:
        """Stops new work of the client, and unmaps its tensors as soon as no copy runs. Never waits.

        Called when the client is gone.
        """
        self.gone = True
        # otherwise the thread that holds it calls this when it is done
        if self.registering.acquire(blocking=False):
            try:
                self._unmap(0.0)
            finally:
                self.registering.release()

    def _map(self, request: Register, descriptors: Sequence[int], models: ServedModels) -> None:
        """Call with `registering` held."""
        engine = self.hello.engine
        fence = FenceView(descriptors[0])
        tensors = MappedTensors(request, descriptors[1:], fence, engine.shards_per_rank, engine.block_size)
        try:
            with on_device(tensors.device):  # staging memory is page-locked in this device's context
                model = models.serve(self.groups[0], tensors.layout, self.hello.client, engine.object_sizes)
            self.worker = Worker(model, engine.rank, tensors)
        except BaseException:
            tensors.unmap(0.0)
            raise
        log.info("worker of %s registered: %s", engine.model, tensors.layout)

    def _unmap(self, timeout: float) -> bool:
        """Ends the registration. Returns False if a copy outlives the wait for it. Call with `registering`
        held."""
        worker, self.worker = self.worker, None
        if worker is None:
            return True
        worker.model.workers.discard(self.hello.client)
        return worker.tensors.unmap(timeout)


def turns(
    client: EngineClient, request: BlockRequest, sessions: Sessions, end: float
) -> Iterator[Answer | None]:
    """Stores or retrieves in turns, one for each `next`. Yields None after each turn but the last, and then
    the answer.

    The engine gives the request up at `end`. A retrieve releases the chunks that its session in `sessions`
    holds for the client. Raises RefusalError if the request does not fit or is late, AbandonedError if the
    engine has given it up, and the memory's own errors.
    """
    if (worker := client.worker) is None:
        raise RefusalError("unknown_client", "register the KV tensors first")
    run = worker.begin(request, end)
    model, count = worker.model, len(run.chunks)
    most = max(1, TURN_BYTES // (model.mover.backend.payload_bytes * len(model.shards[worker.rank])))
    tiers, outcomes = TierChunks(), bytearray()
    for first in range(0, max(1, count), most):
        if time.monotonic() > end:
            raise RefusalError("late", "its turn came after its deadline")
        part = run.part(first, first + most)
        if isinstance(request, Retrieve):
            loaded = model.mover.load(part)
            tiers = TierChunks(*map(sum, zip(tiers, loaded.tiers, strict=True)))
            if loaded.chunks < len(part.chunks) or first + most >= count:
                if request.session:
                    sessions.loaded(request.session, model.group, worker.rank, run.names)
                yield Loaded(first + loaded.chunks, loaded.reason, tiers)
        else:
            outcomes += bytes(model.mover.store(part))
            if first + most >= count:
                yield Stored(bytes(outcomes))
        yield None
