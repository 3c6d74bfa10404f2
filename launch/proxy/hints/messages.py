"""The messages of hints, as vLLM, SGLang and Dynamo send them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from pd_cache.errors import PdCacheError

KINDS = {"kv.retain": "retain", "kv.release": "release", "kv.prefetch": "prefetch"}
PROMPTS = ("tokens", "prompt", "messages")
TARGETS = (*PROMPTS, "block_hashes", "request_id")
_Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){16,64}\Z")]


class HintRefusedError(PdCacheError):
    """An action that is not done; the message is the reason."""


class HintsMessage(msgspec.Struct, frozen=True):
    """The envelope on which vLLM, SGLang and Dynamo agreed."""

    protocol_version: Literal["0.1"]
    message_id: _Id
    actions: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=8)]
    """The actions are parsed one by one, because each may be wrong. They are so few that the answer fits into
    a header."""


class HintAction(msgspec.Struct, frozen=True):
    action_id: _Id
    action_type: str
    action_version: str
    payload: msgspec.Raw


class HintPayload(msgspec.Struct, frozen=True):
    """The fields of a payload besides the prompt."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    once: bool = False
    action_id: _Id | None = None
    model: str | None = None
    request_id: str | None = None
    block_hashes: Annotated[list[_Hash], msgspec.Meta(max_length=1 << 14)] | None = None
    """The engine's chained hashes of the prompt's blocks, from the first, for at most as many tokens as a
    lookup may have."""


class ActionAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of an action."""

    action_id: str
    status: Literal["accepted", "clipped", "refused"]
    reason: str = ""
    """Why the action was clipped or refused; empty if it was accepted."""
    ttl_s: float | None = None
    tokens: int | None = None
    """How many leading tokens of the prompt are kept for `ttl_s`."""
    in_pool: int | None = None
    """How many of these tokens the pool has now."""
    released: int | None = None
    """How many pins have ended."""
    node: str | None = None
    """The node that loads the prompt, for clients that may see nodes."""


class HintsAnswer(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[ActionAnswer]


def done(action_id: str, why: Sequence[str], **fields: Any) -> ActionAnswer:
    """Returns the answer to an action that was done; `why`: the reasons why only a part was done."""
    return ActionAnswer(action_id, "clipped" if why else "accepted", "; ".join(why), **fields)


def refused(action_id: str, error: Exception) -> ActionAnswer:
    """Returns the answer to an action that was not done, because of `error`."""
    return ActionAnswer(action_id, "refused", str(error).encode("ascii", "backslashreplace")[:150].decode())
