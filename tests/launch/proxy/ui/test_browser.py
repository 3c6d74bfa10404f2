"""`/ui` in a real Chromium: it is live, loads nothing from elsewhere, takes no text for HTML, and can be read on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.discovery import View
from launch.proxy.ui import pages
from pd_cache.cluster import NodeRecord
from tests.launch.proxy.ui.test_pages import WATCHING, counting, keys
from tests.support.browser import Browser, chromium, needs_chromium
from tests.support.proxy import Cluster, cluster, says, scenario, until

pytestmark = needs_chromium

LIVE = "document.getElementById('state') !== null && document.getElementById('state').dataset.state === 'live'"
EVIL = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_INTERVAL_S", 0.2)


def text_of(part: str) -> str:
    return f"document.getElementById('{part}').textContent"


def assert_kept_to_itself(browser: Browser, c: Cluster) -> None:
    """It asked no other host for anything, broke no policy, and raised no exception."""
    asked = [one["request"]["url"] for one in browser.said("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith((c.url + "/ui", "data:,"))] == []
    assert len([url for url in asked if url.startswith(c.url)]) >= 4
    assert [one for one in browser.said("Audits.issueAdded") if "Policy" in one["issue"]["code"]] == []
    assert browser.said("Runtime.exceptionThrown") == []


def test_the_page_asks_for_a_key_follows_the_cluster_comes_back_and_can_be_read_anywhere(tmp_path: Path) -> None:
    @scenario
    async def run() -> None:
        files = keys(tmp_path, monitor_keys=f"prometheus {WATCHING}\n")
        async with cluster(prefill=2, decode=2, **files) as c, chromium(tmp_path) as browser:
            for node in (*c.prefill, *c.decode):
                node.default = counting()
            await browser.open(c.url + "/ui")
            await until(lambda: bool(browser.said("Network.responseReceived")), "an answer")
            assert [one["response"]["status"] for one in browser.said("Network.responseReceived")] == [401]
            await browser.type_password(WATCHING)
            await browser.screen(390, 844, phone=True)
            await browser.open(c.url + "/ui")
            await browser.until(LIVE)
            await browser.until(f"{text_of('picture')}.includes('decode-1')")
            await browser.until(f"{text_of('nodes')}.includes('kB/s')")
            await browser.until("document.querySelectorAll('#picture path.edge.load').length === 4")
            assert await browser.evaluate("document.documentElement.scrollWidth") == 390, "nothing beside the screen"
            small = "[...document.querySelectorAll('td, p, span')].filter((one) => parseFloat(getComputedStyle(one).fontSize) < 12).length"
            assert await browser.evaluate(small) == 0, "large enough to be read"
            paper = "getComputedStyle(document.body).backgroundColor"
            assert await browser.evaluate(paper) == "rgb(255, 255, 255)"
            await browser.screen(1440, 900, dark=True)
            assert await browser.evaluate(paper) == "rgb(17, 24, 39)"
            await browser.until("document.querySelector('#picture svg').viewBox.baseVal.width > 1000")
            await c.decode[1].stop()
            await browser.until(f"{text_of('line')}.includes('1 without an answer')")
            c.proxy._ui._closing = True  # as for a proxy that is being restarted: streams end, and new ones are refused
            await browser.until("document.getElementById('state').dataset.state === 'lost'")
            assert await browser.evaluate("document.body.classList.contains('stale')")
            c.proxy._ui._closing = False
            await browser.until(LIVE)
            assert_kept_to_itself(browser, c)
            await browser.open("about:blank")

    run()


def test_texts_from_outside_stay_texts(tmp_path: Path) -> None:
    @scenario
    async def run() -> None:
        async with cluster(prefill=0, decode=1) as c, chromium(tmp_path) as browser:
            asked = iter(range(1, 1_000_000))

            async def behaviour(request: Any) -> Any:
                text = f'pd_cache_missed_tokens_total{{reason="{EVIL[:40]}"}} {next(asked)}\n'
                return await says(text.encode())(request)

            c.decode[0].default = behaviour
            evil = NodeRecord(name=EVIL, role="decode", address=c.decode[0].url)
            gone = NodeRecord(name="gone", role="prefill", address="http://127.0.0.1:1")
            c.proxy.update(View((evil, gone, NodeRecord(name="odd", role=EVIL, address="127.0.0.1:1"))))
            await browser.open(c.url + "/ui")
            await browser.until(LIVE)
            await browser.until(f"{text_of('nodes')}.includes({EVIL[:40]!r})")
            titles = "[...document.querySelectorAll('#picture title')].map((one) => one.textContent)"
            assert await browser.evaluate(f"{titles}.some((text) => text.startsWith('<img src=x onerror'))")
            assert await browser.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
            assert await browser.evaluate("document.title") == "pd-cache"
            assert_kept_to_itself(browser, c)
            await browser.open("about:blank")

    run()
