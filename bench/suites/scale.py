"""What a cluster of 1 to 1,000 nodes does, in simulation, and what is full first.

Requests of a trace come at a rate that grows with the cluster. Unit costs are measured on this machine, or given in a file. The policies are
the product's own modules. `--validate` runs a real cluster of the reference engine beside its simulation first.

    pd-cache bench scale --trace FILE --html scale.html
    pd-cache bench scale --trace FILE --costs mine.yaml        costs of other machines: those that the file gives
    pd-cache bench scale --trace FILE --validate 1x1 --validate 2x2 --rounds 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from bench.lib.about import about
from bench.lib.report import Check, Figure, Report, Table, finish, option, progress, report_options, size
from bench.lib.simulation.costs import UnitCosts, read_costs, write_costs
from bench.lib.simulation.growing import GrowthPlan, GrowthStep, Limit, grow, limits, usual_rate
from bench.lib.simulation.validating import ComparedLoad, EngineCount, spread, validate, whole_conversations, workbench
from bench.lib.svg import Bars, bar_plot, line_plot
from bench.lib.trace import read_trace
from pd_cache.cluster import ProxyConfig
from transfer.settings import ByteSize

_NODES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_NEAR = 0.15
"""How far a simulated figure may be from the real one."""
_SHOWN = 1.25
"""Where a plot of shares ends: what is full is full."""


def _counts(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[EngineCount, ...]:
    def read(value: str) -> EngineCount:
        parts = value.split("x")
        if len(parts) != 2 or not all(part.isdecimal() and 1 <= int(part) <= 8 for part in parts):
            raise click.BadParameter(f"{value!r} is not of the form 2x1 (prefill x decode nodes, 1 to 8 of each)", context, parameter)  # fmt: skip
        return EngineCount(*map(int, parts))

    return tuple(map(read, values))


@click.command()
@option("--trace", required=True, type=click.Path(path_type=Path), help="In the format of bench/lib/trace.py.")
@option("--nodes", "counts", multiple=True, type=click.IntRange(1, 100_000), help="Prefill and decode nodes together; may be given several times. By default ten numbers from 1 to 1000.")  # fmt: skip
@option("--prefill-share", default=0.5, type=click.FloatRange(0, 1), help="Part of the nodes that prefill.")
@option("--proxies", default=1, type=click.IntRange(1, 10_000))
@option("--max-requests", default=ProxyConfig().max_requests, type=click.IntRange(1), help="As in the proxy's section of a cluster's file.")  # fmt: skip
@option("--policy", default=ProxyConfig().policy, type=click.Choice(["prefix_aware", "least_loaded", "round_robin"]))
@option("--memory", default="32GiB", callback=size, help="That each node gives to the pool.")
@option("--rate", type=click.FloatRange(0, min_open=True), help="Requests a second and node; by default what keeps engines busy --busy of the time.")  # fmt: skip
@option("--busy", default=0.6, type=click.FloatRange(0, 1, min_open=True))
@option("--requests-per-node", default=8, type=click.IntRange(1), help="How long each number of nodes is simulated.")
@option("--warm", default=1000, type=click.IntRange(0), help="Requests of the trace that the pool has seen before.")
@option("--costs", "file", type=click.Path(path_type=Path), help="YAML: unit costs that are not as measured here. With a file that gives all, nothing is measured.")  # fmt: skip
@option("--write-costs", "costs_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the unit costs to this file, in the form that --costs reads.")  # fmt: skip
@option("--validate", "clusters", multiple=True, callback=_counts, help="Also run a real cluster of so many prefill x decode nodes on this machine, such as 2x1; may be given several times.")  # fmt: skip
@option("--rounds", default=3, type=click.IntRange(1), help="Of a validation.")
@option("--validate-requests", default=60, type=click.IntRange(8), help="Of each load of a validation.")
@option("--seed", default=0)
@report_options
def main(
    trace: Path,
    counts: tuple[int, ...],
    prefill_share: float,
    proxies: int,
    max_requests: int,
    policy: Any,
    memory: ByteSize,
    rate: float | None,
    busy: float,
    requests_per_node: int,
    warm: int,
    file: Path | None,
    costs_file: Path | None,
    clusters: tuple[EngineCount, ...],
    rounds: int,
    validate_requests: int,
    seed: int,
    **output: Any,
) -> None:  # fmt: skip
    """A cluster of 1 to 1,000 nodes, in simulation."""
    requests = read_trace(trace)
    given = (
        None if file is None else read_costs(file, UnitCosts())
    )  # what is wrong with it is found before anything is measured
    plan = GrowthPlan(
        warm=warm,
        prefill_share=prefill_share,
        proxies=proxies,
        node_memory=int(memory),
        requests_per_node=requests_per_node,
        proxy=ProxyConfig(max_requests=max_requests, policy=policy),
        seed=seed,
    )
    compared: list[ComparedLoad] = []
    with progress() as bar:
        measured: UnitCosts | None = None
        for cluster in clusters:
            task = bar.add_task("", total=1 + 2 * rounds)

            def told(what: str, task: Any = task) -> None:
                bar.update(task, description=what, advance=1)

            more, measured = validate(cluster, whole_conversations(requests, validate_requests), rounds, seed, told)
            compared += more
            bar.remove_task(task)
        if measured is None and not (given is not None and file is not None and _gives_all(file)):
            with workbench(EngineCount(1, 1)) as bench:
                bench.warm_up(requests, seed)
                measured = bench.costs()
        costs = given if measured is None or file is None else read_costs(file, measured)
        costs = costs or measured
        assert costs is not None
        if costs_file is not None:
            write_costs(costs, costs_file)
        steps = []
        per_node = rate or usual_rate(requests, costs, plan, busy)
        for nodes in bar.track(sorted(set(counts or _NODES)), description="nodes"):
            steps.append(grow(requests, costs, plan, nodes, per_node))
    found = limits(steps)
    results = {
        "rate_per_node": per_node,
        "costs": msgspec.to_builtins(costs),
        "results": [msgspec.to_builtins(step) for step in steps],
        "limits": [msgspec.to_builtins(one) for one in found],
        "validation": [{**msgspec.to_builtins(one), "ratios": one.ratios()} for one in compared],
    }
    report = report_of(steps, found, compared, costs, per_node, about())
    finish(results, checks_of(compared), report=report, **output)


def _gives_all(file: Path) -> bool:
    """Returns whether a file of costs leaves nothing to be measured: it is the same whatever was measured."""
    ones = msgspec.convert({section: {key: 2 * value + 1 for key, value in costs.items()} for section, costs in msgspec.to_builtins(UnitCosts()).items()}, UnitCosts)  # fmt: skip
    return read_costs(file, UnitCosts()) == read_costs(file, ones)


def checks_of(compared: Sequence[ComparedLoad]) -> list[Check]:
    """Each quantity of a validation is within 15 % of the real one, in the median of the rounds."""
    return [
        Check(f"{cluster} {load}: {name}, simulated / real: off by", abs(middle - 1), _NEAR, at_least=False)
        for cluster, load, name, middle, _, _ in spread(compared)
    ]


def report_of(
    steps: Sequence[GrowthStep],
    found: Sequence[Limit],
    compared: Sequence[ComparedLoad],
    costs: UnitCosts,
    rate: float,
    facts: Mapping[str, str],
) -> Report:
    """Returns what is full first, the tables, and the plots."""
    names = list(steps[0].asked)
    parts: list[Table | Figure] = [
        Table(
            "What is full first",
            ["resource", "full from, nodes", "full at, requests/s a node"],
            [[one.resource, _nodes(one, steps), one.rate_per_node] for one in found],
            "The second column: as the cluster grows at the same rate a node. The third: the rate a node that the largest cluster in which "
            "nothing is full could do, if only this resource limited it.",
        ),
        Table(
            "As the cluster grows",
            ["nodes", "prefill", "decode", "requests/s", "answered/s", "errors", "hit rate, %", "TTFT p50, ms", "TTFT p99, ms"],
            [[s.nodes, s.prefill, s.decode, s.rate, s.answered_per_s, s.refused, 100 * s.hit_rate, s.ttft_p50_ms, s.ttft_p99_ms] for s in steps],
            "answered/s counts to the last answer, so it stays below requests/s for a load that is short.",
        ),
        Table(
            "What each resource is asked for, % of what it can do",
            ["nodes", *names],
            [[step.nodes, *(100 * step.asked[name] for name in names)] for step in steps],
            "The mean of all of a kind. 100 is full: what is asked beyond that waits, and everything behind it is asked for less.",
        ),
    ]  # fmt: skip
    if len(steps) > 1:
        shares = {name: [(float(step.nodes), step.asked[name]) for step in steps] for name in names}
        times = {
            "median": [(float(step.nodes), step.ttft_p50_ms) for step in steps],
            "99th percentile": [(float(step.nodes), step.ttft_p99_ms) for step in steps],
        }
        parts += [
            Figure(line_plot("How full each resource is", "nodes", "share asked for; 1 is full", shares, y_most=_SHOWN), "Lines end at the top where more is asked for than can ever be done."),
            Figure(line_plot("Time to first token", "nodes", "milliseconds", times)),
        ]  # fmt: skip
    if compared:
        parts += _validation(compared)
    flat = [[f"{section}.{key}", value] for section, values in msgspec.to_builtins(costs).items() for key, value in values.items()]  # fmt: skip
    parts.append(Table("Unit costs", ["cost", "value"], [[name, f"{value:.4g}"] for name, value in flat], "Seconds of one core, unless the name says otherwise."))  # fmt: skip
    return Report(
        "A cluster as it grows, in simulation",
        f"{_first(found, steps)} Requests of a trace come at {rate:.3g} a second and node.",
        parts,
        facts,
    )


def _validation(compared: Sequence[ComparedLoad]) -> list[Table | Figure]:
    rows = [
        [f"{one.cluster} {one.load} {one.round}", one.real.requests_per_s, one.simulated.requests_per_s, one.real.hit_tokens, one.simulated.hit_tokens, one.real.ttft_p50_ms, one.simulated.ttft_p50_ms, one.real.ttft_p90_ms, one.simulated.ttft_p90_ms, one.others, one.late_ms]
        for one in compared
    ]  # fmt: skip
    columns = ["load, round", "requests/s", "simulated", "hit tokens", "simulated", "TTFT p50, ms", "simulated", "TTFT p90, ms", "simulated", "other programs, cores", "woken late, ms"]  # fmt: skip
    ratios = [[cluster, load, name, middle, least, most] for cluster, load, name, middle, least, most in spread(compared)]  # fmt: skip
    groups = [Bars(f"{cluster} {load} {name}", (middle,)) for cluster, load, name, middle, _, _ in spread(compared)]
    return [
        Table("A real cluster and its simulation", columns, rows, "A cluster of prefill x decode engines, a master and a proxy on this machine. burst: all requests at once. steady: at half the rate of the burst's answers. other programs: how many cores they took meanwhile. woken late: how long a thread that should run waited for a core."),
        Table("Simulated / real", ["cluster", "load", "quantity", "median", "least", "most"], ratios, "Over the rounds."),
        Figure(bar_plot("Simulated / real, median of the rounds", "", ["simulated / real"], groups), "1 is right; the target is 0.85 to 1.15."),
    ]  # fmt: skip


def _first(found: Sequence[Limit], steps: Sequence[GrowthStep]) -> str:
    first = found[0]
    if first.nodes is None:
        return f"Nothing is full up to {steps[-1].nodes} nodes; {first.resource} comes nearest."
    return f"The first to be full: {first.resource}, from {_nodes(first, steps)} nodes on."


def _nodes(limit: Limit, steps: Sequence[GrowthStep]) -> str:
    if limit.nodes is None:
        return f"not up to {steps[-1].nodes}"
    return f"{limit.nodes:.0f}" if limit.nodes > steps[0].nodes else f"{steps[0].nodes} or fewer"


if __name__ == "__main__":
    main()
