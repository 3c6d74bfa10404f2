"""The engine over HTTP (`/v1/completions`, `/v1/models`, `/health`, `/metrics`, `/requests/ID`), and its process."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest

from launch.engines.reference.engine import CacheFactory, ReferenceEngine
from launch.engines.reference.protocol import (
    AnswerBuilder,
    BadRequest,
    CompletionRequest,
    parse_completion,
)
from launch.engines.reference.requests import (
    EngineClosedError,
    Generation,
    GenerationError,
    GenerationRequest,
    QueueFullError,
)
from launch.openai import ServerLog, error_body
from launch.supervise import StoppedError, signals_as_exceptions, stop_signals
from pd_cache.cluster import HandoffConfig, ReferenceEngineConfig
from pd_cache.reasons import RecentReports, RequestReport
from pd_cache.tracing import UNTRACED, TraceSpan, Tracing, trace_headers

_logger = logging.getLogger(__name__)

Peers = Callable[[], Awaitable[Mapping[str, Any]]]
"""Returns which of the cluster's other nodes this one reaches; called on the event loop's thread."""

_RETRY_AFTER_S = 1
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_BODY_TIMEOUT_S = 30.0
_WRITE_TIMEOUT_S = 30.0
_FAILURE_STATUS = {"timeout": 504, "aborted": 503, "closed": 503, "failed": 500}


def make_app(
    engine: ReferenceEngine,
    registry: CollectorRegistry | None = None,
    about: Callable[[], Mapping[str, Any]] | None = None,
    peers: Peers | None = None,
    tracing: Tracing = UNTRACED,
) -> web.Application:
    """Returns the application. The caller keeps ownership of the engine and closes it.

    `registry` holds further metrics, the cache's, for `/metrics`. `about` returns further fields for `/health`, and `peers` the content
    of `/peers`, which does not exist without it. Serve it with `handler_cancellation=True`, so that a client that goes away ends its
    request.
    """
    config = engine.config
    app = web.Application(client_max_size=(1 << 20) + 64 * config.max_model_len, middlewares=[_errors])
    server = _Handlers(engine, registry, about or dict, tracing)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/survey", server.survey)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/requests/{id}", server.report)
    if peers is not None:

        async def told(_: web.Request) -> web.Response:
            return web.json_response(await peers())

        app.router.add_get("/peers", told)
    return app


class _Handlers:
    def __init__(
        self,
        engine: ReferenceEngine,
        registry: CollectorRegistry | None,
        about: Callable[[], Mapping[str, Any]],
        tracing: Tracing,
    ) -> None:
        self._tracing = tracing
        self._engine = engine
        self._about = about
        self._registry = registry
        self._model = engine.config.model.name
        self._reports: RecentReports[RequestReport] = RecentReports()
        self._reading = 0
        self._most_reading = 2 * (engine.config.max_running + engine.config.max_queue)

    async def health(self, _: web.Request) -> web.Response:
        if self._engine.healthy:
            return web.json_response({"status": "ok", **self._about()})
        return web.json_response({"status": "unavailable"}, status=503)

    async def models(self, _: web.Request) -> web.Response:
        entry = {
            "id": self._model,
            "object": "model",
            "owned_by": "pd-cache reference engine: for trying out, testing and measuring",
            "max_model_len": self._engine.config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._engine.metrics.registry)
        if self._registry is not None:
            text += generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def tokenize(self, http: web.Request) -> web.Response:
        """Returns the token ids of a prompt, in the form of vLLM's servers."""
        _, tokens = await self._read(http)
        return web.json_response(
            {"count": len(tokens), "max_model_len": self._engine.config.max_model_len, "tokens": list(tokens)}
        )

    async def survey(self, http: web.Request) -> web.Response:
        """Returns how many tokens of a prompt this node would find in its tiers and in the pool, and why not more."""
        request, tokens = await self._read(http)
        found = await asyncio.to_thread(self._engine.survey, tokens, request.cache_salt)
        return web.json_response({"tokens": len(tokens), "found": found.tokens, "reason": found.reason})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        arrival = time.monotonic()
        identifier = f"cmpl-{uuid.uuid4().hex}"
        given = _request_id(http)
        known_as = identifier if given == "-" else given
        outcome = "refused, or its client went away"
        span = self._tracing.begin(
            "pd_cache.engine", trace_headers(http.headers), kind="server", request_id=known_as, model=self._model
        )
        try:
            response = await self._complete(http, arrival, identifier, known_as, span)
            outcome = str(response.status)
        finally:
            span.note(outcome=outcome)
            span.end("" if outcome[:1] in "234" else outcome)
            report = self._reports.get(known_as)
            took, line = time.monotonic() - arrival, "" if report is None else report.line()
            _logger.info("request %s: %s in %.3f s %s", known_as, outcome, took, line)
        return response

    async def report(self, http: web.Request) -> web.Response:
        """Returns the report on one of the last requests, by its `X-Request-Id`, or else by the id of its answer."""
        report = self._reports.get(http.match_info["id"])
        if report is None:
            raise BadRequest("no such request among the last ones", param="id", code="not_found", status=404)
        return web.json_response({"reports": [msgspec.to_builtins(report)]})

    async def _complete(
        self, http: web.Request, arrival: float, identifier: str, known_as: str, span: TraceSpan
    ) -> web.StreamResponse:
        try:
            request, generation = await self._submit(http, arrival, span)
        except (BadRequest, ValueError):
            self._engine.metrics.requests.labels("invalid").inc()
            raise
        try:
            builder = AnswerBuilder(request, self._model, identifier, int(time.time()))
            if request.stream:
                return await self._stream(http, builder, generation)
            return await self._whole(builder, generation)
        finally:
            if generation.described:
                stats = generation.stats
                span.note(prompt_tokens=stats.prompt_tokens, cached_tokens=stats.cached_tokens, ttft_ms=stats.ttft_ms)
                self._reports.note(known_as, generation.stats.report)
            generation.cancel()

    async def _read(self, http: web.Request) -> tuple[CompletionRequest, tuple[int, ...]]:
        if self._reading >= self._most_reading:
            raise QueueFullError("too many requests are being read already")
        self._reading += 1
        try:
            body = await asyncio.wait_for(http.read(), _BODY_TIMEOUT_S)
            request = parse_completion(body, self._model)
            return request, await self._tokens(request.prompt)
        finally:
            self._reading -= 1

    async def _submit(self, http: web.Request, arrival: float, span: TraceSpan) -> tuple[CompletionRequest, Generation]:
        request, tokens = await self._read(http)
        asked = GenerationRequest(
            prompt=tokens,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
            announced_prefix=request.announced_prefix,
            arrival=arrival,
            trace=span.headers,
        )
        return request, self._engine.submit(asked)

    async def _tokens(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        return tuple(await asyncio.to_thread(self._engine.tokenizer.encode, prompt))

    async def _whole(self, builder: AnswerBuilder, generation: Generation) -> web.Response:
        detokenizer = self._engine.tokenizer.detokenizer()
        text, tokens = [], []
        async for event in generation:
            tokens.append(event.token)
            text.append(detokenizer.push(event.token))
            if event.finish_reason is not None:
                text.append(detokenizer.finish())
                answer = builder.whole("".join(text), tokens, event.finish_reason, generation.stats, len(tokens))
                return web.json_response(answer)
        raise GenerationError("failed", "the engine ended without a last token")

    async def _stream(self, http: web.Request, builder: AnswerBuilder, generation: Generation) -> web.StreamResponse:
        detokenizer = self._engine.tokenizer.detokenizer()
        response: web.StreamResponse | None = None
        produced = 0
        try:
            async for event in generation:
                produced += 1
                text = detokenizer.push(event.token)
                if event.finish_reason is None:
                    chunk = builder.chunk(text, [event.token])
                else:
                    text += detokenizer.finish()
                    chunk = builder.whole(text, [event.token], event.finish_reason, generation.stats, produced)
                if response is None:
                    # Only now, so that a failure before the first token gets a status of its own.
                    response = web.StreamResponse(
                        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                    )
                    await asyncio.wait_for(response.prepare(http), _WRITE_TIMEOUT_S)
                await _send(response, json.dumps(chunk))
            if response is None:
                raise GenerationError("failed", "the engine ended without a token")
            await _send(response, "[DONE]")
        except GenerationError as failure:
            if response is None:
                raise
            await _send(response, json.dumps(_describe(failure)[1]))
        except (ConnectionError, TimeoutError):
            # The client is gone or no longer reads: there is no one to inform.
            if http.transport is not None:
                http.transport.abort()
        assert response is not None
        return response


def _request_id(request: web.Request) -> str:
    """Returns the proxy's id for the request, for the log."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else "-"


async def _send(response: web.StreamResponse, data: str) -> None:
    await asyncio.wait_for(response.write(f"data: {data}\n\n".encode()), _WRITE_TIMEOUT_S)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into OpenAI's error object with a fitting status."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        status = 400 if error.status == 413 else error.status
        what = error.text or error.reason
        if error.status in (404, 405):  # mention the path: the client may see this behind a proxy that has it
            what = f"this node has no {request.method} {request.path[:200]}"
        return web.json_response(error_body(what, status), status=status, headers=headers)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # the edge: a client gets an error in OpenAI's shape, whatever went wrong
        status, body = _describe(error)
        if status == 500:
            _logger.exception("request %s failed", _request_id(request))
        headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else None
        return web.json_response(body, status=status, headers=headers)


def _describe(error: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(error, BadRequest):
        return error.status, error_body(str(error), error.status, param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return 503, error_body(str(error), 503, code="queue_full")
    if isinstance(error, EngineClosedError):
        return 503, error_body(str(error), 503, code="closing")
    if isinstance(error, GenerationError):
        status = _FAILURE_STATUS[error.kind]
        return status, error_body(str(error), status, code=error.kind)
    if isinstance(error, TimeoutError):
        return 408, error_body(f"the request's body did not arrive within {_BODY_TIMEOUT_S:.0f} s", 408)
    if isinstance(error, ValueError):
        return 400, error_body(str(error), 400, param="prompt", code="invalid_value")
    return 500, error_body("an internal error; see the node's log", 500, code="internal_error")


_CLEANUP_S = 2.0


def serve(
    config: ReferenceEngineConfig,
    handoff: HandoffConfig,
    host: str,
    port: int,
    cache: CacheFactory | None,
    ready: Callable[[str], None],
    *,
    registry: CollectorRegistry | None = None,
    grace_s: float = 4.0,
    on_stop: Callable[[], None] | None = None,
    about: Callable[[], Mapping[str, Any]] | None = None,
    peers: Peers | None = None,
    tracing: Tracing = UNTRACED,
) -> None:
    """Serves the reference engine on `host:port` (0 takes a free port) until asked to stop (`stop_signals`), then returns.

    For the main thread, which gets the signals. `cache` is called once, after the model is loaded, with what identifies this engine's
    weights and pages; it returns the cache to use, or None. The caller closes the cache; by then no call of this engine runs in it except
    those that outlived every deadline. `ready` gets `host:port` once requests are answered. On a signal, running requests have `grace_s`
    to finish. `registry` holds further metrics for `/metrics`. `on_stop` is called on a signal, before anything ends; it may take a
    moment. `about` returns further fields for `/health`, `peers` the content of `/peers`. The caller closes `tracing`. Raises OSError if the address cannot be bound.
    """

    async def until_signal(engine: ReferenceEngine) -> None:
        stop = asyncio.Event()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_engine(
            engine,
            host,
            port,
            ready,
            stop,
            registry=registry,
            grace_s=grace_s,
            on_stop=on_stop,
            about=about,
            peers=peers,
            tracing=tracing,
        )

    with suppress(StoppedError), signals_as_exceptions():
        engine = ReferenceEngine.open(config, handoff, cache, tracing)
        try:
            _logger.warning(
                "serving %s with the reference engine, for trying out, testing and measuring, not for production",
                config.model.name,
            )
            asyncio.run(until_signal(engine))
        finally:
            engine.close()


async def run_engine(
    engine: ReferenceEngine,
    host: str,
    port: int,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    *,
    registry: CollectorRegistry | None = None,
    grace_s: float = 4.0,
    on_stop: Callable[[], None] | None = None,
    about: Callable[[], Mapping[str, Any]] | None = None,
    peers: Peers | None = None,
    tracing: Tracing = UNTRACED,
) -> None:
    """Serves `engine` on `host:port` until `stop` is set, then closes it: running requests have `grace_s` to finish."""
    runner = web.AppRunner(
        make_app(engine, registry, about, peers, tracing),
        handler_cancellation=True,
        shutdown_timeout=_CLEANUP_S,
        access_log=None,
        logger=ServerLog(),
    )
    site: web.TCPSite | None = None
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        ready(f"{host}:{runner.addresses[0][1]}")
        await stop.wait()
        if on_stop is not None:
            await asyncio.to_thread(on_stop)
    finally:
        if site is not None:
            await site.stop()
        # Requests end with their last token or, after the grace, an error. Their connections end only then.
        await asyncio.to_thread(engine.close, grace_s)
        await runner.cleanup()
