"""Names that are remembered are those that hashing returns, whatever was named before, and little memory is taken for them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cache import chunks
from pd_cache.chunks import ChunkNamer, RecentNames

CHUNK = 512
"""Tokens: four chunks make up a run."""
RUN = 4 * CHUNK

# prompts of few kinds of runs, so that they begin alike
prompts = st.lists(
    st.tuples(
        st.lists(st.integers(min_value=0, max_value=2), max_size=4),
        st.integers(min_value=0, max_value=2 * CHUNK + 1),
        st.sampled_from([(), ("salt", "a"), ("salt", "b")]),
    ),
    max_size=6,
)


def tokens_of(runs: list[int], tail: int) -> list[int]:
    return [token for run in runs for token in [run] * RUN] + [7] * tail


@given(prompts)
def test_a_prompt_has_the_same_names_whatever_was_named_before(
    asked: list[tuple[list[int], int, tuple[str, ...]]],
) -> None:
    namer = ChunkNamer(CHUNK)
    for runs, tail, salt in asked:
        tokens = tokens_of(runs, tail)
        assert namer.hash_tokens(tokens, salt) == ChunkNamer(CHUNK).hash_tokens(tokens, salt)


def test_a_run_behind_another_prefix_or_under_another_salt_has_other_names() -> None:
    namer = ChunkNamer(CHUNK)
    first = namer.hash_tokens(tokens_of([1, 2], 0))
    assert set(first).isdisjoint(namer.hash_tokens(tokens_of([2, 2], 0)))
    assert set(first).isdisjoint(namer.hash_tokens(tokens_of([1, 2], 0), ("salt", "a")))


def test_what_a_caller_does_to_its_names_changes_none_of_those_remembered() -> None:
    namer = ChunkNamer(CHUNK)
    tokens = tokens_of([1], 0)
    names = namer.hash_tokens(tokens)
    expected = list(names)
    names[0] = b"changed"
    assert namer.hash_tokens(tokens) == expected


def test_a_run_that_only_has_the_checksum_of_another_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "checksum", lambda run: 0)
    recent = RecentNames(8)
    recent.note(b"root", b"one", [b"name"])
    assert recent.find(b"root", b"two") is None
    assert recent.find(b"root", b"one") == [b"name"]


def test_the_run_that_was_not_used_for_longest_makes_room() -> None:
    recent = RecentNames(8 << 10, most_bytes=16 << 10)
    recent.note(b"", b"a", [b"A"])
    recent.note(b"", b"b", [b"B"])
    assert recent.find(b"", b"a") == [b"A"]
    recent.note(b"", b"c", [b"C"])
    assert [recent.find(b"", run) for run in (b"a", b"b", b"c")] == [[b"A"], None, [b"C"]]


def test_many_threads_name_prompts_with_one_namer() -> None:
    namer, wrong = ChunkNamer(CHUNK), []
    asked = [tokens_of([first, second], 5) for first in range(6) for second in range(6)]
    expected = [ChunkNamer(CHUNK).hash_tokens(tokens) for tokens in asked]

    def name_all() -> None:
        wrong.extend(
            tokens for tokens, names in zip(asked, expected, strict=True) if namer.hash_tokens(tokens) != names
        )

    threads = [threading.Thread(target=name_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
