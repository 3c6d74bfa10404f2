"""The completions API in JSON: reads requests, builds answers; text as bytes. Pure.

Reading is strict: unsupported parameters that would change the answer are refused by name, not ignored.
"""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any, NamedTuple

import msgspec

from launch.engines.reference.requests import Generation
from launch.openai import ApiError
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.handoff import Announcement, BadParams, PrefillWork, read_params, write_params

_ONLY_NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_k": (0, -1),
    "response_format": ({"type": "text"},),
}
"""Unsupported parameters, and the values (besides null) that make them change nothing."""

_HARMLESS = frozenset(("user", "stream_options", "metadata", "service_tier", "request_id", "priority", "return_token_ids", "store", "session_id", "seed", "ignore_eos"))  # fmt: skip
"""Parameters that change nothing: the engine draws nothing at random, and its model never ends a text by
itself."""
_AT = re.compile(r" - at `\$\.([^`\[]*)")
"""The place in msgspec's message that names the wrong field."""


def _refused(
    message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
) -> ApiError:
    return ApiError(status, message, param=param, code=code)


class CompletionFields(msgspec.Struct, frozen=True):
    """The fields of a `/v1/completions` request that are read."""

    model: str = ""
    prompt: Any = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    stream: bool = False
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] = {}


class CompletionRequest(NamedTuple):
    """A `/v1/completions` request. Everything is checked except what needs the model."""

    prompt: str | tuple[int, ...]
    fields: CompletionFields
    announce: bool
    """Whether a proxy asks this node to compute the prompt for another node, which gives the answer."""
    announced: Announcement


def parse_completion(body: bytes, model: str) -> CompletionRequest:
    """Reads a request to the model `model`. Raises ApiError for anything that cannot be done as asked."""
    try:
        given = decode_json(body.removeprefix(codecs.BOM_UTF8), dict[str, Any])
    except UndecodableError as error:
        raise _refused(f"the body is no JSON object: {error}", code="invalid_json") from None
    given = {name: value for name, value in given.items() if value is not None and name not in _HARMLESS}
    for name in given.keys() - set(CompletionFields.__struct_fields__):
        if name not in _ONLY_NEUTRAL:
            raise _refused(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
        # to Python, False is 0
        if (type(given[name]) is bool, given[name]) not in [
            (type(neutral) is bool, neutral) for neutral in _ONLY_NEUTRAL[name]
        ]:
            message = f"{name} is not supported by this engine; leave it out"
            raise _refused(message, param=name, code="unsupported_parameter")
    try:
        fields = msgspec.convert(given, CompletionFields, strict=False)
    except msgspec.ValidationError as error:
        where = _AT.search(str(error))
        raise _refused(str(error), param=where and where[1], code="invalid_type") from None
    if fields.model != model:
        message = f"the model {fields.model!r:.200} does not exist; this node serves {model!r}"
        raise _refused(message, param="model", code="model_not_found", status=404)
    try:
        handoff = read_params(fields.kv_transfer_params)
    except BadParams as error:
        raise _refused(str(error), param=".".join(filter(None, ("kv_transfer_params", error.path)))) from None
    return CompletionRequest(
        _prompt(fields.prompt), fields, handoff.announce, handoff.announced or Announcement()
    )


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise _refused("one prompt a request is supported, not a batch of several", param="prompt")
        prompt = prompt[0]
    if prompt and isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise _refused("prompt must be a string or a list of token ids, and not empty", param="prompt")


class AnswerBuilder:
    """Builds the JSON objects of one answer, which are the same in every chunk except for text and tokens."""

    def __init__(self, request: CompletionRequest, model: str, identifier: str, created: int) -> None:
        self._request = request
        self._head = {"id": identifier, "object": "text_completion", "created": created, "model": model}

    def chunk(self, text: str, tokens: list[int], reason: str | None = None) -> dict[str, Any]:
        """Returns one piece of a stream. Without a reason to end, the stream continues."""
        choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": reason, "logprobs": None}
        return {**self._head, "choices": [choice]}

    def whole(self, text: str, tokens: list[int], generation: Generation, produced: int) -> dict[str, Any]:
        """Returns an answer, or the last chunk of a stream.

        It holds text and tokens, usage over all `produced` tokens, where the prompt's KV came from, and for a
        proxy what to hand to the decode node.
        """
        stats = generation.stats
        assert stats is not None, "they are known with the first token"
        report = stats.report
        answer = {
            **self.chunk(text, tokens, "length"),
            "usage": {
                "prompt_tokens": report.asked,
                "completion_tokens": produced,
                "total_tokens": report.asked + produced,
                "prompt_tokens_details": {"cached_tokens": report.loaded},
            },
            "pd_cache": {
                "self": {
                    "cached_tokens": report.loaded,
                    "computed_tokens": report.computed,
                    "ttft_ms": round(stats.ttft_ms, 3),
                },
                "report": msgspec.to_builtins(report),
                "prefill": msgspec.to_builtins(self._request.announced.prefill),
            },
        }
        if self._request.announce:
            work = PrefillWork(report.loaded, report.computed, report.reason)
            answer["kv_transfer_params"] = write_params(
                Announcement(prefix_tokens=stats.prefix_tokens, prefill=work)
            )
        return answer


def encode(text: str, vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids of a text: its bytes. Raises ApiError if the vocabulary has no room for them."""
    if vocab_size < 256:
        raise _refused(
            f"this model's vocabulary of {vocab_size} has no room for bytes; send token ids", param="prompt"
        )
    return tuple(text.encode())


class Detokenizer:
    """Turns one request's output into text, piece by piece; the pieces together are the whole text. Ids from
    256 on have no text and come out as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int, last: bool) -> str:
        """Returns the text that is certain after `token`; may be empty in the middle of a character, unless
        no more tokens come."""
        if token < 256:
            return self._decoder.decode(bytes((token,)), final=last)
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text + "\ufffd"
