"""Ends each request: at its deadline, with its client's connection, or with an error that the client can read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from aiohttp import web

from launch.proxy.answers import ApiError, overloaded
from launch.proxy.exchange import ClientGone, Exchange
from launch.proxy.hops import HopError
from launch.proxy.metrics import ProxyMetrics

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""How long it may take to inform a client that its stream broke."""


class Deliveries:
    """The requests under way."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self.running: set[asyncio.Task[web.StreamResponse]] = set()
        self._metrics = metrics

    async def finish(
        self, exchange: Exchange, serving: Awaitable[web.StreamResponse], limit_s: float
    ) -> web.StreamResponse:
        """Runs `serving` within `limit_s`, and ends it with the client's connection. Raises ApiError for the client."""
        task = self._task(serving)
        # a separate task, to tell apart the deadline, a shutdown (`drain` cancels the task) and the client's disconnect (cancels us)
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            timeout = ApiError(504, f"No complete answer within {limit_s:.3g} s", code="timeout")
            return await self._cut(exchange, overloaded("The proxy is shutting down") if done else timeout)
        try:
            return task.result()
        except ApiError as error:
            return await self._cut(exchange, error)
        except HopError as error:
            what = f"The decode node failed while it answered: {error.reason}"
            return await self._cut(exchange, ApiError(502, what, code="node_failed"))
        except ClientGone:
            raise
        except Exception:  # the client gets an error in OpenAI's shape for every failure
            log.exception("request %s: unexpected error", exchange.id)
            return await self._cut(exchange, ApiError(500, "Internal error of the proxy", code="internal_error"))

    async def drain(self, limit_s: float) -> None:
        """Waits up to `limit_s` for requests to end, then cuts off the rest."""
        if self.running:
            await asyncio.wait(self.running, timeout=limit_s)
        for task in self.running:
            task.cancel()

    def _task(self, serving: Awaitable[web.StreamResponse]) -> asyncio.Task[web.StreamResponse]:
        task = asyncio.ensure_future(serving)
        assert isinstance(task, asyncio.Task)
        self.running.add(task)
        self._metrics.running.set(len(self.running))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[web.StreamResponse]) -> None:
        self.running.discard(task)
        self._metrics.running.set(len(self.running))
        if not task.cancelled():
            task.exception()  # retrieved even if the client's disconnect came first

    async def _cut(self, exchange: Exchange, error: ApiError) -> web.StreamResponse:
        """Reports an error to the client: by a status before the first byte, by an event in a stream, otherwise by breaking off."""
        response = exchange.response
        if response is None or not response.prepared:
            raise error
        self._metrics.cut.labels(error.code or "").inc()
        log.warning("request %s: cut after its first byte: %s", exchange.id, error.message)
        response.force_close()
        if response.content_type == "text/event-stream" and response.content_length is None:
            event = (b"" if exchange.event_ended else b"\n\n") + b"data: " + error.body() + b"\n\n"
            try:
                await asyncio.wait_for(self._last_words(exchange, event), _LAST_WORDS_S)
                return response
            except (TimeoutError, ClientGone):
                pass
        transport = exchange.request.transport
        if transport is not None:
            transport.abort()
        return response

    async def _last_words(self, exchange: Exchange, event: bytes) -> None:
        assert exchange.response is not None
        await exchange.write(event)
        await exchange.response.write_eof()
