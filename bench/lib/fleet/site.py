"""What one machine contributes to a bench: steps, which the coordinator asks for."""

from __future__ import annotations

import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pd_cache.cluster import ClusterConfig, MasterNode, decode_custom
from pd_cache.decoding import UndecodableError, msgpack_decoder
from transfer.settings import ByteSize

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)
S = TypeVar("S", bound="Site")
K = TypeVar("K", bound=msgspec.Struct)
_STEP = "_bench_step"


def encode(struct: msgspec.Struct) -> bytes:
    """Returns a job or a result; the types of the cluster's file may be in it."""
    return msgspec.msgpack.encode(struct, enc_hook=_plain)


def decode(raw: bytes, kind: type[K]) -> K:
    """Returns the value that `encode` was given. Raises UndecodableError if it is something else."""
    decoded: K = msgpack_decoder(kind, decode_custom)(raw)
    return decoded


def _plain(value: object) -> int:
    if isinstance(value, ByteSize):
        return int(value)
    raise NotImplementedError(type(value))  # how msgspec learns that a type is not ours


class Nothing(msgspec.Struct, frozen=True):
    """The job, or the result, of a step that has none."""


def step(method: Callable[[S, J], R]) -> Callable[[S, J], R]:
    """Marks a method `(self, job: SomeStruct) -> SomeStruct` of a `Site` as a step. Both structs are msgspec's."""
    setattr(method, _STEP, True)
    return method


@dataclass(frozen=True)
class Location:
    """Where a site is."""

    node: str
    """The participant's name."""
    host: str
    """Its address, as the other machines reach it."""
    config: ClusterConfig
    """The file of this machine."""

    @classmethod
    def here(cls) -> Location:
        """This machine, for a bench that has no cluster's file."""
        return cls("bench", "127.0.0.1", ClusterConfig(nodes=(MasterNode(name="master"),)))


class Site:
    """Base of a bench's own class, whose methods marked `@step` are what the coordinator may ask for.

    A site is made when the machine joins, and closed at the end, whatever happened. One step runs at a time, on a thread that is
    not the main one. `close` may be called while a step runs (the coordinator is gone, Ctrl-C): `stopping` is set before, and a
    step that loops must look at it.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.stopping = threading.Event()
        self._once = threading.Lock()
        self._shut = False

    def close(self) -> None:
        """Releases everything, in a bounded time. Called once, by `shut`."""

    def shut(self) -> None:
        """Stops the step under way, if there is one, and `close`. Idempotent."""
        with self._once:
            if not self._shut:
                self._shut = True
                self.stopping.set()
                self.close()

    @step
    def leave(self, job: Nothing) -> Nothing:
        """`shut` as a step: for a bench whose sites must be closed before something that the coordinator runs ends."""
        self.shut()
        return Nothing()

    def run(self, name: str, job: bytes) -> bytes:
        """Returns the step of that name, from an encoded job to an encoded result. Raises ValueError if there is none, or for another job."""
        method = getattr(type(self), name, None)
        if not hasattr(method, _STEP):
            raise ValueError(f"this side has no step {name!r}; do all machines run the same version?")
        kind: type[msgspec.Struct] = typing.get_type_hints(method)["job"]
        try:
            decoded = decode(job, kind)
        except UndecodableError as error:
            raise ValueError(f"step {name}: {error}; do all machines run the same version?") from None
        return encode(getattr(self, name)(decoded))


def result_type(method: Callable[..., Any]) -> type[msgspec.Struct]:
    """Returns what a step answers with."""
    kind: type[msgspec.Struct] = typing.get_type_hints(method)["return"]
    return kind
