"""`pd-cache pool`: what is held of a million keys, what is asked of a serving master, and the commands on a
real pool. `rm --old`: test_recipes.py; `copy` under requests: test_change_of_master.py."""

import itertools
import json
import os
import re
import secrets
import signal
import urllib.parse
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from launch.masters import Segment, copies_at, keys_at
from launch.operate import pool as pooled
from launch.operate import scan as scanned
from launch.operate.pool import OTHERS, SAMPLES, PoolReport, Space, Tally, choose
from launch.run.supervise import StopFlag
from pd_cache.chunks import ChunkedTokenDatabase, Namespace
from pd_cache.cluster import load_config
from pd_cache.errors import PdCacheError
from pd_cache.tiers.memory import TRAILER_BYTES, Damage, inspect, seal
from tests.support import pages
from tests.support.cli import cli, drawn
from tests.support.pool import Pool

pytestmark = pytest.mark.slow(seconds=70)

SPACE = Namespace(
    model="some/model@3f2a", kv_dtype="float16", layout="heads8.block16.bytes256x2", layers=2, block_size=16, page_bytes=64,
    chunk_size=32, shards=2, hash_mode="tokens",
)  # fmt: skip
OF_SPACE = SPACE.fingerprint()
VALUES = "22dae4edae526bb1"
NAME = "0" * 32


def chunk_keys(count, version=""):
    return ChunkedTokenDatabase(SPACE).keys([secrets.token_bytes(16) for _ in range(count)], label=version)


# --- bounds -------------------------------------------------------------------------------------------------


@contextmanager
def master(keys, asked):
    """A master that lists keys as they are made, and says that an object has 10 bytes, in two copies."""

    def page(path):
        if path == "/get_all_keys":
            return keys()
        asked.append(urllib.parse.unquote(path).partition("=")[2].split(","))
        copies = [{"size_": 10, "transport_endpoint_": f"{host}:1"} for host in "ab"]
        body = {key: {"values": copies} if key[-1] != "9" else {"values": None} for key in asked[-1]}
        return json.dumps({"data": body}).encode()

    with pages.serving(page) as port:
        yield f"http://127.0.0.1:{port}"


def million():
    """57 MB of keys: of four versions of a namespace with two shards, and of another program."""
    for start in range(0, 1_000_000, 1000):
        names = range(start, start + 1000, 10)
        lines = (
            f"pdc1/{OF_SPACE}{version}/{shard}/{name:032x}\n"
            for name in names
            for version in ("", ".v1", ".v2", ".v3")
            for shard in (0, 1)
        )
        yield "".join(
            [*lines, *(f"other-{name:040x}/{name}\nno slash {name:040x}\n" for name in names)]
        ).encode()


def test_of_a_million_keys_only_counts_and_a_few_are_held():
    sent = 0

    def pieces():
        nonlocal sent
        for piece in million():
            yield piece
            sent += len(piece)

    with master(pieces, []) as url:
        keys = keys_at(url, 600.0)
        first = next(keys)
        held = sent
        tally = Tally(itertools.chain([first], keys))
    assert held < 30 << 20 < 50 << 20 < sent, "the rest waits at the master, but for buffers of sockets"
    assert {name: one.prefixes.total() for name, one in tally.spaces.items()} == {
        **{f"{OF_SPACE}{version}": 200_000 for version in ("", ".v1", ".v2", ".v3")},
        OTHERS: 200_000,
    }
    assert [len(one.sample) for one in tally.spaces.values()] == [SAMPLES] * 5
    assert [len(one.prefixes) for one in tally.spaces.values()] == [2, 2, 2, 2, 1], "one number a shard"
    assert pooled._namespace.cache_info().currsize <= 4096


def test_sizes_are_asked_in_short_requests_of_all_namespaces_alike():
    samples = [[f"{space}-{number}" for number in range(50)] for space in range(5)]
    asked = []
    with master(lambda: iter(()), asked) as url:
        sizes = pooled._sizes(url, samples)
    assert [len(keys) for keys in asked] == [64, 64, 64, 58]
    assert [key.partition("-")[0] for key in asked[0][:10]] == list("0123401234")
    assert sizes["0-0"] == 20, "both copies count"
    assert "0-9" not in sizes, "it is gone"


def test_a_master_that_is_slow_is_asked_for_sizes_no_longer_than_the_deadline(monkeypatch):
    asked = []
    now = iter(range(100))
    # a request takes two seconds
    monkeypatch.setattr(pooled, "time", SimpleNamespace(monotonic=lambda: 2.0 * next(now)))
    with master(lambda: iter(()), asked) as url:
        monkeypatch.setattr(pooled, "copies_at", lambda metrics, keys, _: copies_at(metrics, keys, 60.0))
        assert len(pooled._sizes(url, [[f"k{number}0" for number in range(1000)]])) == 128
    assert len(asked) == 2


# --- what is shown ------------------------------------------------------------------------------------------


def space(name, **fields):
    usual = {
        "kind": "chunks",
        "model": "",
        "nodes": [],
        "current": None,
        "shards": 1,
        "objects": 10,
        "bytes": 1 << 30,
    }
    return Space(**({"name": name, "sampled": 10, "namespace": None} | usual | fields))


def test_eighty_columns_show_namespaces_with_long_names_and_what_was_estimated():
    rows = [
        space(f"{OF_SPACE}.{'5' * 16}", model="org/a-model-with-a-long-name", nodes=["a"], current=True, objects=12_345_678, shards=8),
        space(OF_SPACE, current=False, namespace={"group": "0-4,6-10"}, bytes=None, sampled=0),
        space(OTHERS, kind="other"),
    ]  # fmt: skip
    text = drawn(pooled.space_table(rows, [Segment("10.0.0.1:3", 4 << 30, "", 3 << 30)]))
    assert "…" not in text
    assert "bytes are estimated from 20 of 12,345,698 objects" in text
    assert text.count("5") >= 16
    assert "10.0.0.1:3 3.0 GiB 4.0 GiB" in " ".join(text.split())
    for part in (OF_SPACE, "1,543,209", "layers 0-4,6-10", "1 node ", "old", " ? ", "other"):
        assert part in text


def test_a_pattern_chooses_by_name_or_model_and_never_what_others_keep_or_what_may_be_current():
    spaces = [
        space("aa", model="m", current=False),
        space("aa.v1", model="m", current=True),
        space("bb", current=None),
        space("cc", nodes=["n"], objects=0),
        space(OTHERS, kind="other"),
    ]
    report = PoolReport(namespaces=spaces, segments=[])

    def chosen(pattern, *, old=False):
        return [one.name for one in choose(report, pattern, old=old)]

    assert chosen("aa") == ["aa"]
    assert chosen("m") == ["aa", "aa.v1"]
    assert chosen("*") == ["aa", "aa.v1", "bb"], "the manifest of a node's namespace stays"
    assert chosen("*", old=True) == ["aa"]
    for pattern, old in ((OTHERS, False), ("a", False), ("bb", True)):
        with pytest.raises(PdCacheError, match=f"matches {re.escape(pattern)}: "):
            chosen(pattern, old=old)


# --- a real pool --------------------------------------------------------------------------------------------


@pytest.fixture
def filled(make_pool):
    """A pool with 12 chunks of the first version and 3 of another one, a value by name, and an object of
    another program."""
    pool = make_pool(client_ttl_s=60).start()
    with pool.bare_client() as client:
        for key in [*chunk_keys(12), *chunk_keys(3, "v1.2")]:
            assert client.put(key, b"x" * 1000) == 0
        assert client.put(f"pdc1/{OF_SPACE}/manifest", SPACE.manifest()) == 0
        assert client.put(f"pdo1/{VALUES}/{NAME}", b"y" * 500) == 0
        assert client.put("someone-elses", b"z" * 100) == 0
    return pool


def run(pool, *arguments, code=0, typed=""):
    return cli("pool", *arguments, "-c", pool.file, code=code, input=typed)


def test_ls_says_what_is_there_and_leases_nothing(filled):
    listed = json.loads(run(filled, "ls", "--json").stdout)
    found = {one["name"]: one for one in listed["namespaces"]}
    assert {
        name: (one["kind"], one["objects"], one["shards"], one["bytes"]) for name, one in found.items()
    } == {
        OF_SPACE: ("chunks", 24, 2, 24_000),
        f"{OF_SPACE}.v1.2": ("chunks", 6, 2, 6_000),
        VALUES: ("values", 1, 1, 500),
        OTHERS: ("other", 1, 1, 100),
    }
    assert found[f"{OF_SPACE}.v1.2"]["model"] == "some/model@3f2a", "its manifest says so"
    assert found[OF_SPACE]["namespace"]["layers"] == 2
    lines = [line.split() for line in run(filled, "ls").stdout.splitlines()]
    assert [OF_SPACE, "no", "node", "12", "23.4", "KiB", "some/model@3f2a"] in lines
    assert lines[-1][0] == filled.segment(0)
    assert [one["segment_name"] for one in listed["segments"]] == [filled.segment(0)]
    assert listed["segments"][0]["allocator_used_bytes"] >= 30_600
    keys = filled.keys()
    with filled.bare_client() as client:
        assert {client.remove(key, False) for key in keys} == {0}, "a leased key would refuse"


def test_rm_asks_for_the_name_and_removes_what_it_showed_leased_or_not(filled):
    before = filled.ask("/get_all_keys")
    with filled.bare_client() as client:
        client.batch_is_exist(before.split())
    asked = run(filled, "rm", OF_SPACE, code=1, typed="yes\n")
    assert f"Type {OF_SPACE} to remove these namespaces" in asked.stdout
    assert "12" in asked.stdout
    assert asked.stderr.endswith("pd-cache: nothing was removed\n")
    assert sorted(filled.ask("/get_all_keys").split()) == sorted(before.split())
    assert run(filled, "rm", OF_SPACE, typed=f"{OF_SPACE}\n").stdout.endswith("24 objects removed\n")
    again = run(filled, "rm", OF_SPACE, "--yes", code=1)
    assert f"pd-cache: no namespace in the pool matches {OF_SPACE}" in again.stderr
    assert f"pdc1/{OF_SPACE}/manifest" in filled.ask("/get_all_keys"), "it is the other version's, too"
    assert run(filled, "rm", "some/model@*", "--yes").stdout == "7 objects removed\n", "with the manifest"
    assert sorted(filled.ask("/get_all_keys").split()) == [f"pdo1/{VALUES}/{NAME}", "someone-elses"]
    assert run(filled, "rm", "*", "--yes").stdout == "1 objects removed\n"
    assert filled.ask("/get_all_keys").split() == ["someone-elses"]


def test_a_key_of_another_program_that_is_no_text_is_passed_over(filled):
    strange = f"pdc1/{OF_SPACE}/0/".encode() + b"\xff"
    with filled.bare_client() as client:
        assert client.put(strange, b"z") == 0
        assert run(filled, "rm", OF_SPACE, "--yes").stdout == "24 objects removed\n"
        assert client.is_exist(strange) == 1


def test_rm_of_nothing_and_a_pool_without_a_master_are_errors(filled, monkeypatch):
    for arguments in ((), ("",), ("", "--old")):
        assert "give a PATTERN or --old" in run(filled, "rm", *arguments, code=2).stderr
    assert (
        "no namespace of an old version in the pool matches *"
        in run(filled, "rm", "--old", "--yes", code=1).stderr
    )

    def killed(metrics, keys):
        filled.kill("master")
        return copies_at(metrics, keys)

    monkeypatch.setattr(scanned, "copies_at", killed)
    assert "pd-cache: the master does not answer: " in run(filled, "verify", code=1).stderr
    for command in (("ls",), ("ls", "--json"), ("rm", "*", "--yes"), ("verify",)):
        result = run(filled, *command, code=1)
        assert re.fullmatch(
            r"pd-cache: no master that leads has answered \(master: down: .*\): see `pd-cache status`\n",
            result.output,
        )


# --- what is read -------------------------------------------------------------------------------------------

CHUNKS, VALUE = chunk_keys(100), f"pdo1/{VALUES}/{NAME}"


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("pool"), client_ttl_s=60)
    try:
        yield pool.start()
    finally:
        pool.end()


@pytest.fixture
def sound(serving):
    """A pool with 200 shards of chunks, a value by name that is 200 times as large, a manifest, and an object
    of another program, which is no object of ours."""
    with serving.bare_client() as client:
        client.remove_all(True)
        for key, size in [*((key, 1000) for key in CHUNKS), (VALUE, 200_000)]:
            raw = bytearray(secrets.token_bytes(size) + bytes(TRAILER_BYTES))
            seal(key, memoryview(raw), size)
            assert client.put(key, bytes(raw)) == 0
        assert client.put(f"pdc1/{OF_SPACE}/manifest", SPACE.manifest()) == 0
        assert client.put("someone-elses", b"z" * 100) == 0
    return serving


def verified(pool, *arguments, code=0):
    return json.loads(run(pool, "verify", "--json", *arguments, code=code).stdout)


def test_verify_finds_and_removes_what_a_load_would_not_use_and_nothing_else(sound):
    sound.damage(CHUNKS[3], VALUE)
    with sound.bare_client() as client:  # the object of another key, and one that was cut short
        for key, raw in ((CHUNKS[5], client.get(CHUNKS[6])), (CHUNKS[7], client.get(CHUNKS[7])[:-1])):
            assert (client.remove(key, True), client.put(key, raw)) == (0, 0)
    keys, damaged = sound.keys(), {CHUNKS[3], VALUE, CHUNKS[5], CHUNKS[7]}
    found = run(sound, "verify", code=1)
    assert "201 of 201 objects" in found.stdout
    assert f", 4 damaged in {sound.segment(0)}\n" in found.stdout
    assert found.stdout not in found.stderr, "the result is no line of progress, too"
    assert sound.keys() == keys, "nothing is removed unasked"
    found = verified(sound, "--repair", code=1)
    assert (found["damaged"], found["removed"]) == ({sound.segment(0): 4}, 4)
    assert keys - sound.keys() == damaged
    found = verified(sound)
    assert (found["objects"], found["done"], found["bytes"]) == (197, 197, 197 * (1000 + TRAILER_BYTES))
    assert (found["damaged"], found["failed"], found["gone"]) == ({}, {}, 0)


def test_verify_reads_a_sample_and_what_is_gone_by_then_is_no_damage(sound, monkeypatch):
    found = verified(sound, "--sample", "1", OF_SPACE)
    assert (found["objects"], found["bytes"]) == (1, 1000 + TRAILER_BYTES)

    def and_then_remove(metrics, keys):
        copies = copies_at(metrics, keys)
        sound.remove(*keys[:10])
        return copies

    monkeypatch.setattr(scanned, "copies_at", and_then_remove)
    found = verified(sound)
    assert (found["done"], found["gone"], found["damaged"]) == (201, 39, {})


def interrupted(metrics, keys):
    """A question to the master during which Ctrl-C comes."""
    os.kill(os.getpid(), signal.SIGINT)
    return copies_at(metrics, keys)


def test_ctrl_c_ends_verify_with_what_it_has_found(sound, monkeypatch):
    sound.damage(*CHUNKS)
    asked = iter([copies_at, interrupted])
    monkeypatch.setattr(scanned, "copies_at", lambda metrics, keys: next(asked)(metrics, keys))
    found = verified(sound, OF_SPACE, code=130)
    assert (found["objects"], found["done"], found["damaged"]) == (200, 64, {sound.segment(0): 64})


def test_verify_reads_no_faster_than_it_may_and_again_what_seems_damaged(sound, monkeypatch):
    config, stop, waits, seeming = load_config(sound.file), StopFlag(), [], iter([Damage.FOREIGN])
    monkeypatch.setattr(scanned, "inspect", lambda *given: next(seeming, None) or inspect(*given))
    monkeypatch.setattr(stop, "wait", waits.append)
    monkeypatch.setattr(scanned, "time", SimpleNamespace(monotonic=lambda: 0.0))
    chosen = choose(pooled.survey(config), "*", old=False)
    *_, found = scanned.scan(config, chosen, rate=10_000, sample=None, repair=False, stop=stop)
    assert not found.damaged
    assert sum(waits) == pytest.approx(found.bytes / 10_000)
    assert max(waits) <= (200_000 + TRAILER_BYTES) / 10_000, "a second's bytes, or one object"


def test_a_rate_or_a_sample_that_makes_no_sense_is_an_error(sound):
    for rate in ("0", "-1", "nan", "2TiB", "fast"):
        assert f"expected 1MiB to 1TiB, got '{rate}'" in run(sound, "verify", "--rate", rate, code=2).stderr
    for sample in ("0", "-1", "many"):
        assert "Invalid value for '--sample'" in run(sound, "verify", "--sample", sample, code=2).stderr


# --- what is copied -----------------------------------------------------------------------------------------


def raw(pool, keys):
    with pool.bare_client() as client:
        return {key: client.get(key) for key in keys}


def copied(pool, target, *arguments, code=0):
    return json.loads(run(pool, "copy", "--to", target.file, "--json", *arguments, code=code).stdout)


def test_copy_goes_on_where_ctrl_c_ended_it_and_brings_all_that_is_intact(sound, make_pool, monkeypatch):
    target = make_pool(client_ttl_s=60).start()
    sound.damage(CHUNKS[0])
    keys = {*CHUNKS[1:], VALUE}
    before = raw(sound, keys)
    with monkeypatch.context() as patched:
        asked = iter([copies_at, interrupted])
        patched.setattr(scanned, "copies_at", lambda metrics, keys: next(asked)(metrics, keys))
        first = copied(sound, target, code=130)
    assert first["copied"] in (63, 64)
    written = target.keys()
    assert len(written) == first["copied"]
    begun = next(key for key in CHUNKS[1:] if key not in written)
    with target.bare_client() as writer:
        assert writer.batch_put_session_start([begun], [1000 + TRAILER_BYTES]) == [0]
        then = copied(sound, target, code=1)
        # a master gives the key of a writer that takes 5 s to the next one
        busy = then["there"] - first["copied"]
        assert busy in (0, 1)
        assert then["copied"] == 200 - first["copied"] - busy
        if busy:
            assert writer.batch_put_session_revoke([begun]) == [0]
    assert copied(sound, target, code=1)["copied"] == busy
    assert then["damaged"] == {sound.segment(0): 1}
    assert target.keys() == keys, "and nothing of another program"
    assert raw(target, keys) == raw(sound, keys) == before
    manifest = f"pdc1/{OF_SPACE}/manifest"
    assert raw(target, [manifest]) == raw(sound, [manifest])
    assert ", 200 there already, 1 damaged in" in run(sound, "copy", "--to", target.file, code=1).stdout

    def killed(metrics, keys):
        target.kill("master")
        return copies_at(metrics, keys)

    monkeypatch.setattr(scanned, "copies_at", killed)
    lost = run(sound, "copy", "--to", target.file, code=1)
    assert "pd-cache: the other pool does not answer: " in lost.stderr, "so nothing is read in vain"


def test_copy_into_the_same_pool_or_one_without_room_is_an_error_and_changes_nothing(sound, make_pool):
    same = run(sound, "copy", "--to", sound.file, code=1)
    assert same.stderr.endswith("pd-cache: both files have the same pool: nothing to copy\n")
    target = make_pool()
    absent = run(sound, "copy", "--to", target.file, code=1)
    assert "pd-cache: the other pool: no master that leads has answered (" in absent.stderr
    target.start("master")
    small = run(sound, "copy", "--to", target.file, code=1)
    assert "396.9 KiB are to be copied, but the other pool has room for 0 B: give it" in small.stderr
    assert target.keys() == set()
