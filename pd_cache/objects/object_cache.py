"""ObjectCache: bytes and tensors by name, in the same pool and tiers as chunks. For programs without a paged
cache.

1. A name is bytes or text, of any length. It stands for its contents: while a name has a value, a put of the
   same name changes nothing. So a program that changes a value gives it another name, or another namespace.
2. A get returns the bytes that were put, or it is a miss. Checksums cover the caller's own bytes, in a put
   and in a get (`values`, `tiers`). Damaged objects are removed, so that the next put replaces them.
3. No call raises because of trouble in the pool: a put returns a status, and a miss has a reason. The
   caller's mistakes raise ValueError.
4. Every call has a deadline. Memory is bounded: by the staging memory, and by `most_bytes` for each value.

Objects have no weights version: see docs/adapters.md.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_cache.config import NodeSettings
from pd_cache.layout import checksum
from pd_cache.lookup import closed_in_child
from pd_cache.metrics import CacheMetrics
from pd_cache.objects.values import (
    MOST_PARTS,
    OVERHEAD,
    Memory,
    Name,
    PartHeader,
    TensorForm,
    bytes_of,
    checksum_of,
    copy_in,
    copy_out,
    head_key,
    key_prefix,
    part_key,
    writable_bytes_of,
)
from pd_cache.tiers import PutOutcome, Staged, StorageBackend, open_backend
from pd_cache.tiers.memory import SELF_SIZED, Damage
from transfer.deadlines import Timeout, end_in
from transfer.errors import PoolUnavailableError, Status

if TYPE_CHECKING:
    import torch

    from pd_cache.objects.values import AnyValue

PART_BYTES = 4 << 20
"""How many bytes of a value are in one object, unless the caller chooses another size."""
MOST_BYTES = 1 << 30
"""The longest value, unless the caller chooses another length or the parts are small."""
_BATCH_BYTES = 12 << 20
"""About how many bytes a transfer call moves. It is small, so that a peer's task is short, and the bytes of
one call can be copied while the next call runs."""
_RETRIES = 8
"""How often a damaged object is read again. Each tier that returns it damaged removes it, so the next read
comes from another tier."""
_DAMAGED = frozenset(damage.value for damage in Damage)
INCOMPLETE = "incomplete"
"""A miss, because the head is there but a part is gone. The head is then removed."""
OTHER_SIZE = "other_size"
"""A miss, because the value and the caller's memory differ in length, or the value is longer than
`most_bytes`."""
OTHER_FORM = "other_form"
"""A miss, because the value was put with another form than the caller asks for."""
NOT_A_TENSOR = "not_a_tensor"
"""A miss, because the value was put as bytes, or its form is not that of a tensor."""

Target = Callable[[int, PartHeader], Memory | str]
"""Takes the index of a name, and the header of its value. Returns memory for the whole value, or the reason
why the caller does not want the value. Runs before the checksum is verified."""


class Deadline:
    """The time by which an operation has to end: `timeout` seconds from now, or never. `cut` moves it to
    now."""

    def __init__(self, timeout: Timeout) -> None:
        self.end = end_in(timeout)

    @classmethod
    def of(cls, timeout: Until) -> Deadline:
        """Returns a deadline as it is; makes one from a number of seconds, or from None."""
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    @property
    def passed(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end

    def cut(self) -> None:
        """Makes the deadline pass now. Any thread may call it. It does not interrupt a wait that has
        begun."""
        self.end = 0.0


Until = float | Deadline | None
"""The time for a call: a number of seconds, or a deadline that another thread can cut; None for the
configured time-outs."""


class ObjectOutcome(NamedTuple):
    """The result of a get."""

    value: bytes | None
    reason: str = ""
    """Why there is no value; empty for a hit."""


class _Piece(NamedTuple):
    key: str
    header: PartHeader
    value: Memory


class _Reading:
    """A value that is being read."""

    def __init__(self, head: str, target: Callable[[PartHeader], Memory | str]) -> None:
        self.head = head
        self.target = target
        self.header: PartHeader | None = None
        self.memory: Memory | None = None
        self.reason = ""

    def take(self, number: int, payload: memoryview, part_bytes: int) -> tuple[str, int | None]:
        """Copies a part to its place. Returns why the payload is useless, empty if it is not; and the
        checksum of the bytes that were used, None if the part is damaged."""
        # copied before it is parsed, because the slot may change
        before = bytes(payload[:OVERHEAD])
        header = PartHeader.parsed(before, len(payload))
        if header is None or header.number != number or header.part_bytes != part_bytes:
            return Damage.FOREIGN.value, None
        if not number:
            memory = self.target(header)
            if isinstance(memory, str):
                return memory, checksum(payload)
            self.header, self.memory = header, memory
        assert self.header is not None
        assert self.memory is not None
        if number and header != PartHeader.of(
            self.header.value_bytes, self.header.checksum, number, part_bytes, None
        ):
            return Damage.FOREIGN.value, None
        return "", copy_out(before, header, payload, self.memory)


class ObjectCache:
    """Values by name, in a namespace. Thread-safe. The module's docstring lists its promises."""

    def __init__(
        self,
        backend: StorageBackend,
        namespace: str,
        *,
        part_bytes: int = PART_BYTES,
        most_bytes: int | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Takes over `backend`, whose payloads must have room for `part_bytes` and `values.OVERHEAD`. To make
        the backend, too, call `open`.

        `most_bytes`: the longest value, by default 1 GiB or 65,536 parts, whichever is less. Raises
        ValueError for sizes that do not fit.
        """
        if not 1 <= part_bytes <= backend.payload_bytes - OVERHEAD:
            raise ValueError(
                f"part_bytes must be 1 to {backend.payload_bytes - OVERHEAD} for payloads of {backend.payload_bytes} bytes, "
                f"got {part_bytes}"
            )
        if most_bytes is None:
            most_bytes = min(MOST_BYTES, part_bytes * MOST_PARTS)
        if not 0 <= most_bytes <= part_bytes * MOST_PARTS:
            raise ValueError(
                f"most_bytes must be at most {MOST_PARTS} parts of {part_bytes} bytes, got {most_bytes}"
            )
        self.backend = backend
        self.namespace = namespace
        self.part_bytes = part_bytes
        self.most_bytes = most_bytes
        self.metrics = metrics or CacheMetrics()
        self._prefix = key_prefix(namespace, part_bytes)
        self.closed = False
        """True after `close`, and in a forked child, where the tiers have no threads."""
        closed_in_child.add(self)

    @classmethod
    def open(
        cls,
        settings: NodeSettings,
        namespace: str,
        *,
        part_bytes: int = PART_BYTES,
        most_bytes: int | None = None,
        metrics: CacheMetrics | None = None,
    ) -> ObjectCache:
        """Returns a cache over the tiers that `settings.cache` names. Waits neither for the pool nor for a
        disk.

        Raises ValueError if `transfer.staging_size` is too small for a part, MissingLibraryError if Mooncake
        cannot be loaded.
        """
        metrics = metrics or CacheMetrics()
        backend = open_backend(settings, part_bytes + OVERHEAD, batch_bytes=_BATCH_BYTES, metrics=metrics)
        try:
            return cls(backend, namespace, part_bytes=part_bytes, most_bytes=most_bytes, metrics=metrics)
        except BaseException:
            backend.close()
            raise

    def __enter__(self) -> ObjectCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one value ------------------------------------------------------------------------------------------

    def put(self, name: Name, value: AnyValue, *, timeout: Until = None) -> Status:
        """Stores a value: bytes, anything else with a contiguous buffer, or a tensor. Returns OK if other
        nodes can get it now.

        If the name already has a value, any value, nothing is stored and the status is OK, too. Raises
        ValueError for a value longer than `most_bytes`.
        """
        return self.put_many([name], [value], timeout=timeout)[0]

    def get(self, name: Name, *, timeout: Until = None) -> bytes | None:
        """Returns the bytes of a value or tensor; None for a miss."""
        return self.get_many([name], timeout=timeout)[0].value

    def get_tensor(self, name: Name, *, timeout: Until = None) -> torch.Tensor | None:
        """Returns a stored tensor, as a new tensor on the CPU; None for a miss, or for a value that is no
        tensor."""
        import torch

        memory: list[torch.Tensor] = []

        def target(_: int, header: PartHeader) -> memoryview | str:
            if header.value_bytes > self.most_bytes:
                return OTHER_SIZE
            dtype = None if header.form is None else getattr(torch, header.form.dtype, None)
            if header.form is None or not isinstance(dtype, torch.dtype):
                return NOT_A_TENSOR
            if math.prod(header.form.shape) * dtype.itemsize != header.value_bytes:
                return NOT_A_TENSOR
            raw = torch.empty(header.value_bytes, dtype=torch.uint8)
            try:
                memory[:] = [raw.view(dtype).reshape(header.form.shape)]
            except (RuntimeError, TypeError):  # a damaged shape without elements may have any dimensions
                return NOT_A_TENSOR
            return memoryview(raw.numpy().data)

        (reason,) = self._read([name], target, timeout)
        return None if reason else memory[0]

    def exists(self, name: Name, *, timeout: Until = None) -> bool:
        """Returns whether there is a value. A get may still miss: a part of a long value may be gone."""
        return self.exists_many([name], timeout=timeout)[0] is Status.OK

    def remove(self, name: Name, *, timeout: Until = None) -> Status:
        """Removes a value. Callers that are reading it get a miss. Returns MISSING if there was no value."""
        return self.remove_many([name], timeout=timeout)[0]

    # --- many values ----------------------------------------------------------------------------------------

    def put_many(
        self,
        names: Sequence[Name],
        values: Sequence[AnyValue],
        *,
        forms: Sequence[TensorForm | None] | None = None,
        timeout: Until = None,
    ) -> list[Status]:
        """Stores values. Returns a status for each, as `put` does. `timeout` (s) bounds the whole call;
        without it, the configured timeout bounds each transfer. `forms`: the form of each value, for which
        `read_into` may ask; by default a tensor's own.

        The caller must not change the values before the call returns: a mixture of old and new bytes could be
        stored. Bytes that are copied after the deadline are not stored. `timeout` may be a `Deadline`, which
        another thread can cut.
        """
        heads = self._heads(names)
        if len(values) != len(heads):
            raise ValueError(
                f"got {len(heads)} names and {len(values)} values; expected one value for each name"
            )
        given = [bytes_of(value) for value in values]
        if forms is not None:
            given = [(raw, form) for (raw, _), form in zip(given, _as_many(forms, heads), strict=True)]
        for raw, _ in given:
            if len(raw) > self.most_bytes:
                raise ValueError(f"a value may have up to {self.most_bytes} bytes here, got {len(raw)}")
        if not heads:
            return []
        if self.closed:
            return [Status.CLOSED] * len(heads)
        deadline = Deadline.of(timeout)
        first = {head: index for index, head in reversed(list(enumerate(heads)))}
        order = sorted(first.values())
        wanted = self.backend.batched_wants([heads[index] for index in order], end=deadline.end)
        statuses = dict(zip(order, wanted, strict=True))
        lacking = [index for index in order if statuses[index] is Status.MISSING]
        self._put_lacking(lacking, heads, given, statuses, deadline)
        self.metrics.outages("put", list(statuses.values()))
        return [statuses[first[head]] for head in heads]

    def get_many(self, names: Sequence[Name], *, timeout: Until = None) -> list[ObjectOutcome]:
        """Returns the bytes of each value, or the reason why there is none. `timeout` as in `put_many`."""
        memory: dict[int, bytearray] = {}

        def target(index: int, header: PartHeader) -> memoryview | str:
            if header.value_bytes > self.most_bytes:
                return OTHER_SIZE
            memory[index] = bytearray(header.value_bytes)
            return memoryview(memory[index])

        reasons = self._read(names, target, timeout)
        return [
            ObjectOutcome(None, reason) if reason else ObjectOutcome(bytes(memory.pop(index)))
            for index, reason in enumerate(reasons)
        ]

    def read_into(
        self,
        names: Sequence[Name],
        buffers: Sequence[Any],
        *,
        forms: Sequence[TensorForm | None] | None = None,
        timeout: Until = None,
    ) -> list[str]:
        """Reads each value into the caller's memory: contiguous writable buffers or CPU tensors, each exactly
        as long as its value.

        Returns a text for each name: empty for a hit, otherwise the reason of the miss. After a miss, the
        buffer's contents are undefined. No buffer is written after the call has returned, however late a
        transfer is. `timeout` as in `put_many`.

        With `forms`, a value that was put with another form is a miss, because memory of equal size may have
        another shape or type.
        """
        views = [writable_bytes_of(buffer) for buffer in buffers]
        if len(views) != len(names):
            raise ValueError(
                f"got {len(names)} names and {len(views)} buffers; expected one buffer for each name"
            )
        wanted = None if forms is None else _as_many(forms, names)

        def target(index: int, header: PartHeader) -> Memory | str:
            if header.value_bytes != len(views[index]):
                return OTHER_SIZE
            return OTHER_FORM if wanted is not None and header.form != wanted[index] else views[index]

        return self._read(names, target, timeout)

    def exists_many(self, names: Sequence[Name], *, timeout: Until = None) -> list[Status]:
        """Returns a status for each name, with one request: OK, MISSING, or the reason why the answer is
        unknown.

        The pool protects found values from eviction until their lease ends, so ask only for values that you
        will read.
        """
        heads = self._heads(names)
        if self.closed:
            return [Status.CLOSED] * len(heads)
        statuses = self.backend.batched_contains(heads, end=Deadline.of(timeout).end) if heads else []
        self.metrics.outages("exists", statuses)
        return statuses

    def remove_many(self, names: Sequence[Name], *, timeout: Until = None) -> list[Status]:
        """Removes values, by their heads. Other parts stay until they are evicted; without the head they are
        never read."""
        heads = self._heads(names)
        if self.closed:
            return [Status.CLOSED] * len(heads)
        return self.backend.batched_remove(heads, end=Deadline.of(timeout).end, force=True) if heads else []

    # --- life -----------------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while the cache is known to be unusable: calls then return at once."""
        return not self.closed and self.backend.available

    def wait_available(self, timeout: float) -> None:
        """Waits until the cache is open. Raises PoolUnavailableError after `timeout` seconds, or if the cache
        is closed."""
        if self.closed:
            raise PoolUnavailableError("this cache is closed")
        self.backend.wait_available(timeout)

    def close(self) -> None:
        """Ends the calls under way, at their deadlines at the latest, and closes the tiers. Idempotent."""
        if not self.closed:
            self.closed = True
            self.backend.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _heads(self, names: Sequence[Name]) -> list[str]:
        if isinstance(names, str | bytes):
            raise ValueError(f"expected a sequence of names, got one name: {names!r:.80}")
        return [head_key(self._prefix, name) for name in names]

    def _put_lacking(
        self,
        lacking: Sequence[int],
        heads: Sequence[str],
        given: Sequence[tuple[Memory, TensorForm | None]],
        statuses: dict[int, Status],
        deadline: Deadline,
    ) -> None:
        """Puts the values with these indices: first all parts except the heads, then the heads of the values
        whose parts were stored."""
        headers: dict[int, PartHeader] = {}
        for index in lacking:
            raw, form = given[index]
            # a value of one part needs no keys for further parts
            total = checksum_of(raw) if len(raw) > self.part_bytes else 0
            headers[index] = PartHeader.of(len(raw), total, 0, self.part_bytes, form)
        owners, pieces = list[int](), list[_Piece]()
        for index in lacking:
            head, raw = headers[index], given[index][0]
            for number in range(1, head.parts):
                header = PartHeader.of(len(raw), head.checksum, number, self.part_bytes, None)
                owners.append(index)
                pieces.append(_Piece(part_key(heads[index], head.checksum, number), header, raw))
        for index, status in zip(owners, self._put(pieces, deadline), strict=True):
            if status is not Status.OK:
                statuses[index] = status
        whole = [index for index in lacking if statuses[index] is Status.MISSING]
        last = [_Piece(heads[index], headers[index], given[index][0]) for index in whole]
        for index, status in zip(whole, self._put(last, deadline), strict=True):
            statuses[index] = status
            if status is Status.OK:
                self.metrics.moved("put", len(given[index][0]))

    def _put(self, pieces: Sequence[_Piece], deadline: Deadline) -> list[Status]:
        """Puts objects. Fills a batch while the batches before it are being sent."""
        outcomes: list[PutOutcome] = []
        begun = 0
        while begun < len(pieces):
            # the first batch is one object, which is sent while the others are copied
            batch = pieces[begun : begun + (self.backend.batch_size if begun else 1)]
            staged = self._stage(batch, deadline)
            if not staged:
                break
            keys = [piece.key for piece in batch[: len(staged)]]
            outcomes.append(self.backend.batched_put(keys, staged, end=deadline.end))
            begun += len(staged)
        statuses = [status for outcome in outcomes for status in outcome.results()]
        return statuses + [self._refusal(deadline)] * (len(pieces) - begun)

    def _refusal(self, deadline: Deadline) -> Status:
        """Returns why `_stage` filled no memory for a put."""
        if self.closed:
            return Status.CLOSED
        if not self.backend.available:
            return Status.POOL_DOWN
        return Status.TIMEOUT if deadline.passed else Status.OVERLOADED

    def _stage(self, batch: Sequence[_Piece], deadline: Deadline) -> list[Staged]:
        """Copies objects into memory, in order, as long as there is memory. Waits for memory only for the
        first object.

        Returns an empty list after the deadline, because the caller may change the values from then on.
        """
        staged: list[Staged] = []
        try:
            for piece in batch:
                if deadline.passed:
                    break
                wait = 0.0 if staged else deadline.end
                memory = self.backend.stage(payload_bytes=piece.header.payload_bytes, end=wait)
                if memory is None:
                    break
                staged.append(memory)
                memory.seal(piece.key, copy_in(piece.header, piece.value, memory.payload))
        except BaseException:
            _release(staged)
            raise
        if deadline.passed:
            _release(staged)
            return []
        return staged

    def _read(self, names: Sequence[Name], target: Target, timeout: Until) -> list[str]:
        """Reads values. Returns a text for each name: empty for a hit, otherwise the reason of the miss."""
        heads = self._heads(names)
        if self.closed:
            return [Status.CLOSED.value] * len(heads)
        deadline = Deadline.of(timeout)
        readings = [_Reading(head, partial(target, index)) for index, head in enumerate(heads)]
        waiting = readings
        while waiting:  # a key may occur only once in a round, so a repeated name is read in a further round
            once = {reading.head: reading for reading in reversed(waiting)}
            now = [reading for reading in waiting if once[reading.head] is reading]
            waiting = [reading for reading in waiting if once[reading.head] is not reading]
            for reading, reason in self._fetch({reading.head: (reading, 0) for reading in now}, deadline):
                reading.reason = reason
            # intact but useless: unless it is removed, a put would find it and store nothing
            self._drop([reading.head for reading in now if reading.reason == Damage.FOREIGN.value], deadline)
            self._read_parts(now, deadline)
        for reading in readings:
            if not reading.reason and reading.header is not None:
                self.metrics.moved("get", reading.header.value_bytes)
            elif reading.reason != Status.MISSING.value:
                self.metrics.trouble("get", reading.reason or Status.CLOSED.value)
        return [reading.reason for reading in readings]

    def _read_parts(self, readings: Sequence[_Reading], deadline: Deadline) -> None:
        wanted: dict[str, tuple[_Reading, int]] = {}
        for reading in readings:
            if not reading.reason and reading.header is not None:
                for number in range(1, reading.header.parts):
                    wanted[part_key(reading.head, reading.header.checksum, number)] = (reading, number)
        broken: set[str] = set()
        for reading, reason in self._fetch(wanted, deadline):
            if reason == Status.MISSING.value or reason in _DAMAGED:
                broken.add(reading.head)
            reading.reason = reading.reason or (INCOMPLETE if reason == Status.MISSING.value else reason)
        self._drop(list(broken), deadline)

    def _drop(self, heads: list[str], deadline: Deadline) -> None:
        """Removes heads of values that cannot be read, so that the next put of their names stores the whole
        values."""
        if heads:
            self.backend.batched_remove(heads, end=deadline.end, force=True)

    def _fetch(
        self, wanted: Mapping[str, tuple[_Reading, int]], deadline: Deadline
    ) -> Iterator[tuple[_Reading, str]]:
        """Reads parts of values, by key. For each part, yields its reading and the reason of a miss, in any
        order.

        A damaged object is read again: the tier that returned it has removed it, and another tier may have an
        intact copy.
        """
        left, known, attempts = list(wanted), dict[str, str](), 0
        while left:
            damaged: list[str] = []
            fetching = self.backend.batched_get(left, payload_bytes=SELF_SIZED, end=deadline.end)
            with contextlib.closing(fetching) as fetches:
                for place, key in enumerate(left):
                    if deadline.passed:  # thousands of keys may be left
                        for late in left[place:]:
                            yield wanted[late][0], known.get(late, Status.TIMEOUT.value)
                        break
                    fetched, (reading, number) = next(fetches), wanted[key]
                    try:
                        if fetched.payload is None:
                            reason = fetched.reason or Status.CLOSED.value
                            # the object is missing because it was damaged and removed
                            yield (
                                reading,
                                known.get(key, reason) if reason == Status.MISSING.value else reason,
                            )
                        elif deadline.passed:
                            yield reading, Status.TIMEOUT.value
                        else:
                            reason, used = reading.take(number, fetched.payload, self.part_bytes)
                            found = self.backend.check(fetched, used)
                            if found and attempts < _RETRIES:
                                damaged.append(key)
                                known[key] = found
                            else:
                                yield reading, found or reason
                    finally:
                        fetched.release()
            left, attempts = damaged, attempts + 1


def _release(staged: Sequence[Staged]) -> None:
    for memory in staged:
        memory.release()


def _as_many(forms: Sequence[TensorForm | None], names: Sequence[object]) -> Sequence[TensorForm | None]:
    if len(forms) != len(names):
        raise ValueError(f"got {len(names)} names and {len(forms)} forms; expected one form for each name")
    return forms
