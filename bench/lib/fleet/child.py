"""A participant on its coordinator's machine: `python -m bench.lib.fleet.child BENCH SITE ADDRESS FILE NAME HOST` (`children.py`)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from bench.lib.fleet.children import imported
from bench.lib.fleet.messages import FleetError, end_if_stuck
from bench.lib.fleet.participant import CoordinatorLink, serve
from bench.lib.fleet.site import Location
from pd_cache.cluster import load_config

_WAIT_S = 60.0


def main(bench: str, site: str, address: str, file: str, name: str, host: str) -> None:
    """Does what the coordinator asks for, until it is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that started us
    kind = imported(site)  # it may take long, and nothing waits for it yet
    location = Location(name, host, load_config(Path(file)))
    link = CoordinatorLink(bench, location)
    try:
        link.join(name, lambda: address, _WAIT_S, lambda _: None)
        serve(kind, location, link)
    except FleetError:
        raise SystemExit(1) from None  # the coordinator knows, or is gone
    finally:
        link.close()
        end_if_stuck(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
