"""The program `vllm serve` with pd-cache's connector: its arguments, and what is added to its environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from launch.run.supervise import Program, RoleError
from pd_cache.cluster import (
    SECRET_VARIABLES,
    Argument,
    ClusterConfig,
    DecodeNode,
    EngineNode,
    VllmEngineConfig,
)
from pd_cache.cluster.machine import find_program
from pd_cache.decoding import decode_json
from pd_cache.vllm.files import NAMESPACE_FILE, TellCache

_PARSE = """
import contextlib, importlib.util, io, json, sys
from vllm.entrypoints.cli import serve
parser = serve.FlexibleArgumentParser(prog="vllm")
commands = parser.add_subparsers()
for command in serve.cmd_init():
    command.subparser_init(commands)
refused = {}
for name, arguments in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(arguments)
    except SystemExit:
        refused[name] = "it refuses its flags: " + said.getvalue().rpartition("error: ")[2].strip()
if importlib.util.find_spec("pd_cache") is None:
    refused[name] = "pd-cache is not installed in its environment, whose processes load the connector"
else:
    try:
        from transfer.store import load_mooncake
        load_mooncake()
    except Exception as error:  # whatever an import raises is the reason
        refused[name] = f"its environment cannot import Mooncake: {error}"
print(json.dumps(refused))
"""
"""vLLM's own parser, without what follows it; and whether vLLM will find the connector and Mooncake."""
_PARSE_S = 120.0


def vllm_program(config: ClusterConfig, node: EngineNode, file: Path, namespace_file: Path) -> Program:
    """Returns the program `vllm serve` for a node of `file`, whose text is `config`. Raises RoleError if
    there is no vLLM.

    Its environment has the file's own variables, and the secrets of its arguments. If the file names a
    collector, the program gets the option for it: with this option, vLLM sends its own spans there, and gives
    the connector the trace context of each request.
    """
    engine, traces = config.engine, config.tracing.endpoint
    assert isinstance(engine, VllmEngineConfig), "the file's checks make sure of it"
    given = _arguments(engine, node)
    arguments = _visible(given)
    connector = {
        "kv_connector": "PdCacheConnector",
        "kv_connector_module_path": "pd_cache.vllm.connector",
        "kv_role": "kv_consumer" if isinstance(node, DecodeNode) else "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config_file": str(file), "node": node.name},
    }
    argv = [
        executable(engine.executable),
        "serve",
        engine.model,
        f"--host={node.host}",
        f"--port={node.port}",
        f"--served-model-name={engine.name or engine.model}",
        f"--kv-transfer-config={json.dumps(connector)}",
        f"--middleware={TellCache.__module__}.{TellCache.__name__}",
    ]
    env = {**engine.env, **node.env, NAMESPACE_FILE: str(namespace_file)}
    if traces is not None:
        arguments.setdefault("otlp-traces-endpoint", traces)
        # vLLM would send over gRPC, which is another port of a collector
        env = {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_SERVICE_NAME": f"vllm-{node.role}",
            **env,
        }
    if node.events_port:
        stream, replay = config.event_addresses(node)
        # vLLM 0.32 binds an address only if it has a `*` or is no TCP address; it connects to any other
        # address
        if stream.startswith("tcp:"):
            stream = f"tcp://*:{stream.rpartition(':')[2]}"
        settings = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": stream,
            "replay_endpoint": replay,
        }
        argv.append(f"--kv-events-config={json.dumps(settings)}")
    for name, variable in SECRET_VARIABLES.items():
        value = given.get(name)
        # true is vLLM's word for the token of `hf auth login`
        if value is not None and not isinstance(value, bool):
            env[variable] = str(value[0] if isinstance(value, list) else value)
    return Program(node.name, (*argv, *flags(arguments)), env)


def refused_flags(config: ClusterConfig, nodes: Iterable[EngineNode]) -> dict[str, str]:
    """Returns the reasons why vLLM refuses these nodes, by their names: its parser refuses a flag, or its
    Python lacks a package.

    It runs in vLLM's Python, and takes seconds to two minutes. Raises RoleError, which says why, if vLLM
    cannot be asked.
    """
    engine = config.engine
    assert isinstance(engine, VllmEngineConfig)
    program = executable(engine.executable)
    with open(program, "rb") as script:
        first = script.readline(4096).decode(errors="replace").split()
    if len(first) != 1 or not first[0].startswith("#!/") or "python" not in first[0]:
        raise RoleError(f"{program} is no script of a Python")
    given = {node.name: ["serve", engine.model, *flags(_visible(_arguments(engine, node)))] for node in nodes}
    try:
        done = subprocess.run(
            [first[0][2:], "-P", "-c", _PARSE, json.dumps(given)],
            capture_output=True, text=True, errors="replace", check=False, timeout=_PARSE_S,
        )  # fmt: skip
        if done.returncode:
            raise RoleError(f"{program} failed: {''.join(done.stderr.splitlines()[-1:])}")
        return decode_json("".join(done.stdout.splitlines()[-1:]), dict[str, str])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RoleError(f"{program} did not answer: {error}") from None


def _arguments(engine: VllmEngineConfig, node: EngineNode) -> dict[str, Argument]:
    """Returns the flags of a node, by the name that vLLM knows them by."""
    return {name.replace("_", "-"): value for name, value in (*engine.args.items(), *node.args.items())}


def _visible(arguments: Mapping[str, Argument]) -> dict[str, Argument]:
    """Returns the arguments without secrets, which every user of the machine could read."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in SECRET_VARIABLES or isinstance(value, bool)
    }


def flags(arguments: Mapping[str, Argument]) -> Iterator[str]:
    """Returns arguments of the file in the form that `vllm serve` takes."""
    for name, value in arguments.items():
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        else:
            yield f"--{name}={value}"


def executable(name: str) -> str:
    """Returns the program's path: beside this Python, or in PATH. Raises RoleError if it is in neither."""
    found = find_program(name)
    if found is None:
        raise RoleError(f"{name} is not installed: neither beside {sys.executable} nor in PATH")
    return found
