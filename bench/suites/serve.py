"""A cluster under load: time to first token, time between tokens, tokens/s, hit rate and errors at a rate of requests.

Open loop: requests begin when they are due, at random times of a given rate (Poisson) or as in a trace, however slow the
cluster is; see `bench/lib/load.py`. The same load is sent twice: first with an isolation of its own for each request (`cache_salt`), so
that every prompt is computed anew, then without, so that prompts reuse what others left in the pool.

    pd-cache bench serve --rate 2                a small cluster of the reference engine on this machine
    pd-cache bench serve --trace FILE --speed 0.5 --scale 16
    pd-cache bench serve --rate 50 -c cluster.yaml         requests to the cluster's proxy
    pd-cache bench serve --serve HOST:PORT                 on a second machine, which sends half with --connect HOST:PORT on the first
    pd-cache bench serve --rate 2 --url http://HOST:PORT --vocabulary 32000      any server that speaks OpenAI's API
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from bench.lib.about import about
from bench.lib.arrivals import Arrival, from_trace, ideal_hit_rate, poisson, synthetic
from bench.lib.load import Destination, Load, generate, join, summarize
from bench.lib.report import Check, LinePlot, Report, Table, at_least, at_most, finish, option, progress, report_options
from bench.lib.stats import quantile
from bench.lib.targets import any_server, clusters_proxy, own_cluster
from bench.lib.trace import read_trace
from bench.lib.two_machines import Crew, MachineOptions, Site, conduct, machine_options
from pd_cache.cluster import read_config
from pd_cache.errors import ConfigError

_START_S = 1.0
"""Between the word to start and due time 0."""
_STEP_S = 60.0
_REQUESTS = 100
_PASSES = ("recompute", "reuse")


class LoadPlan(NamedTuple):
    """A load, as given by the options."""

    rate: float | None
    """Requests a second; None takes the times of the trace."""
    trace: Path | None
    speed: float
    scale: float
    requests: int | None
    prompt_tokens: int
    shared: float
    prefixes: int
    output_tokens: int
    longest: int
    """Tokens of a prompt and its answer together."""

    def arrivals(self) -> list[Arrival]:
        """In the order in which they are due. Raises TraceError for a trace that cannot be read."""
        trace = None if self.trace is None else read_trace(self.trace, self.requests)
        count = len(trace) if trace is not None else self.requests or _REQUESTS
        if self.rate is not None:
            times = poisson(self.rate, count)
        else:
            assert trace is not None
            times = [(request.timestamp - trace[0].timestamp) / 1000 / self.speed for request in trace]
        if trace is not None:
            return from_trace(trace, times, self.scale, self.longest)
        output = min(self.output_tokens, self.longest - 1)
        prompt = min(self.prompt_tokens, self.longest - output)
        return synthetic(times, prompt, self.shared, self.prefixes, output)


class Send(msgspec.Struct, frozen=True):
    """Send these requests; due time 0 is `_START_S` after the word came."""

    what: str
    """For the progress bar."""
    target: Destination
    arrivals: list[Arrival]


class ServeSite(Site):
    """This machine's generator."""

    def send(self, job: Send) -> Load:
        """Returns what became of the requests, when the last one has ended."""
        with progress() as bar:
            task = bar.add_task(job.what, total=len(job.arrivals))
            return asyncio.run(
                generate(job.target, job.arrivals, time.monotonic() + _START_S, lambda: bar.advance(task))
            )


def run_pass(
    machines: Crew,
    name: str,
    target: Destination,
    arrivals: Sequence[Arrival],
    ttft_limit_s: float | None,
) -> tuple[Load, dict[str, Any]]:
    """Has every generator send its share, all beginning together. Returns what they saw, and a row of the report."""
    parts = len(machines.nodes)
    jobs = {
        node: Send(
            name, target._replace(salted=target.salted and f"{target.salted}-{node}"), list(arrivals[part::parts])
        )
        for part, node in enumerate(machines.nodes)
    }
    timeout_s = arrivals[-1].due + target.deadline_s + _STEP_S
    load = join(machines.run(ServeSite.send, {node: job for node, job in jobs.items() if job.arrivals}, timeout_s=timeout_s).values())  # fmt: skip
    row = summarize(load, ttft_limit_s)
    row["ideal_hit_rate"] = ideal_hit_rate(arrivals) if not target.salted else 0.0
    return load, row


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Everything answered, and sooner with reuse than without."""
    by_pass = {row["pass"]: row for row in rows}
    checks = [at_least(f"{row['pass']}: answered", row["answered"], row["requests"]) for row in rows]
    reuse, recompute = (by_pass.get(name, {}).get("ttft_p50_ms") for name in ("reuse", "recompute"))
    if reuse is not None and recompute is not None:
        ratio = reuse / recompute
        checks.append(at_most("ttft_p50_ms: reuse / recompute", ratio, 1.0))
    return checks


_ABOVE_0 = click.FloatRange(0, min_open=True)


@click.command()
@machine_options
@option("--url", help="A server to put under load, in place of the cluster's proxy or a small cluster of this machine.")
@option("--vocabulary", type=click.IntRange(16), help="Prompts have token ids below this; by default the model's.")
@option("--key-file", type=click.Path(path_type=Path), help="Holds an API key; read at the machine that leads.")
@option("--rate", type=_ABOVE_0, help="Requests a second, of both machines together, at random times (Poisson).")
@option("--trace", type=click.Path(path_type=Path), help="Prompts, and times where no --rate is given, of a trace.")
@option("--speed", default=1.0, type=_ABOVE_0, help="Times a trace's own.")
@option("--scale", default=16.0, type=click.FloatRange(1), help="How many times shorter than a trace's prompts are.")
@option("--requests", type=click.IntRange(1), help="How many; by default 100, or all of a trace.")
@option("--prompt-tokens", default=1024, type=click.IntRange(1), help="Without a trace: of a prompt.")
@option("--shared", default=0.75, type=click.FloatRange(0, 1), help="Without a trace: the part that others have, too.")
@option("--prefixes", default=8, type=click.IntRange(1), help="Without a trace: how many such parts there are.")
@option("--output-tokens", default=16, type=click.IntRange(1), help="Without a trace: of an answer.")
@option("--longest", type=click.IntRange(2), help="Tokens of a prompt and its answer; by default what the model takes.")
@option("--deadline", "deadline_s", default=60.0, type=_ABOVE_0, help="Seconds of each request.")
@option("--in-flight", default=512, type=click.IntRange(1), help="Requests of a machine at a time; more are dropped.")
@option("--ttft-limit", type=_ABOVE_0, help="Milliseconds: also count what was answered as soon as this.")
@option("--only-reuse", is_flag=True, help="Leave out the pass that computes everything anew.")
@report_options
def main(
    where: MachineOptions,
    url: str | None,
    vocabulary: int | None,
    key_file: Path | None,
    deadline_s: float,
    in_flight: int,
    ttft_limit: float | None,
    only_reuse: bool,
    **load: Any,
) -> None:  # fmt: skip
    """A cluster under an open-loop load."""
    output = {name: load.pop(name) for name in ("as_json", "html", "strict")}
    if load["rate"] is None and load["trace"] is None:
        raise click.UsageError("say how fast requests come: --rate, --trace, or both")

    if where.connect and where.file is None and url is None:
        raise click.UsageError(
            "--connect: say what to put under load, with -c or --url: a cluster of this machine alone is on its loopback"
        )

    def lead(there: Crew) -> tuple[dict[str, Load], list[dict[str, Any]]]:
        key = "" if key_file is None else _read_key(key_file)
        with ExitStack() as stack:
            if url is not None:
                server = any_server(url, vocabulary, key)
            elif where.file is not None:
                server = clusters_proxy(read_config(where.file)[0], vocabulary)
            else:
                server = stack.enter_context(own_cluster(vocabulary))
            arrivals = LoadPlan(**{**load, "longest": min(load["longest"] or 1 << 30, server.longest)}).arrivals()
            target = server._replace(deadline_s=deadline_s, most=in_flight, key=key or server.key)
            limit_s = None if ttft_limit is None else ttft_limit / 1000
            loads, rows = {}, []
            for name in _PASSES[1:] if only_reuse else _PASSES:
                salted = target._replace(salted=uuid.uuid4().hex if name == "recompute" else "")
                loads[name], row = run_pass(there, name, salted, arrivals, limit_s)
                rows.append({"pass": name, **row})
            return loads, rows

    led = conduct(where, ServeSite, lead, local=1)
    if led is not None:
        loads, rows = led
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in load.items()}
        report = report_of(loads, rows, about(None if where.file is None else read_config(where.file)[0]))
        results = {"load": shown, "results": rows}
        finish(results, checks_of(rows), report=report, **output)


def _read_key(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--key-file {file}: {error.strerror}") from None


def report_of(loads: Mapping[str, Load], rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> Report:
    """Returns the figures of each pass beside each other, and time to first token as it was distributed."""
    names = [name for name in rows[0] if name != "pass"]
    note = (
        "Times count from when a request was due. recompute: each request with an isolation of its own; reuse: without. "
        "The ideal hit rate is that of a pool that never forgets and holds a prompt as soon as it is sent."
    )
    cells = [[name, *(row[name] for row in rows)] for name in names]
    parts: list[Table | LinePlot] = [Table("Passes", ["", *(str(row["pass"]) for row in rows)], cells, note)]
    answered = {name: [one.first or 0.0 for one in load.outcomes if not one.error] for name, load in loads.items()}
    if all(answered.values()):
        spread = {name: distribution(seconds) for name, seconds in answered.items()}
        parts.append(LinePlot("Time to first token", "milliseconds", "share of requests", spread, y_most=1.0))
    summary = "Open loop: requests begin when they are due, however slow the cluster is."
    return Report("A cluster under load", summary, parts, facts)


def distribution(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Points (milliseconds, the share of values that are no more than that), in a hundred steps."""
    return [(max(quantile(seconds, part / 100) * 1e3, 0.01), part / 100) for part in range(1, 101)]


if __name__ == "__main__":
    main()
