"""How `vllm serve` is called for a node of the file. vLLM itself: tests/vllm."""

import json
import stat
from pathlib import Path

import pytest

from launch.discovery import file_records
from launch.engines.vllm_command import vllm_program
from launch.run.supervise import Child, RoleError
from pd_cache.cluster import (
    ClusterConfig,
    DecodeNode,
    MasterNode,
    PrefillNode,
    VllmEngineConfig,
    decode_record,
)
from pd_cache.config import TracingConfig
from tests.support.waiting import wait_for


@pytest.fixture
def executable(tmp_path):
    file = tmp_path / "vllm"
    file.write_text("#!/bin/sh\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def program(engine, node, folder, **sections):
    config = ClusterConfig(nodes=(MasterNode(name="m"), node), engine=engine, **sections)
    return vllm_program(config, node, folder / "c.yaml", folder / "n")


def test_flags_are_those_of_the_engine_and_over_them_those_of_the_node(executable, tmp_path):
    engine = VllmEngineConfig(
        model="/models/llama",
        name="demo",
        executable=executable,
        args={
            "max_model_len": 8192,
            "enforce-eager": True,
            "enable-prefix-caching": False,
            "cudagraph-sizes": [1, 2],
        },
    )
    node = DecodeNode(name="decode-0", port=8100, args={"max-model-len": 4096})
    argv = program(engine, node, tmp_path).argv
    assert argv[:3] == (executable, "serve", "/models/llama")
    assert [flag for flag in argv if flag.startswith("--max-model-len")] == ["--max-model-len=4096"]
    assert {
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--port=8100",
        "--served-model-name=demo",
    } <= set(argv)
    assert argv[argv.index("--cudagraph-sizes") :][:3] == ("--cudagraph-sizes", "1", "2")


@pytest.mark.parametrize(
    "node, role", [(PrefillNode(name="a"), "kv_both"), (DecodeNode(name="a"), "kv_consumer")]
)
def test_the_connector_is_told_its_file_node_and_role(node, role, executable, tmp_path):
    started = program(VllmEngineConfig(model="m", executable=executable), node, tmp_path)
    given = json.loads(
        next(flag for flag in started.argv if flag.startswith("--kv-transfer-config=")).partition("=")[2]
    )
    extra = {"config_file": str(tmp_path / "c.yaml"), "node": "a"}
    expected = {"kv_connector": "PdCacheConnector", "kv_role": role, "kv_load_failure_policy": "recompute"}
    assert given == given | expected | {"kv_connector_extra_config": extra}
    assert "--middleware=pd_cache.vllm.files.TellCache" in started.argv
    assert started.env["PD_CACHE_NAMESPACE_FILE"] == str(tmp_path / "n")


def test_vllm_binds_the_port_of_its_events_on_all_addresses_or_a_socket_and_records_say_where_others_find_them(
    executable, tmp_path
):
    engine = VllmEngineConfig(model="m", executable=executable)
    for host, port, events, bound in (
        (
            "10.1.2.3",
            5570,
            ("tcp://10.1.2.3:5570", "tcp://10.1.2.3:5571"),
            ("tcp://*:5570", "tcp://10.1.2.3:5571"),
        ),
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
        argv = program(engine, node, tmp_path).argv
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


def test_keys_are_in_the_environment_of_the_child_and_in_nobodys_command_line(executable, tmp_path):
    Path(executable).write_text(SHOW)
    args = {"api_key": "over-ridden", "hf-token": "hf-secret", "max-model-len": 64}
    engine = VllmEngineConfig(model="m", executable=executable, args=args)
    node = DecodeNode(name="a", args={"api-key": ["node-secret"]})
    lines = []
    vllm = program(engine, node, tmp_path)
    child = Child(vllm, lambda _, line: lines.append(line))
    wait_for(lambda: child.poll() is not None, "the child's end")
    assert "--max-model-len=64" in lines, "the child shows its command line"
    assert {"key node-secret", "token hf-secret"} <= set(lines)
    shown = "\n".join(line for line in lines if not line.startswith(("key ", "token ")))
    assert "secret" not in shown + " ".join(vllm.argv)
    assert "over-ridden" not in shown + " ".join(vllm.argv)


def test_the_token_of_an_earlier_login_stays_a_flag_and_a_vllm_that_is_not_there_is_named(
    executable, tmp_path
):
    engine = VllmEngineConfig(model="m", executable=executable, args={"hf-token": True})
    vllm = program(engine, DecodeNode(name="a"), tmp_path)
    assert "--hf-token" in vllm.argv
    assert "HF_TOKEN" not in (vllm.env or {})
    with pytest.raises(RoleError, match="no-such-vllm is not installed"):
        program(VllmEngineConfig(model="m", executable="no-such-vllm"), DecodeNode(name="a"), tmp_path)


def test_with_a_collector_vllm_sends_its_spans_there_unless_the_file_says_otherwise(executable, tmp_path):
    collector, node = "http://10.0.0.9:4318/v1/traces", DecodeNode(name="a")
    tracing = TracingConfig(endpoint=collector)
    plain = VllmEngineConfig(model="m", executable=executable)
    args, env = {"otlp_traces_endpoint": "http://c:4317"}, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    own = VllmEngineConfig(model="m", executable=executable, args=args, env=env)
    for engine, endpoint, protocol in ((plain, collector, "http/protobuf"), (own, "http://c:4317", "grpc")):
        vllm = program(engine, node, tmp_path, tracing=tracing)
        assert [one for one in vllm.argv if "otlp" in one] == [f"--otlp-traces-endpoint={endpoint}"]
        assert (vllm.env or {})["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == protocol
    vllm = program(plain, node, tmp_path)
    assert not [one for one in (*vllm.argv, *(vllm.env or {})) if "otlp" in one or one.startswith("OTEL")]
