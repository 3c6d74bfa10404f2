"""The plan of a run, as a pure function of its seed, its length and what the machine has: operations, requests, and timed faults.

Each lane (a thread that calls an engine, or a client of the proxy) has an endless list of its own, so that what one lane does
never depends on how fast another is. Times of faults are seconds from the moment when the faults begin.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from bench.suites.soak.kinds import KINDS, LONG_KINDS, Kind, possible, touched

CHUNK = 16
"""Tokens per chunk, and tokens per block."""
LONGEST = 256
"""Chunks of the longest prompt: so many objects in one call that a stalled call lasts longer than Mooncake's 60 s."""
VOCABULARY = 512
OUTPUT_TOKENS = 8
"""Tokens of each answer of the proxy."""
SHORT_RUN_S = 120.0
"""Shorter runs have only quick faults, of a few seconds."""
_QUICK_S = 3.0
_FAMILIES = 12
_LONG_HEAD_S = 5.0

OperationKind = Literal["store", "retrieve", "lookup", "unknown", "remove"]
_OPERATIONS: tuple[tuple[OperationKind, float], ...] = (
    ("store", 38), ("retrieve", 36), ("lookup", 16), ("unknown", 4), ("remove", 6),
)  # fmt: skip


class PlannedPrompt(NamedTuple):
    """A prompt: the first `shared` tokens of a family, then `own` tokens that only prompts of the same `tail` have."""

    family: int
    shared: int
    tail: int
    own: int

    @property
    def length(self) -> int:
        return self.shared + self.own

    @property
    def chunks(self) -> int:
        """Whole chunks."""
        return self.length // CHUNK


class Operation(NamedTuple):
    """One call of a lane. `unknown` is a lookup of a prompt that was never stored."""

    number: int
    kind: OperationKind
    prompt: PlannedPrompt
    first: int
    """How many chunks, from the first, the mask leaves out."""
    scattered: bool
    """Whether tokens are placed in single slots anywhere, not in whole blocks."""
    places: int
    """Seed for their places in the paged buffer."""
    timeout: float
    pause: float
    """Seconds before it."""


class PlannedCompletion(NamedTuple):
    """One request of a client of the proxy."""

    number: int
    prompt: int
    """Index in `served_prompts`."""
    stream: bool
    pause: float


class Fault(NamedTuple):
    """One fault, from `at` to `at + seconds`."""

    at: float
    kind: str
    target: str
    seconds: float
    seed: int


def tokens_of(seed: int, prompt: PlannedPrompt) -> list[int]:
    """Returns the token ids of a prompt."""
    family = random.Random(f"{seed}/family/{prompt.family}").choices(range(VOCABULARY), k=prompt.shared)
    return family + random.Random(f"{seed}/tail/{prompt.tail}").choices(range(VOCABULARY), k=prompt.own)


def operations(seed: int, lane: str, removes: bool = True) -> Iterator[Operation]:
    """Yields the endless list of a lane. `removes`: whether its cache can remove keys; if not, it looks up instead."""
    rng = random.Random(f"{seed}/operations/{lane}")
    kinds, weights = zip(*_OPERATIONS, strict=True)
    number = 0
    while True:
        kind: OperationKind = rng.choices(kinds, weights)[0]
        if kind == "remove" and not removes:
            kind = "lookup"
        prompt = _prompt(rng)
        if kind == "unknown":  # a family that no store uses
            prompt = prompt._replace(family=_FAMILIES + rng.randrange(1 << 30))
        yield Operation(
            number=number,
            kind=kind,
            prompt=prompt,
            first=rng.randrange(prompt.chunks) if rng.random() < 0.2 else 0,
            scattered=removes and prompt.chunks <= 8 and rng.random() < 0.3,
            places=rng.randrange(1 << 30),
            timeout=rng.choice((0.3, 1.0, 2.0)) if kind in ("lookup", "unknown", "remove") else rng.choice((1.0, 3.0, 10.0, 10.0)),
            pause=min(1.0, rng.expovariate(8.0)),
        )  # fmt: skip
        number += 1


def pressed(operation: Operation, lane: str) -> Operation:
    """Returns the operation to do under pressure: immediately, and with as many objects in one call as possible.

    Stores are of prompts whose second half was never stored before. After two stores the lane loads both prompts again: some of them are
    in local memory, some only in the pool.
    """
    kind: OperationKind = "retrieve" if operation.number % 4 >= 2 else "store"
    rng = random.Random(f"{lane}/{operation.number - 2 * (kind == 'retrieve')}")
    own = LONGEST // 2 * CHUNK
    prompt = PlannedPrompt(rng.randrange(_FAMILIES), own, rng.randrange(1 << 40), own)
    return operation._replace(kind=kind, prompt=prompt, first=0, scattered=False, timeout=10.0, pause=0.0)


def check_prompts(seed: int, count: int) -> list[PlannedPrompt]:
    """Returns prompts of moderate length that the lanes use, too. After the last fault they must be found and loaded again."""
    rng = random.Random(f"{seed}/check")
    return [PlannedPrompt(rng.randrange(_FAMILIES), rng.randint(4, 40) * CHUNK, 0, 0) for _ in range(count)]


def served_prompts(seed: int, count: int) -> list[list[int]]:
    """Returns prompts for the proxy, many of which share a prefix."""
    rng = random.Random(f"{seed}/served")
    prefixes = [rng.choices(range(VOCABULARY), k=rng.randint(32, 320)) for _ in range(max(1, count // 4))]
    return [rng.choice(prefixes) + rng.choices(range(VOCABULARY), k=rng.randint(1, 120)) for _ in range(count)]


def completions(seed: int, lane: str, prompts: int) -> Iterator[PlannedCompletion]:
    """Yields the endless list of a client of the proxy, over `prompts` prompts."""
    rng = random.Random(f"{seed}/completions/{lane}")
    number = 0
    while True:
        yield PlannedCompletion(number, rng.randrange(prompts), rng.random() < 0.5, min(4.0, rng.expovariate(1.5)))
        number += 1


def faults(seed: int, seconds: float, there: frozenset[str]) -> list[Fault]:
    """Returns the faults of a run of `seconds` seconds on a machine with `there` (`kinds.EVERYTHING` or less), by time.

    Every kind occurs once before one occurs again, as far as there is time; no two touch a node at the same time.
    """
    rng = random.Random(f"{seed}/faults")
    short = seconds < SHORT_RUN_S
    long_ones = [] if short else list(_long_faults(rng, seconds, there))
    kinds = possible(KINDS, there, short)
    todo = rng.sample(kinds, len(kinds))
    found: list[Fault] = []
    now = rng.uniform(0.2, 1.0)
    while now < seconds - 1.0:
        for kind in [*todo, *rng.choices(kinds, [kind.weight for kind in kinds], k=8)]:
            fault = _drawn(rng, kind, now, seconds, short)
            if not any(_collide(fault, kind, other) for other in long_ones):
                break
        else:
            now += 1.0
            continue
        if kind in todo:
            todo.remove(kind)
        found.append(fault)
        now += fault.seconds + (rng.uniform(0.1, 0.5) if short else rng.uniform(0.3, 4.0))
    return sorted(found + [fault for _, fault in long_ones])


def _prompt(rng: random.Random) -> PlannedPrompt:
    size = rng.random()
    chunks = rng.randint(1, 24) if size < 0.55 else rng.randint(25, 128) if size < 0.75 else rng.randint(224, LONGEST)
    own = rng.choice((0, 0, 5, CHUNK, 3 * CHUNK + 1))
    shared = max(1, chunks * CHUNK - own)
    return PlannedPrompt(rng.randrange(_FAMILIES), shared, rng.randrange(64) if own else 0, own)


def _long_faults(rng: random.Random, seconds: float, there: frozenset[str]) -> Iterator[tuple[Kind, Fault]]:
    """Yields long faults one after another. The first stops a store, because slots of staging memory have to outlive that."""
    kinds = possible(LONG_KINDS, there, short=False)
    now, first = _LONG_HEAD_S, True
    while now + 62.0 < seconds:
        kind = kinds[0] if first else rng.choices(kinds, [kind.weight for kind in kinds])[0]
        fault = _drawn(rng, kind, now, seconds, short=False)
        if first:
            fault = fault._replace(target=rng.choice(("store-0", "store-1")))
        first = False
        yield kind, fault
        now += fault.seconds + rng.uniform(5.0, 25.0)


def _drawn(rng: random.Random, kind: Kind, now: float, end: float, short: bool) -> Fault:
    longest = min(kind.longest, _QUICK_S) if short else kind.longest
    shortest = min(kind.shortest, longest)
    seconds = shortest * (longest / shortest) ** rng.random()  # as many short ones as long ones, by magnitude
    target = rng.choice(kind.targets)
    return Fault(round(now, 3), kind.name, target, round(min(seconds, max(0.1, end - now)), 3), rng.randrange(1 << 30))


def _collide(fault: Fault, kind: Kind, other: tuple[Kind, Fault]) -> bool:
    other_kind, long_one = other
    if not touched(kind, fault.target) & touched(other_kind, long_one.target):
        return False
    margin = 3.0  # a node that was started again takes a while to be there
    return fault.at < long_one.at + long_one.seconds + margin and long_one.at < fault.at + fault.seconds + margin


def coverage(planned: Sequence[Fault]) -> dict[str, int]:
    """Returns how often each kind occurs in a plan; `stop>60` and `cut>60` count those that outlast a minute."""
    counted: dict[str, int] = {}
    for fault in planned:
        name = f"{fault.kind}>60" if fault.seconds > 60 else fault.kind
        counted[name] = counted.get(name, 0) + 1
    return dict(sorted(counted.items()))
