"""The plan of a soak: a function of its seed, with every kind of fault in it."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from bench.suites.soak.faults import ACTIONS
from bench.suites.soak.kinds import EVERYTHING, HOSTS, KINDS, LONG_KINDS, NODES, Kind, touched
from bench.suites.soak.plan import (
    CHUNK,
    LONGEST,
    Fault,
    PlannedPrompt,
    check_prompts,
    completions,
    coverage,
    faults,
    operations,
    served_prompts,
    tokens_of,
)

_MARGIN_S = 2.9


def _kind_of(fault: Fault) -> Kind:
    kinds = LONG_KINDS if fault.seconds > 60 else KINDS
    return next(kind for kind in kinds if kind.name == fault.kind)


def test_one_seed_makes_one_plan() -> None:
    assert faults(5, 600, EVERYTHING) == faults(5, 600, EVERYTHING)
    assert faults(5, 600, EVERYTHING) != faults(6, 600, EVERYTHING)
    assert list(islice(operations(5, "engine-a/0"), 50)) == list(islice(operations(5, "engine-a/0"), 50))
    assert list(islice(operations(5, "engine-a/0"), 50)) != list(islice(operations(5, "engine-a/1"), 50))
    assert list(islice(completions(5, "client/0", 8), 50)) == list(islice(completions(5, "client/0", 8), 50))
    assert served_prompts(5, 8) == served_prompts(5, 8)
    assert check_prompts(5, 4) == check_prompts(5, 4)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_have_every_kind_and_stops_that_outlast_a_minute(seed: int) -> None:
    planned = faults(seed, 600, EVERYTHING)
    counted = coverage(planned)
    assert {name.removesuffix(">60") for name in counted} == {kind.name for kind in KINDS}
    assert counted["stop>60"] >= 1
    first = next(fault for fault in planned if fault.seconds > 60)
    assert first.kind == "stop"
    assert first.target.startswith("store-")


@pytest.mark.parametrize("seed", range(20))
def test_no_two_faults_touch_a_node_at_the_same_time(seed: int) -> None:
    planned = faults(seed, 600, EVERYTHING)
    for index, one in enumerate(planned):
        for other in planned[index + 1 :]:
            if other.at < one.at + one.seconds:
                assert not touched(_kind_of(one), one.target) & touched(_kind_of(other), other.target), (one, other)


@pytest.mark.parametrize("seed", range(5))
def test_a_short_run_has_quick_faults_one_after_the_other_and_all_of_them_fit(seed: int) -> None:
    planned = faults(seed, 24, EVERYTHING)
    assert all(fault.seconds <= 3 and fault.at + fault.seconds <= 24 for fault in planned)
    assert all(one.at + one.seconds < other.at for one, other in pairwise(planned))
    assert {fault.kind for fault in planned} <= {kind.name for kind in KINDS if kind.quick}


def test_a_machine_without_namespaces_has_only_the_faults_that_it_can_have() -> None:
    needing = {kind.name for kind in KINDS if kind.needs}
    assert needing
    assert not needing & {fault.kind for fault in faults(1, 600, frozenset())}


def test_every_kind_has_an_action_and_known_targets() -> None:
    assert {kind.name for kind in (*KINDS, *LONG_KINDS)} == set(ACTIONS)
    for kind in (*KINDS, *LONG_KINDS):
        assert set(kind.targets) <= {*NODES, *HOSTS}  # also etcd, which has a host of its own name
        assert 0 < kind.shortest <= kind.longest <= 90


def test_operations_stay_within_the_longest_prompt_and_some_reach_it() -> None:
    drawn = list(islice(operations(3, "engine-a/0"), 2000))
    assert [operation.number for operation in drawn] == list(range(2000))
    assert {operation.kind for operation in drawn} == {"store", "retrieve", "lookup", "unknown", "remove"}
    assert max(operation.prompt.chunks for operation in drawn) > 240
    for operation in drawn:
        assert CHUNK <= operation.prompt.length <= LONGEST * CHUNK
        assert 0 <= operation.first < operation.prompt.chunks
    assert "remove" not in {operation.kind for operation in islice(operations(3, "engine-b/0", removes=False), 500)}


def test_prompts_of_one_family_share_their_beginning() -> None:
    one, other = tokens_of(3, PlannedPrompt(2, 100, 7, 20)), tokens_of(3, PlannedPrompt(2, 160, 8, 20))
    assert one[:100] == other[:100]
    assert one[100:] != other[100:120]
    assert len(one) == 120
