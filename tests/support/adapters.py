"""Every adapter, and the plain client, built alike for the suite that all of them pass."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from pd_cache.async_objects import AsyncObjectCache
from pd_cache.config import NodeSettings
from pd_cache.object_cache import ObjectCache
from transfer.errors import Status
from transfer.settings import Timeouts

PAGE = 20_000
"""Bytes of the values that every adapter can take: no whole number of anything."""


class AdapterSubject(ABC):
    """One instance of an adapter, as the engine or cache above it uses it. All of it may run on several threads at once."""

    @abstractmethod
    def store(self, values: dict[str, bytes]) -> list[bool]:
        """Stores values of `PAGE` bytes each. Returns for each whether others can load it now."""

    @abstractmethod
    def has(self, names: Sequence[str]) -> list[bool]:
        """Looks names up."""

    @abstractmethod
    def load(self, names: Sequence[str]) -> list[bytes | None]:
        """Loads values of `PAGE` bytes. None for a miss."""

    @abstractmethod
    def wait_available(self) -> None:
        """Waits until the pool is open."""

    @abstractmethod
    def close(self) -> None:
        """Closes it, as its owner does."""


class _Plain(AdapterSubject):
    def __init__(self, settings: NodeSettings, namespace: str) -> None:
        self.cache = ObjectCache.open(settings, namespace, part_bytes=PAGE)

    def store(self, values: dict[str, bytes]) -> list[bool]:
        return [status is Status.OK for status in self.cache.put_many(list(values), list(values.values()))]

    def has(self, names: Sequence[str]) -> list[bool]:
        return [status is Status.OK for status in self.cache.exists_many(names)]

    def load(self, names: Sequence[str]) -> list[bytes | None]:
        return [outcome.value for outcome in self.cache.get_many(names)]

    def wait_available(self) -> None:
        self.cache.wait_available(60)

    def close(self) -> None:
        self.cache.close()


class _IntoMemory(_Plain):
    """The plain client, reading into the caller's memory, values in several parts."""

    def __init__(self, settings: NodeSettings, namespace: str) -> None:
        self.cache = ObjectCache.open(settings, namespace, part_bytes=PAGE // 3)

    def load(self, names: Sequence[str]) -> list[bytes | None]:
        buffers = [bytearray(PAGE) for _ in names]
        reasons = self.cache.read_into(names, buffers)
        return [None if reason else bytes(buffer) for reason, buffer in zip(reasons, buffers, strict=True)]


class _Async(AdapterSubject):
    """The asyncio client, on a loop of its own."""

    def __init__(self, settings: NodeSettings, namespace: str) -> None:
        self.cache = AsyncObjectCache(ObjectCache.open(settings, namespace, part_bytes=PAGE))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop-of-a-test")
        self._thread.start()

    def store(self, values: dict[str, bytes]) -> list[bool]:
        put = asyncio.run_coroutine_threadsafe(self.cache.put_many(list(values), list(values.values())), self._loop)
        return [status is Status.OK for status in put.result(300)]

    def has(self, names: Sequence[str]) -> list[bool]:
        asked = asyncio.run_coroutine_threadsafe(self.cache.exists_many(names), self._loop)
        return [status is Status.OK for status in asked.result(300)]

    def load(self, names: Sequence[str]) -> list[bytes | None]:
        got = asyncio.run_coroutine_threadsafe(self.cache.get_many(names), self._loop)
        return [outcome.value for outcome in got.result(300)]

    def wait_available(self) -> None:
        self.cache.cache.wait_available(60)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.cache.close(), self._loop).result(300)

    def end(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


def _vllm_tier(settings: NodeSettings, namespace: str) -> AdapterSubject:
    from tests.support.vllm_tier import VllmTierSubject  # it needs this module

    return VllmTierSubject(settings, namespace)


def _sglang(settings: NodeSettings, namespace: str) -> AdapterSubject:
    from tests.support.sglang_host import SglangSubject  # it needs this module

    return SglangSubject(settings, namespace)


KINDS: dict[str, Callable[[NodeSettings, str], AdapterSubject]] = {
    "objects": _Plain,
    "objects-in-parts": _IntoMemory,
    "asyncio": _Async,
    "vllm-tier": _vllm_tier,
    "sglang": _sglang,
}
"""Makes an adapter for a pool, in a namespace. A factory whose peer is not installed calls `pytest.skip` with how to install it."""


ALIKE = frozenset(("objects-in-parts", "asyncio"))
"""Kinds that need no outages of their own: they stand on the plain client, as all others do."""


def end_subject(subject: AdapterSubject) -> None:
    """Closes a subject, twice, and ends what only the test needed."""
    subject.close()
    subject.close()
    if isinstance(subject, _Async):
        subject.end()


def impatient(settings: NodeSettings) -> NodeSettings:
    """Returns settings for outages: deadlines that pass soon, and a breaker that opens soon."""
    transfer = msgspec.structs.replace(
        settings.transfer,
        timeouts=Timeouts(exist_ms=500, get_ms=1000, put_ms=1000, close_ms=5000),
        breaker=msgspec.structs.replace(settings.transfer.breaker, failures=1, probe_interval_ms=200),
    )
    return msgspec.structs.replace(settings, transfer=transfer)
