"""Weights versions: with which of a model's weights a chunk was computed, if weights change while engines run.

A *version* is a label that is part of each chunk's key. `FIRST` is that of the weights with which engines start, and which the namespace
identifies; its keys do not mention it. Equal labels mean equal weights. One authority (`launch/versions.py`) numbers the versions of each
model; the one with the largest number is *current*. Five rules keep KV of other weights out:

1. Each engine has a version of its own. It takes another one only if it says itself that its weights have changed (`reset`), or if a
   command says so of all nodes. It uses the cache only while its own version is the current one.
2. It relies on an answer of the authority for `LEASE_S`, counted from when it asked. Without such an answer it finds, loads and stores nothing.
3. A change or command is reported as done when `OVER_S` has passed since the version began. So an engine that could not be reached has
   stopped using the cache by then.
4. A change without a label leads from the engine's own version to the next one. The first engine that says so makes it; the others join it
   within `CHANGE_S`, each with one call a change and none with a label. An engine that is further behind, or does not know its own version (it started late, or its
   last call was not answered), is refused: only a person knows which weights it has.
5. An authority writes each version down before it answers. One that has just started, or finds that what it wrote down is lost, answers
   nothing for `OVER_S`. In that time it learns from the questions which version is current.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pd_cache.decoding import decode_json
from pd_cache.sparse_log import SparseLog

if TYPE_CHECKING:
    from pd_cache.config import NodeSettings

log = logging.getLogger(__name__)

FIRST = ""
"""The label of the weights that the namespace identifies."""
UNKNOWN = "?"
"""In place of the label of weights that are not known: no version has it."""
LABEL = r"^[A-Za-z0-9._-]{0,64}\Z"
LEASE_S = 2.0
"""How long a process relies on an answer, from when it asked."""
OVER_S = LEASE_S + 0.2
"""The age of a version at which nobody relies on an older one. A bit more than a lease: clocks of two machines do not run alike."""
CHANGE_S = 60.0
"""How long after the first engine the others may say that they have changed, too."""
POLL_S = 0.4
_RESET_S = 8.0
_AGAIN_S = 0.1
_SHORTEST_S = 0.001
_FIRST_S = 1.0
_LONGEST = 1 << 20
"""The most bytes of an answer."""

Label = Annotated[str, msgspec.Meta(pattern=LABEL)]


class Version(msgspec.Struct, frozen=True, array_like=True):
    """One of a model's versions."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    """Larger than those of all versions before: milliseconds since 1970, so that an authority that has forgotten some makes larger ones."""
    label: Label
    previous: int | None = None
    """The number of the one before, if engines that have that one may join by a change without a label."""
    said: int | None = None
    """If a command has said it of all nodes at once: the latest number when that command began."""


BEGINNING = Version(0, FIRST)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a process asks the authority."""

    model: str
    process: str = ""
    """Differs from one start of a process to the next; empty for a process without weights."""
    name: str = ""
    """What people call the process."""
    own: Label | None = None
    """The label of its weights; None if it is not known."""
    since: int | None = None
    """The number of that version, as a label may be used again; None if the label is not known."""
    known: Version = BEGINNING
    """The newest version that it knows of."""
    new: Version | None = None
    """What becomes current if `known` still is. The authority numbers it. So a question that comes late, or twice, changes nothing."""
    turn: int = 0
    """Which of its asker's questions it is. So an answer that comes late, or twice, is not taken for the answer to another one."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the authority answers."""

    current: Version
    age_s: float
    """How long it has been current at least."""
    latest: int = 0
    """What begins after the question has come has a larger number; what began before has not."""
    turn: int = 0
    """That of the question."""
    authorities: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Where to ask from now on, if the authority knows more than the caller."""


class RefusedError(Exception):
    """It is not known which weights an engine has; the message says why, and what to do."""


class UnavailableError(Exception):
    """The authority cannot answer now."""


class Channel:
    """Asks authorities over HTTP: the first, and after a failure the next one. For use by one thread."""

    def __init__(self, urls: list[str]) -> None:
        """`urls` becomes what an answer says of the authorities: channels that have the same list all follow."""
        self._urls = urls
        self._turn = 0
        # no other channel's numbers: what lies between may mix up answers
        self._asked = secrets.randbits(48)
        self._connection: Any = None

    def ask(self, question: Question, timeout: float) -> Reply:
        """Returns the answer. Raises UnavailableError."""
        import http.client  # an engine without an authority imports no HTTP

        url = self._urls[self._turn % len(self._urls)]
        self._asked += 1
        question = msgspec.structs.replace(question, turn=self._asked)
        try:
            if self._connection is None:
                address = url.removeprefix("http://").rstrip("/")
                self._connection = http.client.HTTPConnection(address)
            self._connection.timeout = timeout
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout)
            self._connection.request("POST", "/versions", msgspec.json.encode(question))
            response = self._connection.getresponse()
            body = response.read(_LONGEST)
            if response.status != 200:
                raise ValueError(f"{response.status}: {body[:1000].decode(errors='replace')}")
            reply = decode_json(body, Reply)
            if reply.turn != question.turn:
                raise ValueError("the answer to another question")
        except (http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            raise UnavailableError(f"{url}: {type(error).__name__}: {error}") from error
        if reply.authorities:
            self._urls[:] = reply.authorities
        return reply

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._turn += 1


def begin_version(
    channel: Channel,
    question: Question,
    label: str | None,
    timeout: float,
    *,
    for_all: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[Version, int]:
    """Makes a version current, or joins the change that has made the current one. Returns it when no process relies on an older one, and
    the latest number when this began.

    `question` says what the caller is. Without a `label` of the new weights, one is made. `for_all`: all nodes have them, not only the caller.
    Raises RefusedError, with nothing changed, or UnavailableError after `timeout` seconds: then the version may have begun.
    """
    end = clock() + timeout
    made = secrets.token_hex(8) if label is None else label
    found: Version | None = None
    begun = latest = None
    while clock() < end:
        try:
            reply = channel.ask(question, max(_AGAIN_S, min(end - clock(), timeout / 2)))
        except UnavailableError:
            if clock() + _AGAIN_S >= end:
                raise
            sleep(_AGAIN_S)
            continue
        current = reply.current
        # what is known is told again with each question: an authority that has been started anew learns it
        question = msgspec.structs.replace(question, known=current, new=None)
        if begun is None or latest is None:
            begun, latest = current.number, reply.latest
        if found is None:
            is_by_command = current.said is not None and current.number > begun
            is_made = current.label == made and (is_by_command or not for_all)
            if is_made or (label is None and not for_all and _joins(question, reply)):
                found = current
            elif label is not None and is_by_command and not for_all:
                raise RefusedError(
                    f"a command has said meanwhile that all nodes have version {current.label or '(first)'}: give the version that this one has"
                )
            elif for_all or label is not None or question.since == current.number:
                previous = current.number if for_all or label is None else None
                said = latest if for_all else None
                question = msgspec.structs.replace(question, new=Version(0, made, previous, said))
                continue
            else:
                had = "weights of no known version" if question.own is None else f"version {question.own or '(first)'}"
                raise RefusedError(
                    f"this process had {had}, and does not follow others to version {current.label or '(first)'}: give the version, or "
                    "run `pd-cache reset` when all nodes have the new weights"
                )
        if reply.age_s >= OVER_S:
            return found, latest
        sleep(max(_SHORTEST_S, min(OVER_S - reply.age_s, end - clock())))  # a rest too short to add up would never end
    raise UnavailableError(f"no version was current for long enough within {timeout:g} s")


def _joins(question: Question, reply: Reply) -> bool:
    """Returns whether an engine's change without a label is the one that has made the current version."""
    current, since = reply.current, question.since
    # an authority that has been started anew knows a version for a shorter time than that has been current
    age_s = max(reply.age_s, (reply.latest - current.number) / 1000)
    is_next = since is not None and since == current.previous and question.own != current.label
    if current.said is not None:
        # an engine that speaks while a command is under way means the same change, whether it has heard of it or not
        return (is_next or since == current.number) and age_s < OVER_S
    return is_next and age_s < CHANGE_S


class WeightsVersion:
    """The version of one engine's weights, as its process knows it. Thread-safe; raises nothing because of the authority."""

    def __init__(
        self,
        urls: str,
        model: str,
        *,
        name: str = "",
        watches: bool = False,
        alone: bool = False,
        channel: Callable[[list[str]], Channel] = Channel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Begins to ask; without an authority, nothing is known but this engine's own changes.

        Args:
            urls: where the authorities are, with commas between them; empty if there is none.
            model: what identifies the weights with which engines start.
            name: what people call the process.
            watches: whether another process decides in which version this one works; its own version is the current one.
            alone: whether no other process has the chunks.
            channel, clock, sleep: for tests; with another clock, nothing is asked but by `poll`.
        """
        self._urls = [url.strip() for url in urls.split(",") if url.strip()]
        self._model = model
        self._name = name or f"process {os.getpid()}"
        self._watches = watches
        self._alone = alone
        self._channel = channel
        self._clock = clock
        self._sleep = sleep
        self._process = "" if watches else uuid.uuid4().hex
        self._stop = threading.Event()
        self._lock = threading.Condition()
        self._asking = threading.RLock()
        """Held while a question is under way: no answer to one from before a change is taken for one from after it."""
        self._complaints = SparseLog(every_s=60.0)

        self._known = BEGINNING
        self._asked = -math.inf
        """When it asked the question by whose answer it knows that, by the clock."""
        self._own = None if self._urls else FIRST
        self._since: int | None = None
        """The number of its own version; if that is not known, of one that was current after the weights last changed. None if nothing is
        known yet."""
        self._latest = 0
        """The latest number when the weights last changed. What a command says of all nodes later, it says of these weights, too. The number
        of the version that was current then says less: an authority that was started anew may hear late of a newer one."""
        self._as_started = True
        """Whether the weights have never changed, as far as this engine has said."""
        self._tried = not self._urls
        if self._urls and clock is time.monotonic:
            threading.Thread(target=self._run, name="pd-cache-versions", daemon=True).start()

    @classmethod
    def of(cls, settings: NodeSettings, model: str, *, watches: bool = False) -> WeightsVersion:
        """Returns the version of a model's weights in a process with these settings."""
        name = settings.name or f"{settings.host}, process {os.getpid()}"
        return cls(settings.versions, model, name=name, watches=watches, alone=not settings.pooled)

    @property
    def own(self) -> str | None:
        """The label of this engine's weights; None if it is not known, or about to change."""
        return self._own

    def current(self, timeout: float | None = None) -> str | None:
        """Returns the label in which to look up and load: the engine's own, if it is current. None if it is not, or if that is unknown.

        Waits only for the first answer, and no longer than a second, or `timeout` (s).
        """
        with self._lock:
            self._lock.wait_for(lambda: self._tried, _FIRST_S if timeout is None else min(timeout, _FIRST_S))
            return None if self.why_not(self._own) else self._own

    def wait_known(self, timeout: float) -> bool:
        """Waits until it is known which version is current. Returns False if it is not after `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(self._knows, timeout)

    def why_not(self, label: str | None) -> Literal["", "reset", "epoch_unknown"]:
        """Returns why chunks of a version are not to be used now; empty if it is current."""
        with self._lock:
            if label is None or self._own is None or not self._knows():
                return "epoch_unknown"
            if not self._urls:
                return "" if self._watches or label == self._own else "reset"
            # An equal label is not enough: a command that was missed may have said that this engine has other weights, before the label was
            # used again.
            return "" if label == self._known.label and self._since == self._known.number else "reset"

    def reset(self, version: str | None = None, *, timeout: float = _RESET_S) -> str | None:
        """Says that this engine has other weights now: those of `version`, or those to which all engines that say so now have changed.

        Returns their label when no process can load what was stored before, two seconds later for the first engine. None if that was refused or
        not answered within `timeout` (s): then this engine uses the cache no more until a call with a `version` succeeds, or a command says
        which weights all nodes have. Raises ValueError for a label that cannot be one.
        """
        if version is not None and (not version or not re.match(LABEL, version)):
            raise ValueError(f"a version is 1 to 64 letters, digits, dots, dashes and underscores, not {version!r}")
        with self._asking, contextlib.closing(self._channel(self._urls)) as channel:
            with self._lock:
                question = self._question()
                self._own, self._since, self._as_started = None, None, False
            begun = self._begin(channel, question, version, timeout)
            if begun is None:
                # The authority may have made a version of this. But the next call may mean the next change, so without a label it cannot
                # be known of which weights it speaks; nor of which a command spoke meanwhile.
                return None
            made, latest = begun
            with self._lock:
                self._own, self._since, self._latest = made.label, made.number, latest
                self._known = max(self._known, made, key=lambda one: one.number)
            if self._urls:
                self.poll(channel)
        return made.label

    def poll(self, channel: Channel, timeout: float = LEASE_S / 2) -> bool:
        """Asks once. Returns whether there was anything new."""
        with self._asking:
            question, asked, reply = self._question(), self._clock(), None
            try:
                reply = channel.ask(question, timeout)
            except UnavailableError as error:
                if (times := self._complaints.admit()) is not None:
                    log.warning("cannot ask which version of %s is current, %d times: %s", self._model, times, error)
            with self._lock:
                before = self._known, self._own
                if reply is not None and reply.current.number >= self._known.number:
                    self._learn(reply, asked)
                self._tried = True
                self._lock.notify_all()
                return before != (self._known, self._own)

    def close(self) -> None:
        """Asks no more. Idempotent."""
        self._stop.set()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._channel(self._urls)) as channel:
            while not self._stop.is_set():
                if not self.poll(channel):
                    self._stop.wait(POLL_S)
        with self._lock:
            self._asked = -math.inf

    def _knows(self) -> bool:
        return not self._urls or self._clock() - self._asked < LEASE_S

    def _question(self) -> Question:
        return Question(
            model=self._model,
            process=self._process,
            name=self._name,
            own=self._own,
            since=None if self._own is None else self._since,
            known=self._known,
        )

    def _learn(self, reply: Reply, asked: float) -> None:
        current = reply.current
        if current != self._known:
            log.info("%s: version %s is current", self._model, current.label or "(first)")
        self._known, self._asked = current, asked
        if self._watches:
            self._own, self._since = current.label, current.number
        elif self._since is None:
            self._since, self._latest = current.number, reply.latest
            if self._as_started and current.label == FIRST:
                self._own = FIRST
        elif current.said is not None:
            # a command may take long to arrive, and speaks of no process that has started in the meantime
            begun = current.said if self._as_started else current.number - 1
            if begun >= self._latest:
                self._own, self._since = current.label, current.number

    def _begin(
        self, channel: Channel, question: Question, version: str | None, timeout: float
    ) -> tuple[Version, int] | None:
        """Returns what `begin_version` does; None if it was refused or not answered."""
        if not self._urls:
            if version is None and not self._alone:
                log.warning(
                    "no reset of %s: no authority of versions is known; give the version, or set `versions` to http://HOST:PORT, the "
                    "`versions_port` of the role master",
                    self._model,
                )
                return None
            return Version(self._known.number + 1, version or secrets.token_hex(8)), 0
        try:
            return begin_version(channel, question, version, timeout, clock=self._clock, sleep=self._sleep)
        except (RefusedError, UnavailableError) as error:
            log.warning("no reset of %s: the authority at %s: %s", self._model, ",".join(self._urls), error)
            return None
