"""One process of a crew: `python -m bench.lib.fleet.child SITE DESCRIPTOR FILE NAME HOST`, started by `bench.lib.fleet.crew`."""

from __future__ import annotations

import signal
import socket
import sys

from bench.lib.fleet.crew import imported
from bench.lib.fleet.errors import FleetError
from bench.lib.fleet.participant import serve
from bench.lib.fleet.site import Place
from bench.lib.fleet.stuck import end_if_stuck
from bench.lib.fleet.wire import Connection
from pd_cache.config import load_config


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
