"""Memory whose size nobody can change, and what is refused in its place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pd_cache.server.fence import FenceView
from pd_cache.server.memory import (
    SealError,
    SharingError,
    check_sealed,
    close_all,
    is_sealed,
    sealed_memory,
    share_tensors,
)
from tests.support.kv import make_cache

SIZE = 1 << 20


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def memory(seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, *, flags: int = 0) -> int:
    """Memory as a stranger makes it, every page written."""
    descriptor = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, SIZE)
    os.pwrite(descriptor, b"x" * SIZE, 0)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_what_an_engine_lends_cannot_change_its_size() -> None:
    shared = share_tensors(make_cache())
    try:
        for descriptor in shared.descriptors:
            size = os.fstat(descriptor).st_size
            for other in (0, size - 1, size + mmap.PAGESIZE):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, other)
            check_sealed(descriptor, size)
    finally:
        close_all(shared.descriptors)


def test_a_tensor_stays_where_it_is_when_it_moves_into_sealed_memory() -> None:
    (cache,) = make_cache(layers=1)
    before = cache.clone()
    first = share_tensors([cache])
    address = cache.data_ptr()
    second = share_tensors([cache])
    try:
        assert cache.data_ptr() == address
        assert torch.equal(cache.view(torch.int16), before.view(torch.int16))
        assert os.fstat(first.descriptors[0]).st_ino == os.fstat(second.descriptors[0]).st_ino
        with mmap.mmap(first.descriptors[0], cache.untyped_storage().nbytes()) as mapped:
            mapped[:] = bytes(len(mapped))
        assert not cache.view(torch.int16).any(), "the tensor and the descriptor are the same memory"
        descriptor, _ = cache.untyped_storage()._share_fd_cpu_()
        assert is_sealed(descriptor), "torch passes the same memory to whoever asks it"
    finally:
        close_all([*first.descriptors, *second.descriptors])


def test_tensors_that_another_process_may_have_already_are_not_moved_away_from_it() -> None:
    (cache,) = make_cache(layers=1)
    cache.share_memory_()
    with pytest.raises(SharingError, match="not sealed against shrinking"):
        share_tensors([cache])


def test_a_cache_without_memory_to_move_to_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    (cache,) = make_cache(layers=1)
    before = cache.clone()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(SharingError, match=r"could not move .* to sealed memory"):
        share_tensors([cache])
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


def unsealed() -> int:
    return memory(0)


def sealed_against_growth_only() -> int:
    return memory(fcntl.F_SEAL_GROW)


def sealed_against_writing() -> int:
    return memory(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE)


def read_only() -> int:
    with closing(memory()) as descriptor:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def sparse() -> int:
    return sealed_memory("sparse", SIZE)


def with_a_hole() -> int:
    descriptor = sealed_memory("hole", SIZE)
    os.pwrite(descriptor, b"x" * (SIZE - mmap.PAGESIZE), 0)
    return descriptor


def too_small() -> int:
    descriptor = sealed_memory("small", SIZE - 1)
    os.pwrite(descriptor, b"x" * (SIZE - 1), 0)
    return descriptor


def zero() -> int:
    return os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)


def pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def huge_pages() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB
    descriptor = os.memfd_create("huge", flags)
    os.ftruncate(descriptor, 2 << 20)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unsealed, "not sealed"),
        (sealed_against_growth_only, "not sealed"),
        (sealed_against_writing, "cannot be written"),
        (read_only, "cannot be written"),
        (sparse, "only 0 are allocated"),
        (with_a_hole, "write all of it before lending"),
        (too_small, f"expected a storage of {SIZE} bytes, the file has {SIZE - 1}"),
        (zero, "expected sealed memory of memfd_create"),
        (pipe, "expected sealed memory of memfd_create"),
        (huge_pages, "has pages of"),
    ],
)
def test_what_is_not_safe_to_map_is_refused_in_words(make: Callable[[], int], reason: str) -> None:
    with closing(make()) as descriptor, pytest.raises(SealError, match=reason):
        check_sealed(descriptor, SIZE)


def test_files_are_refused_in_words(tmp_path: Path) -> None:
    for folder in (Path("/dev/shm"), tmp_path):
        path = folder / "pd-cache-test-file"
        path.write_bytes(b"x" * SIZE)
        try:
            with closing(os.open(path, os.O_RDWR)) as descriptor, pytest.raises(SealError, match="sealed"):
                check_sealed(descriptor, SIZE)
        finally:
            path.unlink()


def test_only_a_sealed_fence_is_taken() -> None:
    with closing(memory(0)) as descriptor, pytest.raises(SealError, match="not sealed"):
        FenceView(descriptor)
