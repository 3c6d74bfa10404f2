"""A cluster of real processes under random operations and random faults, watched by an oracle that knows every byte.

pd-cache bench soak                          ten minutes with a new seed
pd-cache bench soak --minutes 60 --check     exit status 1 if anything was wrong, late, raised, lost or leaked
pd-cache bench soak --seed 7                 the same operations, requests and faults again
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import click

from bench.lib.about import about
from bench.lib.report import finish
from bench.suites.soak import isolate
from bench.suites.soak.conduct import Soak
from bench.suites.soak.kinds import EVERYTHING, NEEDS_CLOCKS, NEEDS_ETCD, NEEDS_LINKS, NEEDS_MOUNTS
from bench.suites.soak.plan import Fault
from bench.suites.soak.verdict import SoakOutcome, checks, report
from launch.signals import StoppedError, signals_as_exceptions


@click.command()
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.1), help="Of operations and faults; starting and checking come on top.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Replays the plan of an earlier run; by default a new one, which is printed.")  # fmt: skip
@click.option("--evidence", type=click.Path(path_type=Path, file_okay=False), help="Keeps logs and plan in this folder, also if all is well; by default a new one, and only if something is wrong.")  # fmt: skip
@click.option("--faults", "listed", help="These faults in place of the plan's: a JSON list of [at, kind, target, seconds, seed].")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--check", "strict", is_flag=True, help="Exit with 1 if anything was wrong, late, raised, lost or leaked.")  # fmt: skip
@click.option("--inside", hidden=True, is_flag=True)
def main(minutes: float, seed: int | None, evidence: Path | None, listed: str | None, as_json: bool, strict: bool, inside: bool) -> None:  # fmt: skip
    """Random operations and random faults on a cluster of real processes, every byte compared."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    reason = None if inside else isolate.why_not()
    if not inside and reason is None:
        arguments = ["--inside", "--minutes", str(minutes), "--seed", str(seed)]
        arguments += ["--evidence", str(evidence)] if evidence is not None else []
        arguments += ["--faults", listed] if listed is not None else []
        arguments += ["--json"] * as_json + ["--check"] * strict
        try:
            sys.exit(isolate.start_isolated(arguments))
        except KeyboardInterrupt:
            sys.exit(130)
    only = None if listed is None else [Fault(*one) for one in json.loads(listed)]
    lacks: dict[str, str] = {}
    if inside:
        isolate.enter()
        if not isolate.has_clocks():
            lacks[NEEDS_CLOCKS] = "clocks of single processes, which this kernel does not have"
    else:
        lacks = dict.fromkeys((NEEDS_LINKS, NEEDS_MOUNTS, NEEDS_CLOCKS), f"what needs namespaces, since {reason}")
    if shutil.which("etcd") is None:
        lacks[NEEDS_ETCD] = "etcd, which is not installed (Debian's etcd-server)"
    there = EVERYTHING - set(lacks)
    try:
        with signals_as_exceptions():
            outcome = _run(seed, minutes, there, evidence, only)
    except StoppedError as stopped:
        raise SystemExit(128 + stopped.args[0]) from None
    outcome.left_out = "; ".join(dict.fromkeys(lacks.values()))
    finish(outcome.figures(), checks(outcome), as_json=as_json, strict=strict, report=report(outcome, about()))
    if outcome.evidence and not as_json:
        click.echo(f"seed {seed}; logs and plan are in {outcome.evidence}")


def _run(
    seed: int, minutes: float, there: frozenset[str], evidence: Path | None, only: list[Fault] | None
) -> SoakOutcome:
    """Does one run and returns its outcome. Keeps the logs if `evidence` says where, or if anything is wrong."""
    keep = evidence is not None
    kept = Path(tempfile.mkdtemp(prefix=f"pd-cache-soak-{seed}-")) if evidence is None else evidence
    kept.mkdir(parents=True, exist_ok=True)
    base = isolate.SHARED_MEMORY if NEEDS_MOUNTS in there else None
    click.echo(f"soak: seed {seed}, {minutes:g} minutes", err=True)
    try:
        with tempfile.TemporaryDirectory(prefix="pd-cache-soak-", dir=base, ignore_cleanup_errors=True) as folder:
            outcome = Soak(seed, minutes, there, Path(folder), kept, only).run()
        keep = keep or outcome.failed
        if keep:
            outcome.evidence = str(kept)
            (kept / "outcome.json").write_text(json.dumps(outcome.figures(), indent=1), encoding="utf-8")
        return outcome
    except StoppedError:
        raise
    except BaseException:
        keep = True
        click.echo(f"soak: seed {seed}; logs and plan are in {kept}", err=True)
        raise
    finally:
        if not keep:
            shutil.rmtree(kept, ignore_errors=True)


if __name__ == "__main__":
    main()
