"""Epochs: which state of a model's weights a chunk belongs to, if weights change while engines run.

A reset begins a new epoch of a model, for all nodes at once. The epoch is part of each chunk's key, so a chunk of an earlier epoch is never
found again, whoever stores it and whenever. The first epoch is that of the weights with which engines start, and which the namespace
identifies; its keys do not mention it.

Nodes agree on epochs through the pool, by small objects that never change. *Signs* say that an epoch has begun: as soon as anybody begins
the epoch after one's own, its sign is there. Epochs are numbered within a *run*, whose random name is part of all its labels, so that a tier
that outlives the pool cannot mistake the epochs of two runs for each other. The *root* names the run; its first writer decides.

A node relies on an answer of the pool for `FRESH_S`. After that it asks again, by one to four keys in a lookup's own request. While no answer
comes, the epoch is unknown, and nothing is found or loaded. If the pool loses the signs, the first node that misses them puts them there
again. Until then, a node that joins or was away cannot know better. If no node is left that knows the run, the first epoch is current
again: engines that start then have the weights that the namespace identifies.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from transfer.errors import Status

log = logging.getLogger(__name__)

FIRST = ""
"""The label of the first epoch."""
LABEL = r"^([0-9a-f]{8}-[1-9][0-9]{0,11})?\Z"
"""What labels look like: a run and a number."""
FRESH_S = 0.5
"""How long a node may rely on an answer of the pool."""

_WINDOW = 256
"""Signs of this many epochs are kept, and besides those every sign whose number is a multiple of this."""
_MULTIPLES = 64
"""How many multiples of the window are looked at together by a node that was away."""
_RUN = re.compile(rb"^[0-9a-f]{8}\Z")
_ROOT = "pdc1/epochs"
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


class EpochCheck(NamedTuple):
    """What has to be asked before the last known epoch may be relied on."""

    label: str
    """The last known epoch."""
    keys: list[str]
    """The keys to look up; none if an answer is fresh."""
    expected: list[Status]
    """The answers that confirm the epoch."""
    asked: float
    """When the question was made, by the clock."""


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
        self._label = FIRST
        self._confirmed = -FRESH_S - clock()
        """When the question was asked that was answered last, by the clock."""
        self._known = False
        """Whether any question was answered."""
        self._agreeing = threading.Lock()

    @property
    def last(self) -> str:
        """The epoch as last known: chunks that are computed now may be stored in it, and in no later one."""
        return self._label

    def check(self) -> EpochCheck:
        """Returns what to ask, together with other keys or alone. Its answers go to `confirm`."""
        label, now = self._label, self._clock()
        if self._known and now - self._confirmed < FRESH_S:
            return EpochCheck(label, [], [], now)
        if label == FIRST:
            return EpochCheck(label, [self._root], [Status.MISSING], now)
        run, number = _parts(label)
        following = sorted({number + 1, (number // _WINDOW + 1) * _WINDOW})
        keys = [self._root, *(self._sign(run, one) for one in (number, *following))]
        return EpochCheck(label, keys, [Status.OK, Status.OK, *[Status.MISSING] * len(following)], now)

    def confirm(self, check: EpochCheck, answers: Sequence[Status]) -> str | None:
        """Takes in the answers to a check. Returns the epoch that is current; None if it is unknown.

        It may be another than the check's: what was asked together with the check has to be asked again then.
        """
        if not check.keys or list(answers) == check.expected:
            if check.label == self._label:
                self._known = True
                self._confirmed = max(self._confirmed, check.asked)
            return check.label
        if not all(_definite(answer) for answer in answers):
            return None
        with self._agreeing:
            return self._agree()

    def current(self) -> str | None:
        """Returns the epoch that is current, and asks if no answer is fresh; None if it is unknown."""
        check = self.check()
        return self.confirm(check, self._ask(check.keys))

    def begin(self) -> str | None:
        """Begins a new epoch, for all nodes. Returns its label. None if the pool did not take it: nothing is known to have begun then."""
        with self._agreeing:
            label = self._agree(may_begin=True)
            if label is None:
                return None
            if label == FIRST:
                return self._begin_run()
            run, number = _parts(label)
            if not self._put_signs(run, [number + 1]):
                return None
            old = number + 1 - _WINDOW
            if old > 0 and old % _WINDOW:
                self._pool.remove([self._sign(run, old)], timeout=self._timeout_s, force=True)
            return self._settle(f"{run}-{number + 1}", self._clock())

    # --- inside; all of it with the lock held ---------------------------------------------------------------------

    def _begin_run(self) -> str | None:
        """Begins the first epoch of a new run; or takes part in the run that another node has just begun."""
        run = secrets.token_hex(4)
        if not self._put_signs(run, [1]) or not self._put_root(run):
            return None
        return self._agree()

    def _agree(self, *, may_begin: bool = False) -> str | None:
        """Finds out the current epoch. With `may_begin`, a run without a sign, which is of no use, makes way for a new one."""
        asked = self._clock()
        (root,) = self._ask([self._root])
        if root is Status.MISSING:
            if self._label == FIRST:
                return self._settle(FIRST, asked)
            log.warning("the pool has lost what it knew of epochs; it is told again that %s is current", self._label)
            run, number = _parts(self._label)
            if not self._put_signs(run, [*range(_WINDOW, number, _WINDOW), number]) or not self._put_root(run):
                return None
            # another node may have begun another run meanwhile: the first writer decides
        elif root is not Status.OK:
            return None
        value = self._pool.get_small(self._root, timeout=self._timeout_s)
        if value is None or not _RUN.match(value):
            return None
        run = value.decode()
        own, number = _parts(self._label)
        known = number if run == own else 0
        latest = self._latest(run, known)
        if latest is None:
            return None
        if latest == 0:
            # its signs were lost with the memory that they lay in, and nobody knows how many there were
            if not may_begin:
                return None
            self._pool.remove([self._root], timeout=self._timeout_s, force=True)
            return FIRST
        if latest == known and not self._put_signs(run, [known]):
            return None
        return self._settle(f"{run}-{latest}", asked)

    def _latest(self, run: str, number: int) -> int | None:
        """Returns the number of the last epoch of a run that has begun, from `number` on; None if that cannot be found out."""
        while True:
            multiple = (number // _WINDOW + 1) * _WINDOW
            numbers = [
                *range(number + 1, number + 1 + _WINDOW),
                *range(multiple, multiple + _MULTIPLES * _WINDOW, _WINDOW),
            ]
            answers = self._ask([self._sign(run, one) for one in numbers])
            if not all(_definite(answer) for answer in answers):
                return None
            begun = [one for one, answer in zip(numbers, answers, strict=True) if answer is Status.OK]
            if not begun:
                return number
            number = max(begun)

    def _put_signs(self, run: str, numbers: Sequence[int]) -> bool:
        """Puts signs. Returns whether they are there: a put is no proof, because another writer may have left the key half done."""
        keys = [self._sign(run, number) for number in numbers]
        for key in keys:
            self._pool.put_small(key, b"begun", timeout=self._timeout_s)
        return self._ask(keys) == [Status.OK] * len(keys)

    def _put_root(self, run: str) -> bool:
        self._pool.put_small(self._root, run.encode(), timeout=self._timeout_s)
        return self._ask([self._root]) == [Status.OK]

    def _settle(self, label: str, asked: float) -> str:
        if label != self._label:
            log.info("epoch %s has begun, after %s", label or "(first)", self._label or "(first)")
        self._label, self._confirmed, self._known = label, asked, True
        return label

    def _ask(self, keys: list[str]) -> list[Status]:
        return self._pool.batch_exist(keys, timeout=self._timeout_s) if keys else []

    def _sign(self, run: str, number: int) -> str:
        return f"{self._root}/{run}-{number}"


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


PROCESS_EPOCHS = EpochBook(_ProcessObjects())
"""The epochs of caches that have no pool. They end with the process, as weights do that were changed in place."""


def _parts(label: str) -> tuple[str, int]:
    """Returns the run and the number of an epoch."""
    run, _, number = label.partition("-")
    return run, int(number or 0)


def _definite(status: Status) -> bool:
    return status in (Status.OK, Status.MISSING)
