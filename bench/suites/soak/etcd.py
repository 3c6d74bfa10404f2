"""The run's etcd: `python -m bench.suites.soak.etcd FOLDER HOST PORT PEERS`, started by `cluster`. It prints `ready` once it answers.

FOLDER keeps what it knows from one start to the next. PEERS is a port that etcd needs for other members, which it does not have here.
"""

from __future__ import annotations

import http.client
import signal
import sys
import time

from launch.process import end, spawn_child
from launch.signals import StoppedError, signals_as_exceptions

_POLL_S = 0.1
_GRACE_S = 5.0


def main(folder: str, host: str, port: str, peers: str) -> int:
    """Runs until asked to stop. Returns etcd's exit status if it ends by itself."""
    client, peer = f"http://{host}:{port}", f"http://127.0.0.1:{peers}"
    process = spawn_child(
        [
            "etcd", f"--data-dir={folder}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync", "--log-level=error",
        ],
        death_signal=signal.SIGKILL,
    )  # fmt: skip
    try:
        with signals_as_exceptions():
            while process.poll() is None and not _answers(host, int(port)):
                time.sleep(_POLL_S)
            print("ready etcd", flush=True)
            return process.wait()
    except StoppedError:
        return 0
    finally:
        end([process], _GRACE_S)


def _answers(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
