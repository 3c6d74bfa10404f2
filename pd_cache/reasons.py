"""Why a chunk was not there: the reasons, a history by which evicted chunks are known, and the report on a
request. Pure.

A pool reports only that a key is missing. Only a process that stored or found the key knows that it was
there. So each process that stores or looks up chunks remembers their names. If a remembered chunk is missing,
it was evicted or removed. Any other missing chunk counts as never stored, although another node may have
stored it and the pool may have evicted it.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from transfer.errors import Status

MissReason = Literal[
    "none",
    "too_short",
    "never_stored",
    "evicted",
    "reset",
    "missing",
    "no_tail",
    "lease_expired",
    "damaged",
    "being_stored",
    "other_namespace",
    "pool_down",
    "weights_unnamed",
    "server_down",
    "transfer_failed",
    "tier_off",
    "deadline",
    "no_staging",
    "no_blocks",
    "media_unidentified",
    "limited",
    "not_worth",
    "not_asked",
    "error",
]
"""Why the first chunk that a prompt lacked was not there. `MEANINGS` explains each reason."""

MEANINGS: dict[MissReason, str] = {
    "none": "every whole chunk of the prompt was there",
    "too_short": "the prompt is shorter than a chunk, so the cache cannot hold any of it",
    "never_stored": "the node that looked has neither stored this chunk nor found it before",
    "evicted": "the node that looked had stored this chunk or found it before; since then it was evicted or removed",
    "reset": "the chunk was computed with weights that have changed since",
    "missing": "it was never stored or it was evicted; no record says which",
    "no_tail": "layers with a window or a state keep only the ends of prompts, and no prompt ended here",
    "lease_expired": "the read outlived the lease that protected the chunk: raise the master's lease, or see why the read was slow",
    "damaged": "the bytes under its key were not the chunk: damaged, truncated, foreign or of another version",
    "being_stored": "another client was writing the chunk, or moving it, at that moment",
    "other_namespace": "the prefill node stores in another namespace than this node reads",
    "pool_down": "the pool's master did not answer, or this node's client of the pool is not open",
    "weights_unnamed": "the engine's weights have changed, and have no label yet: see `pd-cache status`",
    "server_down": "the host's cache server did not answer, or refused",
    "transfer_failed": "the node that has the bytes did not deliver them",
    "tier_off": "the storage tier that has the chunk is switched off because it failed",
    "deadline": "a deadline passed first",
    "no_staging": "no staging memory, or no thread for the transfer, became free in time",
    "no_blocks": "the engine had too few free blocks for the load",
    "media_unidentified": "the names of the prompt's images, audio or video may not come from their content: see `connector.trust_media_ids`",
    "limited": "the request's `max_load_tokens` or `kv_load_tiers` allows no more",
    "not_worth": "loading the chunk would have taken longer than computing it",
    "not_asked": "the cache was not asked: the request or `connector.load` excludes it, its prompt cannot be named, or an earlier load failed",
    "error": "another error, which is in the node's log",
}


def reason_text(reason: MissReason, detail: str = "") -> str:
    """Returns a reason as text, with `detail` or, if that is empty, its meaning."""
    return f"{'no miss' if reason == 'none' else reason}: {detail or MEANINGS[reason]}"


_REASONS: dict[str, MissReason] = {
    **{reason: reason for reason in get_args(MissReason)},
    **dict.fromkeys(
        ("checksum", "truncated", "foreign", "other_version", "corrupt", "unreadable", "other_size"),
        "damaged",
    ),
    "busy": "being_stored",
    "closed": "pool_down",
    "timeout": "deadline",
    "late": "deadline",
    "abandoned": "deadline",
    "overloaded": "no_staging",
    "server_lost": "server_down",
    "closing": "server_down",
    "unknown_client": "server_down",
    "read_only": "tier_off",
}


def miss_reason(trouble: str) -> MissReason:
    """Returns the reason for a `Status` or `Damage` value, or for the reason of a trouble as the cache's
    metrics count it.

    Returns `error` for any other text.
    """
    return _REASONS.get(trouble, "error")


def worst_reason(statuses: Iterable[Status]) -> MissReason:
    """Returns why a chunk whose objects have these statuses is not there; `none` if all are OK.

    Any other status wins over MISSING.
    """
    found: MissReason = "none"
    for status in statuses:
        if status is Status.MISSING:
            found = "missing"
        elif status is not Status.OK:
            return miss_reason(status.value)
    return found


_MARK = 8
"""How many bytes of a name the history remembers."""
_PLACES = 1 << 17
"""The most names that a history remembers: those of 33 million tokens in chunks of 256."""


class ChunkHistory:
    """Remembers the names of chunks that were there once: stored or found by this process. Thread-safe.

    It is a table of 131,072 places of 8 bytes (1 MiB). After a reset, a second table has the chunks of the
    weights before. A name is a hash; its first 8 bytes determine its place. A new name replaces an older name
    in the same place. So names are forgotten after a while, and then count as never stored.
    """

    def __init__(self, places: int = _PLACES) -> None:
        """`places` is a power of two. The memory is allocated with the first name."""
        self._mask = places - 1
        self._table = array("Q")
        self._before = array("Q")
        """The table of chunks of earlier weights."""
        self._label = ""  # the label of the weights that the namespace identifies

    def note(self, names: Sequence[bytes]) -> None:
        """Remembers that chunks of these names were there. All names have one width, of at least 8 bytes.
        Takes 0.1 µs a name."""
        if not names:
            return
        if not self._table:
            self._table = array("Q", bytes(8 * (self._mask + 1)))
        table, mask = self._table, self._mask
        whole, rest = divmod(len(names[0]), _MARK)
        marks = array("Q", b"".join([name[:_MARK] for name in names] if rest else names))
        for mark in marks if rest else marks[::whole]:
            table[mark & mask] = mark

    def follow(self, label: str) -> None:
        """Notes the label of the weights for which a lookup asks. Chunks of the label before are missing
        because of the reset, not because of eviction."""
        if label != self._label:
            self._label, self._before, self._table = label, self._table, array("Q")

    def _is_in(self, table: array[int], name: bytes) -> bool:
        mark = int.from_bytes(name[:_MARK], sys.byteorder)
        return bool(table) and table[mark & self._mask] == mark

    def explain(self, reason: MissReason, name: bytes) -> MissReason:
        """Returns `reason`. Replaces `missing` by a more exact reason: the chunk was evicted, belongs to
        earlier weights, or was never stored."""
        if reason != "missing":
            return reason
        if self._is_in(self._table, name):
            return "evicted"
        return "reset" if self._is_in(self._before, name) else "never_stored"


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class StoreOutcome(enum.IntEnum):
    """What a store achieved for a chunk."""

    NOT = 0
    """The chunk is not in the pool, or not known to be there."""
    BEFORE = 1
    """The chunk was there already."""
    NEW = 2
    """The chunk was missing, and is there after the put. Another node may have put it at the same time."""

    @staticmethod
    def together(parts: Iterable[StoreOutcome]) -> StoreOutcome:
        """Returns the outcome for a chunk of several parts: NEW if all parts are there and at least one is
        new."""
        known = list(parts)
        return StoreOutcome.NOT if StoreOutcome.NOT in known else max(known)


class TierChunks(NamedTuple):
    """How many chunks were read from each kind of tier."""

    memory: int = 0
    """Chunks that were read from this host's memory."""
    disk: int = 0
    pool: int = 0


class Found(Struct, frozen=True, array_like=True, tag_field="type", tag="found"):
    """The answer to a lookup: how long a prefix is, in chunks. It is also a message of the cache server
    (`pd_cache.server.protocol`)."""

    chunks: Count
    """How many chunks a load can restore."""
    leading: Count
    """How many leading chunks the groups without a tail have. For example, 5 with 3 `chunks` means that the
    prefixes of 4 and 5 chunks lack only what layers with a window or a state need at their ends."""
    reason: MissReason = "none"
    """Why the prefix is not longer; `none` if it has all chunks that it can have."""
    near: TierChunks = TierChunks()
    """How many of the chunks that were found lie in tiers of the host that looked. The others are in the
    pool, which is not counted."""


class Loaded(Struct, frozen=True, array_like=True, tag_field="type", tag="loaded"):
    """The answer to a load. It is also a message of the cache server."""

    chunks: Count
    """How many of the wanted chunks were loaded, counted from the first."""
    reason: MissReason = "none"
    """Why the next chunk was not loaded; `none` if all were."""
    tiers: TierChunks = TierChunks()
    """The tiers from which the loaded chunks came. If a chunk has several shards, the first one counts."""


Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

KEY = "report"
"""The key of a request's report in the object `pd_cache` of an answer (docs/troubleshooting.md)."""


class RequestReport(Struct, frozen=True, kw_only=True):
    """Where a node got the KV of a prompt, in tokens. `at_hand + loaded + computed == asked`."""

    asked: Tokens
    """The prompt's length."""
    at_hand: Tokens = 0
    """Tokens that the engine's own cache held."""
    streamed: Tokens = 0
    """Tokens, at hand or loaded, that arrived while a prefill node still computed the prompt."""
    found: Tokens = 0
    """Tokens that the lookup found after the tokens at hand, in whole chunks."""
    loaded: Tokens = 0
    """Tokens whose KV was loaded and used. At least the last token of a prompt is always computed."""
    memory: Tokens = 0
    """Tokens of chunks that were read from this host's memory."""
    disk: Tokens = 0
    """Tokens of chunks that were read from this host's disk."""
    pool: Tokens = 0
    """Tokens of chunks that were read from the pool."""
    computed: Tokens = 0
    reason: MissReason = "none"
    """Why the first chunk that was not loaded was missing."""
    detail: Annotated[str, msgspec.Meta(max_length=200)] | msgspec.UnsetType = msgspec.UNSET
    """The figures behind the reason, if it has any."""

    def text(self) -> str:
        """Returns the report as indented lines of text."""
        loaded = f"{self.loaded} loaded" + (f" of {self.found} found" if self.found != self.loaded else "")
        tiers = {"memory": self.memory, "disk": self.disk, "pool": self.pool}
        if read := ", ".join(f"{tier} {tokens}" for tier, tokens in tiers.items() if tokens):
            loaded += f" ({read})"
        lines = [
            f"  {self.asked} tokens: {self.at_hand} in the engine's own cache, {loaded}, {self.computed} computed",
            *(
                [f"  {self.streamed} of these came while the prefill node computed others"]
                if self.streamed
                else ()
            ),
            f"  {reason_text(self.reason, self.detail or '')}",
        ]
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        asked: int,
        chunk_size: int,
        *,
        at_hand: int = 0,
        found: int = 0,
        loaded: int = 0,
        tiers: TierChunks = TierChunks(),  # noqa: B008 - immutable
        reason: MissReason = "none",
        streamed: int = 0,
        detail: str = "",
    ) -> RequestReport:
        """Returns the report on a prompt of `asked` tokens. `tiers` counts chunks; all other numbers are
        tokens.

        A prompt without a whole chunk gets the reason `too_short`, whatever `reason` says.
        """
        at_hand = min(at_hand, asked)
        loaded = min(loaded, asked - at_hand)
        memory, disk, pool = (chunks * chunk_size for chunks in tiers)
        return cls(
            asked=asked,
            at_hand=at_hand,
            found=found,
            loaded=loaded,
            memory=memory,
            disk=disk,
            pool=pool,
            computed=asked - at_hand - loaded,
            streamed=min(streamed, at_hand + loaded),
            reason="too_short" if asked < chunk_size else reason,
            detail=detail or msgspec.UNSET,
        )

    def line(self) -> str:
        """Returns the report as a part of a log line."""
        return (
            f"asked={self.asked} at_hand={self.at_hand} found={self.found} loaded={self.loaded} (memory={self.memory} "
            f"disk={self.disk} pool={self.pool}) streamed={self.streamed} computed={self.computed} reason={self.reason}"
            + (f" ({self.detail})" if self.detail else "")
        )
