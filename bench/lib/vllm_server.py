"""`vllm serve` in its usual form, beside what pd-cache launches: to compare with, and to switch the connector on by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launch.engines.vllm_command import executable, flags
from launch.http import healthy
from launch.run.supervise import Child, ForeignProgram, Program, StopFlag
from pd_cache.cluster import Argument
from pd_cache.cluster.machine import bound_socket

_GRACE_S = 30.0
_LINES = 60


@contextmanager
def vllm_server(
    model: Path,
    name: str,
    arguments: Mapping[str, Argument],
    env: Mapping[str, str],
    *more: str,
    ready_timeout_s: float = 600.0,
    program: str = "vllm",
    host: str = "127.0.0.1",
    port: int = 0,
    before: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yields a server of `model` under the name `name`, by default on a free port of this machine; its URL. `program` is vLLM's command,
    `before` a command that runs it.

    RoleError, with the last lines that it printed, if it ends or is not ready in time.
    """
    if not port:
        with bound_socket(host, 0) as free:
            port = int(free.getsockname()[1])
    command = (
        *before,
        executable(program),
        "serve",
        str(model),
        f"--served-model-name={name}",
        f"--host={host}",
        f"--port={port}",
        *flags(arguments),
        *more,
    )
    last: list[str] = []

    def note(stream: str, line: str) -> None:
        last.append(line)
        del last[:-_LINES]

    server = Program("vllm", command, env)
    with ForeignProgram(
        "vLLM", lambda: Child(server, note), _GRACE_S, lambda: "its last lines:\n" + "\n".join(last)
    ) as vllm:
        vllm.wait_serving(StopFlag(), lambda: healthy(host, port), ready_timeout_s)
        yield f"http://{host}:{port}"
