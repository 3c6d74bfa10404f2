"""Epochs: which state of a model's weights a chunk belongs to, if weights change while engines run.

A reset begins a new epoch of a model, for all nodes at once. The epoch is part of each chunk's key, so no node finds a chunk of an earlier
epoch again, even if it is stored after the reset. The first epoch is that of the weights with which engines start, and which the namespace
identifies; its keys do not mention it.

Nodes agree on epochs through the pool, by small objects that never change. *Signs* say that an epoch has begun: as soon as anybody begins
the epoch after one's own, its sign is there. Epochs are numbered within a *run*, whose random name is part of all its labels, so that a tier
that outlives the pool cannot mistake the epochs of two runs for each other. The *root* names the run; its first writer decides. Who begins
a run removes the signs of all others, so that every node notices.

A node relies on an answer of the pool for `FRESH_S` after it has asked. Then it asks again, by one to four keys in a lookup's own request.
A lookup that has to wait for its answer may use it until `LATE_S` after the question, so a reset is known everywhere after that time. While
no answer comes, or only late ones, the epoch is unknown, and nothing is found or loaded. If the pool has lost the root, or all signs
that lead to the current epoch, the first node that misses them begins a new run: what was computed before may be of any weights. Until
then, a node that joins cannot know better. If no node is left that knows of a run, the first epoch is current again: engines that start then
have the weights that the namespace identifies.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pd_cache.deadline import Deadline
from transfer.errors import Status

log = logging.getLogger(__name__)

FIRST = ""
"""The label of the first epoch."""
LABEL = r"^([0-9a-f]{8}-[1-9][0-9]{0,11})?\Z"
"""What labels look like: a run and a number."""
FRESH_S = 0.5
"""How long a node relies on an answer of the pool, from when it asked."""
LATE_S = 1.0
"""An answer that comes this long after the question says nothing any more."""

_WINDOW = 256
"""Signs of this many epochs are kept, and besides those every sign whose number is a multiple of this."""
_MULTIPLES = 64
"""How many multiples of the window are looked at together by a node that was away."""
_RUN = re.compile(rb"^[0-9a-f]{8}\Z")
_ROOT = "pdc1/epochs"
_HOLLOW_S = 5.0
"""For so long a run may be without a sign: its first one is about to come."""
_AWAY_S = 5.0
"""A node that has not asked for so long looks for all later signs: the one after its own may have been lost meanwhile."""
_TRIES = 3
_MOMENT_S = 0.1
_LOOK_S = 0.02
"""How often a caller that waits for an agreement looks whether its time is up."""
_MOST_MODELS = 256


class SmallObjects(Protocol):
    """The part of a `MooncakeStore` that is needed here. All times are in seconds."""

    def batch_exist(self, keys: list[str], *, timeout: float) -> list[Status]:
        """Returns OK or MISSING for each key, or why the answer is unknown."""

    def put_small(self, key: str, value: bytes, *, timeout: float) -> Status:
        """Writes an object, unless it is there."""

    def get_small(self, key: str, *, timeout: float) -> bytes | None:
        """Returns an object; None if there is no answer."""

    def remove(self, keys: list[str], *, timeout: float, force: bool = False) -> list[Status]:
        """Removes objects."""

    def remove_matching(self, pattern: str, *, timeout: float) -> int:
        """Removes all objects in whose keys a regular expression is found."""


class EpochCheck(NamedTuple):
    """What has to be asked before the last known epoch may be relied on."""

    label: str
    """The last known epoch."""
    keys: list[str]
    """The keys to look up; none if an answer is fresh."""
    expected: list[Status]
    """The answers that confirm the epoch."""
    asked: float
    """When the question was made that confirms the epoch, by the clock."""


class _Known(NamedTuple):
    """What a process knows."""

    label: str
    asked: float
    """When it asked the question by whose answer it knows that, by the clock."""


class _Agreement:
    """A thread's finding out what the current epoch is."""

    def __init__(self, find_out: Callable[[_Agreement], None]) -> None:
        self.asked = -math.inf
        """When the thread asked its first question, by the clock."""
        self.label: str | None = None
        """What it found out; None if that is nothing."""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=find_out, args=[self], name="pd-cache-epoch", daemon=True)

    @property
    def under_way(self) -> bool:
        """False also if its thread was never started, or was left behind by a fork."""
        return self.thread.is_alive() and not self.ended.is_set()


class Epochs:
    """The epochs of one model, as one process knows them. Thread-safe."""

    def __init__(
        self,
        pool: SmallObjects,
        model: str,
        *,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` identifies the weights, as in `Namespace.model`. Each question to the pool waits at most `timeout_s`."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._clock = clock
        self._root = f"{_ROOT}/{hashlib.sha256(model.encode()).hexdigest()[:16]}"
        self._known = _Known(FIRST, -math.inf)
        """Replaced as a whole, with `_lock` held."""
        self._lock = threading.Lock()
        self._agreeing = threading.Lock()
        """Held while a thread finds out, or changes, what the current epoch is."""
        self._agreement: _Agreement | None = None
        """The last one. Replaced with `_lock` held."""
        self._hollow: _Known | None = None
        """A run that was seen without a sign, and when first."""

    @property
    def last(self) -> str:
        """The epoch as last known: chunks that are computed now may be stored in it, and in no later one."""
        return self._known.label

    def check(self) -> EpochCheck:
        """Returns what to ask, together with other keys or alone. Its answers go to `confirm`."""
        known, now = self._known, self._clock()
        if now - known.asked < FRESH_S:
            return EpochCheck(known.label, [], [], known.asked)
        if known.label == FIRST:
            return EpochCheck(FIRST, [self._root], [Status.MISSING], now)
        run, number = _parts(known.label)
        following = sorted({number + 1, (number // _WINDOW + 1) * _WINDOW})
        keys = [self._root, *(self._sign(run, one) for one in (number, *following))]
        return EpochCheck(known.label, keys, [Status.OK, Status.OK, *[Status.MISSING] * len(following)], now)

    def confirm(
        self, check: EpochCheck, answers: Sequence[Status], *, timeout: float | Deadline | None = None
    ) -> str | None:
        """Takes in the answers to a check. Returns the epoch that is current; None if it is unknown, or not known within `timeout` (s).

        It may be another than the check's: what was asked together with the check has to be asked again then.
        """
        if not all(_definite(answer) for answer in answers):
            return None
        deadline = self._deadline(timeout)
        if self._is_late(check.asked):
            return self.current(timeout=deadline)
        away = check.asked - self._known.asked > _AWAY_S and check.label != FIRST
        if list(answers) == check.expected and not away:
            with self._lock:
                if self._known.label == check.label and self._known.asked < check.asked:
                    self._known = _Known(check.label, check.asked)
                return self._known.label
        known: _Known | None = self._known
        if known is None or known.asked <= check.asked:  # otherwise another thread has found out meanwhile
            known = self._agreed(check.asked, deadline)
        return None if known is None or self._is_late(known.asked) else known.label

    def current(self, expected: str | None = None, *, timeout: float | Deadline | None = None) -> str | None:
        """Returns the epoch that is current; None if it is unknown, or not known within `timeout` (s). Asks if no answer is fresh, or if the
        last known epoch is not `expected`."""
        deadline = self._deadline(timeout)
        if expected is not None:
            with self._lock:
                if self._known.label != expected:
                    self._known = self._known._replace(asked=-math.inf)
        for _ in range(_TRIES):
            check, left = self.check(), deadline.left()
            answers = self._ask(check.keys, self._timeout_s if left is None else min(left, self._timeout_s))
            if not self._is_late(check.asked):
                return self.confirm(check, answers, timeout=deadline)
        return None

    def begin(self) -> str | None:
        """Begins a new epoch, for all nodes. Returns its label. None if the pool did not take it: nothing is known to have begun then.

        It takes several questions to the pool, each of which waits at most `timeout_s`, and waits for others that ask.
        """
        with self._agreeing:
            asked = self._clock()
            label = self._agree()
            if label is None:
                return None if self._hollow is None else self._begin_run(replace=True)
            if label == FIRST:
                return self._begin_run(replace=False)
            run, number = _parts(label)
            if not self._put_sign(run, number + 1):
                return None
            begun = self._settle(f"{run}-{number + 1}", asked)
            old = number + 1 - _WINDOW
            if old > 0 and old % _WINDOW:
                self._pool.remove([self._sign(run, old)], timeout=self._timeout_s, force=True)
            return begun

    def _deadline(self, timeout: float | Deadline | None) -> Deadline:
        return timeout if isinstance(timeout, Deadline) else Deadline(timeout, self._clock)

    def _agreed(self, asked: float, deadline: Deadline) -> _Known | None:
        """Returns what an agreement has found out that asked at `asked` or later; None if it found nothing, or not by the deadline.

        It has a thread of its own: a caller in a hurry must not leave a run half begun, and callers share its outcome. A caller without a
        deadline waits for `LATE_S` at most.
        """
        for _ in range(2):  # the first may have begun too early
            with self._lock:
                agreement = self._agreement
                begins = agreement is None or not agreement.under_way
                if agreement is None or begins:
                    agreement = self._agreement = _Agreement(self._find_out)
            if begins:
                try:
                    agreement.thread.start()
                except RuntimeError as error:
                    log.warning("cannot find out the epoch: %s", error)
                    return None
            until = self._clock() + LATE_S
            while not agreement.ended.wait(_LOOK_S):
                if deadline.passed or self._clock() >= until:
                    return None
            if agreement.asked >= asked:
                return None if agreement.label is None else _Known(agreement.label, agreement.asked)
        return None

    def _find_out(self, agreement: _Agreement) -> None:
        try:
            with self._agreeing:
                asked = self._clock()
                agreement.label = self._agree()
                agreement.asked = asked
        except Exception:  # callers take the epoch for unknown
            log.exception("cannot find out the epoch")
        finally:
            agreement.ended.set()

    # --- inside; with `_agreeing` held ------------------------------------------------------------------------------

    def _begin_run(self, *, replace: bool) -> str | None:
        """Begins the first epoch of a new run, or follows the run that another node has just begun. With `replace`, the run before makes way
        first."""
        run = secrets.token_hex(4)
        if replace:
            self._pool.remove([self._root], timeout=self._timeout_s, force=True)
        asked = self._clock()
        self._pool.put_small(self._root, run.encode(), timeout=self._timeout_s)
        decided = self._read_root()
        if decided != run:
            return None if decided is None else self._follow(decided, asked)
        self._pool.remove_matching(f"^{self._root}/(?!{run}-)", timeout=self._timeout_s)
        return self._settle(f"{run}-1", asked) if self._put_sign(run, 1) else None

    def _agree(self) -> str | None:
        """Finds out the current epoch."""
        asked = self._clock()
        (root,) = self._ask([self._root], self._timeout_s)
        if root is Status.OK:
            run = self._read_root()
            return None if run is None else self._follow(run, asked)
        if root is not Status.MISSING:
            return None
        if self._known.label == FIRST:
            return self._settle(FIRST, asked)
        log.warning("the pool has lost what it knew of epoch %s: a new one begins", self._known.label)
        return self._begin_run(replace=False)

    def _follow(self, run: str, asked: float) -> str | None:
        """Finds out the current epoch of the run that the root names."""
        own, number = _parts(self._known.label)
        known = number if run == own else 0
        latest = self._latest(run, known)
        if latest is None:
            return None
        if latest:
            return self._settle(f"{run}-{latest}", asked)
        if known:
            log.warning("the pool has lost the sign of epoch %s: a new one begins", self._known.label)
            return self._begin_run(replace=True)
        # its first sign is about to come, or all signs were lost with the memory that they lay in, and nobody knows how many there were
        if self._hollow is None or self._hollow.label != run:
            self._hollow = _Known(run, asked)
        if asked - self._hollow.asked < _HOLLOW_S:
            return None
        log.warning("run %s has lost its epochs: a new one begins", run)
        return self._begin_run(replace=True)

    def _latest(self, run: str, number: int) -> int | None:
        """Returns the number of the last epoch of a run that has begun, from `number` on; 0 if there is none, None if that cannot be found
        out."""
        latest = 0
        while True:
            multiple = (number // _WINDOW + 1) * _WINDOW
            numbers = [
                *range(max(1, number), number + 1 + _WINDOW),
                *range(multiple, multiple + _MULTIPLES * _WINDOW, _WINDOW),
            ]
            answers = self._ask([self._sign(run, one) for one in numbers], self._timeout_s)
            if not all(_definite(answer) for answer in answers):
                return None
            newest = max((one for one, answer in zip(numbers, answers, strict=True) if answer is Status.OK), default=0)
            if newest <= latest:
                return latest
            latest = number = newest

    def _put_sign(self, run: str, number: int) -> bool:
        """Puts a sign. Returns whether it is there, and the run is still the one that the root names.

        A put is no proof of that: another writer may have left the key half done, and another run may have begun meanwhile.
        """
        key = self._sign(run, number)
        self._pool.put_small(key, b"begun", timeout=self._timeout_s)
        if self._ask([key], self._timeout_s) != [Status.OK]:
            return False
        if self._read_root() == run:
            return True
        self._pool.remove([key], timeout=self._timeout_s, force=True)
        return False

    def _read_root(self) -> str | None:
        """Returns the run that the root names; None if it could not be read, or is not ours."""
        value = self._pool.get_small(self._root, timeout=self._timeout_s)
        return value.decode() if value is not None and _RUN.match(value) else None

    def _settle(self, label: str, asked: float) -> str:
        with self._lock:
            if label != self._known.label:
                log.info("epoch %s is current, after %s", label or "(first)", self._known.label or "(first)")
            self._known = _Known(label, asked)
        self._hollow = None
        return label

    def _ask(self, keys: list[str], timeout: float) -> list[Status]:
        return self._pool.batch_exist(keys, timeout=timeout) if keys else []

    def _is_late(self, asked: float) -> bool:
        return self._clock() - asked >= LATE_S

    def _sign(self, run: str, number: int) -> str:
        return f"{self._root}/{run}-{number}"


def last_word(deadline: Deadline | None) -> float | None:
    """Returns how many seconds a load may wait, at its end, for the answer whether its epoch is still current: what is left, or a moment if it
    has used up its time."""
    left = None if deadline is None else deadline.left()
    return None if left is None else max(left, _MOMENT_S)


def asks_for_epochs(key: str) -> bool:
    """Returns whether a key is one of an `EpochCheck`, about which only the pool knows."""
    return key.startswith(_ROOT)


class EpochBook:
    """The epochs of all models in one pool. Thread-safe."""

    def __init__(self, pool: SmallObjects, *, timeout_s: float = 1.0) -> None:
        """The arguments are those of `Epochs`."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._models: OrderedDict[str, Epochs] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, model: str) -> Epochs:
        """Returns the epochs of the model whose weights `model` identifies."""
        with self._lock:
            found = self._models.get(model)
            if found is None:
                found = self._models[model] = Epochs(self._pool, model, timeout_s=self._timeout_s)
                if len(self._models) > _MOST_MODELS:
                    self._models.popitem(last=False)
            self._models.move_to_end(model)
            return found


class _ProcessObjects:
    """The objects of a process that has no pool."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def batch_exist(self, keys: list[str], *, timeout: float) -> list[Status]:
        return [Status.OK if key in self._values else Status.MISSING for key in keys]

    def put_small(self, key: str, value: bytes, *, timeout: float) -> Status:
        self._values.setdefault(key, value)
        return Status.OK

    def get_small(self, key: str, *, timeout: float) -> bytes | None:
        return self._values.get(key)

    def remove(self, keys: list[str], *, timeout: float, force: bool = False) -> list[Status]:
        return [Status.MISSING if self._values.pop(key, None) is None else Status.OK for key in keys]

    def remove_matching(self, pattern: str, *, timeout: float) -> int:
        found = [key for key in list(self._values) if re.search(pattern, key)]
        return sum(self._values.pop(key, None) is not None for key in found)


PROCESS_EPOCHS = EpochBook(_ProcessObjects())
"""The epochs of caches that have no pool. They end with the process, as weights do that were changed in place."""


def _parts(label: str) -> tuple[str, int]:
    """Returns the run and the number of an epoch."""
    run, _, number = label.partition("-")
    return run, int(number or 0)


def _definite(status: Status) -> bool:
    return status in (Status.OK, Status.MISSING)
