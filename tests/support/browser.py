"""A real Chromium without a window, spoken to by its DevTools protocol. It needs nothing but aiohttp, which
we have."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
from contextlib import asynccontextmanager

import aiohttp
import pytest

from launch.run.supervise import end, spawn_child
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium; `make test` installs Debian's chromium as root"
)
_LARGEST = 64 << 20


class Browser:
    """One page."""

    def __init__(self, socket):
        self._socket = socket
        self._number = 0
        self._answers = {}
        self.events = []
        """What the browser said without being asked: requests, violations of policies, exceptions."""

    async def read(self):
        """Reads what the browser says until it is gone."""
        async for message in self._socket:
            said = json.loads(message.data)
            if (waiting := self._answers.pop(said.get("id", 0), None)) is not None:
                waiting.set_result(said)
            else:
                self.events.append(said)

    async def call(self, method, **params):
        """Calls a method of the protocol."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in said, said
        return said["result"]

    async def open(self, url):
        """Opens an address, and does not wait until it is there."""
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression):
        """Returns what a JavaScript expression is on the page."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression):
        """Waits until an expression is true on the page, and returns it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(AssertionError):  # between two pages there is nothing to ask
                    if found := await self.evaluate(expression):
                        return found
                await asyncio.sleep(0.05)

    def said(self, method):
        """Returns the parameters of all events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]


@asynccontextmanager
async def chromium(folder):
    """Starts Chromium with an empty profile in `folder`."""
    port = free_port()
    process = spawn_child(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            f"--remote-debugging-port={port}",
            f"--user-data-dir={folder}/profile",
            "about:blank",
        ],
        death_signal=signal.SIGKILL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _page(session, port)
            async with session.ws_connect(address, max_msg_size=_LARGEST) as socket:
                browser = Browser(socket)
                reading = asyncio.create_task(browser.read())
                try:
                    for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
                        await browser.call(f"{domain}.enable")
                    yield browser
                finally:
                    reading.cancel()
                    await asyncio.wait([reading])
    finally:
        await asyncio.to_thread(end, [process], 5.0)


async def _page(session, port):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):  # until it listens
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    if pages := [one for one in await response.json() if one["type"] == "page"]:
                        return pages[0]["webSocketDebuggerUrl"]
            await asyncio.sleep(0.05)
