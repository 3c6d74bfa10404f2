"""The message about a prompt from a prefill node to a decode node: our part of `kv_transfer_params`. No other
module knows this format.

A proxy sends `do_remote_decode: true` to the prefill node, and forwards the node's answer to the decode node
unread:

    {"do_remote_prefill": true, "pd_cache": {"prefix_tokens": 4096, "namespace": "0123456789abcdef",
                                             "prefill": {"cached_tokens": 1024, "computed_tokens": 3072,
                                                         "reason": "never_stored"}}}

When the answer arrives, the prefill node may still be storing the chunks. The decode node waits for them, at
most for `handoff.wait_ms`.

A proxy may send the prompt to the decode node earlier, in a request of its own (a *stream*), so that the node
loads chunks as they appear in the pool: `{"do_remote_prefill": true, "pd_cache": {"stream": true}}`. The
proxy cancels this request at the first byte of the answer, or when no prefill node computes the prompt any
more.

For a prompt with images, the proxy adds `media_hashed: true` if it has removed the client's names of the
images, so that vLLM names them by hashes of their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pd_cache.decoding import prepared
from pd_cache.reasons import TierChunks

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Limit = Annotated[int, Meta(ge=0)]
Space = Annotated[str, Meta(pattern=r"^[!-~]{0,160}\Z")]


def next_pause(pause_s: float = 0.0) -> float:
    """Returns the seconds until the next lookup of what another node is storing. `pause_s` is the pause
    before the last lookup; 0 if there was none."""
    return min(2 * pause_s or 0.001, 0.020)


class PrefillWork(Struct, frozen=True):
    """What the prefill node did for the prompt, in tokens."""

    cached_tokens: Count = 0
    computed_tokens: Count = 0
    reason: Annotated[str, Meta(pattern=r"^[a-z_]{0,32}\Z")] = ""
    """Why it computed tokens (`pd_cache.reasons.MissReason`); empty if unknown. A later release may have
    other reasons."""


class Announcement(Struct, frozen=True, kw_only=True):
    """A prefix that is in the pool, or about to be."""

    prefix_tokens: Count = 0
    """The length of the prefix in tokens, a whole number of chunks."""
    namespace: Space = ""
    """The namespace and weights version of the chunks, as in their keys. A node with another one need not
    wait. Empty if unknown."""
    further: Annotated[tuple[Space, ...], Meta(max_length=256)] = ()
    """The same for the model's other layer groups. A node that needs another namespace need not wait."""
    prefill: PrefillWork | None = None
    stream: bool = False
    """Whether this request only loads the prompt's chunks, as they appear."""

    def serves(self, namespaces: Sequence[str]) -> bool:
        """Returns whether a node can load the announced chunks. `namespaces` are those of its layer groups,
        in order, as in keys. Returns True if the announcement names no namespace."""
        first, *others = namespaces
        return not self.namespace or (self.namespace == first and set(others) <= set(self.further))


class TierMatch(Struct, frozen=True):
    """Identifies tiers by medium and locality, in upper or lower case; None matches any."""

    medium: Annotated[str, Meta(pattern=r"^(?i:CPU|STORAGE)\Z")] | None = None
    locality: Annotated[str, Meta(pattern=r"^(?i:LOCAL|REMOTE)\Z")] | None = None

    def matches(self, medium: str | None, locality: str) -> bool:
        """Returns whether it identifies this tier. `medium` is None for a pool, whose objects may be in
        memory or on disks."""
        return (not self.medium or medium in (None, self.medium.upper())) and (
            not self.locality or locality == self.locality.upper()
        )


class _Params(Struct, frozen=True):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    pd_cache: Announcement | None = None
    media_hashed: bool | None = None
    max_load_tokens: Limit | None = None
    max_offload_tokens: Limit | None = None
    kv_load_tiers: Annotated[tuple[TierMatch, ...], Meta(max_length=32)] | None = None

    def __post_init__(self) -> None:
        if self.do_remote_decode and self.do_remote_prefill:
            raise ValueError("do_remote_decode and do_remote_prefill exclude each other")


class BadParams(ValueError):
    """Wrong `kv_transfer_params`. `path` is the path of the wrong key, with dots; empty if the value as a
    whole is wrong."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"kv_transfer_params{path and '.' + path}: {message}")
        self.path = path


class Handoff(Struct, frozen=True):
    """A request's `kv_transfer_params`, as a node understands them."""

    announce: bool = False
    """Whether another node decodes this prompt, so that this node announces the prefix that it stored."""
    announced: Announcement | None = None
    media_hashed: bool = False
    """Whether the names of the prompt's images are hashes of their content."""
    max_load_tokens: int | None = None
    """The most tokens to load beyond those at hand, as in vLLM's own connectors; None for any number."""
    max_offload_tokens: int | None = None
    """The most tokens to store, from the start of the prompt."""
    load_tiers: tuple[TierMatch, ...] | None = None
    """The tiers from which to load; None for all."""

    def allows(self, tiers: TierChunks) -> bool:
        """Returns whether all of these chunks are in tiers from which the request may load."""
        named = (("CPU", "LOCAL"), ("STORAGE", "LOCAL"), (None, "REMOTE"))
        return self.load_tiers is None or all(
            not count or any(match.matches(*tier) for match in self.load_tiers)
            for tier, count in zip(named, tiers, strict=True)
        )


def read_params(params: object) -> Handoff:
    """Parses a request's `kv_transfer_params`. Ignores keys of other connectors.

    `params` may be any value that an engine received. None and an empty mapping give the defaults. Raises
    BadParams for a wrong value.
    """
    if params is None:
        return Handoff()
    if not isinstance(params, Mapping):
        raise BadParams("", f"must be an object, not {type(params).__name__}")
    try:
        ours = {name: params[name] for name in _Params.__struct_fields__ if name in params}
        known = msgspec.convert(ours, prepared(_Params))
    except (ValueError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadParams(path.strip(".`"), message[:1].lower() + message[1:]) from None
    announced = known.pd_cache if known.do_remote_prefill else None
    return Handoff(
        bool(known.do_remote_decode),
        announced,
        bool(known.media_hashed),
        known.max_load_tokens,
        known.max_offload_tokens,
        known.kv_load_tiers,
    )


def write_params(announcement: Announcement, *, media_hashed: bool = False) -> dict[str, Any]:
    """Returns the `kv_transfer_params` for a prefill node's answer."""
    ours = msgspec.to_builtins(announcement)
    if not announcement.further:
        del ours["further"]
    if not announcement.stream:
        del ours["stream"]
    return {"do_remote_prefill": True, "pd_cache": ours, **({"media_hashed": True} if media_hashed else {})}
