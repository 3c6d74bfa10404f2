"""The smallest bench: every machine says hello, when all have begun. It can hang and fail on demand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import msgspec

from bench.lib.fleet import Fleet, FleetOptions, Location, Site, conduct, fleet_options, step
from tests.support.waiting import wait_for


class Word(msgspec.Struct, frozen=True):
    text: str
    meet: str = ""
    """A folder where each of `of` machines makes a file, and waits until all have: none ends before all have begun."""
    of: int = 0
    until: str = ""
    """A file to wait for."""
    hang: str = ""
    """A file to make, before waiting for ever."""
    fail: bool = False


class Said(msgspec.Struct, frozen=True):
    text: str


class Echo(Site):
    def __init__(self, location: Location) -> None:
        super().__init__(location)
        print(f"{location.node} open", file=sys.stderr)

    @step
    def say(self, job: Word) -> Said:
        if job.fail:
            raise RuntimeError(f"{self.location.node} cannot")
        if job.hang:
            Path(job.hang).touch()
            self.stopping.wait(600)
        if job.meet:
            Path(job.meet, f"{self.location.node}.meets").touch()
            wait_for(lambda: len(list(Path(job.meet).glob("*.meets"))) >= job.of, what="the others beginning")
        if job.until:
            wait_for(Path(job.until).exists, what=job.until)
        return Said(f"{job.text} {self.location.node}")

    def close(self) -> None:
        print(f"{self.location.node} closed", file=sys.stderr)


@click.command()
@click.option("--hang")
@click.option("--fail")
@click.option("--step-timeout", default=120.0)
@fleet_options
def main(fleet: FleetOptions, hang: str | None, fail: str | None, step_timeout: float) -> None:
    print("begun", file=sys.stderr, flush=True)

    def lead(all_of_us: Fleet) -> dict[str, Said]:
        assert set(all_of_us.hosts.values()) == {"127.0.0.1"}
        meet = str(fleet.file.parent) if fleet.file is not None and not hang and not fail else ""
        jobs = {
            node: Word(
                "hello",
                meet=meet,
                of=len(all_of_us.nodes),
                hang=str(fleet.file.parent / f"{node}.hangs") if node == hang and fleet.file else "",
                fail=node == fail,
            )
            for node in all_of_us.nodes
        }
        return all_of_us.run(Echo.say, jobs, timeout_s=step_timeout)

    said = conduct("echo", fleet, Echo, lead)
    if said is not None:
        print(json.dumps({"words": {node: one.text for node, one in said.items()}}))


if __name__ == "__main__":
    main()
