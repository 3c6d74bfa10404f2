"""File descriptors that run out: the proxy's own trouble, which says nothing about nodes."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from launch.process import end, spawn_child
from launch.proxy import hops
from pd_cache.wire.descriptors import descriptor_limits, raise_limit
from tests.support.pool import free_port
from tests.support.proxy import EVENTS, Node, begin, cluster, error_of, scenario, until


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    program = (
        "from pd_cache.wire.descriptors import *; print(*descriptor_limits(), raise_limit(), *descriptor_limits())"
    )
    command = f"ulimit -Sn 300 && ulimit -Hn 777 && exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == ["300", "777", "777", "777", "777"]


def test_a_limit_is_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_limit() >= before[0]
        assert descriptor_limits()[0] >= before[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
def test_without_a_descriptor_for_a_node_the_client_may_come_back_and_no_node_is_blamed(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, out = hops._socket, [True]

    def no_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        if out[0]:
            raise OSError(number, "none left")
        return real(address)

    monkeypatch.setattr(hops, "_socket", no_socket)

    @scenario
    async def asked() -> None:
        async with cluster(1, 2, breaker_failures=1, health_interval_s=0.02) as c:
            for _ in range(30):
                async with c.post() as response:
                    assert response.status == 503
                    assert response.headers["Retry-After"] == "1"
                    assert (await error_of(response))["code"] == "overloaded"
            await asyncio.sleep(0.1)  # a few checks of health
            async with c.get("/health") as response:
                assert all((await response.json())["decode"].values())
            out[0] = False
            async with c.post() as response:
                assert response.status == 200

    asked()
    assert sum(line.count("exhausted") for line in caplog.messages) <= 60, "of each node a few lines"


@contextmanager
def proxy_with(descriptors: int, node: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A proxy in a process that may open so few files; its URL and its log."""
    host, _, port = node.removeprefix("http://").rpartition(":")
    file, log = folder / "cluster.yaml", folder / "log"
    nodes = [
        {"name": "master", "role": "master", "port": free_port()},
        {"name": "proxy", "role": "proxy", "port": 0},
        {"name": "decode", "role": "decode", "host": host, "port": int(port)},
    ]
    engine = {"kind": "reference", "model": {"name": "tiny", "random": {}}}
    file.write_text(yaml.safe_dump({"engine": engine, "proxy": {"direct_tokens": 0}, "nodes": nodes}))
    command = f"ulimit -n {descriptors} && exec {sys.executable} -m launch launch proxy -c {file}"
    with log.open("wb") as sink:
        process = spawn_child(["bash", "-c", command], stdout=subprocess.PIPE, stderr=sink)
    assert process.stdout is not None
    with closing(process.stdout):
        try:
            ready = process.stdout.readline().split()
            assert ready, log.read_text()
            yield ready[-1].decode(), log
        finally:
            assert not end([process], 20)


def test_more_streams_than_descriptors_are_refused_and_those_that_run_go_on(tmp_path: Path) -> None:
    @scenario
    async def asked() -> None:
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            response = await begin(request, EVENTS[0])
            await go.wait()
            await response.write(EVENTS[-1])
            return response

        node = Node(waits)
        await node.start()
        starting = proxy_with(256, node.url, tmp_path)
        url, log = await asyncio.to_thread(starting.__enter__)
        timeout, many = aiohttp.ClientTimeout(total=25), aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(connector=many, timeout=timeout) as session:

                async def one() -> tuple[int, bytes]:
                    async with session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
                        return response.status, await response.read()

                asking = [asyncio.create_task(one()) for _ in range(90)]
                await until(lambda: len(node.bodies) == 48, "as many as fit are served", 15)
                await until(lambda: sum(task.done() for task in asking) == 42, "the others were answered", 15)
                go.set()
                answers = await asyncio.gather(*asking)
                assert sorted({status for status, _ in answers}) == [200, 503]
                assert all(body.endswith(EVENTS[-1]) for status, body in answers if status == 200)
                async with session.get(f"{url}/health") as response:
                    assert all((await response.json())["decode"].values())
                async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
                    assert response.status == 200
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
            await node.stop()
        lines = log.read_text().splitlines()
        assert any("at most 48 requests at a time, not the 1024" in line for line in lines)
        assert not any("Too many open files" in line for line in lines)

    asked()
