"""`make fuzz`: tries every parser with many inputs, and keeps those that a parser did not survive."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time

from tests.fuzz.inputs import draw
from tests.fuzz.target import Failure, Target, accepts, reduced
from tests.fuzz.targets import TARGETS

_MOST_FAILURES = 5
"""Of one target: after so many others are not looked for."""


def main() -> int:
    options = _options()
    logging.disable()
    names = options.target or list(TARGETS)
    share = -(-options.inputs // len(names))
    print(f"seed {options.seed}, {share} inputs for each of {len(names)} targets", flush=True)
    print(f"{'target':20} {'inputs':>8} {'accepted':>9} {'refused':>8} {'failed':>7} {'CPU s':>6} {'slowest ms':>10}")
    totals = [0, 0]
    for name in names:
        done, failures = _fuzz(TARGETS[name], share, random.Random(f"{options.seed}/{name}"))
        totals[0] += done
        totals[1] += len(failures)
        for failure in failures:
            print(f"  {failure}\n  kept as {failure.target.keep(failure.data)}", flush=True)
    print(f"{totals[0]} inputs, {totals[1]} failures (seed {options.seed})")
    return 1 if totals[1] else 0


def _fuzz(target: Target, count: int, rng: random.Random) -> tuple[int, list[Failure]]:
    accepted = refused = 0
    slowest = 0.0
    failures: dict[str, Failure] = {}
    started = time.process_time()
    with target.open() as parse:
        for _ in range(count):
            data = draw(target, rng)
            begun = time.thread_time()
            try:
                well = accepts(target, parse, data)
                slowest = max(slowest, time.thread_time() - begun)
                accepted += well
                refused += not well
            except Failure as failure:
                kind = f"{type(failure.error).__name__}: {str(failure.error)[:20]}"
                if kind not in failures:
                    failures[kind] = reduced(target, parse, failure)
                if len(failures) >= _MOST_FAILURES or not target.alone:
                    break
    tried = accepted + refused + len(failures)
    print(
        f"{target.name:20} {tried:8} {accepted:9} {refused:8} {len(failures):7} {time.process_time() - started:6.1f} "
        f"{1000 * slowest:10.1f}",
        flush=True,
    )
    return tried, list(failures.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many, over all targets")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="replays a run")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; may be given again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
