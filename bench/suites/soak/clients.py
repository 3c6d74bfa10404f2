"""Clients that send requests through the proxy and compare each answer with what the model says without a cache."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.suites.soak.cluster import REQUEST_S
from bench.suites.soak.plan import OUTPUT_TOKENS, PlannedCompletion, completions

_GIVE_UP_S = 15.0
"""Seconds beyond the proxy's own limit, after which the client hangs up."""


class Reply(NamedTuple):
    """What became of a request."""

    begin: float
    end: float
    """Seconds since 1970."""
    outcome: str
    """`answered`, `refused 503` and the like, `broken` (a stream that ended with an error event, or a connection that ended),
    `unreachable`, `no answer`."""
    wrong: bool
    got: str
    cached: int
    """Prompt tokens that the nodes took from the cache."""


def complete(address: tuple[str, int], prompt: list[int], stream: bool, expected: list[int]) -> Reply:
    """Sends one request and reads its answer to the end."""
    begin = time.time()
    connection = http.client.HTTPConnection(*address, timeout=REQUEST_S + _GIVE_UP_S)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0, "stream": stream}  # fmt: skip
    tokens: list[int] = []
    cached, outcome = 0, "answered"
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            answer.read()
            outcome = f"refused {answer.status}"
        elif stream:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        outcome = "broken"
                    for choice in event.get("choices", ()):
                        tokens += choice.get("token_ids", ())
                    cached = max(cached, _cached(event))
        else:
            whole = json.loads(answer.read())
            tokens, cached = whole["choices"][0]["token_ids"], _cached(whole)
    except ConnectionRefusedError:
        outcome = "unreachable"
    except TimeoutError:
        outcome = "no answer"
    except OSError as error:
        outcome = "no answer" if "timed out" in str(error) else "unreachable" if not tokens else "broken"
    except (http.client.HTTPException, ValueError, KeyError, LookupError):
        outcome = "broken"
    finally:
        connection.close()
    # what has arrived must be right even if the stream broke off
    if outcome == "answered" and len(tokens) < len(expected) and stream:
        outcome = "broken"
    wrong = tokens != expected[: len(tokens)] or (outcome == "answered" and tokens != expected)
    return Reply(begin, time.time(), outcome, wrong, str(tokens) if wrong else "", cached)


def _cached(body: dict[str, Any]) -> int:
    usage = body.get("pd_cache") or {}
    return int((usage.get("self") or {}).get("cached_tokens", 0)) + int((usage.get("prefill") or {}).get("cached_tokens", 0))  # fmt: skip


class CompletionClient(threading.Thread):
    """A thread that sends one request after the other."""

    def __init__(
        self, number: int, seed: int, address: tuple[str, int], prompts: list[list[int]], expected: list[list[int]],
        on_reply: Callable[[str, PlannedCompletion, Reply], None],
    ) -> None:  # fmt: skip
        super().__init__(name=f"client-{number}", daemon=True)
        self.label = f"client/{number}"
        self._seed, self._address, self._prompts, self._expected = seed, address, prompts, expected
        self._on_reply = on_reply
        self.go, self.closing, self.resting = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        for one in completions(self._seed, self.label, len(self._prompts)):
            if not self.go.is_set():
                self.resting.set()
                self.go.wait()
                self.resting.clear()
            if self.closing.wait(one.pause):
                return
            reply = complete(self._address, self._prompts[one.prompt], one.stream, self._expected[one.prompt])
            self._on_reply(self.label, one, reply)

    def close(self) -> None:
        """Asks it to end after the request that it has under way."""
        self.closing.set()
        self.go.set()
