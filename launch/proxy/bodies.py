"""Reads clients' bodies within a bound of memory, parses them, and writes a new body for each hop. Reads
nodes' answers.

Only the fields that matter here are decoded. All others keep their bytes: a prompt of 128k token ids is not
turned into Python numbers and back, and no number changes its spelling.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from aiohttp import http_exceptions, web

from launch.openai import ApiError, overloaded
from launch.proxy.routing.prefixes import PromptTokens, RoutedPrompt, read_prompt
from pd_cache.chunks import MediaItem
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.handoff import Announcement, write_params

P = TypeVar("P")
_COPIES = 2
"""How many copies of a body are in memory: the client's, and that for the current node. Parsing makes a third
copy, of one body at a time."""
_SMALL = 256 << 10
"""The most bytes of a small body: 64k tokens of text, or a chat of many turns."""


_M_MMAP_THRESHOLD = -3
"""glibc's name for the size from which memory is mapped."""


def unmap_freed_bodies() -> None:
    """Makes this process return the memory of a large body, and of its parts, as soon as they are freed.

    By default glibc maps blocks of at least 128 KiB, and raises that limit to the size of each mapped block
    that is freed. Smaller blocks come from the heap, where they leave holes: 14 bodies at once take 660 MiB.
    With a fixed limit they take 420 MiB.
    """
    with contextlib.suppress(AttributeError):  # musl has no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)


class ClientGone(ConnectionError):
    """The client closed its connection."""


@dataclass
class BodyMemory:
    """How much of the memory for bodies is taken, in bytes."""

    limit: int
    used: int = 0


@dataclass
class BodyShare:
    """The memory that one request's body takes."""

    memory: BodyMemory
    taken: int = 0

    def grow(self, count: int) -> bool:
        """Takes room for `count` more bytes of the body. Returns False, and takes nothing, if there is none.

        Large bodies together get three quarters of the memory; the rest is kept for small ones.
        """
        memory, count = self.memory, count * _COPIES
        large = self.taken + count > _SMALL * _COPIES
        if memory.used + count > (memory.limit * 3 // 4 if large else memory.limit):
            return False
        memory.used += count
        self.taken += count
        return True

    def close(self) -> None:
        """Gives the memory back."""
        self.memory.used -= self.taken
        self.taken = 0


async def read_body(
    pieces: AsyncIterator[bytes], share: BodyShare, most: int, limit_s: float, announced: int | None = None
) -> bytes:
    """Returns the whole body of a request, of at most `most` bytes, within `limit_s`. `announced` is its
    `Content-Length`, if known.

    Raises ApiError 413 if the body is larger, 408 if it comes too slowly, 503 if there is no memory for it,
    400 if it cannot be read. Raises ClientGone if the client hung up.
    """
    too_large = ApiError(413, f"The body is larger than {most} bytes", code="request_too_large")
    if announced is not None and announced > most:
        raise too_large
    parts: list[bytes] = []
    total = 0
    try:
        # not `wait_for`: its task would hold a refused body's memory for another turn of the loop, so that
        # all bodies that arrive together would be refused
        async with asyncio.timeout(limit_s):
            async for data in pieces:
                total += len(data)
                if total > most:
                    raise too_large
                if not share.grow(len(data)):
                    raise overloaded("Other requests take all the memory for bodies")
                parts.append(data)
        return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {limit_s:.3g} s", code="timeout") from None
    except ConnectionError as error:
        raise ClientGone from error
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError) as error:
        raise ApiError(400, f"The body cannot be read: {error}", code="invalid_body") from None


_TRANSFER, _HINTS = "kv_transfer_params", "kv_hints"
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_ZERO, _ONE, _NULL = msgspec.Raw(b"0"), msgspec.Raw(b"1"), msgspec.Raw(b"null")
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
"""Other fields that determine the prompt. `/tokenize` does not accept them; `/render` does."""
_ISOLATION = ("model", "cache_salt")
_CHECKED: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", _Count | None, "an integer of at least 0"),
    ("max_completion_tokens", _Count | None, "an integer of at least 0"),
    ("cache_salt", str | None, "text"),
)
"""Fields that a node would not accept otherwise, or that have to be known here."""
_SHOWN = ("tools", "documents", "chat_template_kwargs")
"""Fields that a chat's template puts before the messages."""
SAMPLING = {
    "allowed_token_ids", "bad_words", "best_of", "echo", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "length_penalty", "logit_bias", "logprob_token_ids", "logprobs", "min_p",
    "min_tokens", "n", "presence_penalty", "prompt_logprobs", "repetition_detection", "repetition_penalty",
    "routed_experts_prompt_start", "seed", "skip_special_tokens", "spaces_between_special_tokens", "stop",
    "stop_token_ids", "stream_interval", "stream_options", "structured_outputs", "temperature",
    "thinking_token_budget", "top_k", "top_logprobs", "top_p", "use_beam_search", "watermarking",
}  # fmt: skip
"""Fields that change only the answer, not the prompt's KV. Prefill nodes do not get them: with
`n: 64`, a node would compute 64 sequences."""


_MOST_FIELDS = 1000
_MOST_NAMED = 1000
"""The most parts in all of a chat's messages that name an image, audio or video."""
_MOST_COLONS = 50_000
"""The most colons outside of the fields in `_LARGE`. That many fields take 12 MiB before they are counted."""


_LARGE = (
    "prompt", "messages", "documents", "tools", "suffix", "logit_bias", "response_format", "structured_outputs",
    "chat_template_kwargs",
)  # fmt: skip
"""The fields of a request that may be large. Their contents are passed on unchanged."""
_Large = msgspec.defstruct("_Large", [(name, msgspec.Raw, _NULL) for name in _LARGE])


_TENANT_SALT = "pd-cache-tenant-"


def tenant_salt(own: str | None, tenant: str) -> str | None:
    """Returns the `cache_salt` for a request of `tenant`, which may be empty. `own` is the client's salt.

    No two tenants have the same salt, because tenants' names have no `/`. Raises ApiError 400 if the client
    sent such a salt. The salt holds a digest, because vLLM takes at most 128 characters, and neither `@`, `/`
    nor `\\`.
    """
    if tenant:
        return _TENANT_SALT + hashlib.sha256(f"{tenant}/{own or ''}".encode()).hexdigest()
    if own is not None and own.startswith(_TENANT_SALT):
        what = f"`cache_salt` must not begin with {_TENANT_SALT}"
        raise ApiError(400, what, param="cache_salt", code="invalid_value")
    return own


class HandedOver(msgspec.Struct, frozen=True):
    """The part of a prefill node's answer that the decode node gets."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    def __bool__(self) -> bool:
        return bytes(self.kv_transfer_params) != b"null"


class _TextPart(msgspec.Struct, frozen=True, gc=False):
    type: Literal["text"]
    uuid: None = None


class _AnyPart(msgspec.Struct, frozen=True, gc=False):
    uuid: msgspec.Raw = _NULL
    """The client's name for an image, audio or video. vLLM ignores the type of a part with a name."""


class _Message(msgspec.Struct, Generic[P], frozen=True, gc=False):
    role: str
    content: str | list[str | P] | None = None


def _is_text(messages: bytes) -> bool:
    """Returns whether all parts of a chat are texts. Runs no Python code per message."""
    try:
        decode_json(messages, list[_Message[_TextPart]])
    except UndecodableError:
        return False
    return True


class Completion:
    def __init__(self, body: bytes, *, chat: bool = False, tenant: str = "") -> None:
        """The request gets the salt of its tenant (`tenant_salt`). Raises ApiError 400 if no node could use
        the body."""
        body = body.removeprefix(codecs.BOM_UTF8)
        check_fields(body)
        try:
            body.decode()  # raw fields are not checked for UTF-8
            self._fields: dict[str, msgspec.Raw] = decode_json(body, dict[str, msgspec.Raw])
        except ValueError as error:
            what = "must be a JSON object" if body.lstrip()[:1] != b"{" else "is not valid JSON"
            raise ApiError(400, f"The body {what}: {error}", code="invalid_json") from None
        if len(self._fields) > _MOST_FIELDS:
            raise _too_many_fields()
        self._fields.pop(_TRANSFER, None)  # it says which memory to read, so it is only for nodes
        hints = bytes(self._fields.pop(_HINTS, _NULL))
        self.hints = None if hints == b"null" else hints
        """The client's hints about future prompts (`launch/proxy/hints/`), as JSON. No node gets them."""
        self._chat = chat
        self._field = prompt = "messages" if chat else "prompt"
        """The field that holds the prompt."""
        if self._fields.get(prompt, _NULL) == _NULL:
            raise ApiError(400, f"`{prompt}` is missing", param=prompt, code="missing_required_parameter")
        for name, kind, expected in _CHECKED:
            try:
                decode_json(self._raw(name), kind, strict=False)
            except UndecodableError:
                shown = self._raw(name)[:40].decode(errors="replace")
                what = f"`{name}` must be {expected}, not {shown}"
                raise ApiError(400, what, param=name, code="invalid_value") from None
        own = self._value("cache_salt", str)
        self.cache_salt = tenant_salt(own, tenant)
        """The salt that separates the request's cache from others; None without one."""
        if self.cache_salt != own:
            self._fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(self.cache_salt))
        self._media: bool | None = False
        """Whether a chat has images, audio or video; None if it cannot be read."""
        if self._chat and not _is_text(self._raw(prompt)):
            self._media = True
            try:
                self._fields[prompt] = _without_media_ids(self._fields[prompt])
            except UndecodableError:
                self._media = None

    @property
    def path(self) -> str:
        """The path of the request in OpenAI's API."""
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    def prompt(self) -> RoutedPrompt:
        shown = [bytes(self._fields[name]) for name in _SHOWN if self._chat and name in self._fields]
        isolation = b"\0".join(bytes(self._fields.get(name, b"")) for name in _ISOLATION)
        return read_prompt(b"".join([*shown, self._raw(self._field)]), isolation)

    def plain(self) -> bool:
        """Returns whether the tokens of `/tokenize` identify the prompt. They do not if it has images or
        documents."""
        return self._media is False and all(self._fields.get(name, _NULL) == _NULL for name in _UNTOLD)

    @property
    def renderable(self) -> bool:
        """Whether vLLM's `/render` returns the prompt's tokens and media."""
        return self._chat and self._media is not None

    def token_ids(self) -> list[int] | None:
        """Returns the prompt's token ids if it is given as token ids, otherwise None."""
        return self._value(self._field, list[Token])

    def model(self) -> str | None:
        """Returns the model that should answer; None if the request names none, or not by a string."""
        return self._value("model", str)

    def priority(self) -> int:
        """Returns the request's priority; 0 without a valid number. Lower priorities go first."""
        return self._value("priority", int) or 0

    def streams(self) -> bool:
        """Returns whether the answer comes token by token."""
        return self._raw("stream") == b"true"

    def scores_prompt(self) -> bool:
        """Returns whether the answer has log probabilities of the prompt. For these, vLLM
        computes the whole prompt, even what it has cached."""

        def given(field: str) -> bool:
            return self._raw(field) not in (b"null", b"false")

        return given("prompt_logprobs") or (given("echo") and (self._chat or given("logprobs")))

    def _raw(self, field: str) -> bytes:
        """Returns a field's JSON: a new copy each time, so that none stays in memory."""
        return bytes(self._fields.get(field, _NULL))

    def _value(self, field: str, kind: type[P]) -> P | None:
        """Returns a field's value; None if it is missing, or of another kind."""
        try:
            return decode_json(self._raw(field), kind)
        except UndecodableError:
            return None

    def for_tokenize(self) -> bytes:
        return msgspec.json.encode({name: raw for name, raw in self._fields.items() if name in _TOKENIZED})

    def for_render(self) -> bytes:
        return self._one_token({}, mm_payload=msgspec.Raw(b'"none"'))

    def for_prefill(self) -> bytes:
        """Returns the body for the prefill node: one token, not streamed, and marked for decoding on another
        node."""
        return self._one_token({"do_remote_decode": True, "do_remote_prefill": False})

    def for_stream(self) -> bytes:
        """Returns the body that makes a decode node load the prompt's chunks as they appear. The node need
        not answer it."""
        return self._one_token(write_params(Announcement(stream=True)))

    def for_load(self) -> bytes:
        """Returns the body that makes a decode node load what the pool has of the prompt, and compute the
        rest."""
        return self._one_token({})

    def _one_token(self, transfer: dict[str, Any], **more: msgspec.Raw) -> bytes:
        fields = {name: raw for name, raw in self._fields.items() if name not in SAMPLING}
        if not self._chat:  # a chat's template may show it
            fields.pop("response_format", None)
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = _ONE
        fields |= {
            "max_tokens": _ONE,
            "temperature": _ZERO,
            "stream": msgspec.Raw(b"false"),
            _TRANSFER: self._transfer(transfer),
            **more,
        }
        return msgspec.json.encode(fields)

    def _transfer(self, params: dict[str, Any]) -> msgspec.Raw:
        if self._media:  # `_without_media_ids` removed the client's names
            params = {**params, "media_hashed": True}
        return msgspec.Raw(msgspec.json.encode(params or None))

    def for_decode(self, handoff: HandedOver | None) -> bytes:
        """Returns the client's body, with what the prefill node handed over."""
        params = handoff.kv_transfer_params if handoff else self._transfer({})
        return msgspec.json.encode({**self._fields, **({} if params == _NULL else {_TRANSFER: params})})


def _without_media_ids(messages: msgspec.Raw) -> msgspec.Raw:
    """Returns a chat's messages without the names that the client gave to images, audio and video.

    vLLM finds named content in its cache by the name alone. So a client could get the content that another
    client sent under this name, even if the name is the hash of other content. Without a name, vLLM hashes
    the content. Raises UndecodableError if this is no chat, ApiError 400 if it has too many parts.
    """
    places, parts = [], 0
    for place, message in enumerate(decode_json(bytes(messages), list[_Message[_AnyPart]])):
        if isinstance(message.content, list) and any(
            getattr(part, "uuid", _NULL) != _NULL for part in message.content
        ):
            places.append(place)
            parts += len(message.content)
            if parts > _MOST_NAMED:
                raise ApiError(
                    400, f"Messages with a `uuid` have more than {_MOST_NAMED} parts", param="messages"
                )
    if not places:
        return messages
    kept = decode_json(bytes(messages), list[msgspec.Raw])
    for place in places:
        message = decode_json(bytes(kept[place]), dict[str, msgspec.Raw])
        content = decode_json(bytes(message["content"]), list[str | dict[str, msgspec.Raw]])
        bare = [
            part if isinstance(part, str) else {k: part[k] for k in part if k != "uuid"} for part in content
        ]
        kept[place] = msgspec.Raw(msgspec.json.encode({**message, "content": bare}))
    return msgspec.Raw(msgspec.json.encode(kept))


def check_fields(body: bytes) -> None:
    """Raises ApiError 400 if the object has far too many fields. Does not parse them: a field of 9 bytes
    would take 200 in memory."""
    colons = body.count(b":")
    if colons <= _MOST_COLONS:
        return
    try:
        large = decode_json(body, _Large)
    except UndecodableError:
        return  # the caller parses it too, and says what is wrong
    colons -= sum(bytes(getattr(large, name)).count(b":") for name in _LARGE)
    if colons > _MOST_COLONS:
        raise _too_many_fields()


def _too_many_fields() -> ApiError:
    return ApiError(400, f"The body has more than {_MOST_FIELDS} fields", code="too_many_fields")


class _Tokenized(msgspec.Struct, frozen=True):
    tokens: list[Token]


def read_tokens(answer: bytes) -> PromptTokens:
    """Reads the answer of a node's `/tokenize`. Raises ValueError for anything else."""
    return PromptTokens(decode_json(answer, _Tokenized).tokens)


class _Place(msgspec.Struct, frozen=True):
    offset: _Count
    length: _Count


class _Features(msgspec.Struct, frozen=True):
    mm_hashes: dict[str, list[Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64,128}\Z")]]] = {}
    """The names of the media, by kind. Only names of this form are made from the content."""
    mm_placeholders: dict[str, list[_Place]] = {}


class _Rendered(msgspec.Struct, frozen=True):
    token_ids: list[Token]
    features: _Features | None = None


def read_rendered(answer: bytes) -> PromptTokens:
    """Reads the answer of vLLM's `/render`. Raises ValueError for anything else, and if media are not named
    by their content."""
    rendered = decode_json(answer, _Rendered)
    features = rendered.features or _Features()
    media = [
        MediaItem(name, place.offset, place.length)
        for kind, names in features.mm_hashes.items()
        for name, place in zip(names, features.mm_placeholders.get(kind, ()), strict=True)
    ]
    media.sort(key=lambda item: item.offset)
    begins = [*(item.offset for item in media[1:]), len(rendered.token_ids)]
    if any(item.offset + item.length > begin for item, begin in zip(media, begins, strict=False)):
        raise ValueError("media overlap, or end behind the prompt's tokens")
    return PromptTokens(rendered.token_ids, media)


class _Models(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]


def read_models(answer: bytes) -> list[msgspec.Raw]:
    """Reads the entries of a node's `/v1/models`. Raises ValueError for anything else."""
    return decode_json(answer, _Models).data


def read_handoff(answer: bytes) -> HandedOver:
    """Reads a prefill node's answer. Raises ValueError for anything else."""
    return decode_json(answer, HandedOver)
