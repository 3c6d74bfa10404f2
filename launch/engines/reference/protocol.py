"""The completions API in JSON: reads requests, builds answers; text as bytes. Pure.

Reading is strict: unsupported parameters that would change the answer are refused by name, not ignored.
"""

from __future__ import annotations

import codecs
import json
import math
from typing import Any, NoReturn

import msgspec

from launch.engines.reference.model import SamplingParams
from launch.engines.reference.requests import FinishReason, GenerationStats
from pd_cache.errors import PdCacheError
from pd_cache.handoff import Announcement, BadParams, Handoff, PrefillWork, read_params, write_params

_LONGEST_SALT = 1024

_ONLY_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "prompt_logprobs": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_k": (0, -1),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
}
"""Unsupported parameters, and the values (besides null) that make them change nothing."""

_HARMLESS = frozenset(
    ("user", "stream_options", "metadata", "service_tier", "request_id", "priority", "return_token_ids", "store")
)
_READ = frozenset(
    (
        "model",
        "prompt",
        "max_tokens",
        "stream",
        "temperature",
        "top_p",
        "seed",
        "ignore_eos",
        "cache_salt",
        "kv_transfer_params",
    )
)


class BadRequest(PdCacheError):
    """A refused request, with the fields of OpenAI's error object."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a `/v1/completions` request. Everything is checked except what needs the model."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    stream: bool
    sampling: SamplingParams
    ignore_eos: bool
    cache_salt: str | None
    for_remote_decode: bool
    """Whether a proxy asks this node to compute the prompt for another node, which gives the answer."""
    announced_prefix: int
    prefill: PrefillWork | None


def parse_completion(body: bytes, model: str) -> CompletionRequest:
    """Reads a request to the model `model`. Raises BadRequest for anything that cannot be done as asked."""
    fields = _object(body)
    for name, value in fields.items():
        if name in _READ or name in _HARMLESS or value is None:
            continue
        if name not in _ONLY_NEUTRAL:
            raise BadRequest(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
        if not any(_same(value, neutral) for neutral in _ONLY_NEUTRAL[name]):
            raise BadRequest(
                f"{name} is not supported by this engine; leave it out", param=name, code="unsupported_parameter"
            )
    wanted = _take(fields, "model", str, "")
    if wanted != model:
        raise BadRequest(
            f"the model {wanted!r:.200} does not exist; this node serves {model!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
    sampling = SamplingParams()
    for name in ("temperature", "top_p", "seed"):
        kind = int if name == "seed" else float
        value = _take(fields, name, kind, getattr(sampling, name))
        try:
            sampling = msgspec.structs.replace(sampling, **{name: value})
        except ValueError as error:
            raise BadRequest(str(error), param=name) from None
    max_tokens = _take(fields, "max_tokens", int, 16)
    if max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    handoff = _handoff(_take(fields, "kv_transfer_params", dict, {}))
    announced = handoff.announced or Announcement()
    return CompletionRequest(
        prompt=_prompt(fields.get("prompt")),
        max_tokens=max_tokens,
        stream=_take(fields, "stream", bool, False),
        sampling=sampling,
        ignore_eos=_take(fields, "ignore_eos", bool, False),
        cache_salt=_salt(_take(fields, "cache_salt", str, None)),
        for_remote_decode=handoff.announce,
        announced_prefix=announced.prefix_tokens,
        prefill=announced.prefill,
    )


class AnswerBuilder:
    """Builds the JSON objects of one answer, which are the same in every chunk except for text and tokens."""

    def __init__(self, request: CompletionRequest, model: str, identifier: str, created: int) -> None:
        self._request = request
        self._head = {"id": identifier, "object": "text_completion", "created": created, "model": model}

    def chunk(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Returns one piece of a stream that continues."""
        return {**self._head, "choices": [_choice(text, tokens, None)]}

    def whole(
        self, text: str, tokens: list[int], reason: FinishReason, stats: GenerationStats, produced: int
    ) -> dict[str, Any]:
        """Returns an answer, or the last chunk of a stream.

        It holds text and tokens, usage over all `produced` tokens, where the prompt's KV came from, and for a proxy what to hand to the
        decode node.
        """
        answer = {
            **self._head,
            "choices": [_choice(text, tokens, reason)],
            "usage": {
                "prompt_tokens": stats.prompt_tokens,
                "completion_tokens": produced,
                "total_tokens": stats.prompt_tokens + produced,
                "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
            },
            "pd_cache": {
                "self": {
                    "cached_tokens": stats.cached_tokens,
                    "computed_tokens": stats.computed_tokens,
                    "ttft_ms": round(stats.ttft_ms, 3),
                },
                "report": msgspec.to_builtins(stats.report),
                "prefill": None if self._request.prefill is None else msgspec.to_builtins(self._request.prefill),
            },
        }
        if self._request.for_remote_decode:
            work = PrefillWork(stats.cached_tokens, stats.computed_tokens, stats.report.reason)
            answer["kv_transfer_params"] = write_params(Announcement(prefix_tokens=stats.prefix_tokens, prefill=work))
        return answer


def _choice(text: str, tokens: list[int], reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": tokens, "finish_reason": reason, "logprobs": None}


def _object(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON value")

    try:
        fields = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the body must be a JSON object, got {_kind(fields)}", code="invalid_json")
    return fields


def _take(fields: dict[str, Any], name: str, kind: type, default: Any, where: str = "") -> Any:
    """Returns the value of `name`, of type `kind`; the default if it is missing or null."""
    value = fields.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}
        path = f"{where}{name}"
        raise BadRequest(f"{path} must be {expected[kind]}, got {_kind(value)}", param=path, code="invalid_type")
    return value


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise BadRequest("one prompt a request is supported, not a batch of several", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise BadRequest("the prompt is not valid Unicode", param="prompt") from None
        return prompt
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return tuple(prompt)
        raise BadRequest("a prompt of token ids must hold integers only", param="prompt", code="invalid_type")
    if prompt in ("", []):
        raise BadRequest("the prompt is empty; at least one token is needed", param="prompt")
    raise BadRequest(
        f"prompt must be a string or a list of token ids, got {_kind(prompt)}", param="prompt", code="invalid_type"
    )


def _salt(salt: str | None) -> str | None:
    if salt is None:
        return None
    if not 1 <= len(salt) <= _LONGEST_SALT:
        raise BadRequest(f"cache_salt must have 1 to {_LONGEST_SALT} characters", param="cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise BadRequest("cache_salt is not valid Unicode", param="cache_salt") from None
    return salt


def _handoff(params: dict[str, Any]) -> Handoff:
    try:
        return read_params(params)
    except BadParams as error:
        where = f"kv_transfer_params.{error.path}" if error.path else "kv_transfer_params"
        raise BadRequest(str(error), param=where) from None


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _kind(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


_REPLACEMENT = "\ufffd"


class ByteTokenizer:
    """Ids from 256 on have no text and come out as U+FFFD. Thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`. Raises ValueError for text that has none."""
        if self._vocab_size < 256:
            raise ValueError(
                f"this model has no tokenizer, and its vocabulary of {self._vocab_size} has no room for bytes; "
                "send token ids"
            )
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error.reason} at {error.start}") from None

    def detokenizer(self) -> Detokenizer:
        """Returns a new detokenizer, for one request."""
        return Detokenizer()


class Detokenizer:
    """Turns one request's output into text, piece by piece; the pieces together are the whole text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Returns the text that is certain after `token`; may be empty in the middle of a character."""
        if token < 256:
            return self._decoder.decode(bytes((token,)))
        return self.finish() + _REPLACEMENT

    def finish(self) -> str:
        """Returns the text that is left when no more tokens come."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
