"""The authority of weights versions: numbers them, and answers over HTTP in the process of the role `master`; see `pd_cache/versions.py`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from launch.discovery import View, open_directory
from launch.health_server import Response, serving, versions
from launch.http import fetch
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, MasterNode
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.runtime import RuntimeFolderError, own_folder, runtime_folder
from pd_cache.versions import BEGINNING, OVER_S, Channel, Question, Reply, UnavailableError, Version, begin_version

if TYPE_CHECKING:
    from launch.discovery.etcd import EtcdValues

log = logging.getLogger(__name__)

KNOWN_S = 60.0
"""How long an authority remembers a process that it does not hear of."""
_MOST = 8192
"""How many processes and models it knows at most."""
_TRIES = 8
_COMMAND_S = 10.0
_CONNECTIONS = 2048


class FileValues:
    """Keeps the current versions in a file that outlives this process. Elected masters use `EtcdValues`. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a `path`, keeps them in memory only. A file that cannot be read counts as lost."""
        self._path = path
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        if path is None:
            return
        try:
            with own_folder(path.parent):
                versions = decode_json(path.read_bytes(), dict[str, Version]) if path.is_file() else {}
            self._values = {key: msgspec.json.encode(version) for key, version in versions.items()}
        except (OSError, RuntimeFolderError, UndecodableError) as error:
            log.warning("%s: the versions of the weights cannot be read, and count as lost: %s", path, error)

    def get(self, key: str) -> bytes | None:
        """Returns a value as it is now; None if there is none."""
        return self._values.get(key)

    def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
        """Writes a value, unless it is not `before` any more. Returns whether it did. Raises UnavailableError."""
        with self._lock:
            if self.get(key) != before:
                return False
            values = {**self._values, key: after}
            if self._path is not None:
                self._write(self._path, {key: msgspec.Raw(value) for key, value in values.items()})
            self._values = values
            return True

    @staticmethod
    def _write(path: Path, values: dict[str, msgspec.Raw]) -> None:
        draft = path.with_suffix(".new")
        try:
            with own_folder(path.parent):  # it may have been removed since the start
                draft.write_bytes(msgspec.json.encode(values))
                draft.replace(path)
        except (OSError, RuntimeFolderError) as error:
            raise UnavailableError(f"the versions of the weights cannot be written: {error}") from error


class ModelVersions(msgspec.Struct, frozen=True):
    """The version of a model that is current, and each process with its name and the label that it has; None if it knows none."""

    current: Version
    processes: dict[str, tuple[str, str | None]] = {}

    def following(self) -> list[str]:
        """Returns the names under which all processes have the current version."""
        return sorted({name for name, _ in self.processes.values()}.difference(self.lagging()))

    def lagging(self) -> list[str]:
        """Returns the names of processes that do not have it, and use no cache."""
        return sorted({name for name, own in self.processes.values() if own != self.current.label})


class Authority:
    """Numbers the versions of models. Thread-safe. Waits for nothing but `values`."""

    def __init__(
        self,
        values: FileValues | EtcdValues,
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
        self._latest = 0
        self._newest: dict[str, tuple[Version, float]] = {}
        """The newest version of each model that this process knows of, and since when, by the clock."""
        self._processes: dict[str, tuple[Question, float, float]] = {}
        """What each process has said last, when that was, and when it was heard of first."""
        self._lock = threading.Lock()

    def answer(self, question: Question) -> Reply:
        """Returns the answer. Raises UnavailableError."""
        self._note(question)
        learning = self._clock() - self._began < OVER_S
        latest = self._number()
        key = self._prefix + hashlib.sha256(question.model.encode()).hexdigest()[:32]
        for _ in range(_TRIES):
            known, _ = self._learn(question.model, question.known)
            stored = self._values.get(key)
            written = _decoded(stored)
            current, _ = self._learn(question.model, written)
            if known.number > written.number and not learning:
                # what was stored is lost, and another authority may know of a version that this one has never heard of
                self._began, learning = self._clock(), True
            if question.new is not None and question.known == current and not learning:
                current = msgspec.structs.replace(question.new, number=max(current.number, self._number()) + 1)
            if current.number == written.number or self._values.replace(key, stored, msgspec.json.encode(current)):
                _, since = self._learn(question.model, current)
                if learning:
                    raise UnavailableError(
                        "it has just started, and learns from the processes which version is current"
                    )
                return Reply(
                    current=current,
                    age_s=self._clock() - since,
                    latest=max(current.number, latest),
                    turn=question.turn,
                )
        raise UnavailableError("others change the versions all the time")

    def models(self) -> dict[str, ModelVersions]:
        """Returns what is known of each model that a process has asked for lately."""
        with self._lock:
            now = self._clock()
            found: dict[str, dict[str, tuple[str, str | None]]] = {}
            begun: dict[tuple[str, str], float] = {}
            for question, _, first in self._processes.values():
                node = question.model, question.name
                begun[node] = max(first, begun.get(node, first))
            for question, at, _ in self._processes.values():
                # one that was silent before another one of its name began has been started again; ranks of a node begin together
                again = at < begun[question.model, question.name]
                if now - at < KNOWN_S and not again and question.model in self._newest:
                    newest, own = self._newest[question.model][0], question.own
                    if own == newest.label and question.since != newest.number:
                        own = None  # the label is that of an earlier version, and what was said in between has not been heard
                    found.setdefault(question.model, {})[question.process] = question.name, own
            return {model: ModelVersions(self._newest[model][0], rows) for model, rows in found.items()}

    def _number(self) -> int:
        """Returns the time as a number of versions. Never goes back, as the clock may."""
        with self._lock:
            self._latest = max(self._latest, int(self._wall() * 1000))
            return self._latest

    def _note(self, question: Question) -> None:
        if not question.process:
            return
        with self._lock:
            now = self._clock()
            if question.process not in self._processes:
                self._processes = {key: one for key, one in self._processes.items() if now - one[1] < KNOWN_S}
                if len(self._processes) >= _MOST:
                    raise UnavailableError(f"{_MOST} processes ask, and there is no room for another")
            _, _, first = self._processes.get(question.process, (question, now, now))
            self._processes[question.process] = question, now, first

    def _learn(self, model: str, version: Version) -> tuple[Version, float]:
        """Takes in that a version has been current. Returns the newest, and since when it is known."""
        with self._lock:
            if model not in self._newest and len(self._newest) >= _MOST:
                raise UnavailableError(f"it knows versions of {_MOST} models, and has no room for another")
            newest = self._newest.setdefault(model, (BEGINNING, self._clock()))
            if version.number > newest[0].number:
                newest = self._newest[model] = version, self._clock()
            return newest


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
        values: FileValues | EtcdValues
        prefix = ""
        masters: list[str] = []
        if isinstance(config.discovery, EtcdDiscovery) and config.masters.ha:
            from launch.discovery import etcd

            def follow(view: View) -> None:
                masters[:] = sorted(one.versions for one in view.by_role("master") if one.versions is not None)

            directory = open_directory(config, follow)
            stack.callback(directory.close)
            values = stack.enter_context(contextlib.closing(etcd.EtcdValues(config.discovery)))
            prefix = etcd.prefix_of(config.name, "versions")
        else:
            values = FileValues(runtime_folder() / f"{config.name}-{node.host}-{node.versions}.versions")
        authority = Authority(values, prefix)
        stack.enter_context(serving(node.host, node.versions, answering(authority, masters), _CONNECTIONS))
        yield authority


def answering(authority: Authority, masters: Sequence[str] = ()) -> Callable[[str, bytes | None], Response]:
    """Returns what answers requests. `masters`: where the authorities are, as they come and go."""

    def respond(path: str, body: bytes | None) -> Response:
        if body is None:
            told = versions() if path == "/health" else authority.models()
            return Response(200, msgspec.json.encode(told), "application/json")
        try:
            reply = authority.answer(decode_json(body, Question))
        except UnavailableError as error:
            return Response(503, str(error).encode())
        except UndecodableError as error:
            return Response(400, str(error).encode())
        return Response(
            200, msgspec.json.encode(msgspec.structs.replace(reply, authorities=tuple(masters))), "application/json"
        )

    return respond


class Told(NamedTuple):
    """What became of a command."""

    told: list[str]
    """The processes that have the version that is current now."""
    untold: list[str]
    """Those that do not, or stand for the processes of a master that did not answer: they use the cache no more until they do."""


def tell_all(urls: Sequence[str], model: str, label: str | None) -> Told:
    """Says that all nodes have other weights of a model: those of `label`, or of a label that is made.

    Returns when no process can rely on an older answer. Raises UnavailableError if none of the authorities takes it.
    """
    if not urls:
        raise UnavailableError("no authority is known")
    with contextlib.closing(Channel(list(urls))) as channel:
        version, _ = begin_version(channel, Question(model=model), label, _COMMAND_S, for_all=True)
    answers = {url: _versions_at(url) for url in urls}
    found = _merged([{model: ModelVersions(version)}, *(one or {} for one in answers.values())])[model]
    silent = [f"the processes that ask {url}" for url, one in answers.items() if one is None]
    return Told(found.following(), found.lagging() + silent)


def known_versions(urls: Iterable[str]) -> dict[str, ModelVersions]:
    """Returns what the authorities at these URLs know, by model; nothing of one that does not answer."""
    return _merged(_versions_at(url) or {} for url in urls)


def _versions_at(url: str) -> dict[str, ModelVersions] | None:
    with contextlib.suppress(OSError, ValueError):
        return decode_json(fetch(f"{url}/versions"), dict[str, ModelVersions])
    return None


def _merged(answers: Iterable[dict[str, ModelVersions]]) -> dict[str, ModelVersions]:
    merged: dict[str, ModelVersions] = {}
    for model, one in (item for answer in answers for item in answer.items()):
        before = merged.get(model, one)
        current = max(before.current, one.current, key=lambda version: version.number)
        # what a process said to a master before it asked another one is old
        new = {process: row for process, row in one.processes.items() if row[1] == current.label}
        merged[model] = ModelVersions(current, one.processes | before.processes | new)
    return merged
