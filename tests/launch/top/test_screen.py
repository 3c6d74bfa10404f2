"""The screen of `top` at any size, and keys as terminals send them."""

from __future__ import annotations

import io
import math
import os

import pytest
from rich.console import Console

from launch.figures import NodeReading
from launch.masters import Segment
from launch.top.asker import NodeAnswer
from launch.top.screen import columns_for, draw, seconds, short, snapshot, sparkline
from launch.top.terminal import Keyboard, read_keys
from launch.top.watched import WatchedCluster
from pd_cache.cluster import NodeRecord

ROLES = ("proxy", "prefill", "decode", "cache-server", "store", "master")


def cluster(count: int = 12, long: bool = False) -> WatchedCluster:
    """A cluster with something in every column, and a node that is silent."""
    watched = WatchedCluster()
    tail = "-with-a-name-that-is-longer-than-any-column" * long
    records = [
        NodeRecord(
            name=f"n{number}{tail}", role=ROLES[number % 6], address="http://h:1" if number % 6 < 4 else "h:1",
            metrics="http://h:2" if number % 6 == 5 else None,
        )
        for number in range(count)
    ]  # fmt: skip
    watched.update(records)
    for at in (0.0, 2.0, 4.0):
        reading = NodeReading(
            at=at,
            counts={
                ("bytes", "retrieve"): 1e9 * at, ("bytes", "store"): 1e6 * at, ("lookups", ""): 1e5 * at,
                ("tokens", "engine"): 10 * at, ("tokens", "loaded"): 70 * at, ("tokens", "computed"): 20 * at,
                ("hits", "memory"): 3 * at, ("hits", "pool"): 4 * at, ("evictions", "memory"): 9 * at,
                ("missed", "never_stored"): 20 * at, ("missed", "lease_expired"): at,
            },
            buckets=dict.fromkeys(("lookup", "first token", "retrieve"), ((0.001, 5 * at), (math.inf, 6 * at))),
            queued=3, running=128, staging=1e9, staging_used=3e8, pool_up=True, tier_bytes={"memory": 1e9},
        )  # fmt: skip
        segments = [Segment("h:1", 1 << 30, "", 1 << 29)]
        watched.take(
            NodeAnswer(record.name, at, reading, segments=segments if record.role == "master" else None)
            for record in records[:7] + records[8:]
        )
    watched.take([NodeAnswer(records[7].name, 4.0, None, "Connection refused\\x1b[2J" + "x" * 300)])
    return watched


def shown(watched: WatchedCluster, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(draw(watched, width, height, 5.0, "source"))
    return captured.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (120, 30), (40, 10), (20, 5), (1, 3), (300, 100)])
@pytest.mark.parametrize("keys", [(), ("help",), ("follow",), ("sort", "sort", "last", "reverse")])
@pytest.mark.parametrize("long", [False, True])
def test_the_screen_fits_any_terminal(size: tuple[int, int], keys: tuple[str, ...], long: bool) -> None:
    watched = cluster(long=long)
    for key in keys:
        watched.press(key, 5.0)  # type: ignore[arg-type]
    lines = shown(watched, *size)
    assert len(lines) <= size[1]
    assert all(len(line) <= size[0] for line in lines)


def test_at_80_columns_there_is_what_matters_most_and_at_200_everything() -> None:
    narrow, wide = ({column.title for column in columns_for(width)} for width in (80, 200))
    assert {"node", "state", "hit", "load/s", "store/s", "look/s", "p50   p99", "queue", "trend"} == narrow
    assert {"engine", "memory", "disk", "pool", "staging", "breaker", "evict/s", "why computed"} <= wide


def test_the_columns_of_the_tiers_come_together() -> None:
    for width in range(60, 220):
        tiers = {"engine", "memory", "disk", "pool"} & {column.title for column in columns_for(width)}
        assert len(tiers) in (0, 4)


def test_the_figures_of_a_node_are_in_its_row() -> None:
    (line,) = (line for line in shown(cluster(), 200, 50) if line.startswith("n1 "))
    for text in ("prefill", "up", "80%", "10%", "30%", "40%", "1.0G", "1.0M", "100k", "3+128", "never_stored"):
        assert text in line


def test_a_silent_node_says_since_when_and_why() -> None:
    (line,) = (line for line in shown(cluster(), 80, 50) if line.startswith("n7 "))
    assert "silent" in line
    assert "no answer: Connection refused" in line
    assert "\x1b[2J" not in line


def test_the_selected_node_is_in_sight_however_many_there_are() -> None:
    watched = cluster(200)
    watched.press("last", 5.0)
    assert any(line.startswith(watched.selected) for line in shown(watched, 80, 24))


def test_a_snapshot_has_every_node_and_no_keys() -> None:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(snapshot(cluster(100), 200, 5.0, "source"), soft_wrap=True)
    lines = captured.get().rstrip("\n").split("\n")
    assert len(lines) == 102
    assert "q end" not in captured.get()
    assert all(len(line) <= 200 for line in lines)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.2"), (999, "999"), (1000, "1.0k"), (123456, "123k"), (1e30, "huge")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize("value", [0.0, 1e-7, 0.00095, 0.0123, 0.9996, 1.0, 9.96, 99.6, 3000.0, math.inf])
def test_durations_have_five_characters_at_most(value: float) -> None:
    assert len(seconds(value)) <= 5


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], "    "), ([0.0, 0.0], "    "), ([0.0, 1.0, 8.0], "  ▁█"), ([math.nan, math.inf, 1.0], "   █")],
)
def test_sparklines(values: list[float], bars: str) -> None:
    assert sparkline(values, 4) == bars
    assert len(sparkline([1.0] * 100, 7)) == 7


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"q", ["quit"]),
        (b"jk\x1b[A\x1b[B", ["down", "up", "up", "down"]),
        (b"\x1b", ["back"]),
        (b"\x1b[15~\x1b[1;5Cx\xff\xc3\xa4", []),
        (b"\x1b[", []),
        (b"\x1b[200~q", ["quit"]),
    ],
    ids=["a letter", "arrows", "escape", "keys that mean nothing", "half a sequence", "a paste"],
)
def test_keys(typed: bytes, keys: list[str]) -> None:
    assert read_keys(typed) == keys


def test_an_input_that_ends_is_no_key_and_does_not_spin() -> None:
    reading, writing = os.pipe()
    try:
        keyboard = Keyboard(reading)
        os.write(writing, b"s")
        assert keyboard.wait(5.0) == ["sort"]
        os.close(writing)
        assert keyboard.wait(5.0) == []
        assert keyboard._descriptor is None, "it is not looked at again"
    finally:
        os.close(reading)


def test_what_a_master_calls_its_segments_cannot_steer_the_terminal() -> None:
    watched = cluster()
    watched.press("last", 5.0)
    odd = [Segment("\x1b[2J\x1b]0;owned\x07" + "x" * 500, 1 << 61, "", 1 << 61), Segment("\r\n", 0, "", 5)]
    watched.take([NodeAnswer(watched.selected, 5.0, NodeReading(at=5.0), segments=odd)])
    lines = shown(watched, 120, 40)
    assert any("\\x1b[2J" in line for line in lines)
    assert not any("\x1b" in line or "\x07" in line for line in lines)
