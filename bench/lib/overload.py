"""What are limits worth on real nodes? Requests a second within limits at 0.8 to 3 times what a cluster on
this machine can do, with `proxy.limits` and without.

A master, two prefill nodes, a decode node and two proxies are processes of their own. The reference engine
sleeps for as long as a large model would compute, so that the figures hardly depend on this machine's
processors. All else is real: its queue and its steps, the pool, and the proxy.

python -m bench.lib.overload launch ROLE ...        runs a node that sleeps
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence

import aiohttp
import msgspec
import torch

from bench.lib.report import Report, at_least, tracked
from launch.cli import main
from launch.engines.reference.model import PagedModel, StepPart
from launch.run.supervise import Program, Supervisor
from launch.run.up import chosen_ports, program_of, quiet
from pd_cache.cluster import LimitsConfig, dump_config, parse_config
from pd_cache.runtime import temporary_folder

_CLUSTER = """
engine:
  kind: reference
  model: {name: bench, random: {vocab_size: 512, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 4, kv_heads: 2}}
  max_queue: 4096
  threads: 1
proxy: {direct_tokens: 0, limits: {ttft_s: 10, token_s: 0.2}}
nodes:
  - {name: master, role: master, port: 0, metrics_port: 0}
  - {name: prefill-0, role: prefill, port: 0, segment_size: 256MiB}
  - {name: prefill-1, role: prefill, port: 0, segment_size: 256MiB}
  - {name: decode, role: decode, port: 0}
  - {name: limits, role: proxy, port: 0}
  - {name: without, role: proxy, port: 0}
"""
_STEP_S, _TOKEN_S = 0.02, 0.002
"""How long a step sleeps: a constant, and a time for each of its tokens."""
_FIRST_S, _NEXT_S = 10.0, 0.2
"""The limits, as in the file."""
_LOADS = (0.8, 1.0, 2.0, 3.0)
_PROMPTS, _ANSWER = (200, 1800), 16
"""The fewest and most tokens of a prompt; the tokens of an answer."""
_AT_ONCE, _WARM_S, _COUNTED_S = 40, 10.0, 120.0


def limits_on_nodes() -> Report:
    """Returns the capacity in requests a second, a row for each load, and the target."""
    config = parse_config(_CLUSTER, "bench.yaml")[0]
    section = msgspec.structs.replace(config.proxy, limits=LimitsConfig())
    with (
        chosen_ports(config, config.nodes) as config,
        temporary_folder() as folder,
        Supervisor(config.supervisor, sink=quiet) as supervisor,
    ):
        limits, without = folder / "limits.yaml", folder / "without.yaml"
        limits.write_text(dump_config(config))
        without.write_text(dump_config(msgspec.structs.replace(config, proxy=section)))
        master, *engines, proxy, _ = (program_of(node, limits) for node in config.nodes)
        command = (sys.executable, "-m", __spec__.name)
        engines = [Program(engine.name, (*command, *engine.argv[3:])) for engine in engines]
        supervisor.start([master, engines, [proxy, program_of(config.nodes[-1], without)]])
        return asyncio.run(_compared(supervisor.ready_urls))


async def _compared(urls: dict[str, str]) -> Report:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        rng, begun = random.Random(0), time.monotonic()
        await asyncio.gather(*(_in_time(session, urls["without"], rng) for _ in range(_AT_ONCE)))
        capacity, rows = _AT_ONCE / (time.monotonic() - begun), list[dict[str, float]]()
        for load in tracked(_LOADS, "loads"):
            rows.append({"load": load, "rate": load * capacity})
            for name in ("without", "limits"):
                rows[-1][name] = await _kept(session, urls[name], load * capacity, rng)
    share = rows[-1]["limits"] / max(row["limits"] for row in rows)
    checks = [at_least("of the peak, at three times the load", share, 0.95)]
    return {"capacity": capacity, "results": rows}, checks


async def _kept(session: aiohttp.ClientSession, url: str, rate: float, rng: random.Random) -> float:
    """Sends requests at random times, `rate` a second. Returns how many a second are within the limits."""
    asked = dict[asyncio.Task[bool], float]()
    due = begun = time.monotonic()
    while due < begun + _WARM_S + _COUNTED_S:
        await asyncio.sleep(due - time.monotonic())
        asked[asyncio.create_task(_in_time(session, url, rng))] = due
        due += rng.expovariate(rate)
    await asyncio.wait(asked, timeout=_FIRST_S + _ANSWER * _NEXT_S)
    kept = sum(task.done() and task.result() for task, due in asked.items() if due >= begun + _WARM_S)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    return kept / _COUNTED_S


async def _in_time(session: aiohttp.ClientSession, url: str, rng: random.Random) -> bool:
    """Asks for an answer. Returns whether it comes within the limits."""
    prompt = [rng.randrange(1, 256) for _ in range(rng.randint(*_PROMPTS))]
    body = {"model": "bench", "prompt": prompt, "max_tokens": _ANSWER, "ignore_eos": True, "stream": True}
    begun, first = time.monotonic(), 0.0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status == 429:
            return False
        assert answer.status == 200, await answer.text()
        async for _ in answer.content.iter_any():
            first = first or time.monotonic()
    return first <= begun + _FIRST_S and time.monotonic() <= first + _NEXT_S * _ANSWER


if __name__ == "__main__":

    def step(self: PagedModel, parts: Sequence[StepPart]) -> torch.Tensor:
        time.sleep(_STEP_S + _TOKEN_S * sum(len(part.tokens) for part in parts))
        return torch.zeros(sum(part.wants_logits for part in parts), self.vocab_size)

    PagedModel.step = step  # type: ignore[method-assign]
    main(prog_name="pd-cache")
