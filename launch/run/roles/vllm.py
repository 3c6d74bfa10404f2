"""The roles `prefill` and `decode` with vLLM, which runs as a child of this process."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from launch.discovery import Member
from launch.engines.vllm_command import vllm_program
from launch.http import healthy
from launch.run.supervise import Child, ForeignProgram, stop_on_signals, to_stderr
from pd_cache.cluster import ClusterConfig, EngineNode, dump_config, read_about
from pd_cache.runtime import temporary_folder
from pd_cache.vllm.files import about

_REFUSAL = re.compile(r"\bpd_cache\.[\w.]+Error: (.+)")


def run_vllm(config: ClusterConfig, node: EngineNode, ready: Callable[[str], None], member: Member) -> None:
    """Runs vLLM until SIGTERM. Raises RoleError if it is not installed, ends by itself or is not ready in
    time."""
    settings = config.supervisor
    with stop_on_signals() as stop, temporary_folder() as folder:
        file, namespace = folder / "cluster.yaml", folder / "namespace.json"
        file.write_text(dump_config(config), encoding="utf-8")
        program = vllm_program(config, node, file, namespace)
        # the connector's reason for a refusal comes many lines before the end
        refused = deque[str](maxlen=1)

        def pass_on(_: str, line: str) -> None:
            to_stderr(line)
            refused.extend(_REFUSAL.findall(line))

        def hint() -> str:
            return refused[0] if refused else "its last lines say why, and a large model needs time"

        # vLLM has to end before our own supervisor kills us
        vllm = ForeignProgram("vLLM", lambda: Child(program, pass_on), 0.8 * settings.stop_grace_s, hint)
        with vllm:
            try:
                if vllm.wait_serving(stop, lambda: healthy(node.host, node.port), settings.ready_timeout_s):
                    member.about = read_about(about(namespace))
                    ready(f"http://{node.host}:{node.port}")
                vllm.watch(stop)
            finally:
                member.leave()  # first, so that no proxy sends new requests
