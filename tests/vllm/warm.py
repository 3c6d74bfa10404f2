"""vLLM servers without the dozen seconds of processor time that importing vLLM takes: forks of one process
that has imported it.

`warm_program` starts that process and writes a program, for `engine.executable` or in place of `vllm`, that
behaves like `vllm`. Given a Python file, it behaves like `python`:

- the program asks for a fork, and lends it its standard streams, arguments, environment and folder;
- a keeper, forked first, forks the server, in a session of its own, and passes its exit status on;
- the program passes signals on to the server, and ends as the server ended. When the program is killed, the
  keeper kills the server.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys

from launch.run._tethered import set_death_signal
from launch.run.supervise import end, spawn_child
from tests.support.warm_nodes import become

_ASKER = """
import json, os, signal, socket, sys

try:
    keeper = socket.socket(socket.AF_UNIX)
    keeper.connect(PATH)
except OSError as error:
    sys.exit(f"no warm vLLM: {error}")
job = json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}).encode()
socket.send_fds(keeper, [len(job).to_bytes(4, "big")], [0, 1, 2])
keeper.sendall(job)
answers = keeper.makefile()
server = int(answers.readline() or sys.exit("the warm vLLM is gone"))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(server, number))
status = int(answers.readline() or 1)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def warm_program(folder, env):
    """Yields the program. vLLM is being imported meanwhile, in an environment with `env`; the first servers
    wait for it."""
    path = folder / "warm.sock"
    program = folder / "vllm"
    program.write_text(f"#!{sys.executable} -IS\nPATH = {str(path)!r}\n{_ASKER}")
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        process = spawn_child(
            (sys.executable, "-m", "tests.vllm.warm", str(listener.fileno())),
            pass_fds=(listener.fileno(),),
            env={**os.environ, **env},
            stdout=subprocess.DEVNULL,
        )
    try:
        yield program
    finally:
        end([process], 30.0)
        path.unlink(missing_ok=True)


# --- in the process that has imported vLLM ------------------------------------------------------------------


def _next_job(listener):
    """Returns only in a server's process: what it is to run."""
    while True:
        asker, _ = listener.accept()
        if os.fork():
            asker.close()
            continue
        listener.close()
        set_death_signal(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (job := _keep(asker)) is not None:
            return job


def _keep(asker):
    """Forks a server. Returns its job in the server, and never in the keeper."""
    length, streams, _, _ = socket.recv_fds(asker, 4, 3)
    with asker.makefile("rb") as lines:
        job = json.loads(lines.read(int.from_bytes(length, "big")))
    keeper = os.getpid()
    if (server := os.fork()) == 0:
        asker.close()
        become({**job, "parent": keeper, "death_signal": signal.SIGKILL, "session": True}, streams)
        return job
    for stream in streams:
        os.close(stream)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    with contextlib.suppress(OSError):  # the asker may be gone at any time
        asker.sendall(f"{server}\n".encode())
    over = os.pidfd_open(server)
    if over not in select.select([asker, over], [], [])[0]:  # the asker never says more, so this is its end
        os.kill(server, signal.SIGKILL)
    _, status = os.waitpid(server, 0)
    with contextlib.suppress(OSError):
        asker.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    os._exit(0)


_IMPORTED_LATER = (
    "compressed_tensors",
    "model_hosting_container_standards.sagemaker",
    "pd_cache.vllm.connector",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.metrics.loggers",
    "vllm.v1.worker.cpu_worker",
)
"""What a server and its engine import only when they come to it."""


def _serve(number):
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    from vllm.entrypoints.cli.main import main

    for name in _IMPORTED_LATER:
        with contextlib.suppress(ImportError):  # another vLLM imports its own when it comes to it
            importlib.import_module(name)
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()  # a collection in a server would copy all pages that it shares with the others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    job = _next_job(socket.socket(fileno=number))
    for usual in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(usual, signal.SIG_DFL)
    if job["argv"][0].endswith(".py"):
        sys.argv = job["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    sys.argv = ["vllm", *job["argv"]]
    sys.exit(main())


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
