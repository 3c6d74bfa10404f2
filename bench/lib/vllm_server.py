"""vLLM's servers in benches: plain `vllm serve`, the servers that pd-cache launches, and requests to both."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from launch.engines.vllm_command import executable, flags
from launch.http import healthy
from launch.run.supervise import Child, ForeignProgram, Program, StopFlag
from pd_cache.cluster import Argument
from pd_cache.cluster.machine import bound_socket

CHUNK, BLOCK = 256, 128
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # "auto" may give two servers different numbers of cores
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "MC_LOG_LEVEL": "ERROR",
}
READY_S = 600.0
_SETTLE_S = 60.0
Peer = Literal["mooncake", "nixl"]
_GRACE_S = 30.0
_LINES = 60


@contextmanager
def vllm_server(
    model: Path,
    name: str,
    arguments: Mapping[str, Argument],
    env: Mapping[str, str],
    *more: str,
    ready_timeout_s: float = READY_S,
    program: str = "vllm",
    host: str = "127.0.0.1",
    port: int = 0,
    before: tuple[str, ...] = (),
) -> Iterator[str]:
    """Runs a server of `model` under the name `name`, by default on a free port of this machine. Yields its
    URL. `program` is vLLM's command; `before` is the beginning of a command line that runs it.

    Raises RoleError, with the last lines that the server printed, if it ends or is not ready in time.
    """
    with ExitStack() as stack:
        if not port:  # held until the server ends, so that no other program gets it
            port = int(stack.enter_context(bound_socket(host, 0)).getsockname()[1])
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


def connector_flag(connector: str, role: str, **more: object) -> str:
    """Returns the flag that gives `vllm serve` a connector."""
    return f"--kv-transfer-config={json.dumps({'kv_connector': connector, 'kv_role': role, **more})}"


class OpenAIServer:
    """An OpenAI-compatible server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def first_token(self, prompt: Sequence[int], **fields: object) -> float:
        """Returns the seconds from sending a request, with the further fields `fields`, to its first
        token."""
        body = {"model": "bench", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "stream": True}
        encoded = json.dumps({**body, "return_token_ids": True, **fields}).encode()
        start = time.perf_counter()
        with self.ask("/v1/completions", encoded, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {") and b'"choices"' in line:
                    seconds = time.perf_counter() - start
                    answer.read()
                    return seconds
        raise RuntimeError(f"{self.url} answered without a token")

    def forget(self) -> None:
        """Empties vLLM's own prefix cache; waits until no store holds its blocks any more."""
        end = time.monotonic() + _SETTLE_S
        while True:
            self.ask("/reset_prefix_cache", b"").close()
            if self.total("vllm:kv_cache_usage_perc") == 0:
                return
            if time.monotonic() > end:
                raise RuntimeError(f"{self.url} still holds blocks {_SETTLE_S:g} s after its last request")
            time.sleep(0.1)

    def ask(self, path: str, body: bytes | None = None, timeout: float = 30) -> http.client.HTTPResponse:
        """Returns the answer, which the caller must close."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        return answer

    def total(self, name: str, label: str = "", value: str = "") -> float:
        """Returns the sum of `metric`."""
        return sum(self.metric(name, label, value).values())

    def metric(self, name: str, label: str = "", value: str = "") -> dict[str, float]:
        """Returns the values of a metric, for all label sets in which `label` has the value `value`."""
        with self.ask("/metrics") as answer:
            lines = answer.read().decode().splitlines()
        wanted = f'{label}="{value}"' if label else ""
        return {
            line.rpartition(" ")[0]: float(line.split()[-1])
            for line in lines
            if line.startswith((f"{name}{{", f"{name} ")) and wanted in line
        }
