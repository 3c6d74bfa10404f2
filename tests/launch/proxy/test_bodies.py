"""The memory that bodies of requests take, and descriptors that run out: neither costs a node, nor the proxy."""

from __future__ import annotations

import asyncio
import errno
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from launch.proxy import nodes
from launch.proxy.bodies import ApiError, BodyMemory, BodyShare, Completion
from launch.supervise import end, spawn_child
from tests.support.pool import free_port
from tests.support.proxy import Node, answers, cluster, error_of, hangs, scenario, until
from transfer.settings import ByteSize

MIB = 1 << 20


def test_large_bodies_leave_a_quarter_of_the_memory_to_small_ones() -> None:
    memory = BodyMemory(64 * MIB)
    large, small = BodyShare(memory), BodyShare(memory)
    assert large.grow(24 * MIB)
    assert not large.grow(1)
    assert all(BodyShare(memory).grow(1 << 18) for _ in range(31))
    assert small.grow(1 << 18)
    assert not small.grow(1)
    large.give_back()
    assert large.grow(1 << 20)


@scenario
async def test_a_body_without_room_is_refused_and_a_small_one_still_served() -> None:
    def body(mib: int) -> io.BytesIO:
        return io.BytesIO(b'{"prompt": "' + b"x" * (mib * MIB + 1) + b'"}')

    async with cluster(0, 1, body_memory=ByteSize(48 * MIB)) as c:
        c.decode[0].script = [hangs]
        first = asyncio.ensure_future(c.post(data=body(15)).__aenter__())
        await until(lambda: c.decode[0].bodies != [], "the decode node has the large one")
        async with c.post(data=body(4)) as response:
            assert response.status == 503
            assert (await error_of(response))["code"] == "overloaded"
        async with c.post(data=body(0)) as response:
            assert response.status == 200
        first.cancel()
        await asyncio.wait({first})
        await until(lambda: c.proxy.requests.bodies.used == 0, "the memory was given back")
        async with c.post(data=body(15)) as response:
            assert response.status == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
def test_without_a_descriptor_for_a_node_the_client_may_come_back_and_no_node_is_blamed(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, out = nodes._socket, [True]

    def no_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        if out[0]:
            raise OSError(number, "none left")
        return real(address)

    monkeypatch.setattr(nodes, "_socket", no_socket)

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
def proxy_process(node: str, folder: Path) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a proxy with the limits that we ship."""
    host, _, port = node.removeprefix("http://").rpartition(":")
    nodes = [
        {"name": "master", "role": "master", "port": free_port()},
        {"name": "proxy", "role": "proxy", "port": 0},
        {"name": "decode", "role": "decode", "host": host, "port": int(port)},
    ]
    engine = {"kind": "reference", "model": {"name": "tiny", "random": {}}}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"engine": engine, "proxy": {"direct_tokens": 0}, "nodes": nodes}))
    with (folder / "log").open("wb") as sink:
        process = spawn_child(
            [sys.executable, "-m", "launch", "launch", "proxy", "-c", str(file)], stdout=subprocess.PIPE, stderr=sink
        )
    assert process.stdout is not None
    with closing(process.stdout):
        try:
            ready = process.stdout.readline().split()
            assert ready, (folder / "log").read_text()
            yield ready[-1].decode(), process.pid
        finally:
            assert not end([process], 20)


def many_keys() -> bytes:
    return b'{"prompt": "x", ' + b",".join(b'"%x":1' % number for number in range(1_400_000)) + b"}"


BODIES = {
    "many keys": many_keys,
    "a long text": lambda: b'{"prompt": "' + b"x" * ((147 << 20) // 10) + b'"}',
    "many token ids": lambda: b'{"prompt": [' + b"7," * ((147 << 20) // 20) + b"7]}",
    "many messages": lambda: b'{"prompt": [' + b"{}," * ((147 << 20) // 30) + b"{}]}",
    "many escapes in a text": lambda: b'{"prompt": "' + b'\\":' * ((147 << 20) // 30) + b'"}',
    "many colons in a text": lambda: b'{"prompt": "' + b":" * ((147 << 20) // 10) + b'"}',
}


def fields(count: int) -> bytes:
    return b",".join(b'"%x":1' % number for number in range(count))


@pytest.mark.parametrize(
    ("body", "many"),
    [
        (b'{"prompt": "x", ' + fields(999) + b"}", False),
        (b'{"prompt": "x", ' + fields(1000) + b"}", True),
        (b'{"prompt": [' + b'{"a":1},' * 60_000 + b"{}]}", False),
        (b'{"prompt": [' + b'{"a":1},' * 60_000 + b"{}], " + fields(1000) + b"}", True),
        (b'{"prompt": "x", ' + fields(60_000) + b"}", True),
        (b'{"prompt": "' + b":" * 60_000 + b'", "tools": [{' + fields(60_000) + b"}]}", False),
    ],
)
def test_a_body_may_have_a_thousand_fields_of_whatever_content(body: bytes, many: bool) -> None:
    if not many:
        Completion(body)
        return
    with pytest.raises(ApiError) as refused:
        Completion(body)
    assert (refused.value.status, refused.value.code) == (400, "too_many_fields")


@pytest.mark.parametrize("kind", list(BODIES))
def test_fourteen_large_bodies_at_once_are_served_or_refused_in_less_than_a_gigabyte(kind: str, tmp_path: Path) -> None:
    body = BODIES[kind]()
    assert 13 << 20 < len(body) <= 16 << 20

    @scenario
    async def asked() -> None:
        node = Node(answers(200, {}))
        await node.start()
        try:
            with proxy_process(node.url, tmp_path) as (url, pid):
                async with aiohttp.ClientSession() as session:

                    async def status() -> int:
                        async with session.post(f"{url}/v1/completions", data=io.BytesIO(body)) as response:
                            return response.status

                    statuses = await asyncio.gather(*(status() for _ in range(14)))
                    assert set(statuses) <= ({400, 503} if kind == "many keys" else {200, 503}), statuses
                    async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
                        assert response.status == 200
                memory = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]
                assert int(memory) < 1 << 20, f"{memory} KiB at most"
        finally:
            await node.stop()

    asked()
