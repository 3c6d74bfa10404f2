"""The authority of weights versions: numbers them, and answers over HTTP in the process of the role `master`; see `pd_cache/versions.py`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple, Protocol

import msgspec

from launch.discovery import View, open_directory
from launch.health_server import serving
from launch.http import fetch
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, MasterNode
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.versions import (
    BEGINNING,
    LEASE_S,
    HttpChannel,
    Question,
    RefusedError,
    Reply,
    UnavailableError,
    Version,
)

log = logging.getLogger(__name__)

CHANGE_S = 60.0
"""How long after the first engine the others may say that they have changed, too."""
KNOWN_S = 60.0
"""How long an authority remembers a process that it does not hear of."""
MARGIN_S = 0.2
"""The authority waits for so much longer than a lease: clocks of two machines do not run alike."""
_MOST_MODELS = 1024
_MOST_PROCESSES = 8192
_TRIES = 8
_COMMANDS = 3
_QUESTION_S = 15.0
_CONNECTIONS = 2048
_IDLE_S = 30.0
_LONGEST = 1 << 14
"""The most bytes of a question."""


class Values(Protocol):
    """Where the current versions lie: in this process, or in etcd (`launch.discovery.etcd.EtcdValues`) for elected masters."""

    def get(self, key: str) -> bytes | None:
        """Returns a value as it is now; None if there is none. Raises UnavailableError."""

    def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
        """Writes a value, unless it is not `before` any more. Returns whether it did. Raises UnavailableError."""


class MemoryValues:
    """Values in this process alone. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
        with self._lock:
            if self._values.get(key) != before:
                return False
            self._values[key] = after
            return True


class _Seen(NamedTuple):
    """What a process said of itself, and when."""

    question: Question
    at: float


class ModelVersions(msgspec.Struct, frozen=True):
    """The version of a model that is current, and the label that each process has; None if it knows none."""

    current: str
    processes: tuple[tuple[str, str | None], ...]


class Authority:
    """Numbers the versions of models. Thread-safe. Waits for nothing but `values`."""

    def __init__(
        self,
        values: Values,
        prefix: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`prefix`: of the keys of `values`."""
        self._values = values
        self._prefix = prefix
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._newest: dict[str, tuple[Version, float]] = {}
        """The newest version of each model that this process knows of, and since when, by the clock."""
        self._processes: dict[str, _Seen] = {}
        self._lock = threading.Lock()

    def answer(self, question: Question) -> Reply:
        """Returns the answer. Raises RefusedError, with nothing changed, or UnavailableError."""
        self._note(question)
        self._learn(question.model, question.known)
        if self._clock() - self._began < LEASE_S + MARGIN_S:
            raise UnavailableError("it has just started, and learns from the processes which version is current")
        key = self._prefix + hashlib.sha256(question.model.encode()).hexdigest()[:32]
        for _ in range(_TRIES):
            stored = self._values.get(key)
            before, since = self._learn(question.model, _decoded(stored))
            after = self._decided(question, before, since)
            if after.number == _decoded(stored).number or self._values.replace(key, stored, msgspec.json.encode(after)):
                _, since = self._learn(question.model, after)
                return Reply(current=after, wait_s=max(0.0, since + LEASE_S + MARGIN_S - self._clock()))
        raise UnavailableError("others change the versions all the time")

    def models(self) -> dict[str, ModelVersions]:
        """Returns what is known of each model that a process has asked for lately."""
        with self._lock:
            now = self._clock()
            known = [one.question for one in self._processes.values() if now - one.at < KNOWN_S]
            current = {model: version.label for model, (version, _) in self._newest.items()}
        return {
            model: ModelVersions(
                current[model], tuple((one.name, one.own) for one in known if one.model == model and not one.watches)
            )
            for model in sorted({one.model for one in known} & current.keys())
        }

    def _note(self, question: Question) -> None:
        if not question.process:
            return
        with self._lock:
            now = self._clock()
            if question.process not in self._processes and len(self._processes) >= _MOST_PROCESSES:
                self._processes = {key: one for key, one in self._processes.items() if now - one.at < KNOWN_S}
                if len(self._processes) >= _MOST_PROCESSES:
                    raise UnavailableError(f"{_MOST_PROCESSES} processes ask, and there is no room for another")
            self._processes[question.process] = _Seen(question, now)

    def _learn(self, model: str, version: Version) -> tuple[Version, float]:
        """Takes in that a version has been current. Returns the newest, and since when it is known."""
        with self._lock:
            if model not in self._newest and len(self._newest) >= _MOST_MODELS:
                raise UnavailableError(f"it knows versions of {_MOST_MODELS} models, and has no room for another")
            newest = self._newest.setdefault(model, (BEGINNING, self._clock()))
            if version.number > newest[0].number:
                newest = self._newest[model] = version, self._clock()
            return newest

    def _decided(self, question: Question, current: Version, since: float) -> Version:
        """Returns the version that is current after a question. Raises RefusedError."""
        number = max(current.number + 1, int(self._wall() * 1000))
        label = question.label if question.label is not None else secrets.token_hex(8)
        if question.do == "poll" or (question.do == "change" and question.label == current.label):
            return current
        if question.do == "reset":
            if question.after not in (None, current.number):
                raise RefusedError(
                    f"version {current.label} has begun meanwhile; look whether it is the one that is meant"
                )
            return Version(number, label, previous=current.label, for_all=True)
        if question.label is not None:
            return Version(number, label)
        if question.own == current.label:
            return Version(number, label, previous=current.label)
        # an engine that speaks while a command is under way means the same change
        joinable_s = LEASE_S + MARGIN_S if current.for_all else CHANGE_S
        if question.own is not None and question.own == current.previous and self._clock() - since < joinable_s:
            return current
        had = "weights of no known version" if question.own is None else f"version {question.own or '(first)'}"
        raise RefusedError(
            f"this process had {had}, and does not follow others to version {current.label or '(first)'}: give the version, or run "
            "`pd-cache reset` when all nodes have the new weights"
        )


def _decoded(value: bytes | None) -> Version:
    """Returns the version that a value is. One that is damaged counts as lost: masters and processes know better."""
    try:
        return BEGINNING if value is None else decode_json(value, Version)
    except UndecodableError as error:
        log.warning("a stored version of the weights cannot be read: %s", error)
        return BEGINNING


# --- over HTTP ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving_versions(config: ClusterConfig, node: MasterNode) -> Iterator[Authority]:
    """Answers questions at the node's port for them while the block runs. Raises RoleError if the address cannot be bound."""
    with contextlib.ExitStack() as stack:
        values: Values = MemoryValues()
        prefix = ""
        others: list[str] = []
        if isinstance(config.discovery, EtcdDiscovery) and config.masters.ha:
            from launch.discovery.etcd import EtcdValues, prefix_of

            def follow(view: View) -> None:
                others[:] = sorted(one.versions for one in view.by_role("master") if one.versions is not None)

            directory = open_directory(config, follow)
            stack.callback(directory.close)
            values = stack.enter_context(contextlib.closing(EtcdValues(config.discovery)))
            prefix = prefix_of(config.name, "versions")
        authority = Authority(values, prefix)
        stack.enter_context(serving(node.host, node.versions, versions_handler(authority, others), _CONNECTIONS))
        yield authority


def versions_handler(authority: Authority, others: Sequence[str] = ()) -> type[BaseHTTPRequestHandler]:
    """Returns the class that answers the requests of a connection. `others`: where the authorities are, as they come and go."""

    class VersionsHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one segment an answer
        timeout = _IDLE_S

        def do_GET(self) -> None:
            self._answer(200, msgspec.json.encode(authority.models()))

        def do_POST(self) -> None:
            length = self.headers.get("content-length", "")
            if not length.isascii() or not length.isdecimal() or int(length) > _LONGEST:
                self.close_connection = True
                self._answer(413, b"expected a question with its length")
                return
            body = self.rfile.read(int(length))
            if self._left():
                self.close_connection = True  # a command that comes late is not what its caller means now
                return
            try:
                reply = authority.answer(decode_json(body, Question))
            except RefusedError as error:
                self._answer(409, str(error).encode())
            except UnavailableError as error:
                self._answer(503, str(error).encode())
            except UndecodableError as error:
                self._answer(400, str(error).encode())
            else:
                self._answer(200, msgspec.json.encode(msgspec.structs.replace(reply, authorities=tuple(others))))

        def _left(self) -> bool:
            """Returns whether the caller has given up."""
            waiting = select.poll()
            waiting.register(self.connection, select.POLLIN)
            return bool(waiting.poll(0))

        def _answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-type", "application/json" if code == 200 else "text/plain; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing: a poll is no event."""

    return VersionsHandler


class Told(NamedTuple):
    """What became of a command."""

    told: list[str]
    """The processes that have the version that is current now."""
    untold: list[str]
    """Those that do not, or stand for the processes of a master that did not answer: they use the cache no more until they do."""


def tell_all(urls: Sequence[str], model: str, label: str | None) -> Told:
    """Says that all nodes have other weights of a model: those of `label`, or of a label that an authority makes.

    Returns when no process can rely on an older answer. Raises RefusedError or UnavailableError, with the reasons of each authority, if none
    of them takes it.
    """
    version: Version | None = None
    wait_s = 0.0
    problems: list[str] = []
    silent: list[str] = []
    for url in urls:
        try:
            with contextlib.closing(HttpChannel([url])) as channel:
                # masters that share etcd have it already
                known = Question(do="poll", model=model, known=version or BEGINNING)
                reply = channel.ask(known, _QUESTION_S) if version else _commanded(channel, model, label)
            version, wait_s = reply.current, max(wait_s, reply.wait_s)
        except (RefusedError, UnavailableError) as error:
            problems.append(f"{url}: {error}")
            silent.append(f"the processes that ask {url}")
    if version is None:
        raise UnavailableError("; ".join(problems) or "none is known")
    time.sleep(wait_s)
    found = known_versions(urls).get(model, ModelVersions(version.label, ()))
    told = {name for name, own in found.processes if own == found.current}
    return Told(sorted(told), sorted({name for name, _ in found.processes} - told) + silent)


def _commanded(channel: HttpChannel, model: str, label: str | None) -> Reply:
    """Asks for a reset of what is current now. If a version begins meanwhile, looks and asks again: the command is meant now."""
    for left in reversed(range(_COMMANDS)):
        current = channel.ask(Question(do="poll", model=model), _QUESTION_S).current
        try:
            return channel.ask(Question(do="reset", model=model, label=label, after=current.number), _QUESTION_S)
        except RefusedError:
            if not left:
                raise
    raise AssertionError


def known_versions(urls: Iterable[str]) -> dict[str, ModelVersions]:
    """Returns what the authorities at these URLs know, by model; nothing of one that does not answer."""
    found: dict[str, ModelVersions] = {}
    for url in urls:
        with contextlib.suppress(OSError, ValueError):
            for model, one in decode_json(fetch(f"{url}/versions"), dict[str, ModelVersions]).items():
                before = () if model not in found else found[model].processes
                found[model] = ModelVersions(one.current, (*before, *one.processes))
    return found
