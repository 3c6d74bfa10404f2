"""Parses completion requests, and makes the body for each hop. Pure.

Only the fields that matter here are decoded. All others keep their bytes: a prompt of 128k token ids is not turned into
Python numbers and back, and no number changes its spelling.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from launch.proxy.answers import ApiError
from launch.proxy.prefixes import RoutedPrompt, is_token_ids, read_prompt
from launch.proxy.tokens import BESIDE_TOKENS, PromptTokens
from pd_cache.decoding import UndecodableError, decode_json

_TRANSFER = "kv_transfer_params"
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_ONE = msgspec.Raw(b"1")
_REMOTE_DECODE = msgspec.Raw(msgspec.json.encode({"do_remote_decode": True, "do_remote_prefill": False}))
_TOKENIZED = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
"""Fields that determine the prompt's tokens, and that vLLM's `/tokenize` accepts."""
_UNTOLD = (
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prompt_embeds",
    "reasoning_effort",
    "truncate_prompt_tokens",
)
"""Other fields that determine the prompt. `/tokenize` does not accept them."""
_ISOLATION = ("model", "cache_salt")
_NOT_FOR_PREFILL = ("stream_options", "min_tokens")
"""Fields that contradict `stream: false` and `max_tokens: 1`. Nodes refuse requests with both."""


class HandedOver(msgspec.Struct, frozen=True):
    """The part of a prefill node's answer that the decode node gets."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    def __bool__(self) -> bool:
        return bytes(self.kv_transfer_params) != b"null"


class _ContentPart(msgspec.Struct, frozen=True):
    type: str = ""


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str | list[str | _ContentPart] | None = None

    def is_text(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return all(isinstance(part, str) or part.type == "text" for part in parts)


class Completion:
    """The body of a request for a completion."""

    def __init__(self, body: bytes, *, prompt: Literal["prompt", "messages"] = "prompt") -> None:
        """`prompt`: the field that holds the prompt. Raises ApiError 400 if no node could use the body."""
        try:
            body.decode()  # raw fields are not checked for this
            self._fields: dict[str, msgspec.Raw] = decode_json(body, dict[str, msgspec.Raw])
        except ValueError as error:
            what = "must be a JSON object" if body.lstrip()[:1] != b"{" else "is not valid JSON"
            raise ApiError(400, f"The body {what}: {error}", code="invalid_json") from None
        self._fields.pop(_TRANSFER, None)  # it says which memory to read, so it is only for nodes
        self.tokens: PromptTokens | None = None
        """The prompt's, if nodes may get them in place of its text."""
        self._chat = prompt == "messages"
        self._prompt = bytes(self._fields.get(prompt, b"null"))
        if self._prompt == b"null":
            raise ApiError(400, f"`{prompt}` is missing", param=prompt, code="missing_required_parameter")
        for name in ("max_tokens", "max_completion_tokens"):
            self._check_count(name)

    def _check_count(self, name: str) -> None:
        raw = bytes(self._fields.get(name, b"null"))
        try:
            count = decode_json(raw, int | None)
        except UndecodableError:
            count = -1
        if count is not None and count < 0:
            shown = raw[:40].decode(errors="replace")
            raise ApiError(
                400, f"`{name}` must be an integer of at least 0, not {shown}", param=name, code="invalid_value"
            )

    def prompt(self) -> RoutedPrompt:
        """Returns what routing needs to know about the prompt."""
        return read_prompt(self._prompt, b"\0".join(bytes(self._fields.get(name, b"")) for name in _ISOLATION))

    def plain(self) -> bool:
        """Returns whether the tokens of `/tokenize` identify the prompt. They do not if it has images or documents."""
        if any(bytes(self._fields.get(name, b"null")) != b"null" for name in _UNTOLD):
            return False
        try:
            return not self._chat or all(message.is_text() for message in decode_json(self._prompt, list[_ChatMessage]))
        except UndecodableError:
            return False

    def takes_tokens(self) -> bool:
        """Returns whether nodes give the same answer to the prompt's tokens as to the prompt: it is one text, and no field of the request
        needs the text. The routing always sees the text."""
        if self._chat or self._prompt[:1] != b'"':
            return False
        others = (item for item in self._fields.items() if item[0] not in BESIDE_TOKENS)
        return all(_says_nothing(name, raw) for name, raw in others)

    def token_ids(self) -> list[int] | None:
        """Returns the prompt's token ids if it is given as token ids, otherwise None."""
        if not is_token_ids(self._prompt):
            return None
        try:
            return decode_json(self._prompt, list[_Token])
        except UndecodableError:
            return None

    def model(self) -> str | None:
        """Returns the model that should answer; None if the request names none, or not by a string."""
        try:
            return decode_json(bytes(self._fields.get("model", b"null")), str | None)
        except UndecodableError:
            return None

    def cache_salt(self) -> str | None:
        """Returns the salt that separates the request's cache from others; None without one. Raises ValueError if it is not text."""
        return decode_json(bytes(self._fields.get("cache_salt", b"null")), str | None)

    def for_tokenize(self) -> bytes:
        """Returns the body for a node's `/tokenize`."""
        return msgspec.json.encode({name: raw for name, raw in self._fields.items() if name in _TOKENIZED})

    def for_prefill(self, tokens: bytes | None = None) -> bytes:
        """Returns the body for the prefill node: one token, not streamed, and marked for decoding on another node. `tokens`: the JSON of
        the token ids that it gets as the prompt."""
        fields = {name: raw for name, raw in self._fields.items() if name not in _NOT_FOR_PREFILL}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = _ONE
        fields |= {"max_tokens": _ONE, "stream": msgspec.Raw(b"false"), _TRANSFER: _REMOTE_DECODE}
        return _encode(fields, tokens)

    def for_decode(self, handoff: HandedOver | None, tokens: bytes | None = None) -> bytes:
        """Returns the client's body, with what the prefill node handed over, and with `tokens` as in `for_prefill`."""
        return _encode({**self._fields, **({_TRANSFER: handoff.kv_transfer_params} if handoff else {})}, tokens)


def _says_nothing(name: str, raw: msgspec.Raw) -> bool:
    value = bytes(raw) if len(memoryview(raw)) <= len(b"false") else b""
    return value == b"null" or (name, value) == ("echo", b"false")


def _encode(fields: dict[str, msgspec.Raw], tokens: bytes | None) -> bytes:
    return msgspec.json.encode(fields if tokens is None else {**fields, "prompt": msgspec.Raw(tokens)})


class _Tokenized(msgspec.Struct, frozen=True):
    tokens: msgspec.Raw


class Tokenized(NamedTuple):
    """A prompt's token ids."""

    ids: list[int]
    json: bytes


def read_tokens(answer: bytes) -> Tokenized:
    """Reads the answer of a node's `/tokenize`. Raises ValueError for anything else."""
    raw = bytes(decode_json(answer, _Tokenized).tokens)  # a copy, so that the answer is not kept
    return Tokenized(decode_json(raw, list[_Token]), raw)


class _Models(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]


def read_models(answer: bytes) -> list[msgspec.Raw]:
    """Reads the entries of a node's `/v1/models`. Raises ValueError for anything else."""
    return decode_json(answer, _Models).data


def read_handoff(answer: bytes) -> HandedOver:
    """Reads a prefill node's answer. Raises ValueError for anything else."""
    return decode_json(answer, HandedOver)
