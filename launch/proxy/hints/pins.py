"""Pins: which chunks are kept in the pool until when. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from launch.proxy.hints.messages import HintRefusedError
from launch.proxy.keys import Client


def fair(holder: str, held: int, free: int) -> bool:
    """Returns whether a holder of `held` items may take another item: only if more than `held` items are
    free.

    So a single holder takes at most half, and the next one always finds some. Without keys, all clients are
    one holder, which may take all.
    """
    return held < free if holder else free > 0


class Pin(NamedTuple):
    names: Sequence[bytes]
    """The chunks that are kept."""
    target: bytes
    """The name of the prompt's last chunk. It identifies the whole prompt, even if only a part is kept."""
    space: tuple[str, str]
    """The namespace and the weights version of the chunks."""
    until: float
    once: bool = False
    """Whether the next request with the prompt ends the pin."""


PinKey = tuple[Client, str]
"""A pin's client, and the id of the action that made it."""


class Pins:
    """All pins, and which chunks they keep."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pins: dict[PinKey, Pin] = {}
        self._uses: dict[str, Counter[bytes]] = {}
        """For each holder, how many of its pins contain each chunk."""

    def __len__(self) -> int:
        return len(self._pins)

    def chunks(self) -> list[bytes]:
        """Returns the names of all chunks that are kept, each once."""
        return list(dict.fromkeys(chain.from_iterable(self._uses.values())))

    def retain(self, key: PinKey, pin: Pin, room: int, tenant_room: int | None = None) -> int:
        """Keeps as many leading chunks of the pin as fit: all pins have room for `room` chunks, and those of
        its tenant for `tenant_room`. The pin replaces an earlier pin of that key. Returns how many chunks are
        kept; 0 if nothing has changed. Raises HintRefusedError if there are too many pins."""
        holder = key[0].holder
        held = sum(client.holder == holder for client, _ in self._pins)
        if key not in self._pins and not fair(holder, held, self._most - len(self._pins)):
            raise HintRefusedError(
                f"all {self._most} pins are taken, or this client has as many pins as are free"
            )
        before, own, count = self._end(key), self._uses.get(holder, ()), 0
        mine, left = len(own), room - self._taken()
        for name in pin.names:
            if name not in own:
                if not (fair(holder, mine, left) if tenant_room is None else mine < tenant_room and left > 0):
                    break
                mine, left = mine + 1, left - 1
            count += 1
        kept = pin._replace(names=pin.names[:count]) if count else before
        if kept is not None:
            self._pins[key] = kept
            self._uses.setdefault(holder, Counter()).update(kept.names)
        return count

    def end_where(self, ends: Callable[[PinKey, Pin], bool]) -> int:
        """Ends the pins for which `ends(key, pin)` is true. Returns how many."""
        ended = [key for key, pin in self._pins.items() if ends(key, pin)]
        for key in ended:
            self._end(key)
        return len(ended)

    def shrink(self, room: int, tenant_room: Callable[[str], int | None]) -> None:
        """Ends the newest pins until all pins have at most `room` chunks, and each tenant's pins are within
        its present bound."""
        for key in reversed(list(self._pins)):
            most = tenant_room(key[0].tenant)
            if self._taken() > room or (most is not None and len(self._uses[key[0].holder]) > most):
                self._end(key)

    def _taken(self) -> int:
        return sum(map(len, self._uses.values()))

    def _end(self, key: PinKey) -> Pin | None:
        pin = self._pins.pop(key, None)
        if pin is not None:
            holder = key[0].holder
            self._uses[holder] -= Counter(pin.names)  # keeps only what is still used
            if not self._uses[holder]:
                del self._uses[holder]
        return pin
