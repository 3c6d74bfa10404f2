"""The cluster's file: every mistake is one message with file, line, key path, value and what is allowed."""

import random
import re
import typing
from pathlib import Path

import msgspec
import pytest

from pd_cache.cluster import (
    ClusterConfig,
    StoreNode,
    dump_config,
    load_config,
    parse_config,
)
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.errors import ConfigError
from transfer.settings import Timeouts, TransferSettings

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


def load(text):
    return parse_config(text, "c.yaml")[0]


def refused(text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)
    assert all(line.startswith("c.yaml") for line in str(caught.value).splitlines())


def test_a_good_file_is_read_with_its_defaults():
    config = load(GOOD)
    assert config.master_address == "127.0.0.1:0"
    assert config.transfer.segment_size == 1 << 30
    prefill, decode = config.node("p0"), config.node("d0")
    assert config.settings_of(prefill).segment_size == 512 << 20
    assert config.settings_of(decode).segment_size == 1 << 30
    assert config.node("nobody") is None


def test_with_etcd_a_file_may_hold_only_a_part_of_the_cluster():
    etcd = "discovery: {kind: etcd, endpoints: ['10.0.0.1:2379', '10.0.0.2:2379']}\n"
    assert load(etcd + "nodes: [{name: proxy, role: proxy}]").by_role("master") == []
    masters = "nodes: [{name: m, role: master, client_ttl_s: 20}, {name: n, role: master, client_ttl_s: 20, host: 127.0.0.2}]"
    elected = load("master: {ha: true}\n" + etcd + masters)
    assert elected.master_address == "etcd://10.0.0.1:2379;10.0.0.2:2379/pd-cache"
    assert load(dump_config(elected)) == elected
    alone = "master: {ha: true}\n" + etcd + "nodes: [{name: m, role: master}]"
    refused(
        alone, "nodes[0].client_ttl_s: is 5 s, but segments, and the keys in them, must outlive an election"
    )


def test_an_engine_that_names_a_cache_server_gives_no_memory_and_has_no_client_of_the_pool():
    text = GOOD.replace("role: decode}", "role: decode, cache_server: c}\n  - {name: c, role: cache-server}")
    config = load(text)
    assert [node.name for node in config.caching_nodes()] == ["p0", "c"]
    sizes = {node.name: config.settings_of(node).segment_size for node in config.nodes}
    assert (sizes["c"], sizes["d0"]) == (1 << 30, 0)


def test_with_etcd_the_address_of_a_cache_server_needs_no_master():
    here = "discovery: {kind: etcd, endpoints: ['10.0.0.1:2379']}\nnodes: [{name: c, role: cache-server}]"
    elsewhere = here.replace("10.0.0.1", "10.0.0.2")
    urls = [config.server_url(config.node("c")) for config in map(load, (here, elsewhere))]
    assert len(set(urls)) == 2, "clusters of one name"
    assert all(url.startswith("ipc:///") and url.endswith("-c.sock") for url in urls)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_files_that_ship_are_good(file):
    assert load_config(file).nodes


def keys_of(kind):
    """Every key that the schema knows."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        for name, field in zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True):
            yield name
            yield from keys_of(hints[field])
    for part in typing.get_args(kind):
        yield from keys_of(part)


def test_the_files_that_ship_show_every_key_that_there_is():
    text = "".join((CONFIGS[0].parent / name).read_text() for name in ("local.yaml", "vllm-local.yaml"))
    assert [key for key in sorted(set(keys_of(ClusterConfig))) if f"{key}:" not in text] == []


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("chunk_size", "chunk_sise", "c.yaml:3: cache.chunk_sise: 256: unknown key; did you mean chunk_size?"),
        ("chunk_size: 256", "chunk_size: big", "cache.chunk_size: 'big': must be auto, or a whole number of at least 1"),
        ("segment_size: 1GiB", "timeouts: {exist_ms: 500ms}", "transfer.timeouts.exist_ms: '500ms': must be a number of milliseconds, without a unit"),
        ("size: 256", "size: 100", "cache.chunk_size: 100: must be a multiple of engine.block_size 16, e.g. 96 or 112"),
        ("chunk_size: 256", "hash_mode: blocks", "the reference engine has no block hashes; use tokens"),
        ("1GiB", "1Gib3", "c.yaml:2: transfer.segment_size: '1Gib3': expected a size such as 512MiB, 4GiB"),
        ("1GiB", "1GiB, staging_size: 0", "c.yaml:2: transfer.staging_size: 0: holds no chunk, and p0 needs room"),
        ("1GiB", "1MiB", "c.yaml:2: transfer: segment_size: must be 0 for none, or at least 16MiB, got 1MiB"),
        ("segment_size: 1GiB", "metadata: nonsense", "metadata: 'nonsense' is neither P2PHANDSHAKE nor an address"),
        ("segment_size: 1GiB", "devices: [mlx5_0]", "only protocol: rdma uses devices"),
        ("engine:\n  kind: reference\n  model: {name: tiny, random: {seed: 1}}\n", "", "engine: missing, but nodes[1] is a prefill node"),
        ("kind: reference", "kind: reference\n  num_blocks: 4", "cannot hold one request of max_model_len 8192"),
        ("512MiB", "1MiB", "c.yaml:9: nodes[1].segment_size: '1MiB': must be 0 for none, or at least 16MiB"),
        ("role: decode", "role: decoder", "nodes[2].role: 'decoder': must be one of master, store, cache-server, prefill"),
        ("role: decode", "rolle: decode", "nodes[2]: the key role is missing; is rolle meant to be it?"),
        ("name: d0", "name: p0", "c.yaml:10: nodes[2].name: 'p0': is also the name of nodes[1]"),
        ("name: d0", "name: 'd 0'", "nodes[2].name: 'd 0': must be 1 to 63 letters"),
        ("name: d0", "name: d0, host: 10.0.0.300", "nodes[2].host: '10.0.0.300': must be a host name or an IPv4 address"),
        ("name: d0", "name: d0, host: 0.0.0.0", "nodes[2].host: '0.0.0.0': is not the address of one machine"),
        ("role: master, port: 0, metrics_port: 0", "role: store, segment_size: 16MiB", "0 nodes have the role master"),
        ("role: prefill, segment_size: 512MiB", "role: master", "c.yaml:9: nodes[1]: 2 nodes have the role master"),
        ("metrics_port: 0", "metrics_port: 0, lease_ttl_ms: 500", "lease_ttl_ms: 500: a read that outlives its lease"),
        ("port: 8000", "port: 80000", "nodes[3].port: 80000: expected a whole number <= 65535"),
        ("port: 8000", "port: 010051", "nodes[3].port: '010051': expected a whole number, got text"),
        ("port: 8000", "port: 8000}\n  - {name: q, role: proxy, port: 8000", "proxy already uses this port of 127.0.0.1"),
        ("role: decode", "role: prefill", "a proxy needs at least one node of the role decode or both"),
        ("role: decode", "role: decode, cache_server: p0", "nodes[2].cache_server: 'p0': is not a cache-server node"),
        ("role: decode", "role: decode, args: {a: 1}", "nodes[2].args: is for vLLM, and engine.kind is reference"),
        ("role: decode", "role: decode, events_port: 5570", "the reference engine has no prefix cache of its own"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_that_says_where_and_what_is_allowed(old, new, message):
    assert old in GOOD
    refused(GOOD.replace(old, new, 1), message)


def test_all_mistakes_are_in_one_message_a_line_for_each_and_those_of_values_come_before_those_of_the_whole_file():
    text = GOOD.replace("chunk_size: 256", "chunk_size: big, chunk_sise: 1").replace(
        "port: 8000", "prt: 8000"
    )
    with pytest.raises(ConfigError) as caught:
        load(text.replace("role: prefill", "role: prefil"))
    places = [line.split(": ")[:2] for line in str(caught.value).splitlines()]
    assert places == [
        ["c.yaml:3", "cache.chunk_size"], ["c.yaml:3", "cache.chunk_sise"],
        ["c.yaml:9", "nodes[1].role"], ["c.yaml:11", "nodes[3].prt"],
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load(GOOD.replace("size: 256", "size: 100").replace("name: d0", "name: p0"))
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "nodes[2].name",
        "cache.chunk_size",
    ]
    with pytest.raises(ConfigError) as caught:
        load("chunk_size: 256\nlocal_cpu: true\nremote_url: lm://h:1\n" + GOOD)
    unknown = str(caught.value).splitlines()
    assert ["allowed here" in line for line in unknown] == [True, False, False], "once is enough"


@pytest.mark.parametrize(
    "section, message",
    [
        ("master: {ha: true}", "c.yaml:1: master.ha: True: masters are elected in etcd"),
        ("discovery: {kind: etcd}", "c.yaml:1: discovery: the key endpoints is missing"),
        ("discovery: {kind: etcd, endpoints: ['http://a:1']}", "endpoints[0]: 'http://a:1': must be `host:port` without a"),
        ("discovery: {kind: etcd, endpoints: ['a:1'], user: u}", "`user` and `password_file` go together"),
        ("discovery: {kind: etcd, endpoints: ['a:1'], ttl_s: 1}", "discovery.ttl_s: 1: expected a whole number >= 2"),
        ("discovery: {kind: etcd, endpoints: ['a:1'], tls: {ca_file: a, key_file: b}}", "`cert_file` and `key_file` go"),
        (
            "master: {ha: true}\ndiscovery: {kind: etcd, endpoints: ['a:1'], user: u, password_file: p}",
            "master.ha: True: Mooncake's election supports neither users nor TLS",
        ),
        ("proxy: {drain_s: 10}", "proxy.drain_s: 10: must be less than supervisor.stop_grace_s, 10 s"),
        ("proxy: {roles: {auto: true}}", "proxy.roles.auto: True: decides for nodes of the role both, and there are none"),
        ("proxy: {roles: {auto: true, min_decode: 2}}", "proxy.roles.min_decode: 2: must be at most 1, the number of nodes that can do that"),
        ("proxy: {limits: {ttft_s: 0}}", "proxy.limits.ttft_s: 0"),
        ("proxy: {limits: {token_s: -0.1}}", "proxy.limits.token_s: -0.1"),
        ("proxy: {limits: {ttft_s: soon}}", "proxy.limits.ttft_s: 'soon': must be a number of seconds"),
        ("proxy: {limits: {over: wait}}", "proxy.limits.over: 'wait'"),
        ("proxy: {limits: {ttft: 5}}", "proxy.limits.ttft: 5: unknown key; did you mean ttft_s"),
        ("proxy: {roles: {min_prefill: 0}}", "proxy.roles.min_prefill: 0: expected a whole number >= 1"),
        ("proxy: {request_timeout_s: 60}", "proxy.prefill_timeout_s: is 120 s, and must be less than request_timeout_s"),
        ('proxy: {cors_origins: ["https://a.example/"]}', "cors_origins[0]: 'https://a.example/': must be * or the origin"),
        ("proxy: {drain_s: 1:30}", "c.yaml:1: proxy.drain_s: '1:30': must be a number of seconds, without a unit"),
        ("name: a\nname: b", "c.yaml:2: name: is given twice, first on line 1"),
        ("name: [", "c.yaml:3: is not valid YAML: "),
        ("name: !!python/name:os.system x", "c.yaml:1: is not valid YAML: could not determine a constructor for the tag"),
        ("name: !!bool x", "c.yaml: is not valid YAML"),
        ("name: a\0", "c.yaml: is not valid YAML: unacceptable character"),
        ("1: x", "c.yaml:1: a key must be text; quote it"),
        ("", "c.yaml: is empty"),
        ("[1]", "c.yaml:1: file: expected a mapping, got a list"),
        ("nodes: []", "length >= 1"),
    ],
)  # fmt: skip
def test_a_mistaken_section_is_refused_in_one_message(section, message):
    rest = (
        GOOD.partition("\n")[2]
        if re.match("name: .|proxy|master|discovery: .*endpoints: .*:1'|discovery: .*}", section)
        else ""
    )
    refused(f"{section}\n{rest}", message)


def test_the_least_of_each_role_is_at_most_the_number_of_nodes():
    both = GOOD.replace("role: prefill", "role: both").replace("role: decode", "role: both")
    roles = "proxy: {roles: {auto: true, min_prefill: %d, min_decode: %d}}\n"
    assert load(roles % (1, 1) + both).by_role("both")
    refused(
        roles % (1, 2) + both,
        "proxy.roles: min_prefill and min_decode are 3 together; must be at most 2, the nodes that",
    )
    refused(
        roles % (3, 1) + both,
        "proxy.roles.min_prefill: 3: must be at most 2, the number of nodes that can do that",
    )


@pytest.mark.parametrize("flag", ["disable-log-stats", "disable_log_stats"])
def test_roles_that_follow_the_load_need_what_vllm_counts(flag):
    head, _, nodes = GOOD.replace("role: prefill", "role: both").partition("engine:")
    engine = (
        f"proxy: {{roles: {{auto: true}}}}\nengine: {{kind: vllm, model: m, args: {{{flag}: true}}}}\nnodes:"
    )
    refused(
        head + engine + nodes.partition("nodes:")[2],
        "vLLM gets disable-log-stats, and then reports no load to proxy.roles.auto; leave it out",
    )


LOCAL, DISK = "{kind: local, capacity: 1GiB}", "{kind: disk, path: /a, capacity: 1GiB}"


@pytest.mark.parametrize(
    "tiers, message",
    [
        ("", "cache.tiers: expected a list of length >= 1"),
        (f"{{kind: mooncake}}, {LOCAL}", "cache.tiers[1]: stands after {kind: mooncake}, which must be the last tier"),
        (f"{DISK}, {LOCAL}, {{kind: mooncake}}", "cache.tiers[1]: memory stands after a disk; the fastest tier comes first"),
        (f"{LOCAL}, {LOCAL}, {{kind: mooncake}}", "cache.tiers[1]: is the second local tier; use only one"),
        (f"{DISK}, {DISK}", "cache.tiers[1].path: '/a': is already the path of another tier"),
        (LOCAL, "c.yaml:3: cache.tiers: prefill and decode nodes share chunks through the pool; add {kind: mooncake}"),
        ("{kind: disk, path: here, capacity: 1GiB}", "cache.tiers[0].path: 'here': must be an absolute path"),
        ("{kind: local, capacity: 0}, {kind: mooncake}", "cache.tiers[0].capacity: 0: holds nothing"),
        ("{kind: local, capacity: 1GiB, polcy: lfu}", "cache.tiers[0].polcy: 'lfu': unknown key; did you mean policy?"),
        ("{kind: mooncake, replicas: 4}", "tiers[0].replicas: 4: each replica needs its own segment, and only 2 nodes"),
        ("{kind: mooncake, preferred_segment: 'h:5'}", "must be own, any or the host:port of a store node; there are: none"),
        ("{kind: mooncake, preferred_segment: here}", "'here': must be own, any or the host:port of a store node"),
        ("{kind: mooncake}, {kind: mooncake}", "cache.tiers[1]: stands after {kind: mooncake}, which must be the last tier"),
    ],
)  # fmt: skip
def test_a_mistake_among_the_tiers_is_refused_in_one_message(tiers, message):
    refused(GOOD.replace("chunk_size: 256", f"tiers: [{tiers}]"), message)


@pytest.mark.parametrize(
    "server, message",
    [
        ("host: 10.0.0.1", "is on 10.0.0.1, but must be on this node's host, 127.0.0.1: they share memory"),
        (f"url: 'ipc:///{'x' * 100}'", "nodes[4].url: 'ipc:///xxxx"),
        ("url: 'tcp://*:7000'", "nodes[4].url: 'tcp://*:7000': must be ipc:///ABSOLUTE/PATH"),
        ("url: ''", "nodes[2].segment_size: '1GiB': must be 0 or absent: the node's cache_server gives memory"),
    ],
)  # fmt: skip
def test_a_mistake_about_a_cache_server_is_refused_in_one_message(server, message):
    engine = "role: decode, cache_server: c" + (", segment_size: 1GiB" if server == "url: ''" else "")
    refused(
        GOOD.replace("role: decode", engine) + f"  - {{name: c, role: cache-server, {server}}}\n", message
    )


VLLM = """\
engine: {kind: vllm, model: m, args: {max-model-len: 8192, lora: [1, a]}}
nodes:
  - {name: master, role: master}
  - {name: d0, role: decode, env: {CUDA_VISIBLE_DEVICES: "0"}}
  - {name: p0, role: prefill, events_port: 5570}
"""


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("8192", "null", "c.yaml:1: engine.args.max-model-len: expected true or false, a whole number, a number, text, a list, got null"),
        ("[1, a]", "[1, []]", "c.yaml:1: engine.args.lora[1]: expected a whole number, a number, text, got a list"),
        ("max-model-len", "--max-model-len", "c.yaml:1: engine.args.--max-model-len: 8192: must be the name of a flag of `vllm serve`"),
        ('"0"', "0", "c.yaml:4: nodes[1].env.CUDA_VISIBLE_DEVICES: 0: expected text, got a whole number"),
        ("max-model-len: 8192", "data-parallel-size: two", "engine.args.data-parallel-size: 'two': must be a whole number, without quotes"),
        ("env: ", "args: {tensor_parallel_size: '2'}, env: ", "nodes[1].args.tensor_parallel_size: '2': must be a whole number"),
        ("max-model-len: 8192", "tensor-parallel-size: 1031", "the tensor-parallel sizes cut a chunk into 1031 parts; at most 1024"),
        ("env: ", "args: {served_model_name: x}, env: ", "nodes[1].args.served_model_name: 'x': is set by pd-cache itself"),
        ("max-model-len: 8192", "api-key: [a, b]", "engine.args.api-key: must be a single text: pd-cache passes it to vLLM in VLLM_API_KEY"),
        ("env: ", "args: {api_key: true}, env: ", "nodes[1].args.api_key: True: must be a single text"),
        ("5570", "65535", "nodes[2].events_port: 65535: must be at most 65534"),
        ("events_port: 5570", "events_port: 65533, args: {data-parallel-size: 2}", "events_port: 65533: must be at most 65532, because each"),
        ("events_port: 5570", "events_port: 50048, args: {data-parallel-size: 2}", "events_port: 50048: master already uses port 50051 of 127.0.0.1"),
        ("events_port: 5570", "events_port: 50050, args: {data-parallel-size: 2, data-parallel-rank: 1}", "events_port: 50050: master already uses port 50051"),
        ("5570", "50051", "nodes[2].events_port: 50051: master already uses this port"),
        ("max-model-len: 8192", "kv-events-config: '{}'", "nodes[2].events_port: 5570: sets vLLM's kv-events-config, which `args` sets, too"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_of_vllm_is_named_by_its_key(old, new, message):
    refused(VLLM.replace(old, new, 1), message)


def test_chunks_fit_the_blocks_and_shards_are_the_least_common_multiple_of_the_sizes_of_nodes():
    refused(
        "cache: {chunk_size: 256}\n" + VLLM.replace("max-model-len: 8192", "block-size: 96"),
        "must be a multiple of engine.args.block-size 96, e.g. 192 or 288",
    )
    text = VLLM.replace("max-model-len: 8192", "tensor-parallel-size: 4").replace(
        "env: ", "args: {tensor-parallel-size: 6}, env: "
    )
    assert load(text).shards == 12
    refused(
        "cache: {shards: 6}\n" + text,
        "cache.shards: 6: must be a multiple of the tensor-parallel size 4 of nodes[2]",
    )


def test_a_host_that_no_name_service_takes_is_refused():
    for host in ("a..b", "a" * 64, "a.", "a-.b", ".".join(["a" * 50] * 6)):
        refused(f"nodes: [{{name: m, role: master, host: {host}}}]\n", "nodes[0].host")


def test_a_date_is_text():
    assert load(GOOD + "connector: {revision: 2026-01-31}\n").connector.revision == "2026-01-31"


def test_keys_of_another_mapping_can_be_merged():
    text = GOOD.replace("{name: p0,", "&p {name: p0,").replace("{name: d0,", "{<<: *p, name: d0,")
    node = load(text).node("d0")
    assert node.segment_size == 512 << 20


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4")
    for file, message in (
        ("none.yaml", "No such file"),
        ("latin.yaml", "not UTF-8"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / file)


def test_a_file_with_changes_at_random_is_read_or_refused_in_lines_that_say_where():
    rng = random.Random(0)
    text = "\n".join(line.partition("#")[0] for line in CONFIGS[0].read_text().splitlines())
    words = [*re.findall(r"\S+", text), "010", "1e999", "[", "{", "*a", "&a", "null", "~", "'", "\x1b", "é"]
    messages, read = [], 0
    for _ in range(150):
        lines = [line.split(" ") for line in text.splitlines()]
        for _ in range(rng.randint(1, 2)):
            line = rng.choice([line for line in lines if "".join(line)])
            line[rng.choice([at for at, word in enumerate(line) if word])] = rng.choice(words)
        try:
            config = load("\n".join(map(" ".join, lines)))
        except ConfigError as error:
            messages += str(error).splitlines()
        else:
            assert load(dump_config(config)) == config
            read += 1
    assert read > 0
    assert len(messages) > 30
    assert [message for message in messages if not re.fullmatch(r"c\.yaml(:\d+)?: .{1,2900}", message)] == []


def test_settings_that_a_program_makes_are_checked_and_read_as_those_of_a_file():
    settings = NodeSettings(
        master="10.0.0.1:50051", segment_size="64Mi", transfer=TransferSettings(staging_size="1 GiB")
    )
    assert (settings.segment_size, settings.transfer.staging_size) == (64 << 20, 1 << 30)
    for make, message in (
        (
            lambda: NodeSettings(master="nonsense"),
            "master: 'nonsense': must be an address such as 10.0.0.1:50051",
        ),
        (lambda: Timeouts(exist_ms=0), "exist_ms: 0: Expected `int` >= 1"),
        (lambda: TransferSettings(protocol="udp"), "protocol: 'udp': Invalid enum value"),
        (lambda: TransferSettings(metadata="nonsense"), "metadata: 'nonsense' is neither"),
        (lambda: CacheConfig(tiers=()), "tiers: (): Expected `array` of length >= 1"),
        (lambda: StoreNode(name="s", segment_size=-1), "segment_size: -1: expected a size"),
        (lambda: msgspec.structs.replace(settings, master="x"), "master: 'x': must be an address"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


def test_segments_that_the_file_does_not_name_may_have_registered():
    nodes = "nodes: [{name: m, role: master}, {name: s, role: store, segment_size: 1GiB, port: 50052}]"
    tiers = "cache: {tiers: [{kind: mooncake, replicas: 2, preferred_segment: '10.0.0.9:50052'}]}\n"
    refused(tiers + nodes, "tiers[0].replicas: 2: each replica needs its own segment, and only 1 nodes")
    load("discovery: {kind: etcd, endpoints: ['127.0.0.1:2379']}\n" + tiers + nodes)
