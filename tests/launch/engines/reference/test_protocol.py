"""Reading requests: what is refused, with which parameter, and what is not; text to tokens and back."""

import json

import pytest

from launch.engines.reference.protocol import Detokenizer, encode, parse_completion
from launch.openai import ApiError


def parsed(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": [1, 2], **fields}).encode(), "m")


REFUSED = {
    "prompt": '[null, "", [], [[]], [""], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [true], [null], 7, {"text": "x"}]',
    "max_tokens": '[0, -1, 1.5, "x", true]',
    "stream": '["yes", 2]',
    "cache_salt": '["", 5, "LONG"]',
    "temperature": '[-0.1, 0.7, "hot", true, 1000000000000000000000000000000]',
    "top_p": "[0, 0.9]",
    "n": "[2, true]",
    "echo": "[true]",
    "logprobs": "[0, 5]",
    "stop": '[["."]]',
    "logit_bias": '[{"5": 1}]',
    "repetition_penalty": "[1.1]",
    "top_k": "[5]",
    "best_of": "[2]",
    "min_tokens": "[5]",
    "response_format": '[{"type": "json_object"}]',
    "sampling_strategy": '["beam"]',
    "max_token": "[5]",
    "kv_transfer_params": '[[], "x", {"do_remote_decode": true, "do_remote_prefill": true}]',
    "kv_transfer_params.do_remote_decode": '[{"do_remote_decode": "yes"}]',
    "kv_transfer_params.pd_cache": '[{"pd_cache": 3}]',
    "kv_transfer_params.pd_cache.prefix_tokens":
        '[{"pd_cache": {"prefix_tokens": "5"}}, {"pd_cache": {"prefix_tokens": -1}}, {"pd_cache": {"prefix_tokens": 1099511627776}}]',
    "kv_transfer_params.pd_cache.prefill": '[{"pd_cache": {"prefill": 1}}]',
}  # fmt: skip


@pytest.mark.parametrize("param, values", REFUSED.items(), ids=list(REFUSED))
def test_a_field_that_cannot_be_done_as_asked_is_refused_by_name(param, values):
    for value in json.loads(values.replace("LONG", "x" * 2000)):
        with pytest.raises(ApiError) as caught:
            parsed(**{param.partition(".")[0]: value})
        assert (caught.value.status, caught.value.param) == (400, param), value
        assert str(caught.value)


@pytest.mark.parametrize(
    "prompt, read",
    [("text", "text"), (["text"], "text"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([3], (3,))],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_one_of_them(prompt, read):
    assert parsed(prompt=prompt).prompt == read


# --- text ---------------------------------------------------------------------------------------------------


def pieces(tokens):
    detokenizer = Detokenizer()
    return [detokenizer.push(token, place == len(tokens)) for place, token in enumerate(tokens, start=1)]


@pytest.mark.parametrize("text", ["plain", "äöü €", "日本 🙂 x"])
def test_bytes_round_trip_and_a_character_comes_out_whole(text):
    tokens = encode(text, 256)
    assert tokens == tuple(text.encode())
    assert [piece for piece in pieces(tokens) if piece] == list(text)


@pytest.mark.parametrize(
    "tokens, text",
    [
        ([65, 299, 66], "A\ufffdB"),
        ([0xE2, 0x82, 299], "\ufffd\ufffd"),
        ([0xE2, 0x82], "\ufffd"),
        ([0xFF, 65], "\ufffdA"),
    ],
)
def test_ids_without_text_are_replacement_characters_and_end_an_open_character(tokens, text):
    assert "".join(pieces(tokens)) == text
