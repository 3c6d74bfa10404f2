"""One more participant of a bench that runs on this machine alone: `python -m bench.lib.fleet BENCH SITE -c FILE --node NAME …`."""

from __future__ import annotations

import click

from bench.lib.fleet import Fleet, FleetError, FleetOptions, conduct, fleet_options
from bench.lib.fleet.crew import imported
from bench.lib.fleet.stuck import end_if_stuck


@click.command()
@click.argument("bench")
@click.argument("site")
@fleet_options
def main(fleet: FleetOptions, bench: str, site: str) -> None:
    """For `bench.lib.fleet.local`; SITE is `module:class`."""

    def lead(_: Fleet) -> None:
        raise AssertionError("the coordinator is another process")

    try:
        conduct(bench, fleet, imported(site), lead)
    except FleetError:
        end_if_stuck(1)
        raise SystemExit(1) from None  # the coordinator, beside us, has the error


if __name__ == "__main__":
    main()
