"""The engine over HTTP (`/v1/completions`, `/v1/models`, `/health`, `/metrics`, `/requests/ID`, `/weights`),
and its process."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from launch.engines.reference.engine import ReferenceEngine
from launch.engines.reference.protocol import (
    AnswerBuilder,
    CompletionRequest,
    Detokenizer,
    encode,
    parse_completion,
)
from launch.engines.reference.requests import Generation, GenerationError, GenerationRequest
from launch.openai import ApiError, RecentReports, errors, given_id, runner_of
from launch.run.supervise import StopFlag
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.reasons import RequestReport
from pd_cache.tracing import UNTRACED, Tracing, trace_headers
from pd_cache.versions import Naming, WeightsVersion

_logger = logging.getLogger(__name__)

_BODY_TIMEOUT_S = 30.0
_WRITE_TIMEOUT_S = 30.0
_CLEANUP_S = 2.0
_FAILURE_STATUS = {"timeout": 504, "failed": 500}


class ReferenceServer:
    """Serves one engine, and closes it at the end."""

    def __init__(
        self,
        engine: ReferenceEngine,
        registry: CollectorRegistry | None = None,
        about: Callable[[], Mapping[str, Any]] = dict,
        tracing: Tracing = UNTRACED,
        version: WeightsVersion | None = None,
    ) -> None:
        """`registry` holds the cache's metrics for `/metrics`. `about` returns further fields for `/health`.
        `version` is the version of the cache's weights."""
        self.engine = engine
        self._registry = registry
        self._about = about
        self._tracing = tracing
        self._version = version or WeightsVersion()
        self._model = engine.config.model.name
        self._reports: RecentReports[RequestReport] = RecentReports()

    async def run(
        self,
        host: str,
        port: int,
        ready: Callable[[str], None],
        stop: StopFlag,
        *,
        grace_s: float = 4.0,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """Serves on `host:port` until `stop` is set, then closes the engine: running requests have `grace_s`
        to finish.

        Calls `ready` with `http://host:port` once the server answers requests. Calls `on_stop` before
        anything ends; it may take a moment.
        """
        app = web.Application(
            client_max_size=(1 << 20) + 64 * self.engine.config.max_model_len, middlewares=[errors]
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/weights", self._name)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/requests/{id}", self._report)
        runner = runner_of(app, shutdown_timeout=_CLEANUP_S)
        site: web.TCPSite | None = None
        try:
            await runner.setup()
            site = web.TCPSite(runner, host, port)
            await site.start()
            ready(f"http://{host}:{runner.addresses[0][1]}")
            await asyncio.to_thread(stop.wait)
            if on_stop is not None:
                await asyncio.to_thread(on_stop)
        finally:
            if site is not None:
                await site.stop()
            # Requests end with their last token or, after the grace, an error. Their connections end only
            # then.
            await asyncio.to_thread(self.engine.close, grace_s)
            await runner.cleanup()

    # --- what it answers ------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if self.engine.healthy:
            weights = [msgspec.to_builtins(self._version.state)]
            return web.json_response({"status": "ok", **self._about(), "weights": weights})
        return web.json_response({"status": "unavailable"}, status=503)

    async def _name(self, http: web.Request) -> web.Response:
        """Gives the weights a label, as vLLM's servers do with `pd_cache.vllm.files.TellCache`."""
        try:
            naming = decode_json(await http.read(), Naming)
        except UndecodableError as error:
            raise ApiError(400, str(error)) from None
        return web.json_response([msgspec.to_builtins(self._version.name(naming))])

    async def _models(self, _: web.Request) -> web.Response:
        entry = {
            "id": self._model,
            "object": "model",
            "owned_by": "pd-cache reference engine: for trying out, testing and measuring",
            "max_model_len": self.engine.config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self.engine.metrics.registry)
        if self._registry is not None:
            text += generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _report(self, http: web.Request) -> web.Response:
        """Returns the report on one of the last requests. The id is the request's `X-Request-Id`, or that of
        its answer."""
        report = self._reports.get(http.match_info["id"])
        if report is None:
            raise ApiError(404, "no such request among the last ones", param="id", code="not_found")
        return web.json_response({"reports": [msgspec.to_builtins(report)]})

    async def _tokenize(self, http: web.Request) -> web.Response:
        """Returns the token ids of a prompt, in the form of vLLM's servers."""
        _, tokens = await self._read(http)
        return web.json_response(
            {"count": len(tokens), "max_model_len": self.engine.config.max_model_len, "tokens": list(tokens)}
        )

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        arrival = time.monotonic()
        given = given_id(http.headers)
        identifier = f"cmpl-{given or uuid.uuid4().hex}"  # the form of vLLM's ids
        known_as = given or identifier
        outcome, line = "refused, or its client went away", ""
        generation: Generation | None = None
        span = self._tracing.begin(
            "pd_cache.engine",
            trace_headers(http.headers),
            kind="server",
            request_id=known_as,
            model=self._model,
        )
        try:
            request, tokens = await self._read(http)
            asked = GenerationRequest(
                prompt=tokens,
                max_tokens=request.fields.max_tokens,
                cache_salt=request.fields.cache_salt,
                announced_prefix=request.announced.prefix_tokens,
                streams=request.announced.stream,
                arrival=arrival,
                trace=span.headers,
            )
            generation = self.engine.submit(asked)
            builder = AnswerBuilder(request, self._model, identifier, int(time.time()))
            if request.fields.stream:
                response = await self._stream(http, builder, generation)
            else:
                response = await self._whole(builder, generation)
            outcome = str(response.status)
        except (ApiError, GenerationError, ValueError) as error:
            if generation is None and not isinstance(error, GenerationError):
                self.engine.metrics.requests.labels("invalid").inc()
            raise _api_error(error) from None
        finally:
            if generation is not None:
                if (stats := generation.stats) is not None:
                    report = stats.report
                    span.note(prompt_tokens=report.asked, cached_tokens=report.loaded, ttft_ms=stats.ttft_ms)
                    self._reports.note(known_as, report)
                    line = report.line()
                generation.cancel()
            span.note(outcome=outcome)
            span.end("" if outcome[:1] in "234" else outcome)
            _logger.info("request %s: %s in %.3f s %s", known_as, outcome, time.monotonic() - arrival, line)
        return response

    async def _read(self, http: web.Request) -> tuple[CompletionRequest, tuple[int, ...]]:
        """Returns the request and its prompt's tokens."""
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await http.read()
        except TimeoutError:
            raise ApiError(408, f"the request's body did not arrive within {_BODY_TIMEOUT_S:.0f} s") from None
        request = parse_completion(body, self._model)
        prompt = request.prompt
        return request, encode(prompt, self.engine.model.vocab_size) if isinstance(prompt, str) else prompt

    async def _whole(self, builder: AnswerBuilder, generation: Generation) -> web.StreamResponse:
        detokenizer = Detokenizer()
        text, tokens = [], []
        async for event in generation:
            tokens.append(event.token)
            text.append(detokenizer.push(event.token, event.last))
        return web.json_response(builder.whole("".join(text), tokens, generation, len(tokens)))

    async def _stream(
        self, http: web.Request, builder: AnswerBuilder, generation: Generation
    ) -> web.StreamResponse:
        detokenizer = Detokenizer()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        produced = 0
        try:
            async for event in generation:
                produced += 1
                text, tokens = detokenizer.push(event.token, event.last), [event.token]
                chunk = (
                    builder.whole(text, tokens, generation, produced)
                    if event.last
                    else builder.chunk(text, tokens)
                )
                # a failure before the first token gets its own status, so the answer begins only now
                if not response.prepared:
                    async with asyncio.timeout(_WRITE_TIMEOUT_S):
                        await response.prepare(http)
                await _send(response, json.dumps(chunk))
            await _send(response, "[DONE]")
        except GenerationError as failure:
            if not response.prepared:
                raise
            await _send(response, _api_error(failure).body().decode())
        except (ConnectionError, TimeoutError):
            # The client is gone or no longer reads: there is no one to inform.
            if http.transport is not None:
                http.transport.abort()
        return response


async def _send(response: web.StreamResponse, data: str) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await response.write(f"data: {data}\n\n".encode())


def _api_error(error: Exception) -> ApiError:
    """Returns the error for the client if the engine refuses or fails a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationError):
        return ApiError(_FAILURE_STATUS.get(error.kind, 503), str(error), code=error.kind)
    return ApiError(400, str(error), param="prompt", code="invalid_value")


def serve(
    open_server: Callable[[], ReferenceServer],
    host: str,
    port: int,
    ready: Callable[[str], None],
    stop: StopFlag,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Opens a server and serves on `host:port` (0 takes a free port) until `stop` is set, then returns.

    The other arguments are those of `ReferenceServer.run`. The caller closes the engine's cache; only calls
    that outlived every deadline may still run in it then. Raises OSError if the address cannot be bound.
    """
    server = open_server()
    try:
        _logger.warning(
            "serving %s with the reference engine, for trying out, testing and measuring, not for production",
            server.engine.config.model.name,
        )
        if not stop.is_set():
            asyncio.run(server.run(host, port, ready, stop, on_stop=on_stop))
    finally:
        server.engine.close()
