"""Every parser of what others wrote, with seeds and with what a value that it lets through must be like."""

import enum
import io
import json
import math
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
from rich.console import Console

from launch.discovery import View
from launch.discovery.directory import _master
from launch.discovery.etcd import _read
from launch.engines.reference.protocol import parse_completion
from launch.openai import ApiError
from launch.operate.status import as_dict, status_table
from launch.operate.top import plain
from launch.proxy.bodies import Completion, HandedOver, read_handoff, read_models, read_tokens
from launch.proxy.events import KnownRank, read_query
from launch.proxy.metrics import read_report
from launch.proxy.routing.prefixes import PromptNamer
from launch.watch.figures import NodeHistory, read_node, read_samples
from launch.watch.state import ClusterStatus, NodeStatus, WatchedNodes
from pd_cache import events as kv_events
from pd_cache.chunks import MAX_SHARDS, BlockHasher, Namespace, describe_hashes, token_bytes
from pd_cache.cluster import (
    About,
    NodeRecord,
    RecordError,
    decode_record,
    differences,
    read_about,
)
from pd_cache.cluster.machine import host_of
from pd_cache.decoding import UndecodableError
from pd_cache.events.subscriber import StreamOrder
from pd_cache.handoff import Announcement, BadParams, PrefillWork, read_params, write_params
from pd_cache.layout import checksum
from pd_cache.reasons import Found, Loaded
from pd_cache.server import protocol
from pd_cache.tiers import memory
from transfer.lookup_rpc import UnexpectedAnswerError, read_answer


class Format(enum.Enum):
    """What a target's seeds are made of, which decides how they are changed."""

    JSON = "json"
    MSGPACK = "msgpack"
    BYTES = "bytes"


_JSON, _MSGPACK, _BYTES = Format.JSON, Format.MSGPACK, Format.BYTES


@dataclass(frozen=True)
class Target:
    """One parser of what others wrote."""

    name: str
    parse: Callable
    """Tries one input. An AssertionError of it is a value that breaks its own promises."""
    refusals: tuple
    """What the parser documents that it raises."""
    seeds: tuple
    """Valid inputs."""
    format: Format
    header: int = 0
    """Bytes of each seed before what is in `format`."""

    def accepts(self, data):
        """Returns whether an input is accepted, and not refused as documented. Raises whatever else the
        parser raises."""
        try:
            self.parse(data)
        except self.refusals:
            return False
        return True


TOKEN = uuid.UUID(int=7).hex
NAMESPACE = Namespace(
    model="m:0123", kv_dtype="bfloat16", layout="heads8.block16.bytes256x2", layers=32, block_size=16, page_bytes=4096,
    chunk_size=256, shards=2, hash_mode="blocks", hash_seed=describe_hashes("sha256", "0", ""),
)  # fmt: skip


def _json(value):
    return json.dumps(value).encode()


def _read_json(text):
    """Numbers stay text: Python reads none of more than 4300 digits."""
    return json.loads(text, parse_int=str)


# --- the cache server's messages ----------------------------------------------------------------------------

_NAMES = (b"a" * 16, b"b" * 16)
_MOVE = ("session", _NAMES, (1, 2, -1), 5, 7, 1000)
REQUESTS = (
    protocol.Hello(
        TOKEN,
        "worker",
        protocol.EngineIdentity(
            model="m",
            block_size=16,
            world_size=2,
            rank=1,
            hash_mode="blocks",
            hash_seed="sha256:0:",
            shards_per_rank=2,
        ),
    ),
    protocol.Register(
        (protocol.CpuStorage(4096), protocol.CudaStorage(4096, "u", b"h", 0, b"r", 0, b"e", True)),
        (protocol.TensorView(0, 0, (2, 3), (3, 1), "bfloat16"),),
    ),
    protocol.Unregister(),
    protocol.Lookup("session", _NAMES, 1),
    protocol.Store(*_MOVE),
    protocol.Retrieve(*_MOVE, b"event"),
    protocol.EndSession("session"),
)
_ANSWERS = (
    protocol.Welcome(256, "tokens", "", True, True),
    protocol.Done(),
    Found(3, 3),
    protocol.Stored(b"\x00\x01\x02"),
    Loaded(4),
    protocol.Refused("busy", "later"),
)


def _server_request(data):
    number, request = protocol.decode_request(data)
    assert protocol.decode_request(protocol.encode(number, request)) == (number, request)
    if isinstance(request, protocol.Hello):
        assert request.engine.rank < request.engine.world_size
        assert request.engine.world_size * request.engine.shards_per_rank <= MAX_SHARDS
    if isinstance(request, (protocol.Lookup, protocol.Store, protocol.Retrieve)):
        assert len(request.names) <= protocol.MAX_CHUNKS
        assert all(8 <= len(name) <= 16 for name in request.names)


def _server_answer(data):
    number, answer = protocol.decode_answer(data)
    if answer == answer:  # not a number is not equal to itself
        assert protocol.decode_answer(protocol.encode(number, answer)) == (number, answer)


# --- objects and files --------------------------------------------------------------------------------------

_KEY, _PAYLOAD = "pdc1/0123456789abcdef/0/" + "a" * 32, b"0123456789" * 20


def _sealed():
    buffer = bytearray(len(_PAYLOAD) + memory.TRAILER_BYTES)
    buffer[: len(_PAYLOAD)] = _PAYLOAD
    memory.seal(_KEY, memoryview(buffer), len(_PAYLOAD))
    return bytes(buffer)


def _object(data):
    found = memory.inspect(_KEY, memoryview(data), len(_PAYLOAD))
    intact = not isinstance(found, memory.Damage) and checksum(memoryview(data)[: len(_PAYLOAD)]) == found
    assert intact == (data == _SEALED)


_SEALED = _sealed()


def _manifest(data):
    _believed(Namespace.read(data))


def _believed(namespace):
    """What the proxy does with a namespace that it read."""
    assert 1 <= namespace.shards <= MAX_SHARDS
    assert min(namespace.layers, namespace.block_size, namespace.page_bytes, namespace.chunk_size) >= 1
    assert Namespace.read(namespace.manifest()) == namespace
    BlockHasher(namespace.block_size, describe_hashes("sha256", "0", ""), ["0"]).hashes(range(100))


# --- discovery ----------------------------------------------------------------------------------------------


def _record(name, role, address, **fields):
    return NodeRecord(name=name, role=role, address=address, **fields)


_RECORDS = (
    _record(
        "a", "prefill", "http://10.0.0.2:8100", model="m", instance="1", version="0.1", master="10.0.0.1:50051",
        **NAMESPACE.described(),
    ),
    _record("a", "master", "10.0.0.1:50051", metrics="http://10.0.0.1:9003", lease_ttl_ms=5000),
    _record("a", "cache-server", "ipc:///run/pd-cache/x.sock", metrics="http://10.0.0.1:9100"),
    _record("a", "store", "10.0.0.3:1234"),
    _record("a", "bench-echo", "10.0.0.3:1234"),
)  # fmt: skip


def _etcd_record(data):
    _used(decode_record(data))


def _etcd_pair(data):
    found = _read(SimpleNamespace(key=b"/pd-cache/c/nodes/" + data[:8], value=data[8:]), "/pd-cache/c/nodes/")
    if found is not None:
        _used(found)


def _used(record):
    """What nodes do with a record."""
    assert decode_record(record.encode()) == record
    if record.role == "master":
        assert 1 <= _master(record).port <= 65535
    if record.role in ("prefill", "decode", "proxy"):
        assert host_of(record.address)
    usual = _RECORDS[0]
    for told in differences([usual, msgspec.structs.replace(usual, name="b"), record]).values():
        assert told.isprintable()
    for namespace in record.cache_namespaces:
        _believed(namespace)
    _show(NodeStatus(record=record))


def _health(data):
    told = read_about(data)
    assert isinstance(told, About)
    _show(NodeStatus(record=_record("a", "decode", "http://h:1", version=told.version, fingerprint=told.fingerprint, namespace=told.namespace)))  # fmt: skip


_CONSOLE = Console(file=io.StringIO(), width=200)


def _show(row):
    status = ClusterStatus("etcd", True, [row])
    table, shown = status_table(status), msgspec.json.encode(as_dict(status))
    json.loads(shown)
    if zlib.crc32(shown) % 32 == 0:  # to draw it takes a hundred times as long as to read
        _CONSOLE.print(table)


_METRICS = b"""# HELP pd_cache_tokens_total Tokens.
# TYPE pd_cache_tokens_total counter
pd_cache_tokens_total{op="lookup",outcome="requested"} 10.0
pd_cache_tokens_total{op="lookup",outcome="hit"} 5.0
pd_cache_tier_bytes{tier="disk"} 1e9
pd_cache_troubles_total{op="store",reason="no_space"} 3.0
vllm:num_requests_running{engine="0"} 2.0
process_start_time_seconds 1.7e9
"""
_ODD_METRICS = b"""pd_cache_tokens_total{op="lookup",outcome="requested"} NaN
pd_cache_tier_bytes{tier="disk"} -Inf
vllm:num_requests_running{engine="0"} +Inf
vllm:num_requests_waiting 1e308
process_start_time_seconds 1e300
"""


_RATED = b"""pd_cache_prompt_tokens_total{source="loaded"} 10.0
pd_cache_prompt_tokens_total{source="computed"} 1e18
pd_cache_tier_hits_total{tier="local"} 3.0
pd_cache_tier_evictions_total{tier="disk-1"} 7
pd_cache_op_seconds_bucket{le="0.1",op="lookup"} 5
pd_cache_op_seconds_bucket{le="+Inf",op="lookup"} 3
pd_cache_missed_tokens_total{reason="evicted\\n\\"x"} 5
pd_cache_staging_bytes 0
pd_cache_pool_up 0
"""


_WATCHED = tuple(msgspec.structs.replace(record, name=record.role) for record in _RECORDS)
_OLDER = read_node(read_samples(_METRICS.decode()), 0.0)


def _metrics(data):
    """What `status`, and after those of a moment before `top` and `/ui`, make of a node's metrics."""
    reading = read_node(read_samples(data.decode(errors="replace")), 2.0)
    row = NodeStatus(record=_RECORDS[0], reading=reading)
    assert row.in_flight is None or row.in_flight >= 0
    _show(row)
    history = NodeHistory()
    history.add(_OLDER)
    history.add(reading)
    rates = history.rates(2.0)
    assert all(0 <= value < math.inf for value in (rates.load, rates.store, rates.lookups, rates.evictions))
    assert rates.hit is None or 0 <= rates.hit <= 1
    assert all(0 <= low <= high for low, high in rates.quantiles.values())
    watched = WatchedNodes()
    watched.update(View(_WATCHED))
    for at, known in ((0.0, _OLDER), (2.0, reading)):
        watched.take([NodeStatus(record=record, at=at, reading=known) for record in _WATCHED])
    for width in (80, 200):
        console = Console(file=io.StringIO(), width=width)
        console.print(plain(watched.status(2.0), "name", width))
        lines = console.file.getvalue().split("\n")
        assert all(line.isprintable() and len(line) <= width for line in lines)


# --- HTTP: the proxy, and the reference engine --------------------------------------------------------------

_BODIES = (
    b'{"model": "m", "prompt": "hello", "max_tokens": 4, "stream": true, "cache_salt": "s", "stream_options": {"include_usage": true}}',
    b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "top_p": 1, "seed": 3, "ignore_eos": true}',
    _json({"model": "m", "prompt": ["text"], "kv_transfer_params": write_params(Announcement(prefix_tokens=4, prefill=PrefillWork(1, 2)))}),
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 4}',
)  # fmt: skip


def _completion(field):
    def parse(data):
        body = Completion(data, chat=field == "messages")
        prompt = body.prompt()
        assert prompt.tokens >= 1
        assert len(prompt.blocks) <= len(data) // 2048
        body.plain()
        tokens = body.token_ids()
        if tokens is not None:
            token_bytes(tokens)
        model = body.model()
        if model is not None:
            model.encode()
        if body.cache_salt is not None:
            body.cache_salt.encode()
        prefill = _read_json(body.for_prefill())
        assert (prefill["max_tokens"], prefill["stream"]) == ("1", False)
        media = {"media_hashed": True} if body._media else {}
        assert prefill["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            **media,
        }
        assert _read_json(body.for_decode(None)).get("kv_transfer_params", {}) == media
        _read_json(body.for_tokenize())
        assert _read_json(body.for_decode(HandedOver(msgspec.Raw(b'{"a": "b"}'))))["kv_transfer_params"] == {
            "a": "b"
        }

    return parse


def _tokens(data):
    tokens = read_tokens(data).ids
    token_bytes(tokens)
    BlockHasher(16, describe_hashes("sha256", "0", ""), ["0"]).hashes(tokens)


def _query(data):
    query = read_query(data)
    named = PromptNamer(NAMESPACE, ["0"]).name(query.token_ids, query.cache_salt)
    assert len(named.names) == len(query.token_ids) // NAMESPACE.chunk_size


def _models(data):
    _read_json(msgspec.json.encode({"object": "list", "data": read_models(data)}))


def _handed_over(data):
    handoff = read_handoff(data)
    _read_json(Completion(_BODIES[0]).for_decode(handoff))


def _reference(data):
    request = parse_completion(data, "m")
    assert request.fields.max_tokens >= 1
    assert request.prompt
    assert 0 <= request.announced.prefix_tokens < 2**31
    if isinstance(request.prompt, str):
        request.prompt.encode()
    if request.fields.cache_salt is not None:
        request.fields.cache_salt.encode()


def _params(data):
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise BadParams("", "no JSON") from None
    handoff = read_params(given)
    if handoff.announced is not None:
        assert 0 <= handoff.announced.prefix_tokens < 2**31
        assert handoff.announced.namespace.isprintable()
        assert read_params(write_params(handoff.announced)).announced == handoff.announced


# --- the master ---------------------------------------------------------------------------------------------

_EXISTS = bytes.fromhex("15000000 07000000 11000000 00000000 5d8c5f2a 04 84870b0100 03 0101 0100 0101")
"""Mooncake's answer to request 7, which was about three keys."""


def _master_answer(data):
    verdicts = read_answer(data, 7, 3)
    assert not verdicts or (len(verdicts) == 3 and set(verdicts) <= {0, 1})


# --- all of them --------------------------------------------------------------------------------------------


def _encoded(found):
    return tuple(protocol.encode(7, message) for message in found)


_PACK = msgspec.msgpack.encode
# --- KV events ----------------------------------------------------------------------------------------------

_EVENTS = _PACK(
    (
        1.5,
        [
            kv_events.StoredEvent([1, b"n" * 16], 16, medium="GPU", group_idx=0, kv_cache_spec_kind="mla_attention"),
            kv_events.StoredEvent([b"n" * 32], block_size=256, medium="STORAGE"),
            kv_events.RemovedEvent([1, b"n" * 16], "STORAGE"),
            kv_events.ClearedEvent(),
        ],
    )
)  # fmt: skip


def _kv_events(data):
    batch = kv_events.read_batch(data)
    order, cache = StreamOrder(), KnownRank(lambda: 100 - len(cache))
    steps = [*order.live(0, batch), *order.replayed(2, batch), *order.replay_ended(whole=True)]
    cache.apply(steps)
    assert len(cache) <= 100


TARGETS = {
    target.name: target
    for target in (
        Target("server-request", _server_request, (protocol.FrameError,), _encoded(REQUESTS), _MSGPACK, 16),
        Target("server-answer", _server_answer, (protocol.FrameError,), _encoded(_ANSWERS), _MSGPACK, 16),
        Target("kv-events", _kv_events, (UndecodableError,), (_EVENTS,), _MSGPACK),
        Target("object", _object, (), (_SEALED,), _BYTES),
        Target("manifest", _manifest, (ValueError,), (NAMESPACE.manifest(),), _JSON),
        Target("etcd-record", _etcd_record, (RecordError,), tuple(record.encode() for record in _RECORDS), _JSON),
        Target("etcd-pair", _etcd_pair, (), (b"a       " + _RECORDS[0].encode(), b"\xff\n" + _RECORDS[1].encode()), _BYTES),
        Target("health", _health, (), (_json({"version": "0.1", **NAMESPACE.described()}),), _JSON),
        Target("metrics", _metrics, (ValueError,), (_METRICS, _ODD_METRICS, _RATED), _BYTES),
        Target("completion", _completion("prompt"), (ApiError,), _BODIES[:3], _JSON),
        Target("chat", _completion("messages"), (ApiError,), _BODIES[3:], _JSON),
        Target(
            "query", _query, (ApiError,),
            (
                _json({"model": "m", "token_ids": list(range(600)), "cache_salt": "tenant", "instance_id": "decode-0"}),
                b'{"token_ids": [], "lora_name": "a", "lora_id": -1, "tenant_id": "default", "block_size": 16}',
            ),
            _JSON,
        ),
        Target("tokenized", _tokens, (ValueError,), (_json({"count": 3, "tokens": list(range(40))}),), _JSON),
        Target("models", _models, (ValueError,), (b'{"object": "list", "data": [{"id": "m"}, {"id": "n"}]}',), _JSON),
        Target(
            "prefill-answer", _handed_over, (ValueError,),
            (b'{"id": "x", "kv_transfer_params": {"do_remote_prefill": true}}',), _JSON,
        ),
        Target(
            "report", lambda data: bool(read_report(data)) and None, (),
            (b'{"pd_cache": {"report": {"asked": 3, "computed": 3, "reason": "evicted"}, "prefill": null}}',), _BYTES,
        ),
        Target("reference-request", _reference, (ApiError,), _BODIES[:3], _JSON),
        Target(
            "transfer-params", _params, (BadParams,),
            (
                _json(write_params(Announcement(prefix_tokens=4096, namespace="0" * 16, prefill=PrefillWork(1, 2)))),
                b'{"do_remote_decode": true, "do_remote_prefill": false}',
            ),
            _JSON,
        ),
        Target("master-answer", _master_answer, (UnexpectedAnswerError,), (_EXISTS,), _BYTES),
    )
}  # fmt: skip
