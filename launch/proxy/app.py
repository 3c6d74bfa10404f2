"""The proxy as an aiohttp application."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import aiohttp
import msgspec
from aiohttp import http_exceptions, web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import pd_cache
from launch.discovery import View
from launch.proxy.admission import Admission, read_keys, read_node_key
from launch.proxy.answers import ApiError, overloaded
from launch.proxy.completion import Completion, Handoff, read_handoff, read_models, read_tokens
from launch.proxy.direct import DirectRule
from launch.proxy.exchange import ID_HEADER, ClientGone, Exchange, client_headers
from launch.proxy.fleet import Fleet
from launch.proxy.health import HealthChecks
from launch.proxy.hops import HopError, new_session, read_all, read_some, send
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.prefixes import Prompt
from launch.proxy.routing import Attempts, Hop
from pd_cache.config import ProxyConfig

log = logging.getLogger(__name__)

MAX_BODY = 16 << 20
"""Bytes of a request; a prompt of a million token ids fits."""
_MAX_ANSWER = 4 << 20
"""Bytes of an answer that is read whole: a prefill node's, or an error."""
_MAX_MODELS_S = 10.0
_MODELS_AT_ONE_S = 3.0
_NO_TOKENIZE_S = 30.0
_MOST_SLOW = 3
_LAST_WORDS_S = 1.0
"""How long a client may take to be told that its stream broke."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CHAT = "/v1/chat/completions"
_request_id: ContextVar[str] = ContextVar("request_id")
"""Set at the edge, for the handler within."""


_Serve = Callable[[Exchange], Awaitable[web.StreamResponse]]


class Proxy:
    """Routes completions through prefill to decode nodes."""

    def __init__(
        self,
        config: ProxyConfig,
        direct: DirectRule | None = None,
        *,
        master: Callable[[View], str | None] | None = None,
    ) -> None:
        """It knows no nodes yet: see `update`. `direct` decides which prompts need no prefill node, by default none.

        `master`: where the pool's master is, for lookups. ConfigError for a file of keys that cannot be used.
        """
        self.metrics = ProxyMetrics()
        self._config = config
        keys = None if config.api_keys_file is None else read_keys(config.api_keys_file)
        self._node_key = None if config.node_key_file is None else read_node_key(config.node_key_file)
        self._admission = Admission(keys, config.max_requests, config.max_requests_per_key)
        self._direct = direct or DirectRule(0)
        self._fleet = Fleet(config, self._direct, master)
        self._pools = self._fleet.pools
        self._tokenize_after = 0.0
        """No node is asked for tokens before."""
        self._slow_to_tokenize = 0
        """Texts in a row whose tokens were not told in time."""
        self._session: aiohttp.ClientSession | None = None
        self._running: set[asyncio.Task[web.StreamResponse]] = set()

    def update(self, view: View) -> None:
        """From now on the view's nodes are used. On the event loop's thread, once that runs."""
        self._fleet.update(view)

    def app(self) -> web.Application:
        """A new application. Run it with `handler_cancellation=True`, or clients that go away are noticed late."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._edge])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post(_CHAT, self._completions)
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._with_session)
        app.on_shutdown.append(self._drain)
        return app

    # --- the edge ------------------------------------------------------------------------------------------------

    @web.middleware
    async def _edge(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get(ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        _request_id.set(request_id)
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ApiError as error:
            response = error.response()
        except web.HTTPException as error:
            what = f"{request.method} {request.path[:200]}: {error.reason}"
            response = ApiError(error.status, what, code=error.reason.lower().replace(" ", "_")).response()
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except Exception:  # the edge: a client is told in OpenAI's shape, whatever went wrong
            log.exception("request %s: unexpected error", request_id)
            response = ApiError(500, "Internal error of the proxy", code="internal_error").response()
        if not response.prepared:
            response.headers[ID_HEADER] = request_id
        return response

    async def _health(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        nodes: dict[str, dict[str, bool]] = {hop: pool.health(now) for hop, pool in self._pools.items()}
        healthy = any(nodes["decode"].values()) and not self._admission.closing
        body: dict[str, Any] = {
            "status": "ok" if healthy else "unavailable",
            "version": pd_cache.__version__,
            **nodes,
            **self._fleet.describe(now),
        }
        return web.json_response(body, status=200 if healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        self.metrics.node_up.clear()  # also of nodes that left
        self.metrics.node_load.clear()
        for hop, pool in self._pools.items():
            for node, up in pool.health(now).items():
                self.metrics.node_up.labels(hop, node).set(up)
            for node, load in pool.loads().items():
                self.metrics.node_load.labels(hop, node).set(load)
        self.metrics.view_stale.set(self._fleet.stale_s(now))
        return web.Response(body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._bounded(request, self._complete, self._config.request_timeout_s)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        async def serve(exchange: Exchange) -> web.StreamResponse:
            exchange.received = True
            models = sorted(self._pools["decode"].models())
            if len(models) > 1:
                return await self._all_models(exchange, models)
            return await self._decode(exchange, "GET", None)

        return await self._bounded(request, serve, min(_MAX_MODELS_S, self._config.request_timeout_s))

    # --- one request ---------------------------------------------------------------------------------------------

    async def _bounded(self, request: web.Request, serve: _Serve, limit_s: float) -> web.StreamResponse:
        """`serve`, if there is room, answered within `limit_s` and ended with the client's connection."""
        exchange = Exchange(request, _request_id.get())
        status = 499
        try:
            exchange.client = self._admission.identify(request.headers.get("Authorization"))
            with self._admission.admitted(exchange.client):
                response = await self._finish(exchange, self._task(serve(exchange)), limit_s)
            status = response.status
        except ApiError as error:
            status = error.status
            raise
        except ClientGone as error:
            # aiohttp needs something to return; nobody reads it
            log.debug("request %s: the client is gone", exchange.id, exc_info=error)
            return exchange.response or web.Response(status=499)
        finally:
            self.metrics.requests.labels(str(status)).inc()
            took = time.monotonic() - exchange.started
            log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.told())
        return response

    def _task(self, serving: Awaitable[web.StreamResponse]) -> asyncio.Task[web.StreamResponse]:
        task = asyncio.ensure_future(serving)
        assert isinstance(task, asyncio.Task)
        self._running.add(task)
        self.metrics.running.set(len(self._running))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[web.StreamResponse]) -> None:
        self._running.discard(task)
        self.metrics.running.set(len(self._running))
        if not task.cancelled():
            task.exception()  # retrieved, also where the client's disconnect came first

    async def _finish(
        self, exchange: Exchange, task: asyncio.Task[web.StreamResponse], limit_s: float
    ) -> web.StreamResponse:
        # A task of its own, so that the deadline, a shutdown (`_drain` cancels it) and the client's disconnect (cancels us)
        # can be told apart.
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            return await self._cut(exchange, self._why_cut(exchange, bool(done), limit_s))
        try:
            return task.result()
        except ApiError as error:
            return await self._cut(exchange, error)
        except HopError as error:
            what = f"The decode node failed while it answered: {error.reason}"
            return await self._cut(exchange, ApiError(502, what, code="node_failed"))
        except ClientGone:
            raise
        except Exception:  # the edge: a client is told in OpenAI's shape, whatever went wrong
            log.exception("request %s: unexpected error", exchange.id)
            return await self._cut(exchange, ApiError(500, "Internal error of the proxy", code="internal_error"))

    def _why_cut(self, exchange: Exchange, closing: bool, limit_s: float) -> ApiError:
        if closing:
            return overloaded("The proxy is shutting down")
        if not exchange.received:
            return ApiError(408, f"The body did not arrive within {limit_s:g} s", code="timeout")
        return ApiError(504, f"No complete answer within {limit_s:g} s", code="timeout")

    async def _cut(self, exchange: Exchange, error: ApiError) -> web.StreamResponse:
        """Tell the client: by a status before the first byte, by an event in a stream, by breaking off otherwise."""
        response = exchange.response
        if response is None or not response.prepared:
            raise error
        self.metrics.cut.labels(error.code or "").inc()
        log.warning("request %s: cut after its first byte: %s", exchange.id, error.message)
        response.force_close()
        if response.content_type == "text/event-stream" and response.content_length is None:
            event = (b"" if exchange.event_ended else b"\n\n") + b"data: " + error.body() + b"\n\n"
            try:
                await asyncio.wait_for(self._last_words(exchange, event), _LAST_WORDS_S)
                return response
            except (asyncio.TimeoutError, ClientGone):
                pass
        transport = exchange.request.transport
        if transport is not None:
            transport.abort()
        return response

    async def _last_words(self, exchange: Exchange, event: bytes) -> None:
        assert exchange.response is not None
        await exchange.write(event)
        await exchange.response.write_eof()

    # --- the two hops --------------------------------------------------------------------------------------------

    async def _complete(self, exchange: Exchange) -> web.StreamResponse:
        completion = Completion(await self._body(exchange), prompt="messages" if exchange.path == _CHAT else "prompt")
        prompt = completion.prompt()
        exchange.model = self._fleet.served(completion.model(), exchange.started)
        if not self._pools["decode"].count(exchange.model):
            raise overloaded("No decode node could answer")
        handoff: Handoff | None = None
        why = await self._direct.why(completion, prompt, exchange.id, lambda: self._tokenize(exchange, completion))
        if why is not None:
            result: str = why
        elif self._pools["prefill"].count(exchange.model):
            answer = await self._prefill(exchange, completion.for_prefill(), prompt)
            self.metrics.prefill_seconds.observe(time.monotonic() - exchange.started)
            if isinstance(answer, web.Response):
                return answer
            handoff = answer
            result = "prefill_failed" if handoff is None else "handed_over" if handoff else "nothing_stored"
        else:
            result = "no_prefill_nodes"
        self.metrics.handoffs.labels(result).inc()
        return await self._decode(exchange, "POST", completion.for_decode(handoff))

    async def _all_models(self, exchange: Exchange, models: list[str]) -> web.Response:
        """What one node of each model answers, in one list. A model none of whose nodes answers is left out."""
        answers = await asyncio.gather(*(self._models_of_one(exchange, model) for model in models))
        found = [entry for entries in answers if isinstance(entries, list) for entry in entries]
        if found:
            body = msgspec.json.encode({"object": "list", "data": found})
            return web.Response(body=body, content_type="application/json")
        for refusal in answers:
            if isinstance(refusal, web.Response):
                return refusal
        raise overloaded("No decode node could answer", self._pools["decode"].retry_after(time.monotonic()))

    async def _models_of_one(self, exchange: Exchange, model: str) -> list[msgspec.Raw] | web.Response:
        """What a node that serves `model` lists, or its refusal; nothing if none of them answers."""
        pool = self._pools["decode"]
        attempts = Attempts(pool, model=model)
        until = time.monotonic() + _MAX_MODELS_S / 2
        while (left := until - time.monotonic()) > 0 and (node := attempts.next(time.monotonic())) is not None:
            limit = min(left, _MODELS_AT_ONE_S)
            try:
                listed = await asyncio.wait_for(self._models_at(exchange, node), limit)
            except asyncio.TimeoutError:
                failure = HopError("timeout", f"no answer within {limit:.3g} s")
                self._note(exchange, "decode", node, attempts, failure)
            except HopError as error:
                self._note(exchange, "decode", node, attempts, error)
            else:
                pool.succeeded(node)
                return listed
        return []

    async def _models_at(self, exchange: Exchange, node: str) -> list[msgspec.Raw] | web.Response:
        answer = await self._send(exchange, "decode", node, "GET", None)
        try:
            if 400 <= answer.status < 500:
                return await _whole(answer)
            if answer.status != 200:
                raise HopError("busy" if answer.status == 503 else "error", f"status {answer.status}")
            try:
                return read_models(await read_all(answer, _MAX_ANSWER))
            except ValueError as error:
                raise HopError("garbage", str(error)) from error
        finally:
            answer.close()

    async def _tokenize(self, exchange: Exchange, completion: Completion) -> list[int] | None:
        """A prompt's token ids, by a decode node. None if it does not tell."""
        now = time.monotonic()
        node = self._pools["decode"].well(now, exchange.model)
        if node is None or now < self._tokenize_after:
            return None
        assert self._session is not None
        try:
            answer = await send(
                self._session, "POST", f"{node}/tokenize", self._headers(exchange), completion.for_tokenize()
            )
            try:
                if answer.status == 200:
                    tokens = read_tokens(await read_all(answer, MAX_BODY))
                    self._slow_to_tokenize = 0
                    return tokens
                if answer.status in (400, 422):
                    return None  # this prompt's own fault
                raise HopError("error", f"status {answer.status}")
            finally:
                answer.close()
        except asyncio.CancelledError:
            if exchange.request.transport is not None:  # it was too slow; else the client went away
                self._slow_to_tokenize += 1  # once may be that text's own fault
                if self._slow_to_tokenize == _MOST_SLOW:
                    self._slow_to_tokenize = 0
                    self._tokenize_after = now + _NO_TOKENIZE_S
            raise
        except (HopError, ValueError) as error:
            self._tokenize_after = now + _NO_TOKENIZE_S
            log.info("request %s: node %s does not tell a text's tokens: %s", exchange.id, node, error)
            return None

    async def _body(self, exchange: Exchange) -> bytes:
        request = exchange.request
        try:
            if (request.content_length or 0) > MAX_BODY:
                raise web.HTTPRequestEntityTooLarge(MAX_BODY, request.content_length or 0)
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            what = f"The body is larger than {MAX_BODY} bytes"
            raise ApiError(413, what, code="request_too_large") from None
        except ConnectionError as error:
            raise ClientGone from error
        except (web.RequestPayloadError, http_exceptions.HttpProcessingError) as error:
            raise ApiError(400, f"The body cannot be read: {error}", code="invalid_body") from None
        exchange.received = True
        return body

    async def _prefill(self, exchange: Exchange, body: bytes, prompt: Prompt) -> web.Response | Handoff | None:
        """What a prefill node handed over; its refusal of the request; None if all of them failed."""
        until = time.monotonic() + self._config.prefill_timeout_s
        pool = self._pools["prefill"]
        attempts = Attempts(pool, prompt, exchange.model)
        while (left := until - time.monotonic()) > 0 and (node := attempts.next(time.monotonic())) is not None:
            try:
                with pool.working(node, prompt):
                    answer = await asyncio.wait_for(self._prefill_at(exchange, node, body), left)
            except asyncio.TimeoutError:
                self._note(exchange, "prefill", node, attempts, HopError("timeout", f"no answer within {left:.3g} s"))
            except HopError as error:
                self._note(exchange, "prefill", node, attempts, error)
            else:
                pool.succeeded(node)
                return answer
        return None

    async def _prefill_at(self, exchange: Exchange, node: str, body: bytes) -> web.Response | Handoff:
        answer = await self._send(exchange, "prefill", node, "POST", body)
        try:
            if answer.status == 200:
                try:
                    return read_handoff(await read_all(answer, _MAX_ANSWER))
                except ValueError as error:
                    raise HopError("garbage", str(error)) from error
            if 400 <= answer.status < 500:
                return await _whole(answer)
            raise HopError("busy" if answer.status == 503 else "error", f"status {answer.status}")
        finally:
            answer.close()

    async def _decode(self, exchange: Exchange, method: str, body: bytes | None) -> web.StreamResponse:
        pool = self._pools["decode"]
        attempts = Attempts(pool, model=exchange.model)
        busy: web.Response | None = None
        while (node := attempts.next(time.monotonic())) is not None:
            answer: aiohttp.ClientResponse | None = None
            try:
                with pool.working(node):
                    try:
                        answer = await self._send(exchange, "decode", node, method, body)
                        if answer.status == 503:
                            busy = await _whole(answer)
                            raise HopError("busy", "status 503")
                        if not (200 <= answer.status < 300 or 400 <= answer.status < 500):
                            raise HopError("error", f"status {answer.status}")
                        first = await read_some(answer)  # a node that dies before it can still be replaced
                    except HopError as error:
                        self._note(exchange, "decode", node, attempts, error)
                        continue
                    if method == "POST":
                        self.metrics.first_byte_seconds.observe(time.monotonic() - exchange.started)
                    response = await self._relay(exchange, node, answer, first)
                pool.succeeded(node)
                return response
            finally:
                if answer is not None:
                    answer.close()
        if busy is not None:
            return busy
        raise overloaded("No decode node could answer", pool.retry_after(time.monotonic(), exchange.model))

    async def _relay(
        self, exchange: Exchange, node: str, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """The node's answer, from its first bytes on, as it comes. HopError if it breaks off."""
        response = web.StreamResponse(status=answer.status, headers=client_headers(answer))
        response.headers[ID_HEADER] = exchange.id
        exchange.response = response
        try:
            await response.prepare(exchange.request)
            data = first
            while data:
                await exchange.write(data)
                data = await read_some(answer)
            await response.write_eof()
        except HopError as error:
            self._note(exchange, "decode", node, None, error)
            raise
        except ConnectionError as error:
            raise ClientGone from error
        return response

    async def _send(
        self, exchange: Exchange, hop: Hop, node: str, method: str, body: bytes | None
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        exchange.nodes[hop] = node
        return await send(self._session, method, node + exchange.path, self._headers(exchange), body)

    def _headers(self, exchange: Exchange) -> dict[str, str]:
        return exchange.headers(self._admission.guarded, self._node_key)

    def _note(self, exchange: Exchange, hop: Hop, node: str, attempts: Attempts | None, error: HopError) -> None:
        self.metrics.hop_failures.labels(hop, error.reason).inc()
        log.warning("request %s: %s node %s: %s: %s", exchange.id, hop, node, error.reason, error)
        if attempts is not None:
            attempts.failed(node, error.reason, time.monotonic())
        else:
            self._pools[hop].failed(node, error.reason, time.monotonic())

    # --- life ----------------------------------------------------------------------------------------------------

    async def _with_session(self, app: web.Application) -> AsyncIterator[None]:
        config = self._config
        # a request holds one connection at a time; the rest is for health checks and those that are being closed
        self._session = new_session(config.max_requests + 128, config.connect_timeout_s)
        checks = HealthChecks(
            self._pools.values(), config.health_interval_s, config.health_timeout_s, self._fleet.told_namespace
        )
        checking = asyncio.create_task(checks.run(self._session))
        try:
            yield
        finally:
            checking.cancel()
            await asyncio.wait({checking})
            await self._session.close()
            await asyncio.to_thread(self._direct.close)

    async def _drain(self, app: web.Application) -> None:
        """Let requests end, then end them. New ones are refused meanwhile."""
        self._admission.closing = True
        if self._running:
            await asyncio.wait(self._running, timeout=self._config.drain_s)
        for task in self._running:
            task.cancel()


async def _whole(answer: aiohttp.ClientResponse) -> web.Response:
    """A node's refusal, to be passed on as it is."""
    body = await read_all(answer, _MAX_ANSWER)
    response = web.Response(status=answer.status, body=body, headers=client_headers(answer))
    if answer.status == 503:
        response.headers.setdefault("Retry-After", "1")
    return response
