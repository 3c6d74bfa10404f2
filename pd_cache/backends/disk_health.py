"""DiskHealth: decides what a disk tier may be used for, and whether an error concerns one file or the whole folder.

1. An error of one file leaves the tier on. The error's number shows that it is one, or a check does: it writes a page to the folder
   and reads it back. But three errors in a row that a dead disk could have caused switch the tier off.
2. A read-only folder is still read. A folder in trouble is switched off, and the tier's keeper tries it again.
3. Callers that meet an error can only make the state worse. Only the keeper makes it better.
"""

from __future__ import annotations

import enum
import logging

from pd_cache.backends.faults import MAY_NOT, DiskFault, fault_of, name_of
from pd_cache.backends.folder import ObjectFolder
from pd_cache.metrics import TierMetrics
from transfer.errors import Status
from transfer.locks import Condition

log = logging.getLogger(__name__)

_STRIKES = 3
_FAIR_S = 2.0
"""A disk that has not answered within this time hangs."""
_FAIR = 0.9
"""The part of that time that a call must have had."""


class DiskState(enum.Enum):
    """How the folder can be used now."""

    OPENING = "opening"
    ON = "on"
    FULL = "full"
    """The folder can be read. Nothing can be written, and there is no object of ours to evict."""
    READ_ONLY = "read-only"
    OFF = "off"
    CLOSED = "closed"


_REFUSALS = {
    DiskState.FULL: Status.NO_SPACE,
    DiskState.READ_ONLY: Status.READ_ONLY,
    DiskState.CLOSED: Status.CLOSED,
}
_READABLE = frozenset({DiskState.ON, DiskState.FULL, DiskState.READ_ONLY})


class DiskHealth:
    """The state of one disk tier. Thread-safe."""

    def __init__(self, folder: ObjectFolder, metrics: TierMetrics, retry_s: float) -> None:
        self.state = DiskState.OPENING
        self.trouble = "not opened yet"
        self.changed = Condition()
        """Notified when the state changes."""
        self._folder = folder
        self._metrics = metrics
        self._retry_s = retry_s
        self._strikes = 0

    @property
    def readable(self) -> bool:
        return self.state in _READABLE

    @property
    def writable(self) -> bool:
        return self.state is DiskState.ON

    @property
    def refusal(self) -> Status:
        """The status of calls that the present state does not allow."""
        return _REFUSALS.get(self.state, Status.TIER_OFF)

    def worked(self) -> None:
        """Ends a row of errors. Call it after a file was read or written."""
        self._strikes = 0

    def late(self, what: str, had_s: float, usual_ms: int) -> None:
        """Switches the tier off if the disk hangs. Call it when a deadline has passed.

        `had_s` is how long the disk itself has had: a long queue or an impatient caller proves nothing.
        """
        if had_s >= _FAIR * min(_FAIR_S, usual_ms / 1000):
            self._worsen(DiskState.OFF, f"{what} got no answer within {had_s:g} s", Status.TIMEOUT.value)

    def judge(self, what: str, error: OSError, *, writing: bool) -> Status:
        """Returns the status of a call that met an error: INTERNAL if it concerns one file. An error of the folder changes the state."""
        fault = fault_of(error)
        if fault in (DiskFault.OBJECT, DiskFault.UNCLEAR):
            trouble = self._asked(writing)
            if trouble is not None:
                what, error, fault = f"{what} failed, and then a check of the folder", trouble, fault_of(trouble)
            elif fault is DiskFault.OBJECT or self._strike() < _STRIKES:
                self._metrics.spoiled(what, name_of(error), str(error))
                return Status.INTERNAL
        if fault is DiskFault.PROCESS:
            self._metrics.spoiled(what, name_of(error), str(error))
            return Status.OVERLOADED
        self._worsen(state_of(error), f"{what} failed: {error}", name_of(error))
        return self.refusal

    def settle(self, state: DiskState, trouble: str = "", reason: str = "") -> None:
        """Sets the state that the keeper found when it tried the folder. A closed tier stays closed."""
        with self.changed:
            if self.state in (state, DiskState.CLOSED):
                return
            self._strikes = 0
            before = self._switch(state, trouble)
        if state is DiskState.ON:
            self._metrics.switched_on()
            what = "open" if before is DiskState.OPENING else "back"
            log.info("tier %s: %s is %s", self._metrics.tier, self._folder.root, what)
        else:
            self._say(state, trouble, reason)

    def close(self) -> bool:
        """Sets the state to closed, for good. Returns False if it was closed before."""
        with self.changed:
            return self._switch(DiskState.CLOSED, "closed") is not DiskState.CLOSED

    def _strike(self) -> int:
        self._strikes += 1
        return self._strikes

    def _asked(self, writing: bool) -> OSError | None:
        """Returns the folder's own error, if it has one that matters for reading or, with `writing`, for writing."""
        try:
            self._folder.check()
        except OSError as trouble:
            if writing or (
                fault_of(trouble) not in (DiskFault.NO_ROOM, DiskFault.TOO_LARGE) and trouble.errno not in MAY_NOT
            ):
                return trouble
        return None

    def _worsen(self, state: DiskState, trouble: str, reason: str) -> None:
        with self.changed:
            if self.state in (state, DiskState.OFF, DiskState.CLOSED):
                return
            self._switch(state, trouble)
        self._say(state, trouble, reason)

    def _switch(self, state: DiskState, trouble: str) -> DiskState:
        before, self.state, self.trouble = self.state, state, trouble
        self.changed.notify_all()
        return before

    def _say(self, state: DiskState, trouble: str, reason: str) -> None:
        self._metrics.switched_off(reason)
        log.warning(
            "tier %s: %s; %s until its folder works again (next try in %g s)",
            self._metrics.tier,
            trouble,
            "the tier is not used" if state is DiskState.OFF else "nothing is written",
            self._retry_s,
        )


def state_of(error: OSError) -> DiskState:
    """Returns how a folder that gives this error can be used."""
    if fault_of(error) in (DiskFault.NO_ROOM, DiskFault.TOO_LARGE):
        return DiskState.FULL
    return DiskState.READ_ONLY if error.errno in MAY_NOT else DiskState.OFF
