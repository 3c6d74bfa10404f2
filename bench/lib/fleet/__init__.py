"""Benches across machines: every machine runs the same command, and one of them, the coordinator, prints the report.

1. Each machine takes the cluster's file and the name of a node. Participants find one another through discovery: in the file, or
   by registering in etcd, beside the nodes, where routing never sees them (`rendezvous`).
2. Which of them is the coordinator follows from the names alone; `--coordinator` overrides it. The others connect to it, and
   it begins when everybody is there.
3. A bench is a `Site`, which every machine has one of and whose methods marked `@step` do the work, and a function that leads:
   it runs at the coordinator only, and has the sites do steps, all at the same time (`Fleet.run`).
4. Every wait has a deadline. The coordinator's error names participants that are gone, late or failing, and everybody else ends
   with that error, too; a Ctrl-C anywhere ends all. Each site is closed whatever happened. Nothing is authenticated.
5. A site that needs more processes than its own, e.g. many clients, has a `Crew`, whose processes have sites, too.
6. Without a file, a bench has participants of its own on this machine, one process each (`children`).

A bench, whole:

    class Echo(Site):
        @step
        def say(self, job: Word) -> Word:           # both are msgspec structs
            return job

    def lead(fleet: Fleet) -> dict[str, Word]:
        return fleet.everywhere(Echo.say, Word("hello"), timeout_s=10)

    @click.command()
    @fleet_options
    def main(fleet: FleetOptions) -> None:
        answers = conduct("echo", fleet, Echo, lead)
        if answers is not None:                     # None: this machine is not the coordinator
            print(answers)
"""

from bench.lib.fleet.children import Crew
from bench.lib.fleet.coordinator import Fleet
from bench.lib.fleet.entry import conduct
from bench.lib.fleet.messages import FleetError
from bench.lib.fleet.options import FleetOptions, fleet_options
from bench.lib.fleet.site import Location, Nothing, Site, step

__all__ = [
    "Crew",
    "Fleet",
    "FleetError",
    "FleetOptions",
    "Location",
    "Nothing",
    "Site",
    "conduct",
    "fleet_options",
    "step",
]
