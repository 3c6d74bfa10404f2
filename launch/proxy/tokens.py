"""A text prompt's tokens, which nodes get in place of the text where that changes no answer. Pure.

The tokens are those that a decode node returns, and what it returns may be wrong. So they are used only if it is the model's only
decode node: then it can spoil no prompt but those that it answers itself. Prefill nodes get them if their namespace is the same. Nodes of
one namespace share the KV of equal tokens, although their tokenizers may differ: a namespace covers the weights, not the tokenizer.
"""

from __future__ import annotations

from typing import NamedTuple

from launch.proxy.routing import Hop

BESIDE_TOKENS = frozenset(
    (
        *("model", "prompt", "cache_salt", "max_tokens", "min_tokens", "n", "stream", "stream_options"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "bad_words", "allowed_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("response_format", "structured_outputs"),
        *("logprobs", "skip_special_tokens", "spaces_between_special_tokens"),
        *("return_token_ids", "return_tokens_as_token_ids"),
        *("user", "metadata", "service_tier", "store", "priority", "request_id", "session_id"),
    )
)
"""Fields with which vLLM and the reference engine answer the same to a prompt's tokens as to its text. With any other field, known or not,
nodes get the text: `echo` repeats it (from tokens vLLM would make another one), `suffix` needs it, `prompt_logprobs` describes it, and
`add_special_tokens` and `truncate_prompt_tokens` change which tokens it makes."""


class PromptTokens(NamedTuple):
    """What a node's `/tokenize` returned for a prompt."""

    node: str
    """The node's URL."""
    fingerprint: str
    """That of the node's namespace when it was asked."""
    json: bytes
    """The token ids as JSON."""


class HopBody(NamedTuple):
    """What the nodes of a hop get: the client's text, or the same request with the prompt's tokens."""

    text: bytes
    tokens: bytes | None = None
    node: str = ""
    """The URL of the node that returned the tokens."""
    fingerprint: str = ""
    """That of its namespace then."""

    def tokens_for(self, hop: Hop, node: str, fingerprint: str | None) -> bytes | None:
        """Returns the request with tokens if this node, whose namespace has this fingerprint now, may get it."""
        return self.tokens if fingerprint == self.fingerprint and (hop == "prefill" or node == self.node) else None
