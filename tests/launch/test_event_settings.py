"""Where nodes publish KV events: what the file says, what is refused, what vLLM and discovery are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launch.discovery import file_records
from launch.engines.vllm_command import command, environment
from pd_cache.cluster import ClusterConfig, PrefillNode, VllmEngineConfig, decode_record, load_config
from pd_cache.errors import ConfigError

VLLM = {"kind": "vllm", "model": "/models/m", "executable": "true"}
REFERENCE = {"kind": "reference", "model": {"name": "tiny", "random": {}}}


def config(
    folder: Path, engine: dict[str, object], master: int = 5560, prefill: int = 5570, host: str = "127.0.0.1"
) -> ClusterConfig:
    nodes = [
        {"name": "master", "role": "master", "host": host, "port": 5001, "metrics_port": 5002, "events_port": master},
        {"name": "store", "role": "store", "host": host, "segment_size": "16MiB"},
        {"name": "prefill", "role": "prefill", "host": host, "port": 5003, "events_port": prefill},
        {"name": "decode", "role": "decode", "host": host, "port": 5004},
    ]
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"engine": engine, "nodes": nodes}))
    return load_config(file)


def test_the_file_says_where_events_are_and_records_pass_it_on(tmp_path: Path) -> None:
    records = {record.name: decode_record(record.encode()) for record in file_records(config(tmp_path, VLLM))}
    assert (records["master"].events, records["master"].replays) == ("tcp://127.0.0.1:5560", "tcp://127.0.0.1:5561")
    assert str(records["prefill"].events).startswith("ipc:///"), "vLLM binds no single address"
    assert records["prefill"].replays == f"{records['prefill'].events}.replay"
    assert (records["decode"].events, records["store"].events) == (None, None)


def test_on_an_address_of_the_network_vllm_binds_the_port_of_all_and_others_connect_to_the_one(tmp_path: Path) -> None:
    made = config(tmp_path, VLLM, host="10.1.2.3")
    node = made.node("prefill")
    assert isinstance(node, PrefillNode) and isinstance(made.engine, VllmEngineConfig)  # noqa: PT018
    assert made.event_addresses(node) == ("tcp://10.1.2.3:5570", "tcp://10.1.2.3:5571")
    argv = command(made.engine, node, tmp_path, tmp_path, events=made.event_addresses(node))
    (flag,) = [one for one in argv if one.startswith("--kv-events-config=")]
    assert json.loads(flag.partition("=")[2]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5570",
        "replay_endpoint": "tcp://10.1.2.3:5571",
    }
    assert environment(made.engine, node, tmp_path)["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0"


def test_without_a_port_nothing_is_published(tmp_path: Path) -> None:
    made = config(tmp_path, VLLM, master=0, prefill=0)
    node = made.node("prefill")
    assert isinstance(node, PrefillNode) and isinstance(made.engine, VllmEngineConfig)  # noqa: PT018
    assert {record.events for record in file_records(made)} == {None}
    assert not [one for one in command(made.engine, node, tmp_path, tmp_path) if "kv-events" in one]
    assert "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES" not in environment(made.engine, node, tmp_path)


@pytest.mark.parametrize(
    ("engine", "master", "prefill", "why"),
    [
        (REFERENCE, 5560, 5570, "the reference engine has no prefix cache of its own"),
        ({**VLLM, "args": {"kv-events-config": "{}"}}, 5560, 5570, "use one of them"),
        (VLLM, 65535, 5570, "must be below 65535"),
        (VLLM, 5560, 5561, "master already uses this port"),
        (VLLM, 5002, 5570, "already uses this port"),
        (VLLM, 5560, 5004, "already uses this port"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, engine: dict[str, object], master: int, prefill: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        config(tmp_path, engine, master, prefill)


@pytest.mark.parametrize("address", ["tcp://host", "udp://h:1", "ipc://relative", "tcp://h:1\n", "inproc://x", "x"])
def test_a_record_with_no_address_of_events_is_refused(tmp_path: Path, address: str) -> None:
    (record,) = [one for one in file_records(config(tmp_path, VLLM)) if one.name == "master"]
    raw = json.loads(record.encode()) | {"events": address}
    with pytest.raises(Exception, match="not the record of a node"):
        decode_record(json.dumps(raw).encode())
