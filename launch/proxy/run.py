"""The proxy as a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from launch.proxy.app import Proxy
from launch.signals import stop_signals
from pd_cache.config import ProxyConfig


def run_proxy(
    config: ProxyConfig,
    prefill: Sequence[str],
    decode: Sequence[str],
    host: str,
    port: int,
    ready: Callable[[str], None],
) -> None:
    """Serve until told to stop (`stop_signals`), then drain for at most 5 s. Main thread only.

    `ready` is called with the base URL once connections are taken; port 0 means any. OSError if the address cannot be bound,
    ValueError as of `Proxy`.
    """
    asyncio.run(_serve(Proxy(config, prefill, decode), host, port, ready))


async def _serve(proxy: Proxy, host: str, port: int, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, stop.set)
    runner = web.AppRunner(proxy.app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0][1]
        ready(f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}")
        await stop.wait()
    finally:
        await runner.cleanup()
