"""Takes a client's request from its key to its last byte: admission, body, deadline, and an error that the client can read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from launch.proxy.answers import ApiError, ClientGone, Refusal, overloaded, passed_on
from launch.proxy.bodies import BodyMemory, BodyShare, read_body, read_models
from launch.proxy.completions import CHAT, Completions
from launch.proxy.exchange import Exchange, NodeClient
from launch.proxy.keys import Admission, Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.nodes import HopError, check_status, read_all, refusal_of
from launch.proxy.routing import RetryBudget
from launch.proxy.ui import RecentRequests
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.tracing import UNTRACED, Tracing

log = logging.getLogger(__name__)

MAX_BODY = LARGEST_BODY
_FEW_RETRIES = 100
_LAST_WORDS_S = 1.0
"""How long it may take to inform a client that its stream broke."""
_LIST_S = 10.0
"""How long the whole list of models may take."""
_LIST_AT_ONE_S = 1.0
_LARGEST_LIST = 4 << 20
_MOST_ASKED = 2
"""The most nodes that are asked for one model."""


class Requests:
    """Serves the pages of OpenAI's API."""

    def __init__(
        self,
        config: ProxyConfig,
        keys: Keys,
        completions: Completions,
        models: ModelList,
        metrics: ProxyMetrics,
        recent: RecentRequests,
        tracing: Tracing = UNTRACED,
    ) -> None:
        self.admission = Admission(config.max_requests, config.max_requests_per_key)
        self.bodies = BodyMemory(config.body_memory)
        self.retries = RetryBudget(max(_FEW_RETRIES, config.max_requests))
        self.running: set[asyncio.Task[web.StreamResponse]] = set()
        self._timeout_s = config.request_timeout_s
        self._keys = keys
        self._completions = completions
        self._models = models
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing

    def add_to(self, app: web.Application) -> None:
        """Adds the pages."""
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_get("/v1/models", self._list_models, allow_head=False)

    async def drain(self, limit_s: float) -> None:
        """Refuses new requests, waits up to `limit_s` for those under way to end, then cuts off the rest."""
        self.admission.closing = True
        if self.running:
            await asyncio.wait(self.running, timeout=limit_s)
        for task in self.running:
            task.cancel()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._read_and_complete)

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._admit_and_list)

    async def _answered(
        self, request: web.Request, answer: Callable[[Exchange], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks the client's key and runs `answer`. Counts and logs the request."""
        exchange = Exchange(request, self.retries, BodyShare(self.bodies))
        span = exchange.begin_span(self._tracing)
        status = 499
        try:
            exchange.client = self._keys.client(request.headers.get("Authorization"))
            response = await answer(exchange)
            status = response.status
        except ApiError as error:
            status = error.status
            raise
        except ClientGone as error:
            # aiohttp needs something to return; nothing reads it
            log.debug("request %s: the client is gone", exchange.id, exc_info=error)
            return exchange.response or web.Response(status=499)
        finally:
            exchange.share.give_back()
            self._metrics.requests.labels(str(status)).inc()
            span.note(status=status, **{f"{hop}_node": node for hop, node in exchange.nodes.items()})
            span.end(f"status {status}" if status >= 500 else "")
            took = time.monotonic() - exchange.started
            log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.told())
            if exchange.nodes and request.method == "POST":
                self._recent.note(exchange.id, took, exchange.first_byte_s, status, exchange.trip())
        return response

    async def _read_and_complete(self, exchange: Exchange) -> web.StreamResponse:
        self.admission.check(exchange.client)  # so that no body is read only to be refused
        body = await read_body(exchange.request, exchange.share, MAX_BODY, self._timeout_s)
        with self.admission.admitted(exchange.client):
            left = self._timeout_s - (time.monotonic() - exchange.started)
            serving = self._completions.serve(exchange, body)
            del body  # so that it takes memory only until the decode node has it
            return await self._finish(exchange, serving, max(0.0, left))

    async def _admit_and_list(self, exchange: Exchange) -> web.StreamResponse:
        with self.admission.admitted(exchange.client):
            return await self._finish(exchange, self._models.serve(exchange), min(_LIST_S, self._timeout_s))

    async def _finish(
        self, exchange: Exchange, serving: Awaitable[web.StreamResponse], limit_s: float
    ) -> web.StreamResponse:
        """Runs `serving` within `limit_s`, and ends it with the client's connection. Raises ApiError for the client."""
        # a separate task, to tell apart the deadline, a shutdown (`drain` cancels the task) and the client's disconnect (cancels us)
        task = asyncio.ensure_future(serving)
        assert isinstance(task, asyncio.Task)
        self.running.add(task)
        self._metrics.running.set(len(self.running))
        task.add_done_callback(self._ended)
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
                await asyncio.wait_for(exchange.write(event), _LAST_WORDS_S)
                await asyncio.wait_for(response.write_eof(), _LAST_WORDS_S)
                return response
            except (TimeoutError, ClientGone):
                pass
        if exchange.request.transport is not None:
            exchange.request.transport.abort()
        return response


class ModelList:
    """Serves `/v1/models`: the models that decode nodes say they serve.

    The answer says nothing about how a node computes, so it never counts for or against the node. Only a refused connection counts.
    """

    def __init__(self, nodes: NodeClient) -> None:
        self._nodes = nodes
        self._pool = nodes.pools["decode"]

    async def serve(self, exchange: Exchange) -> web.Response:
        """Returns one node's answer for each model. Leaves out a model if none of its nodes answers."""
        found: list[msgspec.Raw] = []
        refusal: Refusal | None = None
        # one after the other, so that a request holds one connection at a time
        models: list[str | None] = [*sorted(self._pool.models())]
        for model in models or [None]:
            said = await self._of_one(exchange, model)
            if isinstance(said, list):
                found += said
            else:
                refusal = refusal or said
        if found:
            body = msgspec.json.encode({"object": "list", "data": found})
            return web.Response(body=body, content_type="application/json")
        if refusal is not None:
            return passed_on(refusal)
        raise overloaded("No decode node could answer", self._pool.retry_after(time.monotonic()))

    async def _of_one(self, exchange: Exchange, model: str | None) -> list[msgspec.Raw] | Refusal | None:
        """Returns the list of a node that serves `model`, or the refusal of one; None if no such node answers."""
        tried: list[str] = []
        said: Refusal | None = None
        while len(tried) < _MOST_ASKED and (node := self._pool.out_of_turn(time.monotonic(), model, tried)) is not None:
            tried.append(node)
            try:
                async with asyncio.timeout(_LIST_AT_ONE_S):
                    answer = await self._at(exchange, node)
            except TimeoutError:
                failure = HopError("timeout", f"no list of models within {_LIST_AT_ONE_S:g} s")
            except HopError as error:
                failure = error
            else:
                self._pool.reached(node)
                return answer
            said = failure.refusal or said
            self._nodes.failed(exchange, "decode", node, None, failure)
        return said

    async def _at(self, exchange: Exchange, node: str) -> list[msgspec.Raw] | Refusal:
        answer = await self._nodes.send(exchange, "decode", node, "GET", None)
        try:
            await check_status(answer)
            if answer.status >= 400:
                return await refusal_of(answer)
            try:
                return read_models(await read_all(answer, _LARGEST_LIST))
            except ValueError as error:
                raise HopError("garbage", str(error)) from error
        finally:
            answer.close()
