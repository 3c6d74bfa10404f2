"""KV tensors in memory that two processes map, and what is refused in its place."""

import math
import mmap
import os
import time

import msgspec
import pytest
import torch

from pd_cache.errors import LayoutError
from pd_cache.server import memory
from pd_cache.server.clients import MappedTensors
from pd_cache.server.fence import AbandonedError, Fence, FenceView
from pd_cache.server.memory import (
    SharingError,
    close_all,
    share_tensors,
)
from pd_cache.server.protocol import (
    CpuStorage,
    CudaStorage,
    Register,
    Retrieve,
    Store,
    decode_request,
    encode,
)
from tests.support.kv import KINDS_WITH_TOKENS, make_cache, same_tensors
from tests.support.made import made

# --- shared memory ------------------------------------------------------------------------------------------


def test_a_tensor_stays_where_it_is_when_it_moves_into_shared_memory():
    (cache,) = make_cache(layers=1)
    before = cache.clone()
    first = share_tensors([cache])
    address = cache.data_ptr()
    second = share_tensors([cache])
    try:
        assert cache.data_ptr() == address
        assert same_tensors([cache], [before])
        assert os.fstat(first.descriptors[0]).st_ino == os.fstat(second.descriptors[0]).st_ino
        nbytes = cache.untyped_storage().nbytes()
        with mmap.mmap(first.descriptors[0], nbytes) as mapped:
            mapped[:] = bytes(len(mapped))
        assert not cache.view(torch.int16).any(), "the tensor and the descriptor are the same memory"
    finally:
        close_all([*first.descriptors, *second.descriptors])


def test_a_cache_without_memory_to_move_to_is_not_moved(monkeypatch):
    monkeypatch.setattr(
        memory.os, "statvfs", lambda path: type("Room", (), {"f_bavail": 1, "f_frsize": 4096})
    )
    with pytest.raises(SharingError, match="do not fit into /dev/shm"):  # before it kills the process
        share_tensors(make_cache(blocks=64))


# --- tensors in it ------------------------------------------------------------------------------------------


@pytest.fixture
def fence():
    one = Fence()
    yield one
    one.close()


@pytest.fixture
def map_them(fence):
    """Map what was shared, as a server does; unmapped afterwards."""

    def do(shared, **changes):
        request = msgspec.structs.replace(Register(shared.storages, shared.tensors), **changes)
        return MappedTensors(request, shared.descriptors, FenceView(fence.descriptor))

    def unmap(mapped):
        assert mapped.unmap(1)

    yield from made(do, unmap)


def admitted(fence, kind):
    """A move whose ticket is in the fence."""
    place = fence.admit(loads=kind is Retrieve)
    return kind(session="", names=(), blocks=(), slot=place[0], ticket=place[1], patience_ms=1)


IN_TIME = math.inf


@pytest.fixture
def shared():
    one = share_tensors(make_cache())
    yield one
    close_all(one.descriptors)


@pytest.mark.parametrize("one_storage", [True, False])
@pytest.mark.parametrize("kind", KINDS_WITH_TOKENS)
def test_every_view_follows_a_storage_into_shared_memory(map_them, fence, kind, one_storage):
    cache = make_cache(kind, one_storage=one_storage)
    view = cache[1][3:5]
    before = view.clone()
    shared = share_tensors(cache)
    mapped = map_them(shared)
    close_all(shared.descriptors)
    assert same_tensors([view], [before])
    with mapped.copiers(admitted(fence, Retrieve), IN_TIME) as (copier,):
        for plane in copier._groups:
            plane[...] = 0
    assert not any(tensor.view(torch.int16).any() for tensor in (*cache, view))


def test_memory_that_is_in_use_is_unmapped_afterwards(map_them, shared, fence):
    mapped = map_them(shared)
    with mapped.copiers(admitted(fence, Retrieve), IN_TIME) as (copier,):
        assert not mapped.unmap(0.05)
        assert copier._groups[0].size, "it is still there"
        with pytest.raises(AbandonedError), mapped.copiers(admitted(fence, Retrieve), IN_TIME):
            raise AssertionError("let in although it is to be unmapped")
    assert mapped.unmap(1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"offset": 10**6}, "does not lie in .* out of bounds"),
        ({"shape": (10**6, 3, 4, 16)}, "does not lie in .* out of bounds"),
        ({"storage": 1}, "does not lie in the 1 storages"),
        ({"dtype": "nn"}, "is not a torch dtype"),
        ({"stride": (1, 1)}, "does not lie in"),
        ({"stride": (192, 64, 1, 4)}, "contiguous"),
    ],
)
def test_what_is_said_about_tensors_is_checked_against_the_memory(map_them, shared, change, message):
    with pytest.raises((SharingError, LayoutError), match=message):
        map_them(shared, tensors=tuple(msgspec.structs.replace(view, **change) for view in shared.tensors))


def test_what_is_said_about_storages_is_checked_against_the_files(map_them, shared):
    (storage,) = shared.storages
    with pytest.raises(SharingError, match="greater than file size"):
        map_them(shared._replace(storages=(CpuStorage(storage.nbytes + 1),)))


def test_tensors_of_other_devices_are_refused():
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

    def untyped_storage(self):
        return self

    def storage_offset(self):
        return 64

    def stride(self):
        return (128, 64, 16, 1)

    def _share_cuda_(self):
        return 1, b"handle", 4096, 512, b"counter", 3, b"event", True

    def ipc_handle(self):
        return b"recorded"


def test_a_gpu_s_tensors_travel_as_ipc_handles_without_descriptors(map_them, monkeypatch):
    monkeypatch.setattr(memory, "gpus", lambda: ["uuid-0", "uuid-1"])
    shared = share_tensors([OnAGpu(), OnAGpu()])
    assert shared.storages == (CudaStorage(4096, "uuid-1", b"handle", 512, b"counter", 3, b"event", True),)
    assert shared.descriptors == []
    assert [view.storage for view in shared.tensors] == [0, 0]
    request = Register(shared.storages, shared.tensors)
    assert decode_request(encode(1, request)) == (1, request)
    assert memory.event_handle(OnAGpu()) == b"recorded"
    assert memory.event_handle(None) == b""
    monkeypatch.setattr(memory, "gpus", lambda: ["uuid-0", "uuid-2"])
    with pytest.raises(
        SharingError, match="tensor is on GPU uuid-1, but this process has uuid-0, uuid-2: a cache server"
    ):
        map_them(shared)


def test_a_server_finds_an_engine_s_gpu_among_its_own_whatever_its_number_there(map_them, monkeypatch):
    monkeypatch.setattr(memory, "gpus", lambda: ["uuid-0", "uuid-1"])
    shared = share_tensors([OnAGpu()])
    monkeypatch.setattr(memory, "gpus", lambda: ["uuid-1", "uuid-0"])
    asked = []

    def refuse(*what):
        asked.extend(what)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(SharingError, match="does not map 4096 bytes of GPU uuid-1: out of memory"):
        map_them(shared)
    assert asked == [0, b"handle", 4096, 512, b"counter", 3, b"event", True]


# --- copies behind the fence --------------------------------------------------------------------------------


def test_nothing_is_copied_for_an_engine_that_has_given_up_or_would_have(map_them, shared, fence):
    mapped = map_them(shared)
    load, store = admitted(fence, Retrieve), admitted(fence, Store)
    for move in (load, store):
        with pytest.raises(AbandonedError), mapped.copiers(move, time.monotonic() - 1):
            raise AssertionError("let in after the deadline")
    with mapped.copiers(load, IN_TIME):
        assert not fence.revoke(load.slot, load.ticket), "a copy into the blocks delays the engine"
    with pytest.raises(AbandonedError), mapped.copiers(store, IN_TIME):
        assert fence.revoke(store.slot, store.ticket), "a copy out of them does not"
    assert fence.revoke(load.slot, load.ticket)
    for move in (load, store):
        with pytest.raises(AbandonedError), mapped.copiers(move, IN_TIME):
            raise AssertionError("let in although the engine has given up")
