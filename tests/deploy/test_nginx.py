"""The nginx configuration of docs/operations.md, in front of a proxy."""

import asyncio
import re
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.support.etcd import make_certificates
from tests.support.pool import ROOT, free_port
from tests.support.proxy import OneByOne, answers, cluster, scenario, waits_for

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


class Front:
    """nginx in front of a cluster's proxy."""

    def __init__(self, c, port, session):
        self.cluster, self.port, self.url, self.session = c, port, f"https://127.0.0.1:{port}", session

    def post(self, body, **options):
        return self.session.post(f"{self.url}/v1/completions", json=body, **options)


@asynccontextmanager
async def front(folder, **changes):
    """`changes`: values of directives that differ from the documentation's."""
    pairs, port = make_certificates(folder), free_port()
    async with cluster(0, 1) as c:
        (block,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
        for name, value in {
            "ssl_certificate": pairs["server"][0], "ssl_certificate_key": pairs["server"][1],
            "listen": f"127.0.0.1:{port} ssl", "server": c.url.removeprefix("http://"), **changes,
        }.items():  # fmt: skip
            block, count = re.subn(rf"(?<![\w$])({name}) [^;{{]+;", rf"\1 {value};", block)
            assert count == 1, name
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        (folder / "nginx.conf").write_text(
            f"user root; daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {paths}\n{block}}}\n"
        )
        nginx = await asyncio.create_subprocess_exec(
            "nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), stderr=subprocess.DEVNULL
        )
        trusting = ssl.create_default_context(cafile=pairs["ca"][0])
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=trusting, limit=0)
            ) as session:
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        break
                    except ConnectionError:
                        assert nginx.returncode is None
                        await asyncio.sleep(0.01)
                writer.close()
                yield Front(c, port, session)
        finally:
            nginx.terminate()
            await nginx.wait()


@scenario
async def test_answers_and_streams_pass_and_pages_of_the_cluster_do_not(tmp_path):
    async with front(tmp_path) as f:
        async with f.post({"prompt": "x"}, headers={"X-Request-Id": "mine"}) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (200, "mine")
        f.cluster.decode[0].default = stream = OneByOne()
        async with f.post({"prompt": "x", "stream": True}) as response:
            await stream.read(response)
        for page in ("/metrics", "/health", "/ui"):
            async with f.session.get(f.url + page) as response:
                assert response.status == 404


@scenario
async def test_a_body_that_is_too_large_a_head_that_is_too_slow_and_too_many_requests_end_at_nginx(tmp_path):
    async with front(tmp_path, client_header_timeout="1s", limit_conn="connections 3") as f:
        large = {"Content-Length": str(17 << 20)}
        async with f.session.post(f.url + "/v1/completions", data=b"", headers=large) as response:
            assert response.status == 413
        silent, writer = await asyncio.open_connection("127.0.0.1", f.port)
        assert await asyncio.wait_for(silent.read(), 60) == b""
        writer.close()
        go = asyncio.Event()
        f.cluster.decode[0].default = waits_for(go, answers(200, {}))

        async def status():
            async with f.post({"prompt": "x"}) as response:
                return response.status

        asking = [asyncio.create_task(status()) for _ in range(8)]
        while sum(task.done() for task in asking) < 5:
            await asyncio.sleep(0.01)
        go.set()
        assert sorted([await task for task in asking]) == [200] * 3 + [429] * 5
