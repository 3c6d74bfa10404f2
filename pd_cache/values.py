"""How a value of any size lies in objects of at most one size: one head, and further parts if the value is long. Pure.

The head begins with 64 bytes about the value, then comes what describes a tensor (up to 192 bytes), then the value's first `part_bytes` bytes.
Each further part begins with 64 bytes about itself, and has the next `part_bytes` bytes.

    offset  size
    0       8     length of the object's payload, these bytes included (`backends.objects.SELF_SIZED`)
    8       8     length of the value
    16      8     XXH3-64 of the value, which is also in the keys of its parts
    24      4     number of this part; the head is part 0
    28      4     `part_bytes`
    32      4     magic "PDV1"
    36      2     kind: 0 bytes, 1 a tensor
    38      2     length of the description of a tensor
    40      24    zero

All fields are little-endian. The keys of a value's parts depend on its contents. So two writers that store different values under one name
at the same time never mix them: the head that is stored first decides whose parts are read. A writer stores the head last.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

KEY_FORMAT = "pdo1"
"""The version of the names of keys and of this format: nodes of another version never find these objects."""

_HEADER = struct.Struct("<QQQII4sHH24x")
_MAGIC = b"PDV1"
HEADER_BYTES = _HEADER.size
_ALIGN = 64
MOST_DESCRIPTION = 192
OVERHEAD = HEADER_BYTES + MOST_DESCRIPTION
"""The most bytes of a payload that are not the value's."""
MOST_PARTS = 65_536

_DESCRIPTION = re.compile(r"([a-z][a-z0-9_]{0,30}):((?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18})){0,8})?", re.ASCII)


class Scattered:
    """A value that lies in several places of the caller's memory, one after another."""

    __slots__ = ("_bytes", "_views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """Each view is contiguous."""
        self._views = tuple(view.cast("B") for view in views)
        self._bytes = sum(len(view) for view in self._views)

    def __len__(self) -> int:
        return self._bytes

    @property
    def readonly(self) -> bool:
        return any(view.readonly for view in self._views)

    def part(self, data: slice) -> Iterator[memoryview]:
        """Yields the bytes from `data.start` to before `data.stop`, in order."""
        at = 0
        for view in self._views:
            start, stop = max(data.start - at, 0), min(data.stop - at, len(view))
            if start < stop:
                yield view[start:stop]
            at += len(view)


class TensorForm(NamedTuple):
    """What distinguishes a tensor from its bytes."""

    dtype: str
    """As torch writes it, without `torch.`."""
    shape: tuple[int, ...]

    def described(self) -> bytes:
        """Returns the form as text. Raises ValueError for more than 9 dimensions."""
        text = f"{self.dtype}:{','.join(map(str, self.shape))}"
        if not _DESCRIPTION.fullmatch(text) or len(text) > MOST_DESCRIPTION:
            raise ValueError(f"a tensor may have up to 9 dimensions, got one of {self.dtype} {self.shape}")
        return text.encode()

    @classmethod
    def of_many(cls, shapes: Iterable[Sequence[int]], dtypes: Iterable[object]) -> TensorForm:
        """Returns a form for several tensors in one value, which stands for their shapes and types and does not say them."""
        text = repr([(list(map(int, shape)), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)])
        return cls("of_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), ())

    @classmethod
    def parsed(cls, text: bytes) -> TensorForm | None:
        """Returns the form that `described` wrote; None for any other text."""
        match = _DESCRIPTION.fullmatch(text.decode("ascii", "replace"))
        if match is None:
            return None
        return cls(match[1], tuple(int(size) for size in match[2].split(",")) if match[2] else ())


class PartHeader(NamedTuple):
    """What an object says about the value whose part it is."""

    payload_bytes: int
    value_bytes: int
    checksum: int
    number: int
    part_bytes: int
    form: TensorForm | None = None
    """In the head of a tensor."""

    @property
    def parts(self) -> int:
        """How many parts the value has, the head included."""
        return parts_of(self.value_bytes, self.part_bytes)

    @property
    def data(self) -> slice:
        """Where in the value the bytes of this part lie."""
        start = self.number * self.part_bytes
        return slice(start, min(start + self.part_bytes, self.value_bytes))

    @property
    def offset(self) -> int:
        """Where in the payload the bytes of this part begin."""
        data = self.data
        return self.payload_bytes - int(data.stop - data.start)

    def packed(self) -> bytes:
        """Returns what stands before the bytes of this part."""
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
    def of(cls, value_bytes: int, checksum: int, number: int, part_bytes: int, form: TensorForm | None) -> PartHeader:
        """Returns the header of one part of a value."""
        text = form.described() if form is not None and number == 0 else b""
        before = HEADER_BYTES + -(-len(text) // _ALIGN) * _ALIGN
        start = number * part_bytes
        data = min(start + part_bytes, value_bytes) - start
        return cls(before + data, value_bytes, checksum, number, part_bytes, form if number == 0 else None)

    @classmethod
    def parsed(cls, start: bytes, payload_bytes: int) -> PartHeader | None:
        """Returns the header of a payload of this size, of which `start` are the first `OVERHEAD` bytes; None if it has none."""
        if len(start) < HEADER_BYTES:
            return None
        size, value_bytes, checksum, number, part_bytes, magic, kind, text = _HEADER.unpack(start[:HEADER_BYTES])
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


class ValueKeys:
    """The keys of the values of one namespace."""

    def __init__(self, namespace: str, part_bytes: int) -> None:
        """Caches whose `part_bytes` differ never meet, because one could not read what the other wrote.

        Raises ValueError if the namespace is not a str.
        """
        if not isinstance(namespace, str):
            raise ValueError(f"a namespace must be a str, got {type(namespace).__name__}")
        said = f"{KEY_FORMAT}\n{part_bytes}\n{namespace}".encode("utf-8", "surrogatepass")
        self.prefix = f"{KEY_FORMAT}/{hashlib.sha256(said).hexdigest()[:16]}/"

    def heads(self, names: Sequence[str | bytes]) -> list[str]:
        """Returns the keys of the heads. Raises ValueError for a name that is neither str nor bytes."""
        keys = []
        for name in names:
            if not isinstance(name, str | bytes):
                raise ValueError(f"a name must be str or bytes, got {type(name).__name__}")
            raw = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
            person = b"str" if isinstance(name, str) else b"bytes"
            keys.append(self.prefix + hashlib.blake2b(raw, digest_size=16, person=person).hexdigest())
        return keys

    @staticmethod
    def part(head: str, header: PartHeader, number: int) -> str:
        """Returns the key of a part of the value that the head with `header` begins."""
        return f"{head}/{header.checksum:016x}/{number}"
