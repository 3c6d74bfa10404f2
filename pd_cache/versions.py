"""Weights versions: with which of a model's weights a chunk was computed, if weights change while engines run.

A *version* is a label that is part of each chunk's key. `FIRST` is that of the weights with which engines start, and which the namespace
identifies; its keys do not mention it. Equal labels mean equal weights. One authority (`launch/versions.py`) numbers the versions of each
model; the last one is *current*. Five rules keep KV of other weights out:

1. Each engine has a version of its own, and takes another one only if it says so itself (`change`), or if a command says that all nodes
   have the new weights (`reset`). It uses the cache only while its own version is the current one.
2. It relies on an answer of the authority for `LEASE_S`, counted from when it asked. Without such an answer it finds, loads and stores nothing.
3. A change or reset is reported as done when every process that could rely on an older answer has confirmed the new version, or when
   `LEASE_S` has passed. So a process that could not be reached has stopped using the cache by then.
4. A change without a label leads from the engine's own version to the next one. The first engine that says so makes it; the others follow
   within `CHANGE_S`, each with one call a change. One that is further behind, or does not know its own version (it started late, or its last
   call was not answered), is refused: only a person knows which weights it has.
5. An authority that has forgotten everything learns the versions again from what the processes report, and answers none of them for `LEASE_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec

from pd_cache.deadline import Deadline
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
POLL_S = 0.4
KEPT = 16
"""How many versions of a model are remembered."""
_RESET_S = 8.0
_AGAIN_S = 0.1
_FIRST_S = 1.0
_LONGEST_MODEL, _LONGEST_NAME = 1024, 300
_LONGEST = 1 << 20
"""The most bytes of an answer."""

Label = Annotated[str, msgspec.Meta(pattern=LABEL)]


class Version(msgspec.Struct, frozen=True, array_like=True):
    """One of a model's versions."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    label: Label
    begun: float = 0.0
    """When it began, in seconds since 1970."""
    for_all: bool = False
    """Whether it was said of all nodes at once: no engine takes it by saying that its weights have changed."""


History = Annotated[tuple[Version, ...], msgspec.Meta(min_length=1)]
"""The last versions of a model, numbered without gaps. The last one is current."""
BEGINNING: History = (Version(0, FIRST),)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a process asks the authority."""

    do: Literal["poll", "change", "reset", "leave"]
    model: Annotated[str, msgspec.Meta(max_length=_LONGEST_MODEL)]
    process: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Differs from one start of a process to the next."""
    name: Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z", max_length=_LONGEST_NAME)] = ""
    """What people call it."""
    own: Version | None = None
    watches: bool = False
    """Whether it has no version of its own, because another process decides for it."""
    attempt: int = 0
    """How many changes it has tried: a `take` from before the last one says nothing about its weights."""
    known: Annotated[tuple[Version, ...], msgspec.Meta(min_length=1, max_length=KEPT)] = BEGINNING
    """What it knows of the versions."""
    label: Label | None = None
    """For `change` and `reset`: the label of the new weights; None if the authority makes one."""
    after: int | None = None
    """For `reset`: the number of the version that its caller has seen as the current one. The reset is refused if a later one has begun: it
    may be a command that was given up, and comes late."""
    age: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """For `reset`: how many seconds ago the command began. Processes that the authority has known for less are not meant."""
    made: Version | None = None
    """For `reset`: the version that another authority has made of this command. No further one is made."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the authority answers."""

    history: History
    version: Version | None = None
    """For `change` and `reset`: the version that the process, or all nodes, have now."""
    take: Version | None = None
    """For `poll`: a version that this process has now, because a command said so, after its change number `attempt`."""
    attempt: int = 0
    told: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    """For `reset`: the processes that did not confirm."""
    authorities: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Where to ask from now on, if the authority knows more than the caller."""


class RefusedError(Exception):
    """The authority does not do what it was asked to; the message says why, and what to do."""


class UnavailableError(Exception):
    """The authority cannot answer now."""


def begun(history: History, label: str | None, now: float, *, for_all: bool = False) -> History:
    """Returns the history with a new version at its end, unless the current one has the label."""
    number = history[-1].number + 1
    if label is None:
        label = f"{secrets.token_hex(4)}-{number}"
    elif label == history[-1].label:
        return history
    return (*history, Version(number, label, now, for_all))[-KEPT:]


class Channel(Protocol):
    """Asks the authority."""

    def ask(self, question: Question, timeout: float) -> Reply:
        """Returns the answer. Raises RefusedError, UnavailableError, OSError or ValueError."""

    def close(self) -> None:
        """Ends the connection."""


class HttpChannel:
    """Asks authorities over HTTP: the first, and after a failure the next one. For use by one thread."""

    def __init__(self, urls: str) -> None:
        """`urls`: one or several, with commas between them."""
        self._urls = [url.strip() for url in urls.split(",") if url.strip()]
        self._turn = 0
        self._connection: Any = None

    def ask(self, question: Question, timeout: float) -> Reply:
        import http.client  # an engine without an authority imports no HTTP

        try:
            if self._connection is None:
                address = self._urls[self._turn % len(self._urls)].removeprefix("http://").rstrip("/")
                self._connection = http.client.HTTPConnection(address)
            self._connection.timeout = timeout
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout)
            self._connection.request("POST", "/versions", msgspec.json.encode(question))
            response = self._connection.getresponse()
            body = response.read(_LONGEST + 1)
            if response.status == 200 and len(body) <= _LONGEST:
                reply = decode_json(body, Reply)
                self._urls = list(reply.authorities) or self._urls
                return reply
        except (http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        self.close()
        text = body[:1000].decode(errors="replace")
        raise RefusedError(text) if response.status == 409 else UnavailableError(f"{response.status}: {text}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._turn += 1


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
        channel: Callable[[str], Channel] = HttpChannel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to ask the authorities at `urls`; without any, nothing is known but this engine's own changes.

        `name`: what people call the process. `watches`: whether another process decides in which version this one works. `alone`: whether no other process has the chunks.
        """
        self._model = model if len(model) <= _LONGEST_MODEL else hashlib.sha256(model.encode()).hexdigest()
        self._watches = watches
        self._alone = alone
        self._urls = urls
        self._channel = channel
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._name = "".join(one if " " <= one <= "~" else "?" for one in name or f"process {os.getpid()}")[
            :_LONGEST_NAME
        ]
        self._known = BEGINNING
        self._asked = -math.inf
        """When it asked the question by whose answer it knows that, by the clock."""
        self._own = None if urls else BEGINNING[0]
        self._original = True
        """Whether the weights are still those with which the engine started."""
        self._pending = False
        """Whether the weights have changed, and no version is known for them."""
        self._attempt = 0
        self._tried = not urls
        self._lock = threading.Condition()
        self._resetting = threading.Lock()
        self._complaints = SparseLog(every_s=60.0)
        self._stop = threading.Event()
        if urls and clock is time.monotonic:
            threading.Thread(target=self._run, name="pd-cache-versions", daemon=True).start()

    @classmethod
    def of(cls, settings: NodeSettings, model: str, *, watches: bool = False) -> WeightsVersion:
        """Returns the version of a model's weights in a process with these settings."""
        name = settings.name or f"{settings.host}, process {os.getpid()}"
        return cls(settings.versions, model, name=name, watches=watches, alone=not settings.pooled)

    @property
    def own(self) -> str | None:
        """The label of this engine's weights; None if it is not known."""
        own = self._own
        return None if own is None or self._pending else own.label

    def current(self, deadline: Deadline | None = None) -> str | None:
        """Returns the label in which to look up and load: the engine's own, if it is current. None if it is not, or if that is unknown.

        Waits only for the first answer, and no longer than a second.
        """
        if not self._tried:
            left = None if deadline is None else deadline.left()
            with self._lock:
                self._lock.wait_for(lambda: self._tried, _FIRST_S if left is None else min(left, _FIRST_S))
        with self._lock:
            label = self._known[-1].label if self._watches else self.own
        return label if label is not None and not self.why_not(label) else None

    def wait_known(self, timeout: float) -> bool:
        """Waits until it is known which version is current. Returns False if it is not after `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._urls or self._clock() - self._asked < LEASE_S, timeout)

    def why_not(self, label: str | None) -> Literal["", "reset", "epoch_unknown"]:
        """Returns why chunks of a version are not to be used now; empty if it is current."""
        with self._lock:
            if self._pending or label is None or (self._urls and self._clock() - self._asked >= LEASE_S):
                return "epoch_unknown"
            if not self._urls:
                return "" if self._watches or label == self.own else "reset"
            return "" if label == self._known[-1].label else "reset"

    def reset(self, version: str | None = None, *, timeout: float = _RESET_S) -> str | None:
        """Says that this engine has other weights now: those of `version`, or those to which all engines that say so now have changed.

        Returns their label when no process can load what was stored before. None if that was refused or not answered within `timeout` (s):
        then this engine uses the cache no more until a call with a `version` succeeds, or a command says which weights all nodes have. Raises
        ValueError for a label that cannot be one.
        """
        if version is not None and (not version or not re.match(LABEL, version)):
            raise ValueError(f"a version is 1 to 64 letters, digits, dots, dashes and underscores, not {version!r}")
        with self._resetting:
            with self._lock:
                self._attempt += 1
                self._pending, self._original = True, False
                question = self._question("change", version)
            reply = self._settled(question, timeout) if self._urls else self._decided(version)
            with self._lock:
                if reply is None or reply.version is None:
                    # The authority may have made a version of this. But the next call may mean the next change, so without a label it
                    # cannot be told which weights it speaks of; nor can what a command said meanwhile.
                    self._own, self._attempt = None, self._attempt + 1
                    return None
                self._learn(reply.history, -math.inf)
                if self._own is None or reply.version.number >= self._own.number:
                    self._own = reply.version
                self._pending = False
                return self._own.label

    def poll(self, channel: Channel, timeout: float = LEASE_S / 2) -> bool:
        """Asks once. Returns whether there was anything new."""
        with self._lock:
            question, asked = self._question("poll"), self._clock()
        try:
            reply = channel.ask(question, timeout)
        except (RefusedError, UnavailableError) as error:
            if (times := self._complaints.admit()) is not None:
                log.warning("cannot ask which version of %s is current, %d times: %s", self._model, times, error)
            reply = None
        with self._lock:
            self._tried = True
            self._lock.notify_all()
            if reply is not None and reply.authorities:
                self._urls = ",".join(reply.authorities)
            return reply is not None and self._take(reply, asked)

    def close(self) -> None:
        """Asks no more. Idempotent."""
        self._stop.set()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        channel = self._channel(self._urls)
        while not self._stop.is_set():
            if not self.poll(channel):
                self._stop.wait(POLL_S)
        with self._lock:
            self._asked = -math.inf  # before it says that nobody need wait for it
        with contextlib.suppress(RefusedError, UnavailableError):
            channel.ask(self._question("leave"), _FIRST_S)
        channel.close()

    def _question(self, do: Literal["poll", "change", "leave"], label: str | None = None) -> Question:
        return Question(
            do=do,
            model=self._model,
            process=self._process,
            name=self._name,
            own=self._own,
            watches=self._watches,
            attempt=self._attempt,
            known=self._known,
            label=label,
        )

    def _learn(self, history: History, asked: float) -> bool:
        """Takes in the versions that an answer told; with the lock held. Returns False if they are older than what is known."""
        if history[-1].number < self._known[-1].number:
            return False
        if history[-1] != self._known[-1]:
            log.info("%s: version %s is current", self._model, history[-1].label or "(first)")
            self._asked = asked
        self._known, self._asked = history, max(asked, self._asked)
        same = self._known[-1].label == (FIRST if self._own is None else self._own.label)
        if same and not self._pending and (self._own is not None or self._original):
            self._own = self._known[-1]
        return True

    def _take(self, reply: Reply, asked: float) -> bool:
        before, own = self._known[-1], self._own
        if not self._learn(reply.history, asked):
            return False
        take = reply.take
        if (
            take is not None
            and reply.attempt == self._attempt
            and not self._resetting.locked()  # the engine's own call decides first; later polls bring this again
            and not self._watches
            and (own is None or take.number > own.number)
        ):
            self._own, self._original, self._pending = take, False, False
        return before != self._known[-1] or own != self._own

    def _settled(self, question: Question, timeout: float) -> Reply | None:
        """Asks until there is an answer."""
        channel, end = self._channel(self._urls), self._clock() + timeout
        try:
            while True:
                try:
                    return channel.ask(question, max(_AGAIN_S, min(end - self._clock(), timeout / 2)))
                except RefusedError as error:
                    log.warning("no reset of %s: %s", self._model, error)
                    return None
                except UnavailableError as error:
                    if self._clock() + _AGAIN_S >= end:
                        log.warning(
                            "no reset of %s: the authority of versions at %s: %s", self._model, self._urls, error
                        )
                        return None
                self._stop.wait(_AGAIN_S)
        finally:
            channel.close()

    def _decided(self, version: str | None) -> Reply | None:
        """Returns the answer of an engine that knows of no authority."""
        if version is None and not self._alone:
            log.warning(
                "no reset of %s: no authority of versions is known; give the version, or set `versions` to http://HOST:PORT, the "
                "`versions_port` of the role master",
                self._model,
            )
            return None
        history = begun(self._known, version, time.time())
        return Reply(history=history, version=history[-1])
