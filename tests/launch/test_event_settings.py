"""Where nodes publish KV events: what the file says, what is refused, what vLLM and discovery are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launch.discovery import file_records
from launch.engines.vllm_command import command
from pd_cache.cluster import ClusterConfig, PrefillNode, VllmEngineConfig, decode_record, load_config
from pd_cache.errors import ConfigError

VLLM = {"kind": "vllm", "model": "/models/m", "executable": "true"}
REFERENCE = {"kind": "reference", "model": {"name": "tiny", "random": {}}}


def config(folder: Path, engine: dict[str, object], prefill: int = 5570, host: str = "127.0.0.1") -> ClusterConfig:
    nodes = [
        {"name": "master", "role": "master", "host": host, "port": 5001, "metrics_port": 5002},
        {"name": "store", "role": "store", "host": host, "segment_size": "16MiB"},
        {"name": "prefill", "role": "prefill", "host": host, "port": 5003, "events_port": prefill},
        {"name": "decode", "role": "decode", "host": host, "port": 5004},
    ]
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"engine": engine, "nodes": nodes}))
    return load_config(file)


def test_the_file_says_where_events_are_and_records_pass_it_on(tmp_path: Path) -> None:
    records = {record.name: decode_record(record.encode()) for record in file_records(config(tmp_path, VLLM))}
    assert str(records["prefill"].events).startswith("ipc:///"), "vLLM binds no single address"
    assert records["prefill"].replays == f"{records['prefill'].events}.replay"
    assert {records[name].events for name in ("master", "decode", "store")} == {None}


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


def test_without_a_port_nothing_is_published(tmp_path: Path) -> None:
    made = config(tmp_path, VLLM, prefill=0)
    node = made.node("prefill")
    assert isinstance(node, PrefillNode) and isinstance(made.engine, VllmEngineConfig)  # noqa: PT018
    assert {record.events for record in file_records(made)} == {None}
    assert not [one for one in command(made.engine, node, tmp_path, tmp_path) if "kv-events" in one]


@pytest.mark.parametrize(
    ("engine", "prefill", "why"),
    [
        (REFERENCE, 5570, "the reference engine has no prefix cache of its own"),
        ({**VLLM, "args": {"kv-events-config": "{}"}}, 5570, "use one of them"),
        (VLLM, 65535, "must be below 65535"),
        (VLLM, 5001, "master already uses this port"),
        (VLLM, 5000, "master already uses this port"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, engine: dict[str, object], prefill: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(tmp_path, engine, prefill)
