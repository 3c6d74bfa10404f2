"""The cluster's file: every mistake is one message with file, line, key path, value and what is allowed."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from pd_cache.cluster import CacheServerNode, ClusterConfig, PrefillNode, StoreNode, dump_config, load_config
from pd_cache.config import MooncakeTier
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize

GOOD = """\
name: test
transfer: {segment_size: 1GiB}
cache: {chunk_size: 256}
engine:
  kind: reference
  model: {name: tiny, random: {seed: 1}}
nodes:
  - {name: master, role: master, port: 0, metrics_port: 0}
  - {name: p0, role: prefill, segment_size: 512MiB}
  - {name: d0, role: decode}
  - {name: proxy, role: proxy, port: 8000}
"""
CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))


def load(tmp_path: Path, text: str) -> ClusterConfig:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load_config(file)


def test_a_good_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.master_address == "127.0.0.1:0"
    assert config.transfer.segment_size == 1 << 30
    prefill, decode = config.node("p0"), config.node("d0")
    assert isinstance(prefill, PrefillNode)
    assert config.settings_of(prefill).segment_size == 512 << 20
    assert decode is not None
    assert config.settings_of(decode).segment_size == 1 << 30
    assert config.node("nobody") is None


def test_a_dumped_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert load(tmp_path, dump_config(config)) == config


def test_with_etcd_a_file_may_hold_only_a_part_of_the_cluster(tmp_path: Path) -> None:
    etcd = "discovery: {kind: etcd, endpoints: ['10.0.0.1:2379', '10.0.0.2:2379']}\n"
    assert load(tmp_path, etcd + "nodes: [{name: proxy, role: proxy}]").by_role("master") == []
    masters = (
        "nodes: [{name: m, role: master, client_ttl_s: 20}, {name: n, role: master, client_ttl_s: 20, host: 127.0.0.2}]"
    )
    elected = load(tmp_path, "master: {ha: true}\n" + etcd + masters)
    assert elected.master_address == "etcd://10.0.0.1:2379;10.0.0.2:2379/pd-cache"
    assert load(tmp_path, dump_config(elected)) == elected
    with pytest.raises(ConfigError, match=r"nodes\[0\]\.client_ttl_s.*must outlive an election"):
        load(tmp_path, "master: {ha: true}\n" + etcd + "nodes: [{name: m, role: master}]")


def test_an_engine_that_names_a_cache_server_gives_no_memory_and_has_no_client_of_the_pool(tmp_path: Path) -> None:
    text = GOOD.replace("role: decode}", "role: decode, cache_server: c}\n  - {name: c, role: cache-server}")
    config = load(tmp_path, text)
    assert [node.name for node in config.caching_nodes()] == ["p0", "c"]
    assert [config.settings_of(node).segment_size for node in config.nodes if node.name in ("c", "d0")] == [
        0,
        1 << 30,
    ]


def test_with_etcd_the_address_of_a_cache_server_needs_no_master(tmp_path: Path) -> None:
    here = "discovery: {kind: etcd, endpoints: ['10.0.0.1:2379']}\nnodes: [{name: c, role: cache-server}]"
    elsewhere = here.replace("10.0.0.1", "10.0.0.2")
    urls = []
    for text in (here, elsewhere):
        config = load(tmp_path, text)
        node = config.node("c")
        assert isinstance(node, CacheServerNode)
        urls.append(config.server_url(node))
    assert len(set(urls)) == 2, "clusters of one name"
    assert all(url.startswith("ipc:///") and url.endswith("-c.sock") for url in urls)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_files_that_ship_are_good(file: Path) -> None:
    assert load_config(file).nodes


def keys_of(kind: object) -> Iterator[str]:
    """Every key that the schema knows."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        for name, field in zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True):
            yield name
            yield from keys_of(hints[field])
    for part in typing.get_args(kind):
        yield from keys_of(part)


def test_the_files_that_ship_show_every_key_that_there_is() -> None:
    text = "".join((CONFIGS[0].parent / name).read_text() for name in ("local.yaml", "vllm-local.yaml"))
    assert [key for key in sorted(set(keys_of(ClusterConfig))) if f"{key}:" not in text] == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "role: decode",
            "role: decode, cache_server: p0",
            "nodes[2].cache_server: 'p0': is not a cache-server node; there are: none",
        ),
        (
            "role: decode}",
            "role: decode, cache_server: c}\n  - {name: c, role: cache-server, host: 10.0.0.1}",
            "is on 10.0.0.1, but must be on this node's host, 127.0.0.1: they share memory",
        ),
        (
            "role: decode}",
            "role: decode, segment_size: 1GiB, cache_server: c}\n  - {name: c, role: cache-server}",
            "nodes[2].segment_size: '1GiB': must be 0 or absent",
        ),
        (
            "role: decode}",
            "role: decode}\n  - {name: c, role: cache-server, url: 'ipc:///" + "x" * 100 + "'}",
            "must have at most 100 bytes",
        ),
        ("chunk_size", "chunk_sise", "c.yaml:3: cache.chunk_sise: 256: unknown key; did you mean chunk_size?"),
        ("cache:", "cach:", "c.yaml:3: cach: unknown key; did you mean cache?"),
        (
            "name: test",
            "'x` - at `$.cache.chunk_size': 1",
            "c.yaml:1: x` - at `$.cache.chunk_size: 1: unknown key (allowed here: name, transfer,",
        ),
        ("seed: 1", "sead: 1", "c.yaml:6: engine.model.random.sead: 1: unknown key; did you mean seed?"),
        (
            "chunk_size: 256",
            "chunk_size: big",
            "c.yaml:3: cache.chunk_size: 'big': must be auto, or a whole number of at least 1",
        ),
        (
            "chunk_size: 256",
            "chunk_size: 0",
            "c.yaml:3: cache.chunk_size: 0: must be auto, or a whole number of at least 1",
        ),
        (
            "chunk_size: 256",
            "chunk_size: 100",
            "c.yaml:3: cache.chunk_size: 100: must be a multiple of engine.block_size 16, e.g. 96 or 112",
        ),
        ("1GiB", "1Gib3", "c.yaml:2: transfer.segment_size: '1Gib3': expected a size such as 512MiB, 4GiB"),
        ("1GiB", "1MiB", "c.yaml:2: transfer: segment_size: must be 0 for none, or at least 16MiB, got 1MiB"),
        ("512MiB", "1MiB", "c.yaml:9: nodes[1].segment_size: '1MiB': must be 0 for none, or at least 16MiB"),
        (
            "role: decode",
            "role: decoder",
            "nodes[2].role: 'decoder': must be one of master, store, cache-server, prefill, decode",
        ),
        ("role: decode", "rolle: decode", "nodes[2]: the key role is missing; is rolle meant to be it?"),
        ("kind: reference", "kind: refrence", "engine.kind: 'refrence': must be one of reference"),
        (
            "name: tiny, random: {seed: 1}",
            "name: tiny, path: /m",
            "engine.model.path: '/m': went in 0.2.0: the reference",
        ),
        ("name: d0", "name: p0", "c.yaml:10: nodes[2].name: 'p0': is also the name of nodes[1]"),
        ("name: d0", "name: 'd 0'", "nodes[2].name: 'd 0': must be 1 to 63 letters"),
        ("role: master, port: 0, metrics_port: 0", "role: store, segment_size: 16MiB", "0 nodes have the role master"),
        ("role: prefill, segment_size: 512MiB", "role: master", "c.yaml:9: nodes[1]: 2 nodes have the role master"),
        ("name: test", "master: {ha: 1}", "c.yaml:1: master.ha: 1: expected `bool`, got `int`"),
        ("name: test", "master: {hah: true}", "c.yaml:1: master.hah: True: unknown key; did you mean ha?"),
        ("name: test", "master: {ha: true}", "c.yaml:1: master.ha: True: masters are elected in etcd"),
        ("name: test", "discovery: {kind: etcd}", "c.yaml:1: discovery: the key endpoints is missing"),
        (
            "name: test",
            "discovery: {kind: etcd, endpoints: []}",
            "discovery.endpoints: expected `array` of length >= 1",
        ),
        (
            "name: test",
            "discovery: {kind: etcd, endpoints: ['http://a:1']}",
            "endpoints[0]: 'http://a:1': must be `host:port` without a scheme, e.g. 10.0.0.1:2379",
        ),
        (
            "name: test",
            "discovery: {kind: etcd, endpoints: ['a:65536']}",
            "endpoints[0]: 'a:65536': must be `host:port`",
        ),
        ("name: test", "name: -test", "c.yaml:1: name: '-test': must be 1 to 63 letters, digits, dots"),
        (
            "name: test",
            "proxy: {drain_s: 10}",
            "proxy.drain_s: 10: must be less than supervisor.stop_grace_s, 10 s, after which `up` kills the proxy",
        ),
        (
            "name: test",
            "proxy: {request_timeout_s: 60}",
            "proxy.prefill_timeout_s: is 120 s, and must be less than request_timeout_s, 60 s: a prefill node that hangs would leave the decode",
        ),
        (
            "name: test",
            "discovery: {kind: etcd, endpoints: ['a:1'], user: u}",
            "`user` and `password_file` go together",
        ),
        (
            "name: test",
            "discovery: {kind: etcd, endpoints: ['a:1'], ttl_s: 1}",
            "discovery.ttl_s: 1: expected `int` >= 2",
        ),
        (
            "name: test",
            "discovery: {kind: etcd, endpoints: ['a:1'], tls: {ca_file: a, key_file: b}}",
            "`cert_file` and `key_file` go together",
        ),
        (
            "name: test",
            "master: {ha: true}\ndiscovery: {kind: etcd, endpoints: ['a:1'], user: u, password_file: p}",
            "master.ha: True: Mooncake's election supports neither users nor TLS",
        ),
        ("port: 8000", "port: 80000", "nodes[3].port: 80000: expected `int` <= 65535"),
        ("role: decode", "role: prefill", "a proxy needs at least one decode node"),
        ("segment_size: 1GiB", "metadata: nonsense", "metadata: 'nonsense' is neither P2PHANDSHAKE nor an address"),
        ("segment_size: 1GiB", "devices: [mlx5_0]", "only protocol: rdma uses devices"),
        ("segment_size: 1GiB", "protocol: udp", "transfer.protocol: 'udp': must be one of tcp, rdma"),
        ("name: test", "name: test\nname: again", "c.yaml:2: name: is given twice, first on line 1"),
        ("name: test", "name: [", "is not valid YAML"),
        ("name: test", "name: &a [*a]", "c.yaml:1: an alias stands inside the value that it refers to"),
        ("1GiB", "'" + "9" * 400 + "'", "expected a size such as 512MiB"),
        ("cache: {chunk_size: 256}", "cache: {tiers: []}", "cache.tiers: expected `array` of length >= 1"),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: mooncake}, {kind: local, capacity: 1GiB}]}",
            "c.yaml:3: cache.tiers[1]: stands after the pool; {kind: mooncake} must be the last tier",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: disk, path: /a, capacity: 1GiB}, {kind: local, capacity: 1GiB}, {kind: mooncake}]}",
            "cache.tiers[1]: memory stands after a disk; the fastest tier comes first",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: local, capacity: 1GiB}, {kind: local, capacity: 2GiB}, {kind: mooncake}]}",
            "cache.tiers[1]: is the second local tier on cpu; make it one",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: disk, path: /a, capacity: 1GiB}, {kind: disk, path: /a, capacity: 1GiB}]}",
            "cache.tiers[1].path: '/a': is already the path of another tier",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: local, capacity: 1GiB}]}",
            "c.yaml:3: cache.tiers: prefill and decode nodes share chunks through the pool; add {kind: mooncake}",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: disk, path: here, capacity: 1GiB}, {kind: mooncake}]}",
            "cache.tiers[0].path: 'here': must be an absolute path",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: local}, {kind: mooncake}]}",
            "cache.tiers[0]: the key capacity is missing",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: local, capacity: 1GiB, polcy: lfu}, {kind: mooncake}]}",
            "cache.tiers[0].polcy: 'lfu': unknown key; did you mean policy?",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: local, capacity: 1GiB, policy: lru2}, {kind: mooncake}]}",
            "cache.tiers[0].policy: 'lru2': must be one of lru, lfu, s3fifo",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: locl}]}",
            "cache.tiers[0].kind: 'locl': must be one of local, disk, mooncake",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {hash_mode: blocks}",
            "the reference engine has no block hashes; use tokens",
        ),
        ("metrics_port: 0", "metrics_port: 0, lease_ttl_ms: 500", "lease_ttl_ms: 500: a read that outlives its lease"),
        (
            "  kind: reference\n",
            "  kind: reference\n  num_blocks: 4\n",
            "cannot hold one request of max_model_len 8192",
        ),
        (
            "{segment_size: 1GiB}\ncache: {chunk_size: 256}",
            "{}\ncache: {tiers: [{kind: mooncake, replicas: 2}]}",
            "c.yaml:3: cache.tiers[0].replicas: 2: each replica needs its own segment, and only 1 nodes give memory",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: mooncake, preferred_segment: '127.0.0.1:5'}]}",
            "preferred_segment: '127.0.0.1:5': must be own, any or the host:port of a store node; there are: none; give a store node a port",
        ),
        (
            "cache: {chunk_size: 256}",
            "cache: {tiers: [{kind: mooncake, pin: firm}]}",
            "must be one of none, soft, hard",
        ),
        (
            "port: 8000",
            "port: 8000}\n  - {name: q, role: proxy, port: 8000",
            "proxy already uses this port of 127.0.0.1",
        ),
    ],
)
def test_a_mistake_is_one_message_that_says_where_and_what_is_allowed(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("", "is empty"), ("[1]", "expected `object`, got `array`"), ("nodes: []", "length >= 1")]
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_an_engine_section_is_needed_where_engines_are(tmp_path: Path) -> None:
    tree = yaml.safe_load(GOOD)
    del tree["engine"]
    with pytest.raises(ConfigError, match=r"engine: missing, but nodes\[1\] is a prefill node"):
        load(tmp_path, yaml.safe_dump(tree))


VLLM = """\
engine: {kind: vllm, model: m, args: {max-model-len: 8192, lora: [1, a]}}
nodes:
  - {name: master, role: master}
  - {name: d0, role: decode, env: {CUDA_VISIBLE_DEVICES: "0"}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "8192",
            "null",
            "c.yaml:1: engine.args.max-model-len: expected `bool | int | float | str | array`, got `null`",
        ),
        ("[1, a]", "[1, []]", "c.yaml:1: engine.args.lora[1]: expected `int | float | str`, got `array`"),
        ("max-model-len", "--max-model-len", "c.yaml:1: engine.args: must be the name of a flag of `vllm serve`"),
        ('"0"', "0", "c.yaml:4: nodes[1].env.CUDA_VISIBLE_DEVICES: 0: expected `str`, got `int`"),
    ],
)
def test_a_mistake_among_the_arguments_of_vllm_is_named_by_its_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert load(tmp_path, VLLM).engine
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, VLLM.replace(old, new, 1))
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_nodes_know_their_role() -> None:
    assert StoreNode(name="s", segment_size=ByteSize(16 << 20)).role == "store"


HOST = """\
engine: {kind: reference, model: {name: tiny, random: {seed: 1}}}
nodes:
  - {name: master, role: master}
  - {name: s0, role: store, segment_size: 1GiB, port: 50052}
  - {name: p0, role: prefill, port: 8100}
"""


def test_segments_that_the_file_does_not_name_may_have_registered(tmp_path: Path) -> None:
    tiers = "cache: {tiers: [{kind: mooncake, replicas: 2, preferred_segment: '10.0.0.9:50052'}]}\n"
    with pytest.raises(ConfigError, match="only 1 nodes give memory"):
        load(tmp_path, tiers + HOST)
    config = load(tmp_path, "discovery: {kind: etcd, endpoints: ['127.0.0.1:2379']}\n" + tiers + HOST)
    assert isinstance(config.cache.tiers[0], MooncakeTier)


def test_a_key_or_value_of_an_earlier_version_says_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"nodes.prefill.speed": "went: buy a GPU", "cache.hash_mode: words": "went: use tokens"}
    monkeypatch.setattr("pd_cache.cluster.reader.REMOVED", gone)
    for old, new, message in (
        ("role: prefill", "role: prefill, speed: 3", r"nodes\[1\]\.speed: 3: went: buy a GPU"),
        ("chunk_size: 256", "hash_mode: words", r"cache\.hash_mode: 'words': went: use tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("connector: {load: layerwise}", r"connector\.load: 'layerwise': went in 0\.2\.0, .*: use async"),
        ("transfer: {client: host}", r"transfer\.client: 'host': went in 0\.2\.0: .*`cache_server: NAME`"),
        (
            "transfer: {client_address: 'h:1'}",
            r"transfer\.client_address: 'h:1': went in 0\.2\.0: .*`cache_server: NAME`",
        ),
        ("connector: {load: auto}", r"connector\.load: 'auto': went in 0\.2\.0, .*: use async"),
    ],
)
def test_what_went_says_what_to_use_instead(tmp_path: Path, old: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, old + "\n")
