"""Processes beside a site: they work together, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from bench.lib.fleet import Crew, FleetError, Location
from pd_cache.cluster import ClusterConfig, MasterNode
from tests.support.echo_bench import Echo, Word
from tests.support.pool import ROOT
from tests.support.waiting import wait_for


@pytest.fixture
def crew() -> Iterator[Crew]:
    with closing(Crew(Echo, Location("a", "127.0.0.1", ClusterConfig(nodes=(MasterNode(name="m"),))))) as crew:
        yield crew


def test_it_grows_and_a_part_of_it_can_work_at_the_same_time(crew: Crew, tmp_path: Path) -> None:
    crew.grow(2)
    assert [said.text for said in crew.run(Echo.say, Word("hi"), timeout_s=120)] == ["hi a-0", "hi a-1"]
    crew.grow(3)
    said = crew.run(Echo.say, Word("hi", meet=str(tmp_path), of=2), timeout_s=120, of=range(1, 3))
    assert [one.text for one in said] == ["hi a-1", "hi a-2"]
    crew.grow(1)
    assert len(crew) == 3


def test_one_that_fails_is_named(crew: Crew) -> None:
    crew.grow(2)
    with pytest.raises(FleetError, match=r"a-1 \(127.0.0.1\): say: RuntimeError: a-1 cannot"):
        crew.run(Echo.say, Word("hi", fail=True), timeout_s=120, of=range(1, 2))


def test_one_that_is_killed_is_named_at_once(crew: Crew) -> None:
    crew.grow(2)
    crew.run(Echo.say, Word("hi"), timeout_s=120)
    victim = next(one for one in psutil.Process().children() if "a-1" in one.cmdline())
    victim.kill()
    with pytest.raises(FleetError, match=r"a-1 \(127.0.0.1\)"):
        crew.run(Echo.say, Word("hi"), timeout_s=600)


def test_an_outcome_that_comes_too_late_is_not_taken_for_that_of_the_next_step(crew: Crew, tmp_path: Path) -> None:
    crew.grow(1)
    crew.run(Echo.say, Word("warm"), timeout_s=120)
    with pytest.raises(FleetError, match=r"did not finish say within 0.01 s"):
        crew.run(Echo.say, Word("first", until=str(tmp_path / "go on")), timeout_s=0.01)
    with pytest.raises(FleetError, match="say is not over"):
        crew.run(Echo.say, Word("second"), timeout_s=120)
    (tmp_path / "go on").touch()

    def over() -> bool:
        try:
            return [said.text for said in crew.run(Echo.say, Word("third"), timeout_s=120)] == ["third a-0"]
        except FleetError:
            return False

    wait_for(over, what="the first step being over, and the next one answered with its own outcome")


def test_too_many_are_refused(crew: Crew) -> None:
    with pytest.raises(FleetError, match="1024 are allowed"):
        crew.grow(2000)


def test_they_end_by_themselves_when_their_starter_is_killed() -> None:
    program = (
        "import time; from bench.lib.fleet import Crew, Location; from tests.support.echo_bench import Echo, Word;"
        "from pd_cache.cluster import ClusterConfig, MasterNode;"
        "crew = Crew(Echo, Location('a', '127.0.0.1', ClusterConfig(nodes=(MasterNode(name='m'),)))); crew.grow(2);"
        "crew.run(Echo.say, Word('hi'), timeout_s=120); print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"ready\n"
        children = psutil.Process(starter.pid).children()
        assert len(children) == 2
        os.kill(starter.pid, signal.SIGKILL)
    wait_for(lambda: not any(one.is_running() for one in children), 15, "the processes being gone")
