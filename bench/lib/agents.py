"""A synthetic trace of coding agents: many turns, one system prompt for all, and a tool's result in each turn. Pure; seeded.

The numbers are those of 610 sessions of Codex with GPT-5.4 on SWE-bench Pro, as their publisher gives them
(https://huggingface.co/datasets/Inferact/codex_swebenchpro_traces, "Per-Trial Statistics", and figure 1 of vLLM's article of 2026-05-06,
"Serving Agentic Workloads at Scale with vLLM x Mooncake"):

- calls of a session: 30 in the median, 57 at the 90th percentile, 33 in the mean;
- context at the first call: 12,278 tokens in the median and 13,744 at the 99th percentile. That it varies so little says that most of it
  is the same in all sessions. How much is not published; we take 11,264 tokens, and a task of 1,014;
- growth per call: 2,242 tokens in the mean (the answer and the tool's result), which makes 80,488 tokens at the last call in the median;
- an answer: 17,239 / 33 = 522 tokens in the mean;
- time from one call to the next: 5.2 to 81.4 s, here evenly on a logarithmic scale.

Turns and growth are log-normal. Sessions begin at random, evenly over the trace.
"""

from __future__ import annotations

import math
import random
from itertools import count

from bench.lib.trace import BLOCK_TOKENS, Request

_SYSTEM_TOKENS = 22 * BLOCK_TOKENS
_TASK_TOKENS = 1_014
_TURNS_MEDIAN, _TURNS_P90 = 30, 57
_GROWTH_MEAN, _GROWTH_SIGMA = 2_242, 1.0
_ANSWER_TOKENS = 522
_PAUSE_S = (5.2, 81.4)
_LONGEST = 200_000
"""Tokens; the longest published context has about 181,000 at the 99th percentile."""
_P90 = 1.2816
"""The 90th percentile of the normal distribution."""


def agent_trace(sessions: int, span_s: float = 3600.0, seed: int = 0) -> list[Request]:
    """Returns the requests of `sessions` agents, in the order of their times. The sessions begin within `span_s` seconds."""
    rng, fresh = random.Random(seed), count(_SYSTEM_TOKENS // BLOCK_TOKENS)
    system = list(range(_SYSTEM_TOKENS // BLOCK_TOKENS))
    sigma = math.log(_TURNS_P90 / _TURNS_MEDIAN) / _P90
    requests: list[Request] = []
    for _ in range(sessions):
        now, tokens = rng.uniform(0, span_s), _SYSTEM_TOKENS + _TASK_TOKENS
        blocks = list(system)
        for _ in range(max(1, round(rng.lognormvariate(math.log(_TURNS_MEDIAN), sigma)))):
            while len(blocks) < tokens // BLOCK_TOKENS:
                blocks.append(next(fresh))
            rest = [next(fresh)] if tokens % BLOCK_TOKENS else []  # it will be another block when it is full
            requests.append(Request(now * 1000, tokens, [*blocks, *rest], _ANSWER_TOKENS))
            growth = rng.lognormvariate(math.log(_GROWTH_MEAN) - _GROWTH_SIGMA**2 / 2, _GROWTH_SIGMA)
            tokens += _ANSWER_TOKENS // 2 + round(max(0.0, growth - _ANSWER_TOKENS // 2))
            if tokens > _LONGEST:
                break
            now += math.exp(rng.uniform(*map(math.log, _PAUSE_S)))
    return sorted(requests, key=lambda request: request.timestamp)
