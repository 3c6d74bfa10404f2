"""The authority of weights versions: numbers them, and answers over HTTP in the process of the role `master`; see `pd_cache/versions.py`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Protocol

import msgspec

from launch.discovery import View, open_directory
from launch.health_server import serving
from launch.http import fetch
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, MasterNode
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.versions import (
    BEGINNING,
    LEASE_S,
    History,
    Question,
    RefusedError,
    Reply,
    UnavailableError,
    Version,
    begun,
)

if TYPE_CHECKING:
    from launch.discovery.etcd import EtcdValues

log = logging.getLogger(__name__)

CHANGE_S = 60.0
"""How long after the first engine the others may say that they have changed, too."""
KNOWN_S = 60.0
"""How long an authority remembers a process that it does not hear of."""
MARGIN_S = 0.2
"""The authority waits for so much longer than a lease: clocks of two machines do not run alike."""
_MOST_MODELS = 1024
_TRIES = 8
_CONNECTIONS = 2048
_IDLE_S = 30.0
_LOOK_S = 0.02
_OUTAGE_S = 5.0
"""How long after etcd has not answered it is not asked again."""
_MOST_PROCESSES = 8192
_LARGEST_NUMBER = 1 << 40
"""No model has had so many versions: a process that says so is not believed."""
_MOST_NAMES = 1000
"""How many processes an answer names."""
_LONGEST = 1 << 16
"""The most bytes of a question."""


class Histories(Protocol):
    """Where the histories lie."""

    shared: bool
    """Whether another authority may read and write them, too: an elected one, or one that was stopped while this one took its place."""

    def read(self, model: str) -> History:
        """Returns a model's history as it is now. Raises UnavailableError."""

    def replace(self, model: str, before: History, after: History) -> bool:
        """Replaces a history, unless it is not `before` any more. Returns whether it did. Raises UnavailableError."""


class MemoryHistories:
    """Histories in this process alone. Thread-safe."""

    shared = False

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}
        self._lock = threading.Lock()

    def read(self, model: str) -> History:
        return self._histories.get(model, BEGINNING)

    def replace(self, model: str, before: History, after: History) -> bool:
        with self._lock:
            if self._histories.get(model, BEGINNING) != before:
                return False
            if model not in self._histories and len(self._histories) >= _MOST_MODELS:
                raise UnavailableError(f"it has versions of {_MOST_MODELS} models, and no room for another")
            self._histories[model] = after
            return True


class _Process(msgspec.Struct):
    """What an authority knows of a process."""

    name: str
    watches: bool
    first: float
    """When it asked first, by the clock."""
    seen: float
    known: int = -1
    """The newest version that it knows of."""
    own: Version | None = None
    attempt: int = 0
    take: Version | None = None
    taken_after: int = 0


class ModelVersions(msgspec.Struct, frozen=True):
    """The version of a model that is current, and the label that each process has; None if it knows none."""

    current: str
    processes: tuple[tuple[str, str | None], ...]


class Authority:
    """Numbers the versions of models. Thread-safe. Waits for nothing but `histories`."""

    def __init__(
        self,
        histories: Histories,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._histories = histories
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._processes: dict[tuple[str, str], _Process] = {}
        self._under_way: set[tuple[str, int]] = set()
        """The resets of all nodes that have not ended: an engine that says that it has changed means the same change."""
        self._made: set[str] = set()
        """The models of which it has made a version."""
        self._lock = threading.Lock()

    def answer(self, question: Question) -> Reply:
        """Returns the answer. That of a change or reset may be passed on once `pending` returns nothing.

        Raises RefusedError, with nothing changed, or UnavailableError.
        """
        if question.do == "leave":
            with self._lock:
                self._processes.pop((question.model, question.process), None)
            return Reply(history=question.known)
        process = self._note(question)  # 1. before the history is read: whatever it is answered, `pending` knows of it
        trusts = question.model not in self._made
        history = self._update(question.model, lambda history: _newer(history, question.known, trusts, self._wall()))
        if self._clock() - self._began < LEASE_S + MARGIN_S:
            raise UnavailableError("it has just started, and learns from the processes which version is current")
        if question.do == "poll":
            return self._polled(question, process, history)
        if question.do == "change":
            with self._lock:
                under_way = frozenset(self._under_way)
            history = self._make(question.model, lambda history: _changed(history, question, self._wall(), under_way))
            own = question.own
            made = history[-1] if question.label is not None or own is None else _next(history, own)
            return Reply(history=history, version=made)
        if question.made is None:
            history = self._make(question.model, lambda history: self._begun(history, question))
            version = history[-1]
        elif question.made in history:
            version = question.made
        else:
            raise UnavailableError(f"it does not know of version {question.made.label} yet")
        with self._lock:
            before = self._clock() - question.age
            for one in self._known(question.model):
                if not one.watches and one.first <= before:
                    one.take, one.taken_after = version, one.attempt
        return Reply(history=history, version=version)

    def pending(self, model: str, number: int, since: float, asker: str = "") -> bool:
        """Returns whether a process may still rely on an answer from before `since`, when version `number` began, by the clock."""
        if self._clock() - since >= LEASE_S + MARGIN_S:
            return False
        if self._histories.shared:  # others may have answered processes that we do not know of
            return True
        with self._lock:
            late = self._clock() - LEASE_S - MARGIN_S
            return any(
                one.known < number or (one.take is not None and one.take.number == number)
                for (name, process), one in self._processes.items()
                if name == model and process != asker and one.seen > late
            )

    def reached(self, model: str, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the names of the known processes that have version `number` or a later one, and of those that do not."""
        told, untold = [], []
        with self._lock:
            self._under_way.discard((model, number))
            for one in self._known(model):
                if one.own is not None and one.own.number >= number:
                    told.append(one.name)
                elif not one.watches:
                    untold.append(one.name)
        return tuple(sorted(told)[:_MOST_NAMES]), tuple(sorted(untold)[:_MOST_NAMES])

    def models(self) -> dict[str, ModelVersions]:
        """Returns what is known of each model that a process has asked for lately."""
        found: dict[str, list[_Process]] = {}
        with self._lock:
            now = self._clock()
            for (model, _), one in self._processes.items():
                if now - one.seen < KNOWN_S:
                    found.setdefault(model, []).append(one)
        return {
            model: ModelVersions(
                self._histories.read(model)[-1].label,
                tuple((one.name, None if one.own is None else one.own.label) for one in known if not one.watches),
            )
            for model, known in sorted(found.items())
        }

    def _note(self, question: Question) -> _Process | None:
        if not question.process:
            return None
        with self._lock:
            now = self._clock()
            place = question.model, question.process
            if place not in self._processes and len(self._processes) >= _MOST_PROCESSES:
                self._processes = {key: one for key, one in self._processes.items() if now - one.seen < KNOWN_S}
                if len(self._processes) >= _MOST_PROCESSES:
                    raise UnavailableError(f"{_MOST_PROCESSES} processes ask, and there is no room for another")
            process = self._processes.setdefault(place, _Process(question.name, question.watches, now, now))
            process.seen, process.own = now, question.own
            process.attempt = max(process.attempt, question.attempt)  # a change may have overtaken this poll
            process.known = question.known[-1].number
            if process.take is not None and question.own is not None and question.own.number >= process.take.number:
                process.take = None
            return process

    def _begun(self, history: History, question: Question) -> History:
        """Returns the history with a version of all nodes at its end. An engine may say the same from then on.

        Raises RefusedError if versions have begun that the caller has not seen.
        """
        if question.after not in (None, history[-1].number) and history[-1].label != question.label:
            raise RefusedError(
                f"version {history[-1].label} has begun meanwhile; look whether it is the one that is meant"
            )
        after = begun(history, question.label, self._wall(), for_all=True)
        with self._lock:
            self._under_way.add((question.model, after[-1].number))
        return after

    def _polled(self, question: Question, process: _Process | None, history: History) -> Reply:
        if process is None:
            return Reply(history=history)
        with self._lock:
            return Reply(history=history, take=process.take, attempt=process.taken_after)

    def _known(self, model: str) -> list[_Process]:
        """Returns the processes of a model; call it with the lock held."""
        now = self._clock()
        return [one for (name, _), one in self._processes.items() if name == model and now - one.seen < KNOWN_S]

    def _make(self, model: str, change: Callable[[History], History]) -> History:
        """Updates a history with a version that this authority makes."""

        def made(history: History) -> History:
            after = change(history)
            if after != history:
                self._made.add(model)  # before it is written: from then on, no process knows better
            return after

        return self._update(model, made)

    def _update(self, model: str, change: Callable[[History], History]) -> History:
        for _ in range(_TRIES):
            before = self._histories.read(model)
            after = change(before)
            if after == before or self._histories.replace(model, before, after):
                return after
        raise UnavailableError("others change the versions all the time")


def _newer(history: History, known: History, trusts: bool, now: float) -> History:
    """Returns what is to be believed if a process knows of later versions: it was told of them before they were forgotten. If others were
    made since then, without it, the last of these stays current, with a number that the process takes for the newest."""
    number = known[-1].number
    if not history[-1].number < number < _LARGEST_NUMBER or number - known[0].number != len(known) - 1:
        return history
    return known if trusts else (Version(number + 1, history[-1].label, now, for_all=True),)


def _next(history: History, own: Version) -> Version:
    return next(one for one in history if one.number == own.number + 1)


def _changed(history: History, question: Question, now: float, under_way: Collection[tuple[str, int]]) -> History:
    """Returns the history after an engine has changed its weights. Raises RefusedError if nobody can know which version it has now."""
    current, own = history[-1], question.own
    if question.label is not None:
        return begun(history, question.label, now)
    if own is None:
        raise RefusedError(_advice(history, f"it is not known which version of {question.model} this process had"))
    known = next((one for one in history if one.number == own.number), None)
    if known is None or known.label != own.label:
        raise RefusedError(_advice(history, f"version {own.label or '(first)'} of {question.model} is not known"))
    if known == current:
        return begun(history, None, now)
    following = _next(history, own)
    if following.for_all and (question.model, following.number) not in under_way:
        raise RefusedError(_advice(history, f"the reset to version {following.label} did not reach this process"))
    if now - following.begun > CHANGE_S:
        raise RefusedError(
            _advice(history, f"this process missed version {following.label}, more than {CHANGE_S:g} s ago")
        )
    return history


def _advice(history: History, problem: str) -> str:
    current = history[-1].label or "that of the start"
    return f"{problem}; give the version, or run `pd-cache reset` when all nodes have the new weights; current is {current}"


# --- over HTTP ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving_versions(config: ClusterConfig, node: MasterNode) -> Iterator[Authority]:
    """Answers questions at the node's port for them while the block runs. Raises RoleError if the address cannot be bound."""
    with contextlib.ExitStack() as stack:
        histories: Histories = MemoryHistories()
        others: list[str] = []
        if isinstance(config.discovery, EtcdDiscovery):
            from launch.discovery.etcd import EtcdValues, prefix_of

            def follow(view: View) -> None:
                others[:] = sorted(one.versions for one in view.by_role("master") if one.versions is not None)

            directory = open_directory(config, follow)
            stack.callback(directory.close)
            values = stack.enter_context(contextlib.closing(EtcdValues(config.discovery)))
            histories = EtcdHistories(values, prefix_of(config.name, "versions"), elected=config.masters.ha)
        authority = Authority(histories)
        stack.enter_context(serving(node.host, node.versions, versions_handler(authority, others), _CONNECTIONS))
        yield authority


class EtcdHistories:
    """Histories in etcd, where they outlive this process. What etcd loses is put back from this process's memory. Thread-safe."""

    shared = True

    def __init__(
        self, values: EtcdValues, prefix: str, *, elected: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """While etcd does not answer, an authority that is not `elected` goes by what it read last: an outage of etcd stops no engine."""
        self._values = values
        self._prefix = prefix
        self._seen: dict[str, History] = {}
        self._elected = elected
        self._clock = clock
        self._again: dict[str, float] = {}
        """When each history is read from etcd again, by the clock: one of many askers waits for etcd."""

    def read(self, model: str) -> History:
        seen, now = self._seen.get(model), self._clock()
        if not self._elected and seen is not None:
            if now < self._again.get(model, now):
                return seen
            self._again[model] = now + MARGIN_S
        try:
            stored = self._stored(model)
        except UnavailableError:
            if self._elected or seen is None:
                raise
            self._again[model] = now + _OUTAGE_S
            return seen
        if seen is not None and stored[-1].number < seen[-1].number:
            if not self._exchange(model, stored, seen):
                raise UnavailableError("etcd has lost versions, and they are being put back")
            return seen
        self._seen[model] = stored
        return stored

    def replace(self, model: str, before: History, after: History) -> bool:
        done = self._exchange(model, before, after)
        if done:
            self._seen[model] = after
        self._again.pop(model, None)  # who lost the race looks what etcd has
        return done

    def _stored(self, model: str) -> History:
        return self._read(self._values.get(self._key(model)))

    def _read(self, value: bytes | None) -> History:
        """Returns the history that a value of etcd is. One that is damaged counts as lost: masters and processes know better."""
        try:
            return BEGINNING if value is None else decode_json(value, History)
        except UndecodableError as error:
            log.warning("etcd holds no versions of the weights: %s", error)
            return BEGINNING

    def _exchange(self, model: str, before: History, after: History) -> bool:
        """Replaces `before`, however it is spelled there."""
        value = self._values.get(self._key(model))
        return self._read(value) == before and self._values.replace(self._key(model), value, msgspec.json.encode(after))

    def _key(self, model: str) -> str:
        return self._prefix + hashlib.sha256(model.encode()).hexdigest()[:32]


def versions_handler(authority: Authority, others: Sequence[str] = ()) -> type[BaseHTTPRequestHandler]:
    """Returns the class that answers the requests of a connection. `others`: where the authorities are, as they come and go."""

    class VersionsHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one segment an answer
        timeout = _IDLE_S

        def do_GET(self) -> None:
            self._answered(lambda: msgspec.json.encode(authority.models()))

        def do_POST(self) -> None:
            length = self.headers.get("content-length", "")
            if not length.isascii() or not length.isdecimal() or int(length) > _LONGEST:
                self.close_connection = True
                self._answer(413, b"expected a question with its length")
                return
            body = self.rfile.read(int(length))
            if self._left():
                self.close_connection = True  # a command that came late is not what its caller means now
                return
            self._answered(lambda: msgspec.json.encode(_answer(authority, decode_json(body, Question), others)))

        def _left(self) -> bool:
            """Returns whether the caller has given up."""
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                return bool(selector.select(0)) and not self.connection.recv(1, socket.MSG_PEEK)

        def _answered(self, work: Callable[[], bytes]) -> None:
            try:
                self._answer(200, work())
            except RefusedError as error:
                self._answer(409, str(error).encode())
            except UnavailableError as error:
                self._answer(503, str(error).encode())
            except UndecodableError as error:
                self._answer(400, str(error).encode())

        def _answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-type", "application/json" if code == 200 else "text/plain; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing: a poll is no event."""

    return VersionsHandler


def _answer(authority: Authority, question: Question, others: Sequence[str]) -> Reply:
    """Returns the answer to a question; that to a change or reset, when it is done."""
    reply = msgspec.structs.replace(authority.answer(question), authorities=tuple(others))
    if reply.version is None:
        return reply
    since, number = time.monotonic(), reply.version.number
    while authority.pending(question.model, number, since, question.process):
        time.sleep(_LOOK_S)
    if question.do == "change":
        return reply
    told, untold = authority.reached(question.model, number)
    return msgspec.structs.replace(reply, told=told, untold=untold)


def known_versions(urls: Iterable[str]) -> dict[str, ModelVersions]:
    """Returns what the authorities at these URLs know, by model; nothing of one that does not answer."""
    found: dict[str, ModelVersions] = {}
    for url in urls:
        with contextlib.suppress(OSError, ValueError):
            for model, one in decode_json(fetch(f"{url}/versions"), dict[str, ModelVersions]).items():
                before = () if model not in found else found[model].processes
                found[model] = ModelVersions(one.current, (*before, *one.processes))
    return found
