"""`pd-cache demo`: the whole of pd-cache on one machine, checked against an engine that has no cache.

Starts the nodes of a file as `up` does, and sends prompts that share a long prefix through the proxy. Then
computes the same prompts on a lone engine, and compares tokens and times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from launch.engines.reference.engine import ReferenceEngine
from launch.engines.reference.requests import GenerationRequest
from launch.http import NOBODY, fetch
from launch.run.up import quiet, running
from pd_cache.cluster import ClusterConfig, ReferenceEngineConfig, read_config
from pd_cache.decoding import decode_json
from pd_cache.errors import ConfigError, PdCacheError

_OUTPUT_TOKENS = 16
_TIMEOUT_S = 120.0


def prompts(vocabulary: int, chunk_size: int, longest: int) -> list[list[int]]:
    """Returns token ids: two long prompts with one prefix, the first again, a part of it that ends with a
    chunk, a short one."""
    rng = random.Random(0)
    size = min(longest - _OUTPUT_TOKENS, 3000)
    prefix = [rng.randrange(vocabulary) for _ in range(size * 5 // 6 // chunk_size * chunk_size)]
    tails = [[rng.randrange(vocabulary) for _ in range(size - len(prefix))] for _ in range(2)]
    return [prefix + tails[0], prefix + tails[1], prefix + tails[0], list(prefix), prefix[: chunk_size // 2]]


def comments(shared: int) -> tuple[str, ...]:
    """Returns what each of `prompts` shows; the first two share `shared` tokens."""
    return (
        "new. The prefill node computes it, and the decode node loads its whole chunks.",
        f"shares its first {shared} tokens with prompt 1. The prefill node loads these.",
        "prompt 1 again.",
        "the shared part alone. All of it is in the pool; its last token is always computed.",
        "shorter than a chunk, so nothing of it is stored.",
    )


def run_demo(file: Path, *, as_json: bool) -> bool:
    """Runs everything and prints the outcome. Returns False if any output differs. Takes well under a
    minute."""
    config, source = read_config(file)
    engine = config.engine
    proxies = config.by_role("proxy")
    if not isinstance(engine, ReferenceEngineConfig) or not proxies or not config.by_role("prefill"):
        raise ConfigError(
            f"{file}: the demo needs a master, a prefill node, a decode node and a proxy, with the reference engine"
        )
    config = msgspec.structs.replace(config, cache=config.cache.fitted(engine.block_size))
    todo = prompts(engine.model.random.vocab_size, config.cache.chunk_tokens, engine.max_model_len)
    with Console(stderr=True).status(
        "starting a master, a prefill node, a decode node and a proxy"
    ) as status:
        with running(config, source, sink=quiet) as cluster:
            url = cluster.urls[proxies[0].name]
            answers = []
            for number, prompt in enumerate(todo, start=1):
                status.update(f"prompt {number} of {len(todo)}: {len(prompt)} tokens through the proxy")
                answers.append(_ask(url, engine.model.name, prompt))
        status.update("the same prompts on a lone engine without a cache")
        alone = list(_compute_alone(engine, todo))
    compared = []
    for prompt, answer, (tokens, ttft_ms) in zip(todo, answers, alone, strict=True):
        usage = answer["pd_cache"]
        compared.append(
            {
                "prompt_tokens": len(prompt),
                "prefill": usage["prefill"] or {"cached_tokens": 0, "computed_tokens": 0},
                "decode": usage["self"],
                "recompute": {"ttft_ms": ttft_ms},
                "tokens_equal": answer["choices"][0]["token_ids"] == tokens,
            }
        )
    all_equal = all(request["tokens_equal"] for request in compared)
    if as_json:
        print(json.dumps({"all_equal": all_equal, "requests": compared}), flush=True)
    else:
        _show(compared, all_equal, config)
    return all_equal


def _ask(url: str, model: str, prompt: list[int]) -> dict[str, Any]:
    """Posts one completion to the proxy. Returns the answer, with the tokens and what the nodes say about
    them."""
    body = {"model": model, "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
    try:
        answer = fetch(f"{url}/v1/completions", _TIMEOUT_S, NOBODY, json.dumps(body).encode())
        return decode_json(answer, dict[str, Any])
    except (OSError, ValueError) as error:
        raise PdCacheError(f"no answer from {url}: {error}") from None


def _compute_alone(engine: ReferenceEngineConfig, todo: list[list[int]]) -> Iterator[tuple[list[int], float]]:
    """Yields tokens and time to first token of each prompt, computed by an engine in this process."""
    with closing(ReferenceEngine.open(engine)) as alone:
        for prompt in todo:
            generation = alone.submit(GenerationRequest(prompt=tuple(prompt), max_tokens=_OUTPUT_TOKENS))
            tokens = [event.token for event in generation]
            assert generation.stats is not None, "they are known with the first token"
            yield tokens, generation.stats.ttft_ms


def _show(compared: list[dict[str, Any]], all_equal: bool, config: ClusterConfig) -> None:
    console = Console()
    table = Table(title=f"pd-cache demo: chunks of {config.cache.chunk_tokens} tokens", title_justify="left")
    for figure in (
        "prompt\ntokens",
        "prefill node:\npool + computed",
        "decode node:\npool + computed",
        "decode\nTTFT ms",
        "alone\nTTFT ms",
    ):
        table.add_column(figure, justify="right")
    table.add_column("tokens", no_wrap=True)
    for request in compared:
        table.add_row(
            str(request["prompt_tokens"]),
            *(
                f"{request[hop]['cached_tokens']} + {request[hop]['computed_tokens']}"
                for hop in ("prefill", "decode")
            ),
            f"{request['decode']['ttft_ms']:.0f}",
            f"{request['recompute']['ttft_ms']:.0f}",
            "[green]identical[/]" if request["tokens_equal"] else "[red]DIFFERENT[/]",
        )
    console.print(table)
    for number, comment in enumerate(comments(compared[3]["prompt_tokens"]), start=1):
        console.print(f"prompt {number}: {comment}", highlight=False, soft_wrap=True)
    if all_equal:
        console.print("Every output is identical to the lone engine's.")
    else:
        console.print("[red]Outputs differ: the cache changed what the model says.[/]")
