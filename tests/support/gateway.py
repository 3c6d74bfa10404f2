"""A gateway before proxies: Envoy from its wheel, with the configuration that we write."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from launch.proxy.gateway.envoy import configuration
from pd_cache.cluster import ProxyConfig, ProxyNode
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S

ENVOY = Path(sys.executable).parent / "envoy"


class Gateway(NamedTuple):
    url: str
    folder: Path
    process: subprocess.Popen


def picker_at(folder, host, port):
    """Returns the change that makes Envoy ask a picker at this address."""
    return f'pipe: {{path: "{folder}/picker"}}', f"socket_address: {{address: {host}, port_value: {port}}}"


def command(folder, host, port, changes=(), **config):
    """Writes the configuration of an Envoy that serves at this address. Returns its command. `changes`: pairs
    of a text of the configuration and what stands there instead."""
    text = configuration(folder, ProxyNode(name="proxy", host=host, port=port), ProxyConfig(**config))
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "envoy.yaml").write_text(text)
    return str(ENVOY), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--disable-hot-restart"


@contextmanager
def envoy(folder, changes=(), **config):
    """An Envoy for proxies that come and go at the same two sockets."""
    port, host = free_port(), "127.0.0.1"
    log = folder / "envoy.log"
    with log.open("wb") as output:
        arguments = command(folder, host, port, changes, **config)
        process = subprocess.Popen(arguments, stdout=output, stderr=output)
    try:
        end = time.monotonic() + PATIENCE_S
        while b"starting main dispatch loop" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
        yield Gateway(f"http://{host}:{port}", folder, process)
    finally:
        process.kill()
        process.wait()
