"""Keys from a terminal, one at a time and without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from launch.top.watched import Key

_KEYS: dict[bytes, Key] = {
    b"q": "quit",
    b"Q": "quit",
    b"\x04": "quit",
    b"j": "down",
    b"k": "up",
    b"g": "first",
    b"G": "last",
    b"s": "sort",
    b"r": "reverse",
    b"f": "follow",
    b"\r": "follow",
    b"\n": "follow",
    b"h": "help",
    b"?": "help",
    b"\x1b": "back",
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[H": "first",
    b"\x1b[F": "last",
}


def read_keys(typed: bytes) -> list[Key]:
    """Returns the keys among what was typed. Ignores all others."""
    keys: list[Key] = []
    at = 0
    while at < len(typed):
        length = 1
        if typed[at : at + 2] in (b"\x1b[", b"\x1bO"):
            length = 2
            while at + length < len(typed) and not 0x40 <= typed[at + length] <= 0x7E:
                length += 1
            length += 1
        if (key := _KEYS.get(typed[at : at + length])) is not None:
            keys.append(key)
        at += length
    return keys


class Keyboard:
    """The terminal at standard input."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def wait(self, seconds: float) -> list[Key]:
        """Waits for keys, for so long at most. If the input has ended, it just waits."""
        if self._descriptor is None:
            select.select([], [], [], seconds)
            return []
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return []
        try:
            typed = os.read(self._descriptor, 256)
        except OSError:
            typed = b""
        if not typed:
            self._descriptor = None
        return read_keys(typed)


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Yields the keyboard, and restores the terminal afterwards. Without a terminal at standard input there are no keys."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        silent = Keyboard(descriptor)
        silent._descriptor = None
        yield silent
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keyboard(descriptor)
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
