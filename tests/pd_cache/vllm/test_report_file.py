"""The file in which the connector leaves its reports, and the page that the API server makes of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pd_cache.reasons import RequestReport
from pd_cache.vllm.files import NAMESPACE_FILE, ReportWriter, TellRequests, find_reports, report_file

REPORT = RequestReport.of(20, 8, reason="evicted")


def test_reports_are_found_by_vllms_id_and_by_the_id_that_the_client_sent(tmp_path: Path) -> None:
    writer = ReportWriter(tmp_path / "requests")
    writer.write("cmpl-abc-0-1f2e", REPORT)
    writer.write("cmpl-abcd-0-1f2e", RequestReport.of(1, 8))
    for name in ("abc", "cmpl-abc-0-1f2e"):
        assert find_reports(tmp_path / "requests", name) == [REPORT]
    assert find_reports(tmp_path / "requests", "ab") == []


def test_the_files_never_grow_beyond_their_bound_and_keep_the_last_reports(tmp_path: Path) -> None:
    file = tmp_path / "requests"
    writer = ReportWriter(file, most_bytes=1000)
    for number in range(100):
        writer.write(f"r{number}", REPORT)
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 2000
    assert find_reports(file, "r99") == find_reports(file, "r95") == [REPORT]
    assert find_reports(file, "r1") == []


def test_what_an_earlier_start_or_anything_else_wrote_is_no_report(tmp_path: Path) -> None:
    file = tmp_path / "requests"
    ReportWriter(file).write("old", REPORT)
    ReportWriter(file).write("new", REPORT)
    with file.open("ab") as lines:
        lines.write(b'{"id": "half", "rep\n{"id": "wrong", "report": {"asked": -1}}\n\xff\n')
    assert find_reports(file, "new") == [REPORT]
    for name in ("old", "half", "wrong"):
        assert find_reports(file, name) == []


def ask(path: str, method: str = "GET") -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"vllm's own"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(TellRequests(app)({"type": "http", "method": method, "path": path}, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_the_page_answers_for_known_requests_and_passes_all_else_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMESPACE_FILE, str(tmp_path / "namespace"))
    assert ask("/requests/abc") == (404, b'{"reports":[]}')
    ReportWriter(report_file(tmp_path / "namespace")).write("cmpl-abc-0", REPORT)
    status, body = ask("/requests/abc")
    assert status == 200
    assert json.loads(body)["reports"][0]["reason"] == "evicted"
    assert ask("/requests/")[0] == 404
    assert ask("/v1/models") == ask("/requests/abc", "POST") == (299, b"vllm's own")
