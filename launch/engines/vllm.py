"""vLLM as the engine of a prefill or decode node: `vllm serve` with pd-cache's connector, as a child of this process."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from launch.errors import RoleError
from launch.foreign import ForeignProgram
from launch.process import LocalProcesses, Program
from launch.signals import stop_on_signals
from pd_cache.cluster import (
    SECRET_VARIABLES,
    Argument,
    ClusterConfig,
    DecodeNode,
    PrefillNode,
    VllmEngineConfig,
    dump_config,
)
from pd_cache.runtime import temporary_folder
from pd_cache.tokens import Namespace
from pd_cache.vllm.health import NAMESPACE_FILE, TellNamespace, read_namespace

_REFUSAL = re.compile(r"\bpd_cache\.[\w.]+Error: (.+)")


def serve_vllm(
    config: ClusterConfig,
    engine: VllmEngineConfig,
    node: PrefillNode | DecodeNode,
    ready: Callable[[str, Namespace | None], None],
    on_stop: Callable[[], None],
) -> None:
    """Run vLLM until SIGTERM. Raises RoleError if it is not installed, ends by itself or is not ready in time.

    `ready` gets its base URL and the namespace of its cache. When it has to end, `on_stop` is called first, so that no
    proxy sends anything more. It must not raise.
    """
    settings = config.supervisor
    with stop_on_signals() as stop, temporary_folder() as folder:
        file, namespace = folder / "cluster.yaml", folder / "namespace.json"
        file.write_text(dump_config(config), encoding="utf-8")
        # vLLM starts processes of its own; a guard ends them with it, however it ends
        guarded = LocalProcesses(settings.stop_grace_s)
        variables = environment(engine, node, namespace)
        program = Program(node.name, tuple(command(engine, node, file, namespace)), variables)
        output = _Output()
        # it has to be gone before the process that stops us loses patience
        vllm = ForeignProgram("vLLM", lambda: guarded.spawn(program, output.pass_on), 0.8 * settings.stop_grace_s)
        with contextlib.closing(guarded), vllm:
            try:
                vllm.run(
                    stop,
                    serving=lambda: healthy(node.host, node.port),
                    ready=lambda: ready(f"http://{node.host}:{node.port}", read_namespace(namespace)),
                    deadline=time.monotonic() + settings.ready_timeout_s,
                    hint=lambda: output.refusal or "its last lines say why, and a large model needs time",
                )
            finally:
                on_stop()


def command(engine: VllmEngineConfig, node: PrefillNode | DecodeNode, file: Path, namespace_file: Path) -> list[str]:
    """Returns the command `vllm serve` for a node of `file`. `environment` has its secrets. Raises RoleError if there is no vLLM."""
    arguments = {
        name: value
        for name, value in _arguments(engine, node).items()
        if name not in SECRET_VARIABLES or isinstance(value, bool)
    }
    connector = {
        "kv_connector": "PdCacheConnector",
        "kv_connector_module_path": "pd_cache.vllm.connector",
        "kv_role": "kv_both" if isinstance(node, PrefillNode) else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "config_file": str(file),
            "node": node.name,
            "namespace_file": str(namespace_file),
        },
    }
    return [
        executable(engine.executable),
        "serve",
        engine.model,
        f"--host={node.host}",
        f"--port={node.port}",
        f"--served-model-name={engine.name or engine.model}",
        f"--kv-transfer-config={json.dumps(connector)}",
        f"--middleware={TellNamespace.__module__}.{TellNamespace.__name__}",
        *flags(arguments),
    ]


def environment(engine: VllmEngineConfig, node: PrefillNode | DecodeNode, namespace_file: Path) -> dict[str, str]:
    """Returns what is added to the environment of a node's vLLM: the file's own, and the secrets of its arguments."""
    arguments = _arguments(engine, node)
    secrets = {}
    for name, variable in SECRET_VARIABLES.items():
        value = arguments.get(name)
        if value is not None and not isinstance(value, bool):  # true is vLLM's word for the token of `hf auth login`
            secrets[variable] = str(value[0] if isinstance(value, list) else value)
    return {**engine.env, **node.env, **secrets, NAMESPACE_FILE: str(namespace_file)}


def _arguments(engine: VllmEngineConfig, node: PrefillNode | DecodeNode) -> dict[str, Argument]:
    """The flags of a node, by the name that vLLM knows them by."""
    return {name.replace("_", "-"): value for name, value in (*engine.args.items(), *node.args.items())}


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
    beside = Path(sys.executable).parent / name  # this is the program itself if `name` is an absolute path
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RoleError(f"{name} is not installed: neither beside {sys.executable} nor in PATH")
    return found


class _Output:
    """Passes on what vLLM prints, and remembers what the connector refused: the reason comes many lines before the end."""

    def __init__(self) -> None:
        self.refusal = ""

    def pass_on(self, stream: str, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if match := _REFUSAL.search(line):
            self.refusal = match[1]


def healthy(host: str, port: int) -> bool:
    """Whether a vLLM serves at that address."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
