"""The coordinator's end: everybody does a step at the same time, and the coordinator has the results."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import msgspec

from bench.lib.fleet.errors import FleetError
from bench.lib.fleet.members import Member
from bench.lib.fleet.site import Nothing, Place, Site, decode, encode, result_type
from bench.lib.fleet.wire import Disconnected, Done, End, Failed, Run
from pd_cache.decoding import UndecodableError
from pd_cache.errors import PdCacheError

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
_numbers = itertools.count(1)


class Fleet:
    """The machines of a bench, all of them there. Made by `conduct`; its methods are for the coordinator's main thread.

    After a FleetError it is of no more use: let the error go up, `conduct` tells the others.
    """

    def __init__(
        self, own: Site | None, others: Iterable[Member] = (), changed: threading.Condition | None = None
    ) -> None:
        """`own`: the coordinator's site, unless it only leads. `changed`: the condition that the others were made with."""
        self._site = own
        self._changed = changed or threading.Condition()
        members = [*others] if own is None else [Member(own.place.node, own.place.host, self._changed), *others]
        self._members = {member.node: member for member in sorted(members, key=lambda member: member.node)}

    @property
    def place(self) -> Place:
        """Where the coordinator is, and its file."""
        assert self._site is not None, "it only leads"
        return self._site.place

    @property
    def own(self) -> str:
        """The coordinator's own name."""
        return self.place.node

    @property
    def nodes(self) -> tuple[str, ...]:
        """Everybody's names, in order, the coordinator's included."""
        return tuple(self._members)

    @property
    def hosts(self) -> dict[str, str]:
        """Everybody's address, by name."""
        return {node: member.host for node, member in self._members.items()}

    def run(self, step: Callable[[Any, J], R], jobs: Mapping[str, J], *, timeout_s: float) -> dict[str, R]:
        """Have each node in `jobs` do its job, all beginning at the same time but for the time that a message takes.

        `step` is the method of the site's class: `fleet.run(MySite.put, {"prefill-0": Put(...)}, timeout_s=60)`. Returns every
        result by name. FleetError, which names the nodes, as soon as any participant is gone or one fails, and after
        `timeout_s` if one has not answered by then.
        """
        return self.start(step, jobs).results(timeout_s)

    def everywhere(self, step: Callable[[Any, J], R], job: J, *, timeout_s: float) -> dict[str, R]:
        """The same job on every node."""
        return self.run(step, dict.fromkeys(self.nodes, job), timeout_s=timeout_s)

    def leave(self, *, timeout_s: float = 60.0) -> None:
        """Have everybody close its site; then no step is possible any more."""
        self.everywhere(Site.leave, Nothing(), timeout_s=timeout_s)

    @contextmanager
    def closing_sites(self, timeout_s: float = 60.0) -> Iterator[None]:
        """For a `with` inside of what sites need and the coordinator runs, such as a pool's master: at its end `leave`.

        After an error everybody is told, and given at most `timeout_s` to close, whoever is gone already excepted.
        """
        try:
            yield
        except BaseException as error:
            self._end(str(error) or "interrupted at the coordinator", timeout_s)
            raise
        self.leave(timeout_s=timeout_s)

    def _end(self, why: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for member in self._members.values():
            if member.connection is not None and not member.lost:
                with suppress(Disconnected):
                    member.connection.send(End(why))
        if self._site is not None:
            self._site.shut()
        with self._changed:  # a participant disconnects when its site is closed
            others = [member for member in self._members.values() if member.connection is not None]
            self._changed.wait_for(lambda: all(one.lost for one in others), max(0.0, deadline - time.monotonic()))

    def start(self, step: Callable[[Any, J], R], jobs: Mapping[str, J]) -> Running[R]:
        """As `run`, but return at once. One step at a time: get its results before the next is started."""
        assert jobs, "a step without jobs"
        name = step.__name__
        # the encoding first, so that nothing but sending lies between the first and the last
        encoded = {node: encode(job) for node, job in jobs.items()}
        workers = [self._members[node] for node in jobs]
        with self._changed:
            self._check(workers)
            number = next(_numbers)
            for member in workers:
                if member.doing:
                    raise FleetError(f"{member}: {member.doing} is not over")
                member.outcome, member.doing, member.number = None, name, number
        for member in workers:
            if member.connection is not None:
                try:
                    member.connection.send(Run(number, name, msgspec.Raw(encoded[member.node])))
                except Disconnected as error:
                    member.gone(str(error))
            else:
                work = (member, number, name, encoded[member.node])
                threading.Thread(target=self._run_here, args=work, name="bench-step", daemon=True).start()
        return Running(self, step, workers)

    def check(self) -> None:
        """FleetError if a participant is gone."""
        with self._changed:
            self._check(())

    def wait(self, workers: Iterable[Member], step: str, timeout_s: float) -> dict[str, msgspec.Raw]:
        """For `Running`: what each node answered, encoded."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check(workers)
                late = [member for member in workers if member.outcome is None]
                if not late:
                    return {one.node: one.outcome.result for one in workers if isinstance(one.outcome, Done)}
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    names = ", ".join(map(str, late))
                    raise FleetError(f"{names}: did not finish {step} within {timeout_s:g} s")
                self._changed.wait(remaining)

    def _check(self, workers: Iterable[Member]) -> None:
        """FleetError for those that failed, or are gone. Call with the lock."""
        troubles = [f"{member}: {member.lost}" for member in self._members.values() if member.lost]
        troubles += [f"{member}: {member.outcome.why}" for member in workers if isinstance(member.outcome, Failed)]
        if troubles:
            raise FleetError("; ".join(troubles))

    def _run_here(self, member: Member, number: int, name: str, job: bytes) -> None:
        assert self._site is not None, "a member without a connection is the coordinator"
        member.take(perform(self._site, Run(number, name, msgspec.Raw(job))))


class Running(Generic[R]):
    """A step that was started."""

    def __init__(self, fleet: Fleet, step: Callable[[Any, Any], R], workers: list[Member]) -> None:
        self._fleet = fleet
        self._step = step
        self._workers = workers

    def results(self, timeout_s: float) -> dict[str, R]:
        """As `Fleet.run` says; `timeout_s` counts from now."""
        name, kind = self._step.__name__, result_type(self._step)
        found: dict[str, Any] = {}
        for node, encoded in self._fleet.wait(self._workers, name, timeout_s).items():
            try:
                found[node] = decode(encoded, kind)
            except UndecodableError as error:
                raise FleetError(f"{node}: {name}: it answered something else: {error}") from None
        return found


def perform(site: Site, run: Run) -> Done | Failed:
    """Do a step; whatever goes wrong is told in words."""
    try:
        return Done(run.number, msgspec.Raw(site.run(run.step, bytes(run.job))))
    except Exception as error:  # noqa: BLE001 - told to whoever asked, who may be another machine
        kind = "" if isinstance(error, PdCacheError) else f"{type(error).__name__}: "
        return Failed(run.number, f"{run.step}: {kind}{error}")
