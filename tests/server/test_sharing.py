"""KV tensors in memory that two processes map, and what is checked before."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from pd_cache.errors import LayoutError
from pd_cache.layout import PageKind
from pd_cache.paged import ChunkSlots
from pd_cache.server import memory
from pd_cache.server.fence import AbandonedError, Fence, FenceView
from pd_cache.server.memory import Shared, SharingError, close_all, share_tensors
from pd_cache.server.moves import FencedCopier, MappedTensors
from pd_cache.server.protocol import CpuStorage, CudaStorage, Register, decode_request, encode
from tests.support.kv import KINDS_WITH_TOKENS, make_cache

MapThem = Callable[..., MappedTensors]


@pytest.fixture
def map_them() -> Iterator[MapThem]:
    """Map what was shared, as a server does; unmapped afterwards."""
    fence = Fence()
    mapped: list[MappedTensors] = []

    def do(shared: Shared, **changes: Any) -> MappedTensors:
        request = Register(shared.storages, shared.tensors)
        try:
            one = MappedTensors(
                msgspec.structs.replace(request, **changes), shared.descriptors, FenceView(fence.descriptor)
            )
        finally:
            close_all(shared.descriptors)
        mapped.append(one)
        return one

    yield do
    for one in mapped:
        assert one.unmap(1)
    fence.close()


@pytest.mark.parametrize("one_storage", [True, False])
@pytest.mark.parametrize("kind", KINDS_WITH_TOKENS)
def test_every_view_follows_a_storage_into_shared_memory(map_them: MapThem, kind: PageKind, one_storage: bool) -> None:
    cache = make_cache(kind, one_storage=one_storage)
    view = cache[1][3:5]
    before = view.clone()
    mapped = map_them(share_tensors(cache))
    assert torch.equal(view.view(torch.int16), before.view(torch.int16))
    with mapped.using(0) as copier:
        planes = copier._groups  # type: ignore[attr-defined]
        for plane in planes:
            plane[...] = 0
    assert not any(tensor.view(torch.int16).any() for tensor in cache)
    assert not view.view(torch.int16).any()


def test_sharing_twice_shares_the_same_memory(map_them: MapThem) -> None:
    cache = make_cache()
    first, second = map_them(share_tensors(cache)), map_them(share_tensors(cache))
    with first.using(0) as one, second.using(0) as other:
        one._groups[0][...] = 0  # type: ignore[attr-defined]
        assert not other._groups[0].any()  # type: ignore[attr-defined]


def test_memory_that_is_in_use_is_unmapped_afterwards(map_them: MapThem) -> None:
    mapped = map_them(share_tensors(make_cache()))
    with mapped.using(0):
        assert not mapped.unmap(0.05)
        with pytest.raises(AbandonedError), mapped.using(0):
            raise AssertionError("let in although it is to be unmapped")
    assert mapped.unmap(1)


def test_what_is_said_about_tensors_is_checked_against_the_memory(map_them: MapThem) -> None:
    shared = share_tensors(make_cache())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"offset": 10**6}, "does not lie in .* out of bounds"),
        ({"shape": (10**6, 3, 4, 16)}, "does not lie in .* out of bounds"),
        ({"storage": 1}, "does not lie in the 1 storages"),
        ({"dtype": "nonsense"}, "is not a torch dtype"),
        ({"dtype": "nn"}, "is not a torch dtype"),
        ({"stride": (1, 1)}, "does not lie in"),
        ({"stride": (192, 64, 1, 4)}, "contiguous"),
    ]
    for change, message in wrong:
        copies = shared._replace(descriptors=[os.dup(one) for one in shared.descriptors])
        tensors = tuple(msgspec.structs.replace(view, **change) for view in shared.tensors)
        with pytest.raises((SharingError, LayoutError), match=message):
            map_them(copies, tensors=tensors)
    close_all(shared.descriptors)


def test_what_is_said_about_storages_is_checked_against_the_files(map_them: MapThem) -> None:
    shared = share_tensors(make_cache())
    (storage,) = shared.storages
    assert isinstance(storage, CpuStorage)
    for storages, message in [
        ((CpuStorage(storage.nbytes + 1),), "bytes, the file has"),
        ((storage, storage), "got fewer"),
    ]:
        copies = shared._replace(descriptors=[os.dup(one) for one in shared.descriptors])
        with pytest.raises(SharingError, match=message):
            map_them(copies, storages=storages)
    read, write = os.pipe()
    try:
        with pytest.raises(SharingError, match="expected sealed memory of memfd_create"):
            map_them(shared._replace(descriptors=[os.dup(read)]))
        with pytest.raises(SharingError, match="got more"):
            map_them(shared._replace(descriptors=[*shared.descriptors, os.dup(read)]))
    finally:
        os.close(read)
        os.close(write)


def test_a_cache_that_shared_memory_cannot_hold_is_refused_before_it_kills_the_process(monkeypatch: Any) -> None:
    free = os.statvfs("/dev/shm")
    monkeypatch.setattr(memory.os, "statvfs", lambda path: type("Room", (), {"f_bavail": 1, "f_frsize": free.f_frsize}))
    with pytest.raises(SharingError, match="do not fit into /dev/shm"):
        share_tensors(make_cache(blocks=64))


def test_tensors_of_other_devices_are_refused() -> None:
    with pytest.raises(SharingError, match="KV tensors on meta"):
        share_tensors([torch.zeros(4, 2, 4, 4, device="meta")])
    with pytest.raises(SharingError, match="no KV tensors"):
        share_tensors([])


class OnAGpu:
    """What is used of a CUDA tensor, its storage and an event, where there is no GPU."""

    device = torch.device("cuda", 1)
    dtype = torch.bfloat16
    shape = torch.Size((8, 2, 4, 16))
    _cdata = 7

    def untyped_storage(self) -> OnAGpu:
        return self

    def storage_offset(self) -> int:
        return 64

    def stride(self) -> tuple[int, ...]:
        return (128, 64, 16, 1)

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 1, b"handle", 4096, 512, b"counter", 3, b"event", True

    def ipc_handle(self) -> bytes:
        return b"recorded"


def test_a_gpu_s_tensors_travel_as_ipc_handles_without_descriptors() -> None:
    shared = share_tensors([OnAGpu(), OnAGpu()])  # type: ignore[list-item]
    assert shared.storages == (CudaStorage(4096, 1, b"handle", 512, b"counter", 3, b"event", True),)
    assert shared.descriptors == []
    assert [view.storage for view in shared.tensors] == [0, 0]
    request = Register(shared.storages, shared.tensors)
    assert decode_request(encode(1, request)) == (1, request)
    assert memory.event_handle(OnAGpu()) == b"recorded"
    assert memory.event_handle(None) == b""


def test_what_is_said_about_a_gpu_s_memory_is_checked_before_torch_believes_it(map_them: MapThem) -> None:
    shared = share_tensors([OnAGpu()])  # type: ignore[list-item]
    (storage,) = shared.storages
    for change, message in [
        ({"device": 1000}, "tensor is on GPU 1000"),
    ]:
        with pytest.raises(SharingError, match=message):
            map_them(shared, storages=(msgspec.structs.replace(storage, **change),))


@contextlib.contextmanager
def a_move(*, loads: bool) -> Iterator[tuple[Fence, MappedTensors, tuple[int, int]]]:
    """A fence, the tensors behind it as the server has mapped them, and the slot and ticket of a move."""
    fence = Fence()
    place = fence.admit(loads=loads)
    assert place is not None
    shared = share_tensors(make_cache())
    request = Register(shared.storages, shared.tensors)
    mapped = MappedTensors(request, shared.descriptors, FenceView(fence.descriptor))
    try:
        yield fence, mapped, place
    finally:
        close_all(shared.descriptors)
        assert mapped.unmap(1)
        fence.close()


ROWS = ChunkSlots(torch.tensor([0, 1]), None)


def test_nothing_is_copied_for_an_engine_that_has_given_up_or_would_have() -> None:
    with a_move(loads=True) as (_, mapped, place):
        payload = torch.zeros(mapped.layout.chunk_bytes(8), dtype=torch.uint8)
        FencedCopier(mapped, 0, *place, b"", time.monotonic() + 600).gather(ROWS, payload)
        with pytest.raises(AbandonedError):
            FencedCopier(mapped, 0, *place, b"", time.monotonic() - 1).scatter(ROWS, payload)


def test_a_store_that_is_given_up_in_the_middle_of_a_chunk_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_move(loads=False) as (fence, mapped, place):
        with mapped.using(0) as copier:
            kind, really = type(copier), type(copier).gather

        def gather(self: Any, *arguments: Any) -> Any:
            assert fence.revoke(*place), "a copy out of the blocks delays nobody"
            return really(self, *arguments)

        monkeypatch.setattr(kind, "gather", gather)
        payload = torch.zeros(mapped.layout.chunk_bytes(8), dtype=torch.uint8)
        with pytest.raises(AbandonedError):
            FencedCopier(mapped, 0, *place, b"", time.monotonic() + 600).gather(ROWS, payload)
