"""Tenants: in whose name a request is, and how much of the pool each tenant may have.

A tenant's requests reach the nodes with a `cache_salt` that no client can send (`bodies.tenant_salt`), so their chunks have names of their own.
The proxy names the chunks of each prompt (`direct.py`), and counts them for the tenant until they are removed:

1. Of a tenant over its quota, chunks that were not used for longest are removed: only its own, and neither those of its pins nor those of requests
   under way, which a decode node may be about to load. Each use leases a chunk, so those used a short while ago are removed by force: a read
   under way is then a miss, because the object's checksum is wrong. What is leased without a use here is another proxy's, and stays.
2. A chunk counts when a prompt names it, whether it is stored or not, and also if the pool has evicted it. So a tenant exceeds its quota only by
   its requests under way, and by what it stores between two looks.
3. What no prompt has named since this proxy began, such as chunks of generated text, does not count. Beyond two million chunks of all tenants,
   neither do those of the tenant with most that were not used for longest.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice, takewhile
from typing import Literal

from aiohttp import web

from launch.discovery import View
from launch.openai import ApiError
from launch.proxy.direct import DirectRule
from launch.proxy.keys import WatchedFiles
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.prefixes import NamedPrompt
from pd_cache.cluster import ProxyConfig, TenantConfig, read_tenants
from transfer.errors import Status

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
Pinned = Callable[[str], Container[bytes]]
"""Returns the chunks that a tenant's pins keep."""
_GONE = TenantConfig(pins=0)
LOOK_S = 0.1
"""How often `Tenants.remove` is to be called."""
_LEASED_S = 15.0
"""For how long after its use a chunk is probably leased by it: longer than the usual lease."""
_COMES_S = 5.0
"""For how long after its use a chunk that the pool lacks goes on to count, because it is probably about to come."""
_STORED_WITHIN_S = 60.0
"""How long after they were removed, or were missing, chunks may still come into the pool."""
_MOST_CHUNKS = 1 << 21
"""The most chunks that are counted for all tenants: 350 MB."""
_MOST_REMOVED = 4096
"""How many chunks of a tenant are removed at a time."""


class Ledger:
    """The chunks that a tenant's prompts have named; the one that was not used for longest comes first. Pure."""

    def __init__(self) -> None:
        self._used: OrderedDict[bytes, float] = OrderedDict()
        self._under_way: Counter[bytes] = Counter()
        """In how many requests under way a chunk is."""
        self._removed: OrderedDict[bytes, float] = OrderedDict()
        """When chunks were removed that a store may bring back."""

    def __len__(self) -> int:
        return len(self._used)

    def use(self, names: Sequence[bytes], now: float) -> None:
        """Notes the chunks of a prompt. Its end goes before its beginning, without which nothing of it is found."""
        for name in reversed(names):
            self._used[name] = now
            self._used.move_to_end(name)
            self._removed.pop(name, None)

    def hold(self, names: Sequence[bytes], clock: Callable[[], float]) -> Callable[[], None]:
        """Keeps a prompt's chunks from `oldest`, until what it returns is called: until then they are in use, and may be leased anew."""
        self._under_way.update(names)

        def let_go() -> None:
            self._under_way.subtract(names)
            now = clock()
            for name in names:
                if name in self._used:
                    self._used[name] = now
                if not self._under_way[name]:
                    del self._under_way[name]

        return let_go

    def forget(self, count: int) -> None:
        """Counts the oldest chunks no longer."""
        for _ in range(count):
            self._used.popitem(last=False)

    def oldest(self, count: int, kept: Container[bytes] = ()) -> Iterator[tuple[bytes, float]]:
        """Yields at most so many chunks, and when each was last used; none of a request under way, and none of `kept`."""
        free = (one for one in self._used.items() if one[0] not in self._under_way and one[0] not in kept)
        return islice(free, max(0, count))

    def again(self, before: float) -> list[bytes]:
        """Returns the chunks that were removed before a time, to be removed once more."""
        due = [name for name, _ in takewhile(lambda one: one[1] < before, self._removed.items())]
        for name in due:
            del self._removed[name]
        return due

    def settle(self, names: Sequence[bytes], statuses: Sequence[Status], asked: float, now: float) -> int:
        """Takes in what became of chunks that were to be removed at the time `asked`. Returns how many were removed."""
        for name, status in zip(names, statuses, strict=False):
            used = self._used.get(name)
            if used is None or used >= asked:
                continue  # it is used again, and possibly stored again
            if status is Status.BUSY:
                self._used.move_to_end(name)
            elif status is Status.OK or (status is Status.MISSING and now - used > _COMES_S):
                del self._used[name]
                self._removed[name] = now
        return statuses.count(Status.OK)


class Tenants:
    """What tenants may have and what they use. One per proxy, on the event loop's thread."""

    def __init__(
        self,
        config: ProxyConfig,
        files: WatchedFiles,
        direct: DirectRule,
        metrics: ProxyMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the tenants' file, and reads it again whenever `files` sees a change. Raises ConfigError if it cannot be used."""
        self._known: Mapping[str, TenantConfig] | None = None
        self._direct = direct
        self._metrics = metrics
        self._clock = clock
        self._proxies = 1
        self._ledgers: dict[str, Ledger] = {}
        if (file := config.tenants_file) is not None:

            def read() -> None:
                self._known = read_tenants(file)

            files.add("proxy.tenants_file", [file], read)

    def update(self, view: View) -> None:
        self._proxies = max(1, len(view.by_role("proxy")))

    def named(self, tenant: str, request: web.Request) -> str:
        """Returns the tenant of a request, which a header names if `tenant` is `@HEADER`; empty for none.

        Raises ApiError 400 if the header does not name one, 403 if the tenant is not known.
        """
        if tenant[:1] == "@":
            given = request.headers.getall(tenant[1:], [])
            # two of them: the gateway's, and one that its client has sent
            if len(given) != 1 or not _NAME.fullmatch(given[0]):
                what = f"The header {tenant[1:]} must name one tenant, in up to 63 letters, digits, . _ -"
                raise ApiError(400, what, code="bad_tenant")
            tenant = given[0]
        if tenant and self._known is not None and tenant not in self._known:
            raise ApiError(403, f"The tenant {tenant} is not in proxy.tenants_file", code="unknown_tenant")
        return tenant

    def config(self, tenant: str) -> TenantConfig:
        """Returns what a tenant may have. One that the file does not name any more has no requests, and its pins end."""
        known = self._known or {}
        return known.get(tenant, _GONE if known and tenant else TenantConfig())

    def chunks(self, tenant: str, what: Literal["quota", "pins"]) -> int | None:
        """Returns how many chunks this proxy grants a tenant; None if that is not bounded."""
        config = self.config(tenant)
        size = config.quota if what == "quota" or config.pins is None else config.pins
        return None if size is None else int(size) // self._proxies // self._direct.chunk_bytes

    def counts(self, tenant: str) -> bool:
        """Returns whether `note` has to know what the tenant's prompts are known by."""
        return tenant in (self._known or ())

    def note(self, tenant: str, named: NamedPrompt | None, until: ExitStack) -> None:
        """Counts a prompt of a tenant. Its chunks stay until `until` is closed."""
        if not self.counts(tenant):
            return
        self._metrics.tenant_requests.labels(tenant, "no" if named is None else "yes").inc()
        if named is None:
            return
        if named.pool_tokens is not None:
            self._metrics.tenant_tokens.labels(tenant, "requested").inc(named.tokens)
            self._metrics.tenant_tokens.labels(tenant, "found").inc(named.pool_tokens)
        if self.chunks(tenant, "quota") is not None:
            ledger = self._ledgers.setdefault(tenant, Ledger())
            ledger.use(named.names, self._clock())
            until.callback(ledger.hold(named.names, self._clock))
            if (over := sum(map(len, self._ledgers.values())) - _MOST_CHUNKS) > 0:
                max(self._ledgers.values(), key=len).forget(over)

    async def remove(self, pinned: Pinned = lambda tenant: ()) -> None:
        """Removes chunks of tenants over their quota: at most 4096 of each, and none that is `pinned(tenant)`."""
        for tenant in list(self._ledgers):
            room, ledger = self.chunks(tenant, "quota"), self._ledgers[tenant]
            if room is None:  # it has no quota any more
                del self._ledgers[tenant]
                continue
            asked = self._clock()
            oldest = list(ledger.oldest(min(_MOST_REMOVED, len(ledger) - room), pinned(tenant)))
            leased = [name for name, used in oldest if used > asked - _LEASED_S]
            others = [name for name, used in oldest if used <= asked - _LEASED_S]
            for force, names in ((True, leased), (False, others + ledger.again(asked - _STORED_WITHIN_S))):
                if names:
                    statuses = await self._direct.remove(names, force)
                    removed = ledger.settle(names, statuses, asked, self._clock())
                    self._metrics.tenant_evicted.labels(tenant).inc(removed)

    def show(self) -> None:
        """Sets the gauges."""
        held, quota = self._metrics.tenant_bytes, self._metrics.tenant_quota
        held.clear()  # also for tenants that are gone
        quota.clear()
        for tenant, counts in self.usage().items():
            if "quota" in counts:
                held.labels(tenant).set(counts["bytes"])
                quota.labels(tenant).set(counts["quota"])

    def usage(self) -> dict[str, dict[str, float]]:
        """Returns for each tenant what `NodeReading.tenants` has of it."""
        metrics, found = self._metrics, dict[str, dict[str, float]]()
        for tenant, config in (self._known or {}).items():
            tokens = {one: metrics.tenant_tokens.labels(tenant, one)._value.get() for one in ("requested", "found")}
            found[tenant] = {**tokens, "evicted": metrics.tenant_evicted.labels(tenant)._value.get()}
            if config.quota is not None:
                held = len(self._ledgers.get(tenant, ())) * self._direct.chunk_bytes
                found[tenant] |= {"bytes": held, "quota": int(config.quota) // self._proxies}
        return found
