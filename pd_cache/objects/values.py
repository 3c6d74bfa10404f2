"""The format of a value of any size in objects of bounded size: a head, and further parts if the value is
long.

The head begins with a header of 64 bytes. A tensor's description (up to 192 bytes) follows, and then the
value's first `part_bytes` bytes. Each further part has a header of 64 bytes, and the next `part_bytes` bytes.

    offset  size
    0       8     length of the object's payload, these bytes included (`tiers.memory.SELF_SIZED`)
    8       8     length of the value
    16      8     XXH3-64 of the value, which is also in the keys of its parts
    24      4     number of this part; the head is part 0
    28      4     `part_bytes`
    32      4     magic "PDV1"
    36      2     kind: 0 bytes, 1 a tensor
    38      2     length of the description of a tensor
    40      24    zero

All fields are little-endian. The keys of a value's parts depend on its contents. So if two writers store
different values under one name at the same time, the values never mix: the head that is stored first decides
which parts are read. A writer stores the head last.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_cache.layout import Digest

if TYPE_CHECKING:
    import torch

KEY_FORMAT = "pdo1"
"""The version of this format and of its keys. Nodes of another version never find these objects."""

_HEADER = struct.Struct("<QQQII4sHH24x")
_MAGIC = b"PDV1"
HEADER_BYTES = _HEADER.size
_ALIGN = 64
MOST_DESCRIPTION = 192
OVERHEAD = HEADER_BYTES + MOST_DESCRIPTION
"""The most bytes of a payload that are not the value's."""
MOST_PARTS = 65_536

_STEP_BYTES = 512 << 10
"""Bytes are copied and hashed in steps of this size, so that they are still in the processor's cache."""

_DESCRIPTION = re.compile(
    r"([a-z][a-z0-9_]{0,30}):((?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18})){0,8})?", re.ASCII
)


Name = str | bytes


class Scattered:
    """A value that is the concatenation of several pieces of the caller's memory."""

    __slots__ = ("_bytes", "_views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """Each of `views` must be contiguous."""
        self._views = tuple(view.cast("B") for view in views)
        self._bytes = sum(len(view) for view in self._views)

    def __len__(self) -> int:
        return self._bytes

    @property
    def readonly(self) -> bool:
        return any(view.readonly for view in self._views)

    def part(self, data: slice) -> Iterator[memoryview]:
        """Yields the bytes of the slice `data`, in order."""
        at = 0
        for view in self._views:
            start, stop = max(data.start - at, 0), min(data.stop - at, len(view))
            if start < stop:
                yield view[start:stop]
            at += len(view)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, as a view of its own memory."""
    import torch

    # not `reshape`: torch calls a tensor of at most one element contiguous whatever its strides, and
    # `reshape` keeps these strides
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)


Memory = memoryview | Scattered
if TYPE_CHECKING:
    AnyValue = bytes | bytearray | memoryview | torch.Tensor | Scattered


class TensorForm(NamedTuple):
    """A tensor's type and shape."""

    dtype: str
    """torch's name of the type, without `torch.`."""
    shape: tuple[int, ...]

    def described(self) -> bytes:
        """Returns the form as text. Raises ValueError for more than 9 dimensions."""
        text = f"{self.dtype}:{','.join(map(str, self.shape))}"
        if not _DESCRIPTION.fullmatch(text) or len(text) > MOST_DESCRIPTION:
            raise ValueError(f"a tensor may have up to 9 dimensions, got one of {self.dtype} {self.shape}")
        return text.encode()

    @classmethod
    def of_many(cls, shapes: Iterable[Sequence[int]], dtypes: Iterable[object]) -> TensorForm:
        """Returns a form for several tensors in a value: a digest of their shapes and types."""
        text = repr(
            [(list(map(int, shape)), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        )
        return cls("of_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), ())

    @classmethod
    def parsed(cls, text: bytes) -> TensorForm | None:
        """Returns the form that `described` wrote; None for any other text."""
        match = _DESCRIPTION.fullmatch(text.decode("ascii", "replace"))
        if match is None:
            return None
        return cls(match[1], tuple(int(size) for size in match[2].split(",")) if match[2] else ())


class PartHeader(NamedTuple):
    """An object's header: it identifies a value, and a part of it."""

    payload_bytes: int
    value_bytes: int
    checksum: int
    number: int
    part_bytes: int
    form: TensorForm | None = None
    """The form of a tensor; only in its head."""

    @property
    def parts(self) -> int:
        """How many parts the value has, including the head."""
        return parts_of(self.value_bytes, self.part_bytes)

    @property
    def data(self) -> slice:
        """The place of this part's bytes in the value."""
        start = self.number * self.part_bytes
        return slice(start, min(start + self.part_bytes, self.value_bytes))

    @property
    def offset(self) -> int:
        """The place in the payload at which the bytes of this part begin."""
        data = self.data
        return self.payload_bytes - int(data.stop - data.start)

    def packed(self) -> bytes:
        """Returns the bytes of the payload before those of this part."""
        text = b"" if self.form is None else self.form.described()
        kind = int(self.form is not None)
        fields = _HEADER.pack(
            self.payload_bytes,
            self.value_bytes,
            self.checksum,
            self.number,
            self.part_bytes,
            _MAGIC,
            kind,
            len(text),
        )
        return (fields + text).ljust(self.offset, b"\0")

    @classmethod
    def of(
        cls, value_bytes: int, checksum: int, number: int, part_bytes: int, form: TensorForm | None
    ) -> PartHeader:
        """Returns the header of a part of a value."""
        text = form.described() if form is not None and number == 0 else b""
        before = HEADER_BYTES + -(-len(text) // _ALIGN) * _ALIGN
        start = number * part_bytes
        data = min(start + part_bytes, value_bytes) - start
        return cls(before + data, value_bytes, checksum, number, part_bytes, form if number == 0 else None)

    @classmethod
    def parsed(cls, start: bytes, payload_bytes: int) -> PartHeader | None:
        """Returns the header of a payload of `payload_bytes` bytes; None if it has none. `start` is the
        payload's first `OVERHEAD` bytes."""
        if len(start) < HEADER_BYTES:
            return None
        size, value_bytes, checksum, number, part_bytes, magic, kind, text = _HEADER.unpack(
            start[:HEADER_BYTES]
        )
        if magic != _MAGIC or kind > 1 or text > MOST_DESCRIPTION or not part_bytes or size != payload_bytes:
            return None
        form = TensorForm.parsed(start[HEADER_BYTES : HEADER_BYTES + text]) if kind else None
        if (kind and form is None) or parts_of(value_bytes, part_bytes) > MOST_PARTS:
            return None
        header = cls.of(value_bytes, checksum, number, part_bytes, form)
        return header if header.payload_bytes == size and number < header.parts else None


def parts_of(value_bytes: int, part_bytes: int) -> int:
    """Returns how many parts a value of this length has."""
    return max(1, -(-value_bytes // part_bytes))


# --- keys ---------------------------------------------------------------------------------------------------


def key_prefix(namespace: str, part_bytes: int) -> str:
    """Returns the beginning of the keys of a namespace's values. Caches with different `part_bytes` have
    different keys, because they cannot read each other's objects.

    Raises ValueError if the namespace is not a str.
    """
    if not isinstance(namespace, str):
        raise ValueError(f"a namespace must be a str, got {type(namespace).__name__}")
    identity = f"{KEY_FORMAT}\n{part_bytes}\n{namespace}".encode("utf-8", "surrogatepass")
    return f"{KEY_FORMAT}/{hashlib.sha256(identity).hexdigest()[:16]}/"


def head_key(prefix: str, name: Name) -> str:
    """Returns the key of a value's head. Raises ValueError for a name that is neither str nor bytes."""
    if not isinstance(name, str | bytes):
        raise ValueError(f"a name must be str or bytes, got {type(name).__name__}")
    raw = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
    person = b"str" if isinstance(name, str) else b"bytes"
    return prefix + hashlib.blake2b(raw, digest_size=16, person=person).hexdigest()


def part_key(head: str, checksum: int, number: int) -> str:
    """Returns the key of part `number` of a value with this checksum. `head` is the key of the value's
    head."""
    return f"{head}/{checksum:016x}/{number}"


# --- the bytes of values ------------------------------------------------------------------------------------


def bytes_of(value: AnyValue) -> tuple[Memory, TensorForm | None]:
    """Returns a value's bytes and, for a tensor, its form. Copies only tensors that are not contiguous or not
    on the CPU."""
    if isinstance(value, Scattered):
        return value, None
    if hasattr(value, "untyped_storage"):
        return _bytes_of_tensor(value)  # type: ignore[arg-type]  # only tensors have one
    try:
        return _flat(memoryview(value)), None
    except TypeError:
        raise ValueError(
            f"a value must be bytes, have a contiguous buffer or be a tensor, got {type(value).__name__}"
        ) from None


def _flat(view: memoryview) -> memoryview:
    """Returns the bytes of contiguous memory. Raises TypeError if it is not."""
    # an array without elements cannot be cast
    return view.cast("B") if view.nbytes else memoryview(b"" if view.readonly else bytearray())


def _bytes_of_tensor(tensor: torch.Tensor) -> tuple[memoryview, TensorForm]:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "a nested one" if tensor.is_nested else f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"a tensor must be dense and have data, got {kind}")
    form = TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    form.described()
    return memory_of(tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()), form


def writable_bytes_of(buffer: Any) -> Memory:
    """Returns the bytes of the caller's memory. Raises ValueError unless the memory is writable, and
    contiguous or `Scattered`."""
    if isinstance(buffer, Scattered):
        if buffer.readonly:
            raise ValueError("a buffer must be writable")
        return buffer
    if hasattr(buffer, "untyped_storage"):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError("a buffer must be a contiguous tensor on the CPU")
        return memory_of(buffer.detach())
    try:
        view = _flat(memoryview(buffer))
    except TypeError:
        raise ValueError(
            f"a buffer must be contiguous memory or a tensor, got {type(buffer).__name__}"
        ) from None
    if view.readonly:
        raise ValueError("a buffer must be writable")
    return view


def copy_in(header: PartHeader, value: Memory, payload: memoryview) -> int:
    """Fills a payload with a part of a value. Returns the checksum that the payload must have, computed from
    the caller's bytes."""
    before = header.packed()
    digest = Digest(before)
    payload[: len(before)] = before
    place = len(before)
    for step in _steps(value, header.data):
        payload[place : place + len(step)] = step
        place += len(step)
        digest.update(step)
    return digest.intdigest()


def copy_out(before: bytes, header: PartHeader, payload: memoryview, value: Memory) -> int:
    """Copies a part to its place in the caller's memory. Returns the checksum of the bytes that were used."""
    digest = Digest(before[: header.offset])
    place = header.offset
    for step in _steps(value, header.data):
        step[:] = payload[place : place + len(step)]
        place += len(step)
        digest.update(step)
    return digest.intdigest()


def _steps(value: Memory, data: slice) -> Iterator[memoryview]:
    """Yields the bytes of a part of a value, in order."""
    pieces = (value[data],) if isinstance(value, memoryview) else value.part(data)
    for piece in pieces:
        for start in range(0, len(piece), _STEP_BYTES):
            yield piece[start : start + _STEP_BYTES]


def checksum_of(value: Memory) -> int:
    digest = Digest()
    for step in _steps(value, slice(0, len(value))):
        digest.update(step)
    return digest.intdigest()
