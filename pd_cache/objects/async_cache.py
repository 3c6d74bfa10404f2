"""AsyncObjectCache: `ObjectCache` for programs with an asyncio loop. Its calls run on its own threads, so
that no call blocks the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pd_cache.objects.object_cache import Deadline, ObjectCache, ObjectOutcome
from pd_cache.objects.values import Name
from transfer.calls import CallThreads
from transfer.deadlines import Timeout
from transfer.errors import Status

if TYPE_CHECKING:
    import torch

    from pd_cache.objects.values import AnyValue

T = TypeVar("T")

_CLOSE_S = 5.0


class AsyncObjectCache:
    """The methods of `ObjectCache` as coroutines, for any number of loops.

    When a call is cancelled or its time is over, it stops reading the caller's memory, which the caller may
    then change. A wait that has begun continues on its thread.

    There is no `read_into`, because a cancelled call could still write to the caller's memory.
    """

    def __init__(
        self, cache: ObjectCache, *, threads: int = 4, most_waiting: int = 256, usual_timeout: float = 60.0
    ) -> None:
        """Takes over `cache`. `threads`: how many calls run at the same time. `most_waiting`: how many calls
        run or wait; further calls are refused as OVERLOADED. `usual_timeout` (s) bounds calls without a
        time-out."""
        self.cache = cache
        self._usual_timeout = usual_timeout
        self._closed = False
        self._threads = CallThreads("objects", threads, limit=most_waiting, spare=threads)

    async def __aenter__(self) -> AsyncObjectCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def available(self) -> bool:
        """False while the cache is known to be unusable: calls then return at once."""
        return self.cache.available

    async def put(self, name: Name, value: AnyValue, *, timeout: Timeout = None) -> Status:
        """Stores a value: bytes, anything else with a contiguous buffer, or a tensor. Returns OK if other
        nodes can get it now.

        `timeout` is in seconds. If the name already has a value, any value, nothing is stored and the status
        is OK, too. Raises ValueError for a value longer than the cache's `most_bytes`.
        """
        return (await self.put_many([name], [value], timeout=timeout))[0]

    async def get(self, name: Name, *, timeout: Timeout = None) -> bytes | None:
        """Returns the bytes of a value or tensor; None for a miss, or if `timeout` (s) is over. `get_many`
        also returns the reason."""
        return (await self.get_many([name], timeout=timeout))[0].value

    async def get_tensor(self, name: Name, *, timeout: Timeout = None) -> torch.Tensor | None:
        """Returns a stored tensor, as a new tensor on the CPU; None for a miss, for a value that is no
        tensor, or if `timeout` (s) is over."""
        return await self._call(self.cache.get_tensor, name, timeout=timeout, refused=lambda _: None)

    async def exists(self, name: Name, *, timeout: Timeout = None) -> bool:
        """Returns whether there is a value; False, too, if `timeout` (s) is over. A get may still miss,
        because a part of a long value may be gone."""
        return (await self.exists_many([name], timeout=timeout))[0] is Status.OK

    async def remove(self, name: Name, *, timeout: Timeout = None) -> Status:
        """Removes a value. Callers that are reading it get a miss. Returns MISSING if there was no value.
        `timeout` is in seconds."""
        return await self._call(self.cache.remove, name, timeout=timeout, refused=lambda status: status)

    async def put_many(
        self, names: Sequence[Name], values: Sequence[AnyValue], *, timeout: Timeout = None
    ) -> list[Status]:
        """Stores values, one for each name. Returns a status for each, as `put` does.

        `timeout` (s) bounds the whole call. Do not change the values until the call returns: a mixture of old
        and new bytes could be stored. Raises ValueError if there are not as many values as names, or for a
        value longer than the cache's `most_bytes`.
        """
        return await self._call(
            self.cache.put_many, names, values, timeout=timeout, refused=lambda status: [status] * len(names)
        )

    async def get_many(self, names: Sequence[Name], *, timeout: Timeout = None) -> list[ObjectOutcome]:
        """Returns the bytes of each value, or the reason why there is none. `timeout` (s) bounds the whole
        call."""
        return await self._call(
            self.cache.get_many,
            names,
            timeout=timeout,
            refused=lambda status: [ObjectOutcome(None, status.value)] * len(names),
        )

    async def exists_many(self, names: Sequence[Name], *, timeout: Timeout = None) -> list[Status]:
        """Returns a status for each name, with one request: OK, MISSING, or the reason why the answer is
        unknown. `timeout` is in seconds."""
        return await self._call(
            self.cache.exists_many, names, timeout=timeout, refused=lambda status: [status] * len(names)
        )

    async def close(self) -> None:
        """Refuses new calls, ends those under way, and closes the cache. Idempotent."""
        self._closed = True

        def close() -> None:
            self.cache.close()  # closed first, so that calls under way end at once
            self._threads.close(_CLOSE_S)

        await asyncio.to_thread(close)

    async def _call(
        self, function: Callable[..., T], *given: object, timeout: Timeout, refused: Callable[[Status], T]
    ) -> T:
        """Runs `function` with its arguments and its deadline, on a thread. Returns `refused(reason)` if it
        cannot run, or does not end in time."""
        seconds = self._usual_timeout if timeout is None else timeout
        deadline = Deadline(seconds)
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(*given, timeout=deadline))
                except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
                    answer.set_exception(error)

        def end() -> None:
            if not answer.done() and answer.set_running_or_notify_cancel():  # the call has not begun
                answer.set_result(refused(Status.CLOSED if self._closed else Status.TIMEOUT))

        call = self._threads.submit(run, time.monotonic() + seconds, end)
        if call is None:
            return refused(Status.CLOSED if self._closed else Status.OVERLOADED)
        waited = asyncio.wrap_future(answer)
        try:
            done, _ = await asyncio.wait({waited}, timeout=seconds)
            return waited.result() if done else refused(Status.TIMEOUT)
        finally:
            # the caller may change its memory from here on; later errors are dropped
            deadline.cut()
            waited.cancel()
            call.abandon()
