"""A gateway before proxies: Envoy from its wheel, with the configuration that we write."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from launch.proxy.gateway import configuration
from pd_cache.cluster import ProxyConfig, ProxyNode
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S

ENVOY = Path(sys.executable).parent / "envoy"


class Gateway(NamedTuple):
    url: str
    folder: Path
    process: subprocess.Popen


@contextmanager
def envoy(folder, changes=(), **config):
    """An Envoy for proxies that come and go at the same two sockets. `changes`: pairs of a text of its
    configuration and what stands there instead."""
    port = free_port()
    text = configuration(folder, ProxyNode(name="proxy", port=port), ProxyConfig(**config))
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "envoy.yaml").write_text(text)
    log = folder / "envoy.log"
    command = [str(ENVOY), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        end = time.monotonic() + PATIENCE_S
        while b"starting main dispatch loop" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
        yield Gateway(f"http://127.0.0.1:{port}", folder, process)
    finally:
        process.kill()
        process.wait()
