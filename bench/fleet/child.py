"""One process of a crew: `python -m bench.fleet.child SITE DESCRIPTOR FILE NAME HOST`, started by `bench.fleet.crew`."""

from __future__ import annotations

import signal
import socket
import sys

from bench.fleet.crew import imported
from bench.fleet.errors import FleetError
from bench.fleet.participant import serve
from bench.fleet.site import Place
from bench.fleet.stuck import end_if_stuck
from bench.fleet.wire import Connection
from pd_cache.cluster import load_config


def main(site: str, descriptor: str, file: str, name: str, host: str) -> None:
    """Do what the other end of the connection asks for, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever started us
    connection = Connection(socket.socket(fileno=int(descriptor)))
    try:
        serve(imported(site)(Place(name, host, load_config(file))), connection)
    except FleetError:
        raise SystemExit(1) from None  # the other end knows, or is gone
    finally:
        connection.close("")
        end_if_stuck(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
