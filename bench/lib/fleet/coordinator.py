"""The coordinator's end: it admits participants, and has all of them do a step at the same time."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq

import pd_cache
from bench.lib.fleet.messages import (
    BEAT,
    PROTOCOL,
    End,
    Failed,
    FleetError,
    Message,
    ParticipantHello,
    Run,
    StepDone,
    decode_message,
    encode_message,
)
from bench.lib.fleet.site import Location, Nothing, Site, decode, encode, result_type
from pd_cache.decoding import UndecodableError

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
_BEAT_S = 0.25
_LATE = "the coordinator gave up before everybody was there"
_AT_ONCE = 1000
_REFUSED = 10
"""How many refused participants an error names."""


@dataclass(eq=False)
class Participant:
    """One participant, as the coordinator sees it."""

    node: str
    host: str
    identity: bytes
    """ZMQ's name of its connection."""
    lost: str = ""
    """Why nothing more comes from it; empty while it is there."""
    doing: str = ""
    """The step under way."""
    number: int = 0
    """The number of the last step: an outcome with another number comes too late, for a caller that gave up."""
    outcome: StepDone | Failed | None = None
    """The outcome of the last step."""

    def __str__(self) -> str:
        return f"{self.node} ({self.host})"

    def gone(self, why: str) -> None:
        """Nothing more comes from it."""
        self.lost = self.lost or (f"{why}, in the middle of {self.doing}" if self.doing else why)


class Fleet:
    """The machines of a bench. For use on one thread, except `stop`.

    After a FleetError it is of no more use: let the error go up, and `end` informs the others.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], bench: str, location: Location, expected: frozenset[str] | int
    ) -> None:
        """`socket` is bound where participants come. `expected`: the names of all participants, or how many they are.

        `location` is the coordinator's, with its file.
        """
        self.location = location
        self.expected = expected
        self._socket = socket
        self._bench = bench
        self._open = True
        self._members: dict[str, Participant] = {}
        self._refused: list[str] = []
        self._numbers = itertools.count(1)
        self._beat_at = 0.0
        self._stopped = threading.Event()

    @property
    def own(self) -> str:
        """The coordinator's own name."""
        return self.location.node

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of all participants, in order, including the coordinator's."""
        return tuple(sorted(self._members))

    @property
    def hosts(self) -> dict[str, str]:
        """The addresses of all participants, by name."""
        return {node: self._members[node].host for node in self.nodes}

    # --- taking in ---------------------------------------------------------------------------------------------------

    def gather(
        self, wait_s: float, tell: Callable[[str], None] = lambda _: None, watch: Callable[[], None] = lambda: None
    ) -> None:
        """Waits until all participants have come; calls `tell` with the missing ones. `watch` may raise while it waits.

        Raises FleetError, which names the missing, after `wait_s` seconds.
        """
        deadline = time.monotonic() + wait_s
        self._open = True
        while missing := self._missing():
            tell(f"waiting for {missing}")
            watch()
            if time.monotonic() > deadline:
                refused = f"; refused were: {'; '.join(self._refused)}" if self._refused else ""
                self.end(_LATE)
                raise FleetError(f"{missing} did not come within {wait_s:g} s{refused}")
            self._turn(deadline)
        self._open = False

    def _missing(self) -> str:
        """Returns the missing participants, in words; empty if all have come."""
        for member in [member for member in self._members.values() if member.lost]:
            del self._members[member.node]  # it may come again
        if isinstance(self.expected, int):
            left = self.expected - len(self._members)
            return f"{left} of {self.expected} nodes (here: {', '.join(self.nodes)})" if left > 0 else ""
        return ", ".join(sorted(self.expected - self._members.keys()))

    def _admit(self, hello: Message, identity: bytes) -> None:
        """Raises FleetError for a participant that does not belong here."""
        if not isinstance(hello, ParticipantHello):
            raise FleetError("it did not say who it is")
        if hello.protocol != PROTOCOL or hello.version != pd_cache.__version__:
            raise FleetError(
                f"{hello.node} runs pd-cache {hello.version} (protocol {hello.protocol}), the coordinator "
                f"{pd_cache.__version__} ({PROTOCOL}); use the same version on all machines"
            )
        if hello.bench != self._bench:
            raise FleetError(f"{hello.node} runs the bench {hello.bench}, the coordinator {self._bench}")
        if hello.node in self._members and not self._members[hello.node].lost:
            raise FleetError(f"{hello.node} is here already: a name belongs to one machine")
        if isinstance(self.expected, frozenset) and hello.node not in self.expected:
            raise FleetError(f"{hello.node} is none of the participants, which are {', '.join(sorted(self.expected))}")
        if not self._open or not self._missing():
            raise FleetError(f"{hello.node} came when everybody was there")
        self._members[hello.node] = Participant(hello.node, hello.host, identity)

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[Any, J], R], jobs: Mapping[str, J], *, timeout_s: float) -> dict[str, R]:
        """Has each node in `jobs` do its job, all beginning at the same time but for the time that a message takes.

        `step` is the method of the site's class: `fleet.run(MySite.put, {"prefill-0": Put(...)}, timeout_s=60)`. Returns every
        result by name. Raises FleetError, which names the nodes, as soon as any participant is gone or one fails, and after
        `timeout_s` if one has not answered by then.
        """
        assert jobs, "a step without jobs"
        number, name = next(self._numbers), step.__name__
        deadline = time.monotonic() + timeout_s
        # the encoding first, so that nothing but sending lies between the first and the last
        messages = {node: encode_message(Run(number, name, msgspec.Raw(encode(job)))) for node, job in jobs.items()}
        self._turn(time.monotonic())
        workers = [self._members[node] for node in jobs]
        self._check(())
        if busy := next((member for member in workers if member.doing), None):
            raise FleetError(f"{busy}: {busy.doing} is not over")
        for member in workers:
            member.outcome, member.doing, member.number = None, name, number
            self._send(member, messages[member.node])
        while True:
            self._check(workers)
            if not (late := [member for member in workers if member.outcome is None]):
                break
            if time.monotonic() > deadline:
                raise FleetError(f"{', '.join(map(str, late))}: did not finish {name} within {timeout_s:g} s")
            self._turn(deadline)
        kind = result_type(step)
        found: dict[str, Any] = {}
        for member in workers:
            assert isinstance(member.outcome, StepDone)
            try:
                found[member.node] = decode(member.outcome.result, kind)
            except UndecodableError as error:
                raise FleetError(f"{member}: {name}: it answered something else: {error}") from None
        return found

    def everywhere(self, step: Callable[[Any, J], R], job: J, *, timeout_s: float) -> dict[str, R]:
        """Runs the same job on every node. Returns their results by node."""
        return self.run(step, dict.fromkeys(self.nodes, job), timeout_s=timeout_s)

    @contextmanager
    def closing_sites(self, timeout_s: float = 60.0) -> Iterator[None]:
        """Closes the sites at the end of a `with` block, inside the context of what they need and the coordinator runs, such as a pool's
        master.

        After an error, all participants are informed and get at most `timeout_s` to close, except those that are already gone.
        """
        try:
            yield
        except BaseException as error:
            self.end(str(error) or f"interrupted at the coordinator {self.own}", timeout_s)
            raise
        self.everywhere(Site.leave, Nothing(), timeout_s=timeout_s)

    def end(self, why: str, wait_s: float = 0.0) -> None:
        """Informs all participants that it is over, and waits until they have closed their sites, at most `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        for member in self._members.values():
            self._send(member, encode_message(End(why)))
        while time.monotonic() < deadline and not all(member.lost for member in self._members.values()):
            self._turn(deadline)

    def stop(self) -> None:
        """Has what waits, on another thread, raise FleetError soon."""
        self._stopped.set()

    def _check(self, workers: Iterable[Participant]) -> None:
        """Raises FleetError for those that failed, or are gone."""
        troubles = [f"{member}: {member.lost}" for member in self._members.values() if member.lost]
        troubles += [f"{member}: {member.outcome.why}" for member in workers if isinstance(member.outcome, Failed)]
        if troubles:
            raise FleetError("; ".join(troubles))
        if self._stopped.is_set():
            raise FleetError("stopped")

    # --- messages ----------------------------------------------------------------------------------------------------

    def _turn(self, until: float) -> None:
        """Handles the messages that have come, or come until then or the next beat; finds participants that are gone."""
        wait_s = max(0.0, min(until, self._beat_at) - time.monotonic())
        if self._socket.poll(math.ceil(1000 * wait_s)):
            for _ in range(_AT_ONCE):  # a stranger that sends without end cannot keep it here
                if not self._socket.poll(0):
                    break
                identity, *frames = self._socket.recv_multipart()
                self._take(identity, frames)
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            for member in self._members.values():
                self._send(member, BEAT)

    def _send(self, member: Participant, raw: bytes) -> None:
        """ZMQ refuses to send to a peer whose connection ended (ROUTER_MANDATORY)."""
        if member.lost:
            return
        try:
            self._socket.send_multipart((member.identity, raw), zmq.NOBLOCK)
        except zmq.Again:
            pass  # it is busy; if it is gone, its heartbeats end
        except zmq.ZMQError:
            member.gone("its connection ended")

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        member = next((one for one in self._members.values() if one.identity == identity), None)
        try:
            message = decode_message(b"".join(frames))
            if member is None:
                self._admit(message, identity)
                return
        except FleetError as error:
            if member is None:
                self._refused = [*self._refused, str(error)][-_REFUSED:]
                self._send(Participant("", "", identity), encode_message(End(str(error))))
            else:
                member.gone(str(error))
            return
        if isinstance(message, StepDone | Failed) and message.number == member.number:
            member.outcome, member.doing = message, ""
        elif isinstance(message, End):
            member.gone(f"it left: {message.why}" if message.why else "it left")
