"""The loads of one step whose requests compute in that step, layer by layer. No thread of its own, and no vLLM.

The thread that loads notes which layers have arrived, and the model's thread waits for each layer before it reads it. Nothing that the step
computes counts before `StepArrivals.wait_over`: only then is known whether all bytes were right. A layer for which nobody waited may have
been read too early, so then no load of the step counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer.locks import Condition


class StepArrivals:
    """What has arrived of the loads of one step. Thread-safe."""

    def __init__(self, layers: Sequence[str], loads: int) -> None:
        """`layers`: the names by which the model waits, in layer order."""
        self._places = {name: place for place, name in enumerate(layers)}
        self._arrived = [0] * loads
        self._waited: set[int] = set()
        self._over = False
        self._changed = Condition()

    def arrived(self, load: int, layers: int) -> None:
        """Notes that this many layers, from the first, of a load have arrived, or that none behind them will."""
        with self._changed:
            self._arrived[load] = max(layers, self._arrived[load])
            self._changed.notify_all()

    def over(self) -> None:
        """Notes that all loads have ended, and touch no block any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, layer: str) -> None:
        """Waits until a layer has arrived in all loads, or all loads have ended. An unknown name waits for all layers."""
        place = self._places.get(layer)
        needed = len(self._places) if place is None else place + 1
        with self._changed:
            self._changed.wait_for(lambda: self._over or min(self._arrived) >= needed)
            if place is not None:
                self._waited.add(place)

    def wait_over(self) -> bool:
        """Waits until all loads have ended. Returns whether each layer was waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)
            return len(self._waited) == len(self._places)
