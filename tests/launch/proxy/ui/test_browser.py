"""`/ui` in a real Chromium: it is live, loads nothing from elsewhere, and takes no text for HTML."""

import pytest

from launch.discovery import View
from launch.proxy.ui import pages
from pd_cache.cluster import NodeRecord
from tests.launch.proxy.ui.test_pages import METRICS, WATCHING
from tests.support.browser import chromium, needs_chromium
from tests.support.proxy import cluster, files_of, says, scenario, until

pytestmark = needs_chromium

STATE = "(document.getElementById('state') || document.body).dataset.state"
EVIL = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pages, "INTERVAL_S", 0.2)


def text_of(part):
    return f"document.getElementById('{part}').textContent"


def counting_evil():
    """Metrics that grow with each question, with a reason that is HTML."""
    asked = iter(range(1, 1_000_000))

    async def behaviour(request):
        evil = f'pd_cache_missed_tokens_total{{reason="{EVIL[:40]}"}} {next(asked)}\n'
        return await says((METRICS % ((next(asked),) * 3)) + evil.encode())(request)

    return behaviour


@scenario
async def test_the_page_asks_for_a_key_follows_the_cluster_comes_back_and_takes_no_text_for_html(tmp_path):
    files = files_of(tmp_path, monitor_keys=f"prometheus {WATCHING}\n")
    async with (
        cluster(prefill=0, decode=2, name=EVIL, health_interval_s=0.2, **files) as c,
        chromium(tmp_path) as browser,
    ):
        for node in c.decode:
            node.default = counting_evil()
        names = zip((EVIL, "decode-1"), c.decode, strict=True)
        records = [NodeRecord(name=name, role="decode", address=node.url) for name, node in names]
        gone = NodeRecord(name="gone", role="prefill", address="http://127.0.0.1:1")
        mine = NodeRecord(name="this-proxy", role="proxy", address=c.url)
        c.proxy.update(View((*records, gone, mine, NodeRecord(name="odd", role=EVIL, address="127.0.0.1:1"))))
        await browser.open(c.url + "/ui")
        await until(lambda: bool(browser.said("Network.responseReceived")), "an answer")
        assert [one["response"]["status"] for one in browser.said("Network.responseReceived")] == [401]
        await browser.open(page := c.url.replace("//", f"//anyone:{WATCHING}@") + "/ui")
        await browser.until(f"{STATE} === 'degraded'")
        await browser.until(f"{text_of('state')} === 'serving, but 1 of 4 nodes down'")
        await browser.until("document.querySelectorAll('#picture path.edge.load').length === 2")
        await browser.until(f"{text_of('nodes')}.includes({EVIL[:40]!r})")
        assert "this-proxy" not in await browser.evaluate(text_of("nodes")), (
            "it would say only that it is not asked"
        )
        assert "first token: needs streamed answers" in await browser.evaluate(text_of("figures"))
        titles = "[...document.querySelectorAll('#picture title')].map((one) => one.textContent)"
        assert await browser.evaluate(f"{titles}.some((text) => text.startsWith('<img src=x onerror'))")
        assert await browser.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
        assert await browser.evaluate("document.title") == f"{EVIL} · pd-cache"
        # as for a proxy that is being restarted: streams end, and new ones are refused
        c.proxy._ui._closing = True
        await browser.until(f"{STATE} === 'lost'")
        assert await browser.evaluate("document.body.classList.contains('stale')")
        c.proxy._ui._closing = False
        await browser.until(f"{STATE} === 'degraded'")
        for node in c.decode:
            await node.stop()
        await browser.until(f"{STATE} === 'down'")
        asked = [one["request"]["url"] for one in browser.said("Network.requestWillBeSent")]
        assert [url for url in asked if not url.startswith((c.url + "/ui", page, "data:,"))] == [], (
            "of no other host"
        )
        assert [one for one in browser.said("Audits.issueAdded") if "Policy" in one["issue"]["code"]] == []
        assert browser.said("Runtime.exceptionThrown") == []
        await browser.open("about:blank")
