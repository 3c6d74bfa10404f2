"""The smallest bench: every machine says hello, at the same time. It can hang and fail on demand."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
import msgspec

from bench.fleet import Fleet, FleetOptions, Place, Site, conduct, fleet_options, step


class Word(msgspec.Struct, frozen=True):
    text: str
    hang: str = ""
    """A file to make, before waiting for ever."""
    fail: bool = False


class Said(msgspec.Struct, frozen=True):
    text: str
    begin: float
    end: float


class Echo(Site):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        print(f"{place.node} open", file=sys.stderr)

    @step
    def say(self, job: Word) -> Said:
        begin = time.time()
        if job.fail:
            raise RuntimeError(f"{self.place.node} cannot")
        if job.hang:
            Path(job.hang).touch()
            self.stopping.wait(60)
        time.sleep(0.3)
        return Said(f"{job.text} {self.place.node}", begin, time.time())

    def close(self) -> None:
        print(f"{self.place.node} closed", file=sys.stderr)


@click.command()
@click.option("--hang")
@click.option("--fail")
@click.option("--step-timeout", default=30.0)
@fleet_options
def main(fleet: FleetOptions, hang: str | None, fail: str | None, step_timeout: float) -> None:
    def lead(all_of_us: Fleet) -> dict[str, Said]:
        assert set(all_of_us.hosts.values()) == {"127.0.0.1"}
        jobs = {
            node: Word(
                "hello",
                hang=str(fleet.file.parent / f"{node}.hangs") if node == hang and fleet.file else "",
                fail=node == fail,
            )
            for node in all_of_us.nodes
        }
        return all_of_us.run(Echo.say, jobs, timeout_s=step_timeout)

    said = conduct("echo", fleet, Echo, lead)
    if said is not None:
        overlap = max(one.begin for one in said.values()) < min(one.end for one in said.values())
        print(json.dumps({"words": {node: one.text for node, one in said.items()}, "overlap": overlap}))


if __name__ == "__main__":
    main()
