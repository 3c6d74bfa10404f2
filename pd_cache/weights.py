"""Computes digests of the folders of models and LoRA adapters. They distinguish weights of the same name,
shape and size. Only reads files.

A model's digest covers config.json whole, and samples of the weight files, which may be hundreds of
gigabytes. For a safetensors file the samples are the whole header and four places in every tensor, so that a
fine-tune that changed a single matrix differs. For other formats they are 256 places in the file. Files that
differ only in a few scattered numbers may get the same digest: give each such model a revision of its own
(`connector.revision`). An adapter's files are small, and are read whole.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pd_cache.decoding import decode_json
from pd_cache.errors import PdCacheError

SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
_SAMPLE = 4096
_SAMPLES_OF_A_TENSOR = 4
_SAMPLES_OF_A_FILE = 256
_LONGEST_HEADER = 100 << 20
"""The format's own limit of a safetensors file's header, in bytes."""


_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = tuple(f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt"))
_READ = 1 << 20


class WeightsError(PdCacheError):
    """The folder has no model or adapter, or its weights cannot be distinguished from others."""


FileStamp = tuple[str, int, int, int]
"""A file's name, inode, size and time of change: they show whether the file was written again."""


def weights_digest(folder: Path) -> str:
    """Returns 32 hex digits that differ between models of different weights. Raises WeightsError if there is
    nothing to read."""
    config = folder / "config.json"
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES) if folder.is_dir() else []
    if not config.is_file() or not files:
        lacking = "weight files" if config.is_file() else "config.json"
        raise WeightsError(f"{folder} is not a model folder: it has no {lacking}")
    digest = hashlib.sha256(config.read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start, length in _places(opened, file, size):
                opened.seek(start)
                digest.update(opened.read(length))
    return digest.hexdigest()[:32]


def adapter_digest(folder: Path) -> str:
    """Returns 32 hex digits that differ between LoRA adapters of different weights or configuration. Reads
    the adapter's files whole.

    Raises WeightsError if the folder holds no adapter, and OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in _adapter_files(folder):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while part := opened.read(_READ):
                digest.update(part)
    return digest.hexdigest()[:32]


def adapter_stamps(folder: Path) -> tuple[FileStamp, ...]:
    """Returns the stamps of the files that `adapter_digest` reads. Raises the same errors."""
    found = ((file.name, file.stat()) for file in _adapter_files(folder))
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _adapter_files(folder: Path) -> list[Path]:
    """Returns the files that an engine loads of an adapter. Raises WeightsError if there are none."""
    config, weights = folder / _ADAPTER_CONFIG, [folder / name for name in _ADAPTER_FILES]
    files = [file for file in weights if file.is_file()]
    if not config.is_file() or not files:
        lacking = "weight files" if config.is_file() else _ADAPTER_CONFIG
        raise WeightsError(f"{folder} is not the folder of a LoRA adapter: it has no {lacking}")
    return [config, *files]


def _places(opened: BinaryIO, file: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yields the parts to read: (start, length) in bytes."""
    header = _safetensors_header(opened, size) if file.suffix == ".safetensors" else None
    if header is None:
        yield from _spread(0, size, _SAMPLES_OF_A_FILE)
        return
    data, ranges = header
    yield 0, data
    for start, end in ranges:
        yield from _spread(data + start, data + end, _SAMPLES_OF_A_TENSOR)


def _spread(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields `count` samples from `start` to `end`, including the first and the last byte. If the range is no
    longer than the samples, yields the whole range."""
    if end - start <= count * _SAMPLE:
        yield start, max(0, end - start)
        return
    for index in range(count):
        yield start + (end - start - _SAMPLE) * index // (count - 1), _SAMPLE


def _safetensors_header(opened: BinaryIO, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Returns where the data begin, and where each tensor is in the data; None if the file is not a
    safetensors file."""
    raw = opened.read(8)
    if len(raw) < 8:
        return None
    length = struct.unpack("<Q", raw)[0]
    if length > min(_LONGEST_HEADER, size - 8):
        return None
    try:
        header = decode_json(opened.read(length), dict[str, Any])
        ranges = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        return 8 + length, sorted((int(start), int(end)) for start, end in ranges)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
