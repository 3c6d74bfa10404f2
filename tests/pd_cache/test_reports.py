"""Reports on requests: their numbers add up, and only the last ones are kept."""

from __future__ import annotations

import pytest

from pd_cache.reasons import RecentReports, RequestReport, TierChunks


@pytest.mark.parametrize("asked", [1, 7, 8, 20, 32])
@pytest.mark.parametrize("loaded", [0, 8, 31])
@pytest.mark.parametrize("at_hand", [0, 8, 40])
def test_every_token_was_at_hand_or_loaded_or_computed(asked: int, loaded: int, at_hand: int) -> None:
    report = RequestReport.of(asked, 8, at_hand=at_hand, loaded=loaded)
    assert report.at_hand + report.loaded + report.computed == report.asked == asked


def test_tiers_count_whole_chunks() -> None:
    report = RequestReport.of(32, 8, found=32, loaded=31, tiers=TierChunks(memory=1, disk=1, pool=2))
    assert (report.memory, report.disk, report.pool, report.computed) == (8, 8, 16, 1)
    assert report.line() == "asked=32 at_hand=0 found=32 loaded=31 (memory=8 disk=8 pool=16) computed=1 reason=none"


def test_a_prompt_without_a_whole_chunk_is_too_short_for_any_other_reason() -> None:
    assert RequestReport.of(7, 8, reason="pool_down").reason == "too_short"
    assert RequestReport.of(8, 8, reason="pool_down").reason == "pool_down"


def test_only_the_last_reports_are_kept() -> None:
    recent: RecentReports[int] = RecentReports(most=2)
    for number, name in enumerate(("a", "b", "a", "c")):
        recent.note(name, number)
    assert [recent.get(name) for name in ("a", "b", "c", "d")] == [2, None, 3, None]
