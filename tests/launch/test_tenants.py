"""Tenants in a real pool: of two, only the one over its quota loses chunks, and neither finds the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.http import client_key
from launch.proxy.bodies import tenant_salt
from tests.launch.proxy.test_tenants import OF_A, OF_B, PLAIN, files
from tests.support.cli import cli, cli_json
from tests.support.cluster import CHUNK, Answer, chunks_held, complete, started
from tests.support.proxy import bearer
from tests.support.waiting import wait_for

CHUNK_BYTES = CHUNK * 2 * 2 * 2 * 16 * 4
"""Tokens, layers, K and V, KV heads, the size of a head, float32."""


def ask(url: str, key: str, prompt: list[int], **fields: Any) -> Answer:
    return complete(url, prompt, headers=bearer(key), max_tokens=1, **fields)


def prompt(number: int) -> list[int]:
    """Five chunks."""
    return [(number + n) % 500 for n in range(5 * CHUNK + 1)]


def test_a_tenant_over_its_quota_loses_its_own_oldest_chunks_and_no_other_does(tmp_path: Path) -> None:
    limits = "tenants: {{a: {{quota: {}}}, b: {{quota: 1GiB}}}}"
    proxy = {**files(tmp_path, limits.format(20 * CHUNK_BYTES)), "direct_tokens": 1}
    with started(tmp_path, proxy=proxy) as running:
        url, file = running.urls["proxy"], tmp_path / "cluster.yaml"

        def held(tenant: str, numbers: range) -> list[int]:
            return chunks_held(running, *map(prompt, numbers), salt=tenant_salt(None, tenant))

        def counted() -> dict[str, Any]:
            return dict(cli_json("pool", "du", "-c", file)["tenants"])

        def known() -> bool:
            """Whether the proxy names prompts: it learns from the nodes how."""
            assert ask(url, OF_B, prompt(0)).status == 200
            return bool(counted().get("b", {}).get("bytes", 0) >= 5 * CHUNK_BYTES)

        assert client_key(running.config) == OF_A, "the first of the file"
        wait_for(known, what="a prompt that counts")
        for number in range(3):
            assert ask(url, OF_B, prompt(number)).status == 200
        for number in range(10):
            answer = ask(url, OF_A, prompt(number))
            assert (answer.status, answer.cached[0]) == (200, 0), "nobody finds another tenant's chunks"
        wait_for(lambda: 0 < sum(held("a", range(10))) <= 20, what="a below its quota")
        assert held("b", range(3)) == [5, 5, 5]
        wait_for(lambda: counted()["a"]["bytes"] <= 20 * CHUNK_BYTES, what="the metrics")
        use = counted()
        assert (use["a"]["quota"], use["b"]["evicted"]) == (20 * CHUNK_BYTES, 0)
        assert use["a"]["evicted"] >= 30
        assert sum(ask(url, OF_B, prompt(1)).cached) >= 4 * CHUNK
        # the file changes
        asked = cli("pool", "rm", "a", "-c", file, code=1).stderr
        assert "pool matches a: it is a tenant: `a: {quota: 0}` in proxy.tenants_file removes what counts" in asked
        assert sum(held("a", range(10))) > 0
        for number in range(10):
            assert ask(url, OF_A, prompt(number)).status == 200, "leased by this use"
        (tmp_path / "tenants").write_text(limits.format(0))
        wait_for(lambda: not any(held("a", range(10))), what="nothing is left of a")
        assert held("b", range(3)) == [5, 5, 5]
        refused = ask(url, PLAIN, prompt(1), cache_salt=tenant_salt(None, "b"))
        assert (refused.status, refused.body["error"]["param"]) == (400, "cache_salt")
        assert "chunks evicted" in cli("pool", "du", "-c", file).stdout
        assert "tenant" in cli("status", "-c", file, "--json", code=None).stdout
