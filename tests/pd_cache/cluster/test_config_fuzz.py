"""Hostile and broken files: each is read, or refused in one line, and never costs more than a bounded amount of work."""

from __future__ import annotations

import random
import re
import tracemalloc
from pathlib import Path

import pytest

from pd_cache.cluster import dump_config, load_config, parse_config
from pd_cache.cluster.document import DEEPEST, LARGEST, MOST_NODES
from pd_cache.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))
GOOD = """\
name: test
cache: {tiers: [{kind: local, capacity: 1GiB}, {kind: mooncake}]}
engine: {kind: reference, num_blocks: 2048, model: {name: tiny, random: {seed: 1}}}
nodes:
  - {name: master, role: master, host: 127.0.0.1, port: 0, metrics_port: 0}
  - {name: c, role: cache-server, url: ""}
  - {name: d0, role: decode}
  - {name: proxy, role: proxy, port: 8000}
"""
STRANGE = (
    "\0", "\x1b", "\x85", "\ud7ff", "\uffff", "\U0010ffff", "\ufeff", '"\\ud800"', '"\\Uffffffff"', '"\\x00"', '"a\\n"', "!!timestamp 2001-99-99",
    "2001-99-99", "!!int x", "!!binary x", "!!python/name:os.system", "!!set {a, b}", "&a", "*a", "*b", "<<: *a", "{<<: {a: 1}}",
    "[" * 2000, "{a: " * 2000, "- " * 2000, "? " * 500, "9" * 6000, "9" * 25, "0x" + "f" * 6000, "1e999", ".nan", "-.inf", "1:30", "010051", "0b1",
    "1_0", "~", "yes", "=", "%YAML 1." + "9" * 5000, "%TAG ! !", "---", "...", "|", ">", "|9", "\t", "@", "`", ": :", "''", '"', "'", "#", "a" * 5000,
    "0.0.0.0", "::", "*", "tcp://*", "tcp://0:1", "ipc://@x", "-1", "1e400", "é" * 100, "null", "[]", "{}", "[{}]", "{[]: 1}", "{1: 2}", "{~: 1}",
    "http://[", "etcd://", "http://h:99999/", "${HOME}", "nodes", "name",
)  # fmt: skip


def parsed(text: str) -> str:
    """What becomes of a file: its configuration written again, or the one line that refuses it. Anything else fails."""
    try:
        config, _ = parse_config(text, "c.yaml")
    except ConfigError as error:
        message = str(error)
        assert message.startswith("c.yaml")
        assert len(message.splitlines()) == 1
        assert len(message) < 3000
        message.encode()
        return message
    dumped = dump_config(config)
    assert parse_config(dumped, "again.yaml")[0] == config
    return dumped


def mutated(rng: random.Random, text: str) -> str:
    """The text with one of its characters, words or lines changed."""
    lines = text.split("\n")
    at, line = rng.randrange(len(text) + 1), rng.randrange(len(lines))
    words = [match.span() for match in re.finditer(r"[^\s:,{}\[\]#]+", text)] or [(0, 0)]
    (start, end), other = rng.choice(words), rng.choice(words)
    kind = rng.randrange(9)
    if kind < 3:
        return text[:start] + rng.choice(STRANGE) + text[end:]
    if kind == 3:
        return text[:at] + rng.choice(STRANGE) + text[at:]
    if kind == 4:
        return text[:start] + text[slice(*other)] + text[end:]
    if kind == 5:
        return text[:at] + chr(rng.randrange(0xD800)) + text[at + 1 :]
    if kind == 6:
        return "\n".join(lines[:line] + lines[line + 1 :])
    if kind == 7:
        return "\n".join([*lines[: line + 1], rng.choice(("", "  ")) + lines[line], *lines[line + 1 :]])
    return text[:at]


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_file_is_read_or_refused_in_one_line(seed: int) -> None:
    rng = random.Random(seed)
    # without their comments, which most changes would fall into
    seeds = [re.sub(r"(?m)^\s*#.*\n|\s+#.*$", "", file.read_text()) for file in CONFIGS]
    outcomes = []
    for _ in range(150):
        text = rng.choice(seeds)
        for _ in range(rng.randint(1, 3)):
            text = mutated(rng, text)
        outcomes.append(parsed(text))
    refused = [outcome for outcome in outcomes if outcome.startswith("c.yaml")]
    assert 30 < len(refused) < 150, "the changes hit, and not all of them"


def bomb(levels: int, copies: int = 9) -> str:
    lines = ["a0: &a0 [x]"]
    for n in range(1, levels + 1):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * copies)}]")
    return "\n".join(lines) + "\n"


def merge_bomb(levels: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    for n in range(1, levels + 1):
        lines.append(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9), r"c\.yaml:\d+: its aliases stand for more than 20000 keys and values"),
        (merge_bomb(9), r"c\.yaml:\d+: its aliases stand for more than"),
        ("[" * 2000, f"c.yaml:1: is nested more than {DEEPEST} levels deep"),
        ("x: " + "[" * 100_000, f"c.yaml:1: is nested more than {DEEPEST} levels deep"),
        # a scanner that read on would find what no token starts with first; each bracket would cost it a look at all before
        ("[" * (DEEPEST + 1) + "@", f"c.yaml:1: is nested more than {DEEPEST} levels deep"),
        ("[" * DEEPEST + "@", "c.yaml:1: is not valid YAML: found character '@' that cannot start any token"),
        ("- " * 2000, f"c.yaml:1: is nested more than {DEEPEST} levels deep"),
        ("{a: " * 2000, f"c.yaml:1: is nested more than {DEEPEST} levels deep"),
        ("\n".join(f"k{n}: 1" for n in range(MOST_NODES)), "has more than 20000 keys and values"),
        (GOOD + "\0", "c.yaml:9: is not valid YAML: the character '\\\\x00' is not allowed|is not allowed"),
        ('name: "a\\0"', r"c\.yaml:1: name: .*: must not hold control characters"),
        ('name: "\\ud800"', r"c\.yaml:1: name: .*: must not hold control characters"),
        ('"\\e[31m": 1', r"c\.yaml:1: the key .* must not hold control characters"),
        ("name: !!timestamp 2001-01-01", r"c\.yaml:1: the tag tag:yaml\.org,2002:timestamp is not allowed here"),
        ("name: !!python/name:os.system x", r"c\.yaml:1: the tag .* is not allowed here"),
        ("bench: {port: " + "9" * 6000 + "}", r"c\.yaml:1: bench\.port: .*is a number of more than 20 digits"),
        ("bench: {port: 1:30}", r"c\.yaml:1: bench\.port: '1:30': YAML 1\.1 reads this as another number"),
        ("bench: {port: 010051}", r"c\.yaml:1: bench\.port: '010051': YAML 1\.1 reads this as another number"),
        ("proxy: {drain_s: .nan}", r"c\.yaml:1: proxy\.drain_s: '\.nan': must be a finite number"),
        ("proxy: {drain_s: 1.0e+999}", r"c\.yaml:1: proxy\.drain_s: '1\.0e\+999': must be a finite number"),
        ("1: x", r"c\.yaml:1: a key must be text, got 1; quote it"),
        ("[a]: x", r"c\.yaml:1: a key must be text, got a list or mapping"),
        ("cache: {chunk_size: 1, 'chunk_size': 2}", r"c\.yaml:1: cache\.chunk_size: is given twice, first on line 1"),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", r"c\.yaml:?\d*: is not valid YAML"),
        ('a: "\\Uffffffff"', r"c\.yaml:?\d*: is not valid YAML"),
    ],
)
def test_what_is_no_configuration_is_refused_before_anything_is_made_of_it(text: str, message: str) -> None:
    tracemalloc.start()
    try:
        assert re.match(f".*({message})", parsed(text))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: test", 'name: "test\\n"', r"c\.yaml:1: name: 'test\\n': must be 1 to 63 letters"),
        ("host: 127.0.0.1", 'host: "127.0.0.1\\n"', r"c\.yaml:5: nodes\[0\]\.host: .*: must be a host name or an IPv4"),
        ("host: 127.0.0.1", "host: 0.0.0.0", r"c\.yaml:5: nodes\[0\]\.host: '0\.0\.0\.0': 0\.0\.0\.0 is not the address of one machine"),
        ("host: 127.0.0.1", "host: '0'", r"nodes\[0\]\.host: '0': 0\.0\.0\.0 is not the address of one machine"),
        ("host: 127.0.0.1", "host: 224.0.0.1", r"nodes\[0\]\.host: .*is not the address of one machine"),
        ("host: 127.0.0.1", "host: '*'", r"nodes\[0\]\.host: '\*': must be a host name or an IPv4 address"),
        ('url: ""', "url: 'tcp://*'", r"c\.yaml:6: nodes\[1\]\.url: 'tcp://\*': must be ipc:///ABSOLUTE/PATH or tcp://HOST:PORT"),
        ('url: ""', "url: 'tcp://*:7000'", r"nodes\[1\]\.url: .*: must be ipc:///ABSOLUTE/PATH or tcp://HOST:PORT"),
        ('url: ""', "url: 'tcp://0.0.0.0:7000'", r"nodes\[1\]\.url: .*0\.0\.0\.0 is not the address of one machine"),
        ('url: ""', "url: 'ipc://@name'", r"nodes\[1\]\.url: .*: must be ipc:///ABSOLUTE/PATH"),
        ("num_blocks: 2048", "num_blocks: 1" + "0" * 15, r"c\.yaml:3: engine\.num_blocks: 10{15}: expected `int` <= 2147483647"),
        ("num_blocks: 2048", "num_blocks: 1" + "0" * 30, r"c\.yaml:3: engine\.num_blocks: .*is a number of more than 20 digits"),
        ("capacity: 1GiB", "capacity: 0", r"c\.yaml:2: cache\.tiers\[0\]\.capacity: 0: holds nothing"),
        ("capacity: 1GiB", "capacity: 99999999TiB", r"c\.yaml:2: cache\.tiers\[0\]\.capacity: .*expected a size"),
        ("port: 8000", "port: 010051", r"c\.yaml:8: nodes\[3\]\.port: '010051': YAML 1\.1 reads this as another number"),
        ("name: test", "transfer: {metadata: 'http://0.0.0.0:1/metadata'}", r"c\.yaml:1: transfer\.metadata: .*not the address of one machine"),
        ("name: test", "transfer: {metadata: 'http://['}", r"c\.yaml:1: transfer\.metadata: .*must be an address"),
        ("name: test", "discovery: {kind: etcd, endpoints: ['0.0.0.0:1']}", r"c\.yaml:1: discovery\.endpoints\[0\]: .*not the address of one machine"),
    ],
)  # fmt: skip
def test_a_value_that_nobody_can_mean_is_refused_with_its_file_line_and_key(old: str, new: str, message: str) -> None:
    assert old in GOOD
    assert parsed(GOOD) != ""
    assert not parsed(GOOD).startswith("c.yaml")
    assert re.match(f".*({message})", parsed(GOOD.replace(old, new)))


def test_a_date_is_text() -> None:
    assert parse_config(GOOD + "connector: {revision: 2026-01-31}\n", "c.yaml")[0].connector.revision == "2026-01-31"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD + "#" * LARGEST)
    with pytest.raises(ConfigError, match="is larger than 256 KiB"):
        load_config(file)
    with pytest.raises(ConfigError, match="is larger than 256 KiB"):
        load_config("/dev/zero")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(name)


VLLM = """\
engine: {kind: vllm, model: m}
nodes:
  - {name: master, role: master}
"""


def with_sizes(sizes: list[int]) -> str:
    return VLLM + "".join(
        f"  - {{name: d{n}, role: decode, port: {8100 + n}, args: {{tp: {size}}}}}\n" for n, size in enumerate(sizes)
    )


@pytest.mark.parametrize("sizes", [[64, 81], [10**19 + n for n in range(300)]], ids=["too many parts", "huge numbers"])
def test_tensor_parallel_sizes_that_cut_chunks_into_too_many_parts_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="cut a chunk into more than 1024 parts"):
        parse_config(with_sizes(sizes), "c.yaml")


def test_tensor_parallel_sizes_that_share_chunks_are_accepted() -> None:
    assert parse_config(with_sizes([2, 3, 4]), "c.yaml")[0].shards == 12


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a.", "a-.b", ".".join(["a" * 50] * 6)])
def test_a_host_that_no_name_service_takes_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        parse_config(f"nodes: [{{name: m, role: master, host: {host}}}]\n", "c.yaml")
