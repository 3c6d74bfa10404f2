"""How `vllm serve` is called for a node of the file. vLLM itself: tests/vllm."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from launch.discovery import file_records
from launch.engines.vllm_command import command, environment
from launch.supervise import Child, Program, RoleError
from pd_cache.cluster import (
    Argument,
    ClusterConfig,
    DecodeNode,
    MasterNode,
    PrefillNode,
    VllmEngineConfig,
    decode_record,
)
from tests.support.waiting import wait_for


@pytest.fixture
def executable(tmp_path: Path) -> str:
    file = tmp_path / "vllm"
    file.write_text("#!/bin/sh\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_flags_are_those_of_the_engine_and_over_them_those_of_the_node(executable: str, tmp_path: Path) -> None:
    engine = VllmEngineConfig(
        model="/models/llama",
        name="demo",
        executable=executable,
        args={"max_model_len": 8192, "enforce-eager": True, "enable-prefix-caching": False, "cudagraph-sizes": [1, 2]},
    )
    node = DecodeNode(name="decode-0", port=8100, args={"max-model-len": 4096})
    argv = command(engine, node, tmp_path / "c.yaml", tmp_path / "n")
    assert argv[:3] == [executable, "serve", "/models/llama"]
    assert [flag for flag in argv if flag.startswith("--max-model-len")] == ["--max-model-len=4096"]
    assert {"--enforce-eager", "--no-enable-prefix-caching", "--port=8100", "--served-model-name=demo"} <= set(argv)
    assert argv[argv.index("--cudagraph-sizes") :][:3] == ["--cudagraph-sizes", "1", "2"]


@pytest.mark.parametrize(("node", "role"), [(PrefillNode(name="a"), "kv_both"), (DecodeNode(name="a"), "kv_consumer")])
def test_the_connector_is_told_its_file_node_and_role(node, role, executable, tmp_path):
    argv = command(VllmEngineConfig(model="m", executable=executable), node, tmp_path / "c.yaml", tmp_path / "n")
    given = json.loads(next(flag for flag in argv if flag.startswith("--kv-transfer-config=")).partition("=")[2])
    extra = {"config_file": str(tmp_path / "c.yaml"), "node": "a", "namespace_file": str(tmp_path / "n")}
    assert (given["kv_connector"], given["kv_role"], given["kv_connector_extra_config"]) == (
        "PdCacheConnector",
        role,
        extra,
    )
    assert given["kv_load_failure_policy"] == "recompute"
    assert "--middleware=pd_cache.vllm.files.TellCache" in argv


def test_vllm_binds_the_port_of_its_events_on_all_addresses_or_a_socket_and_records_say_where_others_find_them(
    executable: str, tmp_path: Path
) -> None:
    engine = VllmEngineConfig(model="m", executable=executable)
    for host, port, events, bound in (
        ("10.1.2.3", 5570, ("tcp://10.1.2.3:5570", "tcp://10.1.2.3:5571"), ("tcp://*:5570", "tcp://10.1.2.3:5571")),
        ("127.0.0.1", 5570, None, None),
        ("127.0.0.1", 0, (None, None), ()),
    ):
        node = PrefillNode(name="p", host=host, port=5003, events_port=port)
        config = ClusterConfig(nodes=(MasterNode(name="m"), node), engine=engine)
        record = decode_record(file_records(config)[1].encode())
        if events is None:  # vLLM binds no single address
            assert str(record.events).startswith("ipc:///")
            events = bound = (str(record.events), f"{record.events}.replay")
        assert (record.events, record.replays) == events
        argv = command(engine, node, tmp_path, tmp_path, events=config.event_addresses(node))
        told = [json.loads(one.partition("=")[2]) for one in argv if one.startswith("--kv-events-config=")]
        expected = {"enable_kv_cache_events": True, "publisher": "zmq"}
        assert told == ([{**expected, "endpoint": bound[0], "replay_endpoint": bound[1]}] if bound else [])


SHOW = """\
#!/bin/sh
tr '\\0' '\\n' < /proc/self/cmdline
tr '\\0' '\\n' < "/proc/$PPID/cmdline"
echo "key $VLLM_API_KEY"
echo "token $HF_TOKEN"
"""


def test_keys_are_in_the_environment_of_the_child_and_in_nobodys_command_line(executable: str, tmp_path: Path) -> None:
    Path(executable).write_text(SHOW)
    args: dict[str, Argument] = {"api_key": "over-ridden", "hf-token": "hf-secret", "max-model-len": 64}
    engine = VllmEngineConfig(model="m", executable=executable, args=args)
    node = DecodeNode(name="a", args={"api-key": ["node-secret"]})
    argv = command(engine, node, tmp_path / "c.yaml", tmp_path / "n")
    lines: list[str] = []
    program = Program("vllm", tuple(argv), environment(engine, node, tmp_path / "n"))
    child = Child(program, lambda _, line: lines.append(line))
    wait_for(lambda: child.poll() is not None, 20, "the child's end")
    assert "--max-model-len=64" in lines, "the child shows its command line"
    assert {"key node-secret", "token hf-secret"} <= set(lines)
    shown = "\n".join(line for line in lines if not line.startswith(("key ", "token ")))
    assert "secret" not in shown + " ".join(argv)
    assert "over-ridden" not in shown + " ".join(argv)


def test_the_token_of_an_earlier_login_stays_a_flag_and_a_vllm_that_is_not_there_is_named(executable, tmp_path):
    engine = VllmEngineConfig(model="m", executable=executable, args={"hf-token": True})
    assert "--hf-token" in command(engine, DecodeNode(name="a"), tmp_path / "c.yaml", tmp_path / "n")
    assert "HF_TOKEN" not in environment(engine, DecodeNode(name="a"), tmp_path / "n")
    with pytest.raises(RoleError, match="no-such-vllm is not installed"):
        command(VllmEngineConfig(model="m", executable="no-such-vllm"), DecodeNode(name="a"), tmp_path, tmp_path)


def test_with_a_collector_vllm_sends_its_spans_there_unless_the_file_says_otherwise(executable, tmp_path):
    collector, node = "http://10.0.0.9:4318/v1/traces", DecodeNode(name="a")
    plain = VllmEngineConfig(model="m", executable=executable)
    own = VllmEngineConfig(
        model="m",
        executable=executable,
        args={"otlp_traces_endpoint": "http://c:4317"},
        env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
    )
    for engine, endpoint, protocol in ((plain, collector, "http/protobuf"), (own, "http://c:4317", "grpc")):
        argv = command(engine, node, tmp_path / "c", tmp_path / "n", traces=collector)
        assert [one for one in argv if "otlp" in one] == [f"--otlp-traces-endpoint={endpoint}"]
        assert (
            environment(engine, node, tmp_path / "n", traces=collector)["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
            == protocol
        )
    assert not [one for one in command(plain, node, tmp_path / "c", tmp_path / "n") if "otlp" in one]
    assert not [name for name in environment(plain, node, tmp_path / "n") if name.startswith("OTEL")]
