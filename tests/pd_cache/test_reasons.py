"""Why chunks were not there: the few reasons, the history that tells evicted chunks from those that were
never stored, and the reports."""

from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.groups import LayerGroups
from pd_cache.lookup import PrefixLookup, count_found
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import (
    MEANINGS,
    ChunkHistory,
    Found,
    MissReason,
    RequestReport,
    TierChunks,
    miss_reason,
    worst_reason,
)
from pd_cache.tiers.memory import Damage
from pd_cache.versions import FIRST, WeightsVersion
from tests.support.names import group
from transfer.errors import Status

OK, MISSING, DOWN = Status.OK, Status.MISSING, Status.POOL_DOWN
NAMES = [bytes([number]) * 16 for number in range(1, 5)]


def over(*groups, history=None):
    """Looks up in nothing: the tests say what was answered."""
    return PrefixLookup(LayerGroups(groups), SimpleNamespace(), WeightsVersion(), CacheMetrics(), history)


def find(lookup, statuses, at_hand=0):
    return count_found(lookup, NAMES, at_hand, statuses, FIRST)


def test_every_reason_is_explained():
    assert set(MEANINGS) == set(get_args(MissReason))


def test_a_report_says_where_the_tokens_of_a_prompt_came_from():
    hit = RequestReport.of(2700, 256, found=2560, loaded=2560, tiers=TierChunks(pool=10))
    assert hit.text().splitlines() == [
        "  2700 tokens: 0 in the engine's own cache, 2560 loaded (pool 2560), 140 computed",
        "  no miss: every whole chunk of the prompt was there",
    ]
    late = RequestReport.of(
        1000, 256, at_hand=256, found=768, loaded=512, tiers=TierChunks(1, 0, 1), reason="deadline"
    )
    assert late.text().splitlines() == [
        "  1000 tokens: 256 in the engine's own cache, 512 loaded of 768 found (memory 256, pool 256), 232 computed",
        "  deadline: a deadline passed first",
    ]
    assert "0 loaded, 1000 computed" in RequestReport.of(1000, 256, reason="never_stored").text()


def test_every_status_and_kind_of_damage_has_a_reason():
    mapped = {
        status: miss_reason(status.value) for status in Status if status not in (Status.OK, Status.NO_SPACE)
    }
    assert {status for status, reason in mapped.items() if reason == "error"} == {
        Status.INVALID,
        Status.INTERNAL,
    }
    assert {miss_reason(damage.value) for damage in Damage} == {"damaged"}
    assert miss_reason("error_KeyError") == "error"


def test_what_is_known_of_one_object_of_a_chunk_says_more_than_that_another_is_missing():
    assert worst_reason([OK, OK]) == "none"
    assert worst_reason([OK, MISSING]) == "missing"
    assert worst_reason([MISSING, DOWN]) == "pool_down"


def test_a_history_knows_what_was_there():
    history = ChunkHistory()
    assert history.explain("missing", NAMES[0]) == "never_stored", "nothing was noted yet"
    history.note(NAMES[:1])
    assert history.explain("missing", NAMES[0]) == "evicted"
    assert history.explain("missing", NAMES[1]) == "never_stored"
    assert history.explain("deadline", NAMES[0]) == "deadline"


@pytest.mark.parametrize("width", [8, 13, 32])
def test_a_history_takes_names_of_any_width(width):
    history, names = ChunkHistory(), [bytes([number]) * width for number in range(1, 40)]
    history.note(names[::2])
    explained = [history.explain("missing", name) for name in names]
    assert explained == ["never_stored" if place % 2 else "evicted" for place in range(len(names))]


def test_what_was_there_before_a_reset_is_gone_for_another_reason_than_eviction():
    history = ChunkHistory()
    history.note(NAMES[:2])
    history.follow("run-1")
    assert [history.explain("missing", name) for name in NAMES[1:3]] == ["reset", "never_stored"]
    history.note(NAMES[1:2])
    assert [history.explain("missing", name) for name in NAMES[:2]] == ["reset", "evicted"]
    history.follow("run-2")
    assert [history.explain("missing", name) for name in NAMES[:2]] == ["never_stored", "reset"]


def test_a_full_history_forgets_and_never_grows():
    history = ChunkHistory(places=2)
    names = [number.to_bytes(16, "little") for number in range(1, 100)]
    history.note(names)
    assert [name for name in names if history.explain("missing", name) == "evicted"] == names[-2:]
    assert len(history._table) == 2


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ([OK, OK, OK, OK], Found(4, 4)),
        ([OK, OK, MISSING, OK], Found(2, 2, "missing")),
        ([OK, DOWN, MISSING, MISSING], Found(1, 1, "pool_down")),
        ([MISSING, DOWN, DOWN, DOWN], Found(0, 0, "missing")),
    ],
)
def test_the_first_chunk_that_is_not_there_gives_the_reason(statuses, expected):
    assert find(over(group(0)), statuses) == expected


def test_the_reason_is_that_of_any_shard_of_the_chunk():
    lookup = over(group(0, shards=2))
    assert find(lookup, [OK, OK, OK, DOWN, OK, OK, MISSING, MISSING]) == Found(1, 1, "pool_down")


def test_chunks_that_were_found_once_count_as_evicted_when_they_are_gone():
    lookup = over(group(0), history=ChunkHistory())
    assert find(lookup, [OK, OK, MISSING, MISSING]) == Found(2, 2, "never_stored")
    assert find(lookup, [OK, MISSING, MISSING, MISSING]) == Found(1, 1, "evicted")
    assert find(lookup, [MISSING, MISSING], at_hand=2) == Found(2, 2, "never_stored")


def test_a_prefix_that_only_lacks_its_window_says_so():
    lookup = over(group(0), group(1, layers="1"), history=ChunkHistory())
    assert find(lookup, [OK] * 4 + [MISSING, OK, MISSING, MISSING]) == Found(2, 4, "no_tail")
    assert find(lookup, [OK] * 4 + [MISSING, OK, DOWN, DOWN]) == Found(2, 4, "pool_down")
    assert find(lookup, [OK] * 2 + [MISSING] * 2 + [OK] * 2 + [MISSING] * 2) == Found(2, 2, "evicted")


def test_a_group_that_is_ahead_lacks_nothing_at_the_end():
    lookup = over(group(0), group(0, layers="1", ahead=1))
    assert find(lookup, [OK] * 4 + [MISSING] + [OK] * 3) == Found(3, 3)
    assert find(lookup, [OK] * 4 + [MISSING, OK, OK, MISSING]) == Found(2, 2, "missing")
    assert find(lookup, [OK] * 8) == find(lookup, [OK] * 4, at_hand=2) == Found(3, 3), (
        "nothing names the last one's KV"
    )


# --- reports on requests ------------------------------------------------------------------------------------


@given(*(st.integers(0, 40) for _ in range(3)))
def test_every_token_was_at_hand_or_loaded_or_computed(asked, loaded, at_hand):
    report = RequestReport.of(asked, 8, at_hand=at_hand, loaded=loaded)
    assert report.at_hand + report.loaded + report.computed == report.asked == asked


def test_tiers_count_whole_chunks():
    report = RequestReport.of(
        32, 8, found=32, loaded=31, tiers=TierChunks(memory=1, disk=1, pool=2), streamed=16
    )
    assert (report.memory, report.disk, report.pool, report.computed) == (8, 8, 16, 1)
    tiers = "(memory=8 disk=8 pool=16)"
    assert (
        report.line() == f"asked=32 at_hand=0 found=32 loaded=31 {tiers} streamed=16 computed=1 reason=none"
    )


def test_a_prompt_without_a_whole_chunk_is_too_short_for_any_other_reason():
    assert RequestReport.of(7, 8, reason="pool_down").reason == "too_short"
    assert RequestReport.of(8, 8, reason="pool_down").reason == "pool_down"
