"""The one way in: `conduct` runs a bench on this machine's part, whichever that is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

import click

from bench.lib.fleet.coordinator import Fleet
from bench.lib.fleet.local import local_participants
from bench.lib.fleet.members import Door
from bench.lib.fleet.options import FleetOptions, Plan, plan
from bench.lib.fleet.participant import join, serve
from bench.lib.fleet.rendezvous import meeting
from bench.lib.fleet.site import Place, Site
from pd_cache.errors import ConfigError

T = TypeVar("T")


def conduct(
    bench: str,
    options: FleetOptions,
    site: type[Site] | Callable[[Place], Site],
    lead: Callable[[Fleet], T],
    *,
    local: int = 2,
) -> T | None:
    """Take part in the bench of this name; blocks until it is over.

    At the coordinator: wait for everybody, return what `lead(fleet)` returned. Elsewhere: do steps, return None. Without a file:
    `options.local` or `local` participants on this machine, of which this process is the coordinator; for that, `site` must be a
    class that can be imported. FleetError, ConfigError, or what `lead` raised; Ctrl-C and SIGTERM are KeyboardInterrupt.
    Call it on the main thread.
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
    bench: str, here: Plan, site: Callable[[Place], Site], lead: Callable[[Fleet], T], tell: Callable[[str], None]
) -> T | None:
    place = here.place
    if here.expected in (1, frozenset((place.node,))):
        return _alone(site(place), lead)
    with meeting(here, bench, tell) as met:
        if met.listener is None:
            connection = join(met, bench, place, here.wait_s, tell)
            why = ""
            try:
                serve(site(place), connection)
            except Exception as error:  # whatever it was: the coordinator is told why, and it goes on to the caller
                why = str(error)
                raise
            finally:
                connection.close(why)
            return None
        door = Door(met.listener, bench, here.expected, place.node)
        try:
            members = door.wait(here.wait_s, tell)
        except BaseException:
            door.close()
            raise
        own = None
        why = f"interrupted at the coordinator {place.node}"
        try:
            own = site(place)
            result = lead(Fleet(own, members, door.changed))
            why = ""
            return result
        except Exception as error:  # whatever it was: everybody is told why, and it goes on to the caller
            why = str(error)
            raise
        finally:
            for member in members:
                assert member.connection is not None
                member.connection.close(None if member.lost else why)
            door.close()
            if own is not None:
                own.shut()


def _alone(own: Site, lead: Callable[[Fleet], T]) -> T:
    try:
        return lead(Fleet(own))
    finally:
        own.shut()


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
    """SIGTERM ends as Ctrl-C does: everybody is told, everything is closed."""
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
