"""The soak: its oracle finds whatever is wrong in a paged buffer, its plan is a function of the seed, and a
short run finds nothing."""

import shutil
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from pd_cache.cache import CacheEngineBuilder, PromptCache
from pd_cache.chunks import CacheMetadata
from pd_cache.config import CacheConfig, LocalTier, NodeSettings
from pd_cache.layout import KVLayout
from tests.soak.books import ALLOWANCE_S, Books, Call, Span
from tests.soak.faults import ACTIONS, KINDS, LONG_KINDS, planned
from tests.soak.oracle import (  # fmt: skip
    BLOCKS,
    CHUNK,
    Operation,
    PagedBuffer,
    Prompt,
    perform,
    places,
    prefixes,
)
from tests.support.hosts import why_not
from tests.support.needs import NO_ETCD
from tests.support.pool import ROOT
from transfer.settings import TransferSettings

CANARY = 0x0123_4567_89AB_CDEF
_NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def buffer():
    return PagedBuffer()


def _loaded(buffer, weights=(0, 0, 0)):
    """Slots of three chunks that hold what they must, in a buffer of canaries."""
    slots, tokens = places(1, 3 * CHUNK), range(3 * CHUNK)
    buffer.words.fill(CANARY)
    for chunk, number in enumerate(weights):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        buffer.put(slots[part], prefixes(tokens, number)[part])
    return slots, prefixes(tokens)


def test_a_single_wrong_byte_is_found_inside_the_slots_and_outside(buffer):
    slots, names = _loaded(buffer)
    buffer.words.view(np.uint8)[1, slots[17] // CHUNK, 1, slots[17] % CHUNK, 801] ^= 0x10
    other = next(slot for slot in range(BLOCKS * CHUNK) if slot not in set(slots.tolist()))
    buffer.words[0, other // CHUNK, 0, other % CHUNK, 3] += np.uint64(1)
    count, (inside, outside) = buffer.compare(slots, names, _NONE, CANARY)
    assert count == 2
    assert inside.startswith(f"token 17 in slot {slots[17]}")
    assert outside.startswith(f"untouched slot {other}")


def test_each_chunk_may_be_of_earlier_weights_but_none_of_no_weights(buffer):
    for weights, earliest, wrong in (((2, 0, 1), 0, 0), ((2, 3, 2), 2, CHUNK)):
        slots, _ = _loaded(buffer, weights)
        names, found = buffer.recognise(slots, lambda number: prefixes(range(3 * CHUNK), number), 2)
        assert (found, buffer.compare(slots, names, _NONE, CANARY)[0]) == (earliest, wrong)


class _Faulty(PromptCache):
    """A cache in memory that is right, but for what a test makes of it."""

    def __init__(self, cache, buffer):
        super().__init__(cache)
        self.buffer = buffer
        self.after = lambda slots: None

    def retrieve(self, *args, **options):
        answer = super().retrieve(*args, **options)
        self.after(options["slot_mapping"].numpy())
        return answer

    def store(self, *args, **options):
        stored = super().store(*args, **options)
        self.after(options["slot_mapping"].numpy())
        return stored

    def do(self, kind, first=0):
        return self.perform(Operation(kind, Prompt(0, 5 * CHUNK), first, 3, 1.0, 0.0))

    def perform(self, operation):
        return perform(self, self.buffer, operation, 4, CANARY, lambda: 0, lambda: None)


@pytest.fixture
def cache(buffer):
    layout = KVLayout.from_tensors(buffer.tensors)
    settings = NodeSettings(
        master="127.0.0.1:1",
        cache=CacheConfig(chunk_size=CHUNK, tiers=(LocalTier(capacity="64MiB"),)),
        transfer=TransferSettings(staging_size="16MiB"),
    )
    engine = CacheEngineBuilder.get_or_create("oracle", settings, CacheMetadata.of("m", layout), layout)
    with closing(engine):
        yield _Faulty(engine, buffer)


def test_a_cache_that_writes_where_it_should_not_is_caught(cache):
    cache.do("store")
    cache.after = lambda slots: cache.buffer.put(slots[:1], prefixes([77]))
    assert cache.do("retrieve", first=2).wrong == 1, "a slot that the mask leaves out"
    assert cache.do("store").wrong == 1, "a store that changes what it reads"


def test_answers_that_cannot_be_right_and_exceptions_are_complaints(cache):
    cache.lookup = lambda tokens, **_: 3
    assert "lookup answered 3" in cache.do("lookup").complaint
    cache.lookup = lambda tokens, **_: 1 // 0
    assert cache.do("lookup").raised


def test_an_answer_is_late_unless_its_time_was_taken_by_the_machine_or_the_soak():
    call = Call("engine-a", "lookup", Span(100.0, 100.0 + 1.0 + ALLOWANCE_S + 3.0), bound=1.0)
    assert call.seconds_late([]) == pytest.approx(3.0)
    assert call.seconds_late([Span(101.0, 101.5), Span(99.0, 102.0)]) == pytest.approx(1.0)
    assert call._replace(starved=3.5).seconds_late([]) == 0.0


@pytest.mark.parametrize("in_copy", [False, True])
def test_a_stopped_cache_server_excuses_only_a_load_whose_blocks_it_was_copying_into(in_copy):
    books = Books()
    books.stops["cache"] = [Span(103.0, 173.0)]
    operation = {"lane": "engine-b/0", "kind": "retrieve", "prompt": "", "begin": 100.0, "end": 173.5}
    done = {"hit": 0, "wrong": 0, "complaint": "", "declined": 0, "compared": 0, "starved": 0.0}
    books.event("engine-b", {"e": "end", **operation, **done, "bound": 10.0, "in_copy": in_copy})
    books.judge()
    assert bool(books.troubles["late"]) is not in_copy


@pytest.mark.parametrize("seconds", [15.0, 600.0])
def test_a_plan_is_a_function_of_its_seed_and_no_two_faults_affect_a_node_at_one_time(seconds):
    for seed in range(20):
        faults = planned(seed, seconds)
        assert faults == planned(seed, seconds) != planned(seed + 1, seconds)
        assert any(fault.kind == "reset" for fault in faults)
        long_ones = [fault for fault in faults if fault.seconds > 60]
        assert (len(long_ones) >= 5) == (seconds > 60)
        assert not [
            (one, other) for one in long_ones for other in faults if one is not other and one.collides(other)
        ]
        assert seconds < 60 or {fault.kind for fault in faults} == {kind.name for kind in KINDS}
    assert {kind.name for kind in (*KINDS, *LONG_KINDS)} == set(ACTIONS)


@pytest.mark.slow(seconds=60)
def test_a_short_run_ends_with_nothing_wrong_late_raised_or_left(tmp_path):
    if reason := why_not() or (NO_ETCD if shutil.which("etcd") is None else None):
        pytest.skip(reason)
    command = (
        sys.executable,
        "-m",
        "tests.soak",
        "--minutes",
        "0.2",
        "--seed",
        "11",
        "--logs",
        str(tmp_path),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    logs = "".join(
        f"\n--- {file.name}\n{file.read_text()[-2000:]}" for file in sorted(tmp_path.glob("*.log"))
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:] + logs
    for what in (
        "requests to proxy, answered",
        "requests to envoy, answered",
        "tokens, retrieve",
        "tokens, declined",
        "tokens, streamed",
        "tokens, pinned",
        "faults, reset",
        "resets",
    ):
        assert f"\n{what}: " in done.stdout, what
        assert f"\n{what}: 0\n" not in done.stdout, what
