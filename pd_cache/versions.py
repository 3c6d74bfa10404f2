"""Weights versions: they distinguish chunks of different weights, if weights change while engines run.

A version is a *label*, which is part of each chunk's key. Equal labels mean equal weights. The empty label,
`FIRST`, means the weights of the engine's files: the namespace identifies them, and keys do not mention the
label. Four rules keep KV of other weights out:

1. Each engine holds its own label. It starts with the label of its files.
2. Once an engine learns that its weights have changed, it is *out*: it finds, loads and stores nothing.
3. A command gives a label to a state of an engine, identified by the state's id. Each change of the weights
   makes a new state. So a command that comes late, twice or after a restart changes nothing.
4. A store uses the label that the engine had before it computed the chunk, and a load counts only if the
   engine has the chunk's label at the load's end.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FIRST = ""
"""The label of the weights that the namespace identifies."""
PRESENT = "*"
"""Stands for the engine's label at the time of the call."""
LABEL = r"^[A-Za-z0-9._-]{0,64}\Z"
Label = Annotated[str, Meta(pattern=LABEL)]
_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine, as its node's `/health` reports it. A state of other weights has another id."""

    id: _Id
    label: Label | None = FIRST
    """The label of the engine's weights; None while the engine is out."""
    since: Annotated[int, Meta(ge=0, lt=1 << 53)]
    """When the state began, in seconds since 1970, for people."""
    declines: Annotated[int, Meta(ge=0)] = 0
    """The most tokens of a hand-off that the engine would compute now, because loading takes too long."""


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /weights`: gives engines a label."""

    label: Label
    ids: Annotated[tuple[_Id, ...], Meta(max_length=4096)]
    """The states that get the label. An engine in another state keeps its own."""


class WeightsVersion:
    """The version of one engine's weights. Thread-safe."""

    def __init__(self, label: str | None = FIRST, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.state = self._new(label)
        """A change replaces this object; nothing modifies it."""

    @property
    def label(self) -> str | None:
        """The label of the engine's weights; None while it is out."""
        return self.state.label

    def why_not(self, label: str | None) -> Literal["", "reset", "weights_unnamed"]:
        """Returns why chunks with this label must not be used now; empty if the engine has the label."""
        own = self.state.label
        if own is None or label is None:
            return "weights_unnamed"
        return "" if label == own else "reset"

    def reset(self, label: str | None = None) -> None:
        """Notes that the engine's weights have changed, and gives them this label. Without a label, the
        engine is out. Raises ValueError for text that cannot be a label."""
        if label is not None and not re.match(LABEL, label):
            raise ValueError(
                f"a version is up to 64 letters, digits, dots, dashes and underscores, not {label!r}"
            )
        with self._lock:
            self.state = self._new(label)

    def name(self, naming: Naming) -> Weights:
        """Gives the engine a label if `naming` lists its state. Returns the state afterwards."""
        with self._lock:
            if self.state.id in naming.ids:
                self.state = self._new(naming.label)
            return self.state

    def _new(self, label: str | None) -> Weights:
        return Weights(id=secrets.token_hex(8), label=label, since=int(self._clock()))


class Versioned:
    """The cache of an engine, whose weights may change."""

    version: WeightsVersion

    @property
    def label(self) -> str | None:
        """The label of the engine's weights. None from the time when they change until they get a label."""
        return self.version.label

    def reset(self, version: str | None = None) -> None:
        """Notes that the engine has other weights now; see `LookupClient.reset`."""
        self.version.reset(version)
