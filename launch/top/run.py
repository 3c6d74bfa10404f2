"""The loop of `pd-cache top`."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from launch.access import proxy_access
from launch.discovery import Directory, open_directory
from launch.top.asker import TIMEOUT_S, Asker
from launch.top.screen import draw, snapshot
from launch.top.terminal import keyboard
from launch.top.watched import WatchedCluster
from pd_cache.cluster import ClusterConfig

_NO_READER = (errno.EIO, errno.EPIPE)
"""The terminal was closed, or the pipe's other end."""
_SYNC_S = 5.0
_TICK_S = 0.1
_REDRAW_S = 0.5
_STALE_S = 10.0
"""After how many seconds without a new reading a node counts as silent. The time from one question to the next is added."""
_PLAIN_WIDTH = 200
"""The width of a snapshot where there is no terminal to say one."""


def top(config: ClusterConfig, *, once: bool = False, interval_s: float = 2.0) -> None:
    """Shows the nodes until `q` or Ctrl-C. Prints them once, as plain text, if `once` is set, or if standard output is no terminal or one that
    cannot move its cursor (`TERM=dumb`).

    `interval_s`: how often each node is asked.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and arrows are question marks where the locale has none
    console = Console()
    with (
        open_directory(config) as directory,
        contextlib.closing(Asker(proxy_access(config), interval_s)) as asker,
        contextlib.suppress(KeyboardInterrupt),
    ):
        directory.wait_synced(_SYNC_S)
        try:
            if once or not console.is_terminal or console.is_dumb_terminal:
                _print_once(console, directory, asker, interval_s, _source(config))
            else:
                _follow(console, directory, asker, WatchedCluster(_STALE_S + interval_s), _source(config))
        except OSError as error:
            if error.errno not in _NO_READER:
                raise


def _source(config: ClusterConfig) -> str:
    return f"{config.name}, {config.discovery.__struct_config__.tag}"


def _print_once(console: Console, directory: Directory, asker: Asker, interval_s: float, source: str) -> None:
    """Asks every node twice, so that there are rates, and prints one table."""
    watched = WatchedCluster(_STALE_S + interval_s)
    deadline = time.monotonic() + 5 * TIMEOUT_S + 2 * interval_s  # reached only where this machine itself is slow
    while True:
        records, now = directory.view().nodes, time.monotonic()
        watched.update(records)
        watched.take(asker.poll(records, now))
        settled = all(row.state in ("-", "silent") or row.rates is not None for row in watched.rows(now))
        if settled or now > deadline:
            break
        time.sleep(_TICK_S)
    width = console.width if console.is_terminal else max(console.width, _PLAIN_WIDTH)
    Console(width=width, highlight=False).print(snapshot(watched, width, now, source), soft_wrap=True)


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    """Keeps lines of the log, such as those about discovery, off the screen, which shows the same."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _follow(console: Console, directory: Directory, asker: Asker, watched: WatchedCluster, source: str) -> None:
    drawn, size = 0.0, console.size
    with _no_log(), keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view, now = directory.view(), time.monotonic()
            watched.update(view.nodes)
            answers = asker.poll(view.nodes, now)
            watched.take(answers)
            pressed = keys.wait(0.0)
            if not all(watched.press(key, now) for key in pressed):
                return
            if pressed or answers or size != console.size or now - drawn >= _REDRAW_S:
                drawn, size = now, console.size
                stale = "" if view.stale_since is None else f", silent for {now - view.stale_since:.0f} s"
                live.update(draw(watched, size.width, size.height, now, source + stale), refresh=True)
            if not all(watched.press(key, now) for key in keys.wait(_TICK_S)):
                return
