"""Discovery's pure parts: records, what differs between namespaces, and views through outages."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.discovery.directory import describe_node
from launch.discovery.membership import Membership
from pd_cache.cluster import (
    About,
    CacheServerNode,
    ClusterConfig,
    MasterNode,
    ModelConfig,
    NodeRecord,
    PrefillNode,
    RandomModel,
    RecordError,
    ReferenceEngineConfig,
    VllmEngineConfig,
    decode_record,
    differences,
)
from tests.support.proxy import NAMESPACE


def node(name, namespace=None):
    told = namespace.described() if namespace else {}
    return NodeRecord(name=name, role="prefill", address="http://10.0.0.2:8100", **told)


# --- records ------------------------------------------------------------------------------------------------


def engine_record(name, *namespaces):
    config = ClusterConfig(nodes=(PrefillNode(name=name),))
    about = About(**namespaces[0].described(namespaces[1:]))
    return describe_node(config, config.nodes[0], "http://h:1").telling(about)


WINDOW, WIDER = (
    msgspec.structs.replace(NAMESPACE, group="1-3", keeps=f"the last {size} tokens", tail=1)
    for size in (256, 512)
)


def test_a_record_with_the_namespaces_of_all_groups_of_layers_is_read_back_as_it_was_written():
    record = engine_record("a", NAMESPACE, WINDOW)
    read = decode_record(record.encode())
    assert read.encode() == record.encode()
    assert read.cache_namespaces == (NAMESPACE, WINDOW)
    unknown = msgspec.structs.replace(record, further=({"group": "1-3"},))
    assert unknown.cache_namespaces == (), "a lookup that asks for some groups only would promise too much"


@pytest.mark.parametrize(
    "engine, model, capacity",
    [
        (
            ReferenceEngineConfig(model=ModelConfig(name="tiny", random=RandomModel()), num_blocks=1024),
            "tiny",
            (16384, 8192),
        ),
        (VllmEngineConfig(model="/models/llama"), "/models/llama", (0, 0)),
        (VllmEngineConfig(model="/models/llama", name="demo"), "demo", (0, 0)),
    ],
    ids=["reference", "vllm", "vllm with a name"],
)
def test_a_record_tells_what_clients_write_into_model_and_what_the_reference_engine_has_room_for(
    engine, model, capacity
):
    config = ClusterConfig(nodes=(MasterNode(name="m"), PrefillNode(name="p")), engine=engine)
    record = describe_node(config, config.nodes[1], "http://127.0.0.1:1")
    told = record.capacity
    assert (record.model, (told.kv_tokens, told.max_model_len), record.fingerprint) == (model, capacity, None)


def test_a_cache_servers_record_tells_its_socket_its_metrics_and_its_memory_and_its_engines_give_none():
    nodes = (
        MasterNode(name="m", lease_ttl_ms=6000),
        CacheServerNode(name="c", metrics_port=9100, segment_size="1GiB"),
        PrefillNode(name="p", cache_server="c"),
    )
    config = ClusterConfig(nodes=nodes)
    address = "ipc:///tmp/pd-cache-0/test-50051-c.sock"
    server = decode_record(describe_node(config, nodes[1], address).encode())
    assert (server.address, server.metrics) == (address, "http://127.0.0.1:9100")
    assert server.capacity.segment_bytes == 1 << 30
    assert describe_node(config, nodes[2], "http://127.0.0.1:1").capacity.segment_bytes == 0
    master = decode_record(describe_node(config, nodes[0], "127.0.0.1:50051").encode())
    assert (master.metrics, master.lease_ttl_ms) == ("http://127.0.0.1:9003", 6000)


def test_what_a_newer_version_adds_is_ignored():
    raw = msgspec.json.encode({**msgspec.to_builtins(node("a", NAMESPACE)), "later": 1})
    assert decode_record(raw).name == "a"
    newer = {**msgspec.to_builtins(NAMESPACE), "codec": "int4"}
    assert msgspec.structs.replace(node("a"), namespace=newer, fingerprint="0" * 16).cache_namespaces == ()
    for address in ("h:1", "http://h:1", "ipc:///run/x"):
        raw = msgspec.json.encode({"name": "a", "role": "later", "address": address})
        assert decode_record(raw).address == address


@pytest.mark.parametrize(
    "fields, told",
    [
        (b"", "not the record"),
        (b"[" * 40_000, "not the record"),
        ({"address": None}, "Expected `str`"),
        ({"address": "http://h:1/path"}, "matching regex"),
        ({"address": "file:///etc/passwd"}, "matching regex"),
        ({"address": "http://h:1\n"}, "matching regex"),
        ({"address": "ipc:///etc"}, "the address of a prefill is http"),
        ({"role": "master", "address": "h:0"}, "port 0"),
        ({"role": "master"}, "the address of a master is host:port"),
        ({"role": "store", "address": "http://h:1"}, "the address of a store is host:port"),
        ({"role": "cache-server"}, "the address of a cache-server is ipc"),
        ({"metrics": "http://h:70000"}, "matching regex"),
        ({"lease_ttl_ms": 1e300}, "lease_ttl_ms"),
        ({"capacity": {"kv_tokens": 1 << 63}}, "kv_tok"),
        ({"model": "\x1b[2J"}, "matching regex"),
        ({"master": "a\nb"}, "matching regex"),
        ({"events": "inproc://x"}, "matching regex"),
    ],
)
def test_what_is_no_record_is_refused_in_words(fields, told):
    good = {"name": "a", "role": "prefill", "address": "http://h:1"}
    raw = fields if isinstance(fields, bytes) else msgspec.json.encode(good | fields)
    with pytest.raises(RecordError, match=told):
        decode_record(raw)


# --- namespaces that differ ---------------------------------------------------------------------------------


USUAL = [engine_record(name, NAMESPACE, WINDOW) for name in "ab"]
CANNOT_LOAD = "neither node can load what the other stores for these layers"
DRAFTER = msgspec.structs.replace(NAMESPACE, group="4", keeps="every token, for drafts of m", ahead=1)


@pytest.mark.parametrize(
    "others, told",
    [
        ([], ""),
        ([NodeRecord(name="proxy", role="proxy", address="http://h:2")], ""),
        (
            [engine_record("c", msgspec.structs.replace(NAMESPACE, chunk_size=512))],
            "chunk_size 512 here, 256 on a: these nodes never share hits",
        ),
        (
            [engine_record("c", msgspec.structs.replace(NAMESPACE, kv_dtype="float16", hash_seed="x"))],
            "hash_seed x here, empty on a, kv_dtype float16 here, bfloat16 on a: these nodes never share hits",
        ),
        (
            [engine_record("c", NAMESPACE, WIDER)],
            f"layers 1-3 the last 512 tokens here, the last 256 tokens on a: {CANNOT_LOAD}",
        ),
        (
            [engine_record("c", NAMESPACE, WINDOW, DRAFTER)],
            f"layers 4 every token, for drafts of m here, not known on a: {CANNOT_LOAD}",
        ),
    ],
    ids=["none", "no cache", "a field", "two fields", "a window", "a drafter"],
)
def test_a_node_that_differs_is_told_in_what(others, told):
    assert differences([*USUAL, *others]) == ({"c": told} if told else {})


def test_a_node_whose_master_has_moved_is_told_to_be_started_again():
    old, new = "10.0.0.1:50051", "10.0.0.1:50052"
    expected = {"a": old, "b": new, "c": "etcd://10.0.0.1:2379/c", "d": None}
    nodes = [msgspec.structs.replace(node(name), master=master) for name, master in expected.items()]
    assert differences(nodes) == {}, "nobody knows where the master is"
    told = f"expects the master at {old}, but it registered at {new}: the node shares no hit until it is started again"
    assert differences([*nodes, NodeRecord(name="m", role="master", address=new)]) == {"a": told}


# --- views --------------------------------------------------------------------------------------------------


def names(view):
    return [record.name for record in view.nodes]


HISTORIES = {
    "nodes come and go": "0 sync ab: ab, 1 put c: abc, 1 delete a: bc, 2 sync c: c",
    "an outage changes nothing but the mark": "0 sync a: a, 10 outage: a!, 999 expire: a!",
    "a node that is missing after an outage has the grace to come back":
        "0 sync ab: ab, 10 outage: ab!, 20 sync: a?b?, 21 put a: ab?, 24.9 expire: ab?, 25 expire: a",
    "leases that run out during or right after an outage are doubted, too":
        "0 sync ab: ab, 10 outage: ab!, 11 delete a: a?b!, 12 sync b: a?b, 13 delete b: a?b?, 14 put b: a?b, 17 expire: b, 18 delete b:",
    "a doubted node that vanishes when the grace is over is gone once":
        "0 sync a: a, 1 outage: a!, 2 sync: a?, 7 delete a:, 8 expire:",
    "a second outage stops the clock":
        "0 sync a: a, 1 outage: a!, 2 sync: a?, 3 outage: a?!, 99 expire: a?!, 100 sync: a?, 104 expire: a?, 105 expire:",
}  # fmt: skip
"""Events with their time, and the view after each: `?` is doubted, `!` at the end an outage."""


@pytest.mark.parametrize("events", HISTORIES.values(), ids=HISTORIES)
def test_the_view_after_each_event(events):
    members = Membership(grace_s=5)
    for step in events.split(","):
        event, expected = step.split(":")
        now, what, *nodes = event.split()
        happen(members, what, "".join(nodes), float(now))
        assert shown(members.view()) == expected.strip(), f"after {event}"


def happen(members, what, nodes, now):
    if what == "outage":
        members.outage(now)
    elif what == "sync":
        members.sync([node(name) for name in nodes], now)
    elif what == "put":
        members.put(node(nodes))
    elif what == "delete":
        members.delete(nodes, now)
    else:
        members.expire(now)


def shown(view):
    text = "".join(f"{name}{'?' if name in view.doubted else ''}" for name in names(view))
    return text + ("" if view.stale_since is None else "!")


def test_the_nodes_of_the_file_are_believed_until_the_first_list():
    members = Membership(5, [node("a"), node("b")])
    assert shown(members.view()) == "ab"
    members.sync([node("b")], 0)
    assert shown(members.view()) == "b"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 4),
            st.sampled_from(["outage", "put", "delete", "expire"]),
            st.sampled_from("abc"),
        )
        | st.tuples(st.floats(0, 4), st.just("sync"), st.sets(st.sampled_from("abc")).map("".join))
    )
)
def test_the_view_is_the_truth_once_the_source_has_answered_for_long_enough(events):
    members, truth, now = Membership(grace_s=5), set(), 0.0
    for passed, what, nodes in events:
        now += passed
        before = set(names(members.view()))
        happen(members, what, nodes, now)
        truth = {"sync": set(nodes), "put": truth | {nodes}, "delete": truth - {nodes}}.get(what, truth)
        view = members.view()
        assert view.doubted <= set(names(view))
        if view.stale_since is not None:
            assert before <= set(names(view)), "no node is dropped while the source is away"
        assert truth <= set(names(view))
    happen(members, "sync", "".join(truth), now)
    members.expire(now + 5)
    assert (set(names(members.view())), members.view().doubted) == (truth, frozenset())
