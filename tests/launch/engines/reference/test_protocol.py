"""Reading requests: what is refused, with which status and parameter; and what is not."""

from __future__ import annotations

import json

import pytest

from launch.engines.reference import GenerationStats
from launch.engines.reference.protocol import AnswerBuilder, BadRequest, parse_completion
from pd_cache.handoff import PrefillWork
from pd_cache.reasons import RequestReport, TierChunks

BASE = {"model": "m", "prompt": [1, 2]}


def parsed(**fields):
    return parse_completion(json.dumps({**BASE, **fields}).encode(), "m")


BAD_BODIES = [
    (b"", None),
    (b"{", None),
    (b"\xff\xfe", None),
    (b"[]", None),
    (b"3", None),
    (b"null", None),
    (b'{"model": "m", "prompt": "x", "temperature": NaN}', None),
    (b'{"model": "m", "prompt": "x", "temperature": Infinity}', None),
    (b'{"model": "m", "prompt": ' + b"[" * 100_000, None),
    (b'{"model": "m", "prompt": [' + b"9" * 5000 + b"]}", None),
]

BAD_FIELDS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [None]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "x" * 2000}, "cache_salt"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"stop": ["\n"]}, "stop"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"sampling_strategy": "beam"}, "sampling_strategy"),
    ({"max_token": 5}, "max_token"),
    ({"kv_transfer_params": []}, "kv_transfer_params"),
    ({"kv_transfer_params": "x"}, "kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params.do_remote_decode"),
    ({"kv_transfer_params": {"do_remote_prefill": 1}}, "kv_transfer_params.do_remote_prefill"),
    ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_transfer_params"),
    ({"kv_transfer_params": {"pd_cache": 3}}, "kv_transfer_params.pd_cache"),
    ({"kv_transfer_params": {"pd_cache": {"prefix_tokens": "5"}}}, "kv_transfer_params.pd_cache.prefix_tokens"),
    ({"kv_transfer_params": {"pd_cache": {"prefix_tokens": -1}}}, "kv_transfer_params.pd_cache.prefix_tokens"),
    ({"kv_transfer_params": {"pd_cache": {"prefix_tokens": 2**40}}}, "kv_transfer_params.pd_cache.prefix_tokens"),
    ({"kv_transfer_params": {"pd_cache": {"prefill": 1}}}, "kv_transfer_params.pd_cache.prefill"),
    (
        {"kv_transfer_params": {"pd_cache": {"prefill": {"cached_tokens": 0, "computed_tokens": 1.5}}}},
        "kv_transfer_params.pd_cache.prefill.computed_tokens",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES, ids=[repr(body)[:40] for body, _ in BAD_BODIES])
def test_a_body_that_is_no_object_is_refused(body, param):
    with pytest.raises(BadRequest) as caught:
        parse_completion(body, "m")
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[str(fields)[:60] for fields, _ in BAD_FIELDS])
def test_a_field_that_cannot_be_done_as_asked_is_refused_by_name(fields, param):
    with pytest.raises(BadRequest) as caught:
        parsed(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value)


@pytest.mark.parametrize("model", ["other", "", None])
def test_an_unknown_model_is_not_found(model):
    with pytest.raises(BadRequest, match="serves 'm'") as caught:
        parsed(model=model)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_what_changes_nothing_is_taken():
    neutral = {"n": 1, "echo": False, "logprobs": None, "stop": None, "presence_penalty": 0.0, "top_k": -1}
    harmless = {"user": "u", "stream_options": {"include_usage": True}, "repetition_penalty": 1.0, "logit_bias": {}}
    assert parsed(**neutral, **harmless) == parsed()


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("text", "text"), (["text"], "text"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([3], (3,))],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_one_of_them(prompt, read):
    assert parsed(prompt=prompt).prompt == read


def test_null_means_the_default():
    fields = ("max_tokens", "stream", "temperature", "top_p", "seed", "ignore_eos", "cache_salt", "kv_transfer_params")
    assert parsed(**dict.fromkeys(fields)) == parsed()
    assert parsed().max_tokens == 16


def test_a_handoff_is_read_and_other_connectors_keys_are_not():
    ours = {"prefix_tokens": 512, "prefill": {"cached_tokens": 256, "computed_tokens": 300}}
    request = parsed(kv_transfer_params={"do_remote_prefill": True, "pd_cache": ours, "remote_engine_id": None})
    assert request.announced_prefix == 512
    assert request.prefill == PrefillWork(256, 300)
    assert not request.for_remote_decode


def test_a_prefix_is_announced_only_where_the_prefill_was_remote():
    assert parsed(kv_transfer_params={"pd_cache": {"prefix_tokens": 512}}).announced_prefix == 0


def test_an_answer_for_a_proxy_carries_what_the_decode_node_needs():
    request = parsed(kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1)
    report = RequestReport.of(40, 16, found=32, loaded=16, tiers=TierChunks(pool=1), reason="evicted")
    stats = GenerationStats(
        prompt_tokens=40, cached_tokens=16, computed_tokens=24, prefix_tokens=32, ttft_ms=1.23456, report=report
    )
    answer = AnswerBuilder(request, "m", "cmpl-1", 5).whole("x", [120], "length", stats, 1)
    assert answer == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "text": "x", "token_ids": [120], "finish_reason": "length", "logprobs": None}],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 1,
            "total_tokens": 41,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
        "pd_cache": {
            "self": {"cached_tokens": 16, "computed_tokens": 24, "ttft_ms": 1.235},
            "report": {
                "asked": 40,
                "at_hand": 0,
                "found": 32,
                "loaded": 16,
                "memory": 0,
                "disk": 0,
                "pool": 16,
                "computed": 24,
                "reason": "evicted",
            },
            "prefill": None,
        },
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "pd_cache": {
                "prefix_tokens": 32,
                "namespace": "",
                "prefill": {"cached_tokens": 16, "computed_tokens": 24, "reason": "evicted"},
            },
        },
    }
