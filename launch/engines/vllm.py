"""vLLM as the engine of a prefill or decode node: `vllm serve` with pd-cache's connector, as a child of this process."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.errors import RoleError
from launch.process import LocalProcesses, Process, Program
from launch.signals import stop_on_signals
from pd_cache.config import (
    Argument,
    ClusterConfig,
    DecodeNode,
    PrefillNode,
    VllmEngineConfig,
    dump_config,
)

_POLL_S = 0.2
_REFUSAL = re.compile(r"\bpd_cache\.[\w.]+Error: (.+)")


def serve_vllm(
    config: ClusterConfig,
    engine: VllmEngineConfig,
    node: PrefillNode | DecodeNode,
    ready: Callable[[str], None],
    on_stop: Callable[[], None],
) -> None:
    """Run vLLM until SIGTERM. RoleError if it is not installed, ends by itself or is not ready in time.

    `on_stop` is called first of all when it has to end, so that no proxy sends anything more; it must not raise.
    """
    settings = config.supervisor
    with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="pd-cache-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        # vLLM starts processes of its own, which a guard ends with it, however that ends
        guarded = LocalProcesses(settings.stop_grace_s)
        program = Program(node.name, tuple(command(engine, node, file)), {**engine.env, **node.env})
        output = _Output()
        vllm = guarded.spawn(program, output.pass_on)
        try:
            deadline = time.monotonic() + settings.ready_timeout_s
            while not stop.is_set() and not _healthy(node):
                _check_alive(vllm, output)
                if time.monotonic() > deadline:
                    raise RoleError(
                        f"vLLM not ready after {settings.ready_timeout_s:g} s; a large model needs a larger "
                        "supervisor.ready_timeout_s"
                    )
                stop.wait(_POLL_S)
            if not stop.is_set():
                ready(f"http://{node.host}:{node.port}")
            while not stop.wait(_POLL_S):
                _check_alive(vllm, output)
        finally:
            deadline = time.monotonic() + 0.8 * settings.stop_grace_s  # before whoever stops us loses patience
            on_stop()
            _end(vllm, deadline)
            guarded.close()


def command(engine: VllmEngineConfig, node: PrefillNode | DecodeNode, file: Path) -> list[str]:
    """`vllm serve` for a node of `file`. RoleError if there is no vLLM."""
    arguments = {name.replace("_", "-"): value for name, value in (*engine.args.items(), *node.args.items())}
    connector = {
        "kv_connector": "PdCacheConnector",
        "kv_connector_module_path": "pd_cache.vllm.connector",
        "kv_role": "kv_both" if isinstance(node, PrefillNode) else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "config_file": str(file),
            "node": node.name,
            "mode": "server" if node.cache_server else "in-process",
        },
    }
    return [
        _executable(engine),
        "serve",
        engine.model,
        f"--host={node.host}",
        f"--port={node.port}",
        f"--served-model-name={engine.name or engine.model}",
        f"--kv-transfer-config={json.dumps(connector)}",
        *(flag for name, value in arguments.items() for flag in _flags(name, value)),
    ]


def _flags(name: str, value: Argument) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    elif isinstance(value, list):
        yield from (f"--{name}", *map(str, value))
    else:
        yield f"--{name}={value}"


def _executable(engine: VllmEngineConfig) -> str:
    beside = Path(sys.executable).parent / engine.executable  # which is the executable itself where that is a path
    found = str(beside) if beside.is_file() else shutil.which(engine.executable)
    if found is None:
        raise RoleError(f"{engine.executable} is not installed: neither beside {sys.executable} nor in PATH")
    return found


class _Output:
    """Passes on what vLLM prints, and remembers what the connector refused: the reason stands many lines before the end."""

    def __init__(self) -> None:
        self.refusal = ""

    def pass_on(self, stream: str, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if match := _REFUSAL.search(line):
            self.refusal = match[1]


def _check_alive(vllm: Process, output: _Output) -> None:
    status = vllm.poll()
    if status is not None:
        raise RoleError(f"vLLM ended with {status}: {output.refusal or 'its last lines say why'}")


def _end(vllm: Process, deadline: float) -> None:
    vllm.terminate()
    while vllm.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    vllm.kill()
    while vllm.poll() is None:
        time.sleep(0.05)


def _healthy(node: PrefillNode | DecodeNode) -> bool:
    try:
        with urllib.request.urlopen(f"http://{node.host}:{node.port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
