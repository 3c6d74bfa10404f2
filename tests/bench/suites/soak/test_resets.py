"""New weights and resets in a soak, by histories of what engines answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.suites.soak.ledger import Ledger
from bench.suites.soak.resets import Resets


class Engine:
    """An engine's process, which notes what it is told."""

    def __init__(self) -> None:
        self.pid: int | None = 1
        self.starts = 1
        self.told: list[dict[str, Any]] = []

    def tell(self, command: dict[str, Any]) -> None:
        self.told.append(command)

    @property
    def resets(self) -> int:
        return sum(command["do"] == "reset" for command in self.told)


class Scene:
    """Two engines, and time that passes only when it is told to."""

    def __init__(self) -> None:
        self.a, self.b = Engine(), Engine()
        self.ledger = Ledger()
        self._due: list[Callable[[], None]] = []
        cluster: Any = {"engine-a": self.a, "engine-b": self.b}
        self.resets = Resets(cluster, self.ledger, lambda seconds, action: self._due.append(action))

    def look(self) -> None:
        """What is due is done."""
        due, self._due = self._due, []
        for action in due:
            action()

    def has(self, engine: str, number: int) -> None:
        self.ledger.event(engine, {"e": "weights", "number": number})

    def answers(self, engine: str, number: int, *, taken: bool) -> None:
        event = {"e": "reset", "number": number, "taken": taken, "complaint": "", "end": 7.0}
        self.ledger.event(engine, event)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.resets.begin("engine-a")
    return scene


def test_an_engine_resets_when_all_engines_have_the_new_weights(scene: Scene) -> None:
    assert scene.a.told == scene.b.told == [{"do": "weights", "number": 1}]
    scene.has("engine-a", 1)
    scene.look()
    assert scene.a.resets == 0
    scene.has("engine-b", 1)
    scene.look()
    assert (scene.a.resets, scene.b.resets) == (1, 0)
    scene.answers("engine-a", 1, taken=True)
    scene.look()
    scene.look()
    assert scene.a.resets == 1
    assert scene.ledger.resets == {1: 7.0}


def test_a_reset_that_the_pool_does_not_take_is_tried_again(scene: Scene) -> None:
    for engine in ("engine-a", "engine-b"):
        scene.has(engine, 1)
    for tried in (1, 2, 3):
        scene.look()
        assert scene.a.resets == tried
        scene.answers("engine-a", 1, taken=False)


def test_an_engine_that_is_down_is_not_waited_for_and_the_other_one_resets(scene: Scene) -> None:
    scene.a.pid = None
    scene.has("engine-b", 1)
    scene.look()
    assert (scene.a.resets, scene.b.resets) == (0, 1)


def test_an_engine_that_is_killed_while_it_resets_is_told_again_when_it_is_back(scene: Scene) -> None:
    for engine in ("engine-a", "engine-b"):
        scene.has(engine, 1)
    scene.look()
    scene.a.starts = 2
    scene.look()
    assert scene.a.resets == 2


def test_a_second_change_waits_for_the_end_of_the_first(scene: Scene) -> None:
    scene.resets.begin("engine-b")
    assert scene.resets.weights == 1
    scene.answers("engine-a", 1, taken=True)
    scene.resets.begin("engine-b")
    assert scene.resets.weights == 2
    assert scene.b.told[-1] == {"do": "weights", "number": 2}
