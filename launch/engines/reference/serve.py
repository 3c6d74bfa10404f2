"""The process: builds an engine, serves it over HTTP until a signal, closes everything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from launch.engines.reference.engine import CacheFactory, ReferenceEngine
from launch.engines.reference.server import Peers, make_app
from launch.signals import StoppedError, signals_as_exceptions, stop_signals
from pd_cache.cluster import HandoffConfig, ReferenceEngineConfig
from pd_cache.tracing import UNTRACED, Tracing

_logger = logging.getLogger(__name__)

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
    moment. `about` returns further fields for `/health`, `peers` the content of `/peers`. The caller closes `tracing`. Raises UnsupportedModelError for a model that
    cannot be served, OSError if the address cannot be bound.
    """
    with suppress(StoppedError), signals_as_exceptions():
        engine = ReferenceEngine.open(config, handoff, cache, tracing)
        try:
            _logger.warning(
                "serving %s with the reference engine, for trying out, testing and measuring, not for production",
                config.model.name,
            )
            asyncio.run(_run_until_signal(engine, host, port, ready, registry, grace_s, on_stop, about, peers, tracing))
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
    )
    site: web.TCPSite | None = None
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        ready(f"{host}:{_bound_port(runner)}")
        await stop.wait()
        if on_stop is not None:
            await asyncio.to_thread(on_stop)
    finally:
        if site is not None:
            await site.stop()
        # Requests end with their last token or, after the grace, an error. Their connections end only then.
        await asyncio.to_thread(engine.close, grace_s)
        await runner.cleanup()


async def _run_until_signal(
    engine: ReferenceEngine,
    host: str,
    port: int,
    ready: Callable[[str], None],
    registry: CollectorRegistry | None,
    grace_s: float,
    on_stop: Callable[[], None] | None,
    about: Callable[[], Mapping[str, Any]] | None,
    peers: Peers | None,
    tracing: Tracing,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
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


def _bound_port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])
