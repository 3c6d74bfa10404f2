"""Jobs of a parallel run without the seconds of processor time that collecting the tests takes: forks of one
process that has collected them.

Most of a collection is imports: torch's and those of all files of tests. A job still collects for itself, but
finds the modules imported. `pytest -n` starts a job as the command that `warm` gives it, which is this file
as a program: it hands its streams to the process that has collected, and ends when the fork does.
"""

import contextlib
import gc
import os
import random
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def warm(config, specs):
    """Has the jobs of these specifications forked, until the run that `config` is of ends."""
    folder = tempfile.TemporaryDirectory(prefix="pdc-")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path := f"{folder.name}/jobs")
        server.listen(len(specs))
        collecting = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_jobs", str(server.fileno()), *config.args],
            pass_fds=(server.fileno(),),
            cwd=ROOT,
            stdin=subprocess.PIPE,  # ends when this is closed, at the latest with us
        )
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-I", "-S", __file__, path])
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(collecting.communicate)


def _ask(path):
    """Has a job forked with the streams of this process, and waits for its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        for stream in (0, 1):  # so that each side sees when the other closes its end
            os.close(stream)
        connection.recv(1)


def _serve(number, arguments):
    """Collects the tests, and forks a job for each that asks. Returns only in a job."""
    import pytest

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-qq", *arguments])  # what fails here fails in each job, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the jobs
    gc.collect()
    gc.freeze()  # a collection in a job would copy all pages that it shares with the others
    with socket.socket(fileno=number) as server:
        while server in select.select([sys.stdin, server], [], [])[0]:
            connection, _ = server.accept()
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            if not os.fork():
                break
            for stream in streams:
                os.close(stream)
            connection.close()
        else:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()  # so that their processor time is that of the run
            os._exit(0)
    connection.detach()  # stays open as long as the job lives
    for stream, theirs in enumerate(streams):
        os.dup2(theirs, stream)
        os.close(theirs)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, closefd=False)
    random.seed()


if __name__ == "__main__":
    if __package__:
        _serve(int(sys.argv[1]), sys.argv[2:])
        exec(eval(sys.stdin.readline()))  # noqa: S102, S307 - as execnet does
        os._exit(0)  # the tests are over; taking apart what all jobs share would cost each a copy
    else:
        _ask(sys.argv[1])
