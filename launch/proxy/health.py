"""Asks each node every few seconds whether it is well, and which namespace it keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import aiohttp

from launch.proxy.hops import HopError, read_all, send
from launch.proxy.patience import within
from launch.proxy.routing import NodePool
from pd_cache.cluster import Namespaced, read_about

log = logging.getLogger(__name__)

_MAX_ANSWER = 64 << 10
_AT_A_TIME = 64


class HealthChecks:
    """Keeps `NodePool.checked` up to date. A node is well if it answers anything but a 5xx."""

    def __init__(
        self,
        pools: Iterable[NodePool],
        interval_s: float,
        timeout_s: float,
        on_namespace: Callable[[str, Namespaced], None],
    ) -> None:
        """`on_namespace` gets a node's URL and what the node says about its cache, each time the node answers a check."""
        self._pools = list(pools)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_namespace = on_namespace
        self._well: dict[str, bool] = {}

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Checks for ever, the first time after one interval."""
        places = asyncio.Semaphore(_AT_A_TIME)
        while True:
            await asyncio.sleep(self._interval_s)
            checks = (self._check(session, places, pool, url) for pool in self._pools for url in pool.urls())
            for ended in await asyncio.gather(*checks, return_exceptions=True):
                if isinstance(ended, Exception):  # one check must not end the checks of all nodes
                    log.error("a health check failed unexpectedly", exc_info=ended)
            known = {url for pool in self._pools for url in pool.urls()}
            self._well = {url: well for url, well in self._well.items() if url in known}

    async def _check(self, session: aiohttp.ClientSession, places: asyncio.Semaphore, pool: NodePool, url: str) -> None:
        async with places:
            why = ""
            try:
                why = await within(self._ask(session, url), self._timeout_s)
            except TimeoutError:
                why = f"no answer within {self._timeout_s:g} s"
            except HopError as error:
                if error.reason == "exhausted":
                    return  # our own trouble, which says nothing about the node
                why = f"{error.reason}: {error}"
            except Exception as error:  # a node that cannot even be asked is not well
                log.exception("node %s: the health check failed unexpectedly", url)
                why = repr(error)
        if self._well.get(url, True) != (not why):
            log.warning("node %s: %s", url, f"not well: {why}" if why else "well again")
        self._well[url] = not why
        pool.checked(url, alive=not why)

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> str:
        """Returns why the node is not well; empty if it is."""
        answer = await send(session, "GET", f"{url}/health", {"Accept-Encoding": "identity"}, None)
        try:
            if answer.status >= 500:
                return f"status {answer.status}"
            body = await read_all(answer, _MAX_ANSWER)
        finally:
            answer.close()
        self._on_namespace(url, read_about(body))
        return ""
