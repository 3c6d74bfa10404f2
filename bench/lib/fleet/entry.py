"""The one way in: `conduct` runs a bench on this machine's part, whichever that is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

import click

from bench.lib.fleet.children import local_participants
from bench.lib.fleet.coordinator import Fleet
from bench.lib.fleet.messages import FleetError
from bench.lib.fleet.options import FleetOptions, Participation, plan
from bench.lib.fleet.participant import CoordinatorLink, serve
from bench.lib.fleet.rendezvous import Meeting, meeting
from bench.lib.fleet.site import Site
from pd_cache.errors import ConfigError

T = TypeVar("T")
_END_S = 60.0
"""How long the coordinator's own site may take to close."""


def conduct(
    bench: str,
    options: FleetOptions,
    site: type[Site],
    lead: Callable[[Fleet], T],
    *,
    local: int = 2,
) -> T | None:
    """Takes part in the bench of this name; blocks until it is over.

    The coordinator waits for all participants, and returns what `lead(fleet)` returned. The others do steps, and return None. Without a
    file there are `options.local` or `local` participants on this machine, of which this process is the coordinator; for that, `site`
    must be a class that can be imported. Raises FleetError, ConfigError, or what `lead` raised; Ctrl-C and SIGTERM become
    KeyboardInterrupt. Call it on the main thread.
    """
    tell = _Teller()
    with _interruptible():
        if options.file is None:
            if given := [name for name in ("node", "nodes", "coordinator") if getattr(options, name)]:
                raise ConfigError(f"--{given[0]}: needs the cluster's file: -c FILE")
            with local_participants(bench, site, options.local or local) as here:
                return _take_part(bench, here, site, lead, tell)
        if options.local:
            raise ConfigError("--local: goes without a file; with -c, --nodes says who takes part")
        return _take_part(bench, plan(options), site, lead, tell)


def _take_part(
    bench: str, here: Participation, site: type[Site], lead: Callable[[Fleet], T], tell: Callable[[str], None]
) -> T | None:
    with meeting(here, bench, tell) as met:
        if met.listener is None:
            _join(bench, here, site, met, tell)
            return None
        fleet = Fleet(met.listener, bench, here.location, here.expected)
        own = threading.Thread(
            target=_join_quietly, args=(bench, here, site, met, tell), name="bench-own-site", daemon=True
        )
        why = f"interrupted at the coordinator {fleet.own}"
        try:
            own.start()
            fleet.gather(here.wait_s, tell)
            result = lead(fleet)
            why = ""
            return result
        except Exception as error:  # of any kind: all participants learn the reason, and the caller gets it
            why = str(error)
            raise
        finally:
            fleet.end(why)
            own.join(_END_S)


def _join(bench: str, here: Participation, site: type[Site], met: Meeting, tell: Callable[[str], None]) -> None:
    link = CoordinatorLink(bench, here.location)
    try:
        link.join(met.leader, met.find, here.wait_s, tell)
        serve(site, here.location, link)
    finally:
        link.close()


def _join_quietly(bench: str, here: Participation, site: type[Site], met: Meeting, tell: Callable[[str], None]) -> None:
    """Runs the coordinator's own part, as a participant like any other."""
    with suppress(FleetError):
        _join(bench, here, site, met, lambda _: None)


class _Teller:
    """Says on stderr what is waited for, each thing once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            click.echo(text, err=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Makes SIGTERM end the bench as Ctrl-C does: all participants are informed, everything is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        with suppress(TypeError):  # it was set outside of Python
            signal.signal(signal.SIGTERM, before)
