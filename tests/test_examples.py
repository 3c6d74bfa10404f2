"""The examples, run as `examples/README.md` says, with the output that it shows; that of vLLM is in
tests/vllm, and that of an engine of one's own in tests/launch/test_recipes.py."""

import contextlib
import io
import runpy
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.support.cli import cli, program
from tests.support.hosts import Network, why_not
from tests.support.pool import Process
from tests.support.waiting import wait_for
from tests.test_architecture import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
"""Of the two machines, in the file that people begin with."""
STAGING = "  staging_size: 128MiB\n"
PATIENT = "  staging_size: 16MiB\n  timeouts: {exist_ms: 10000, get_ms: 10000, put_ms: 10000}\nhandoff: {wait_ms: 60000}\n"
"""Less memory, and deadlines that no machine is too busy for."""
SMALLER = ("segment_size: 512MiB", "segment_size: 64MiB"), ("\nengine:\n", "\nengine:\n  threads: 1\n")


def output_of(example, *arguments):
    """What an example prints, run in this process, which has imported torch."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [example, *arguments])
        patch.setattr(
            "transfer.staging.prefault", lambda address, nbytes: None
        )  # half a second for what is hardly used
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return said.getvalue()


def test_bytes_and_tensors_by_name_are_there_the_second_time(pool):
    outputs = [output_of("object_cache.py", pool.address)]
    # a busy machine may exceed a deadline of its pool
    while "found: True" not in outputs[-1] and len(outputs) < 10:
        outputs.append(output_of("object_cache.py", pool.address))
    assert outputs[0].startswith("there before: False\n")
    assert outputs[-1].replace("before: True", "before: False") in (EXAMPLES / "README.md").read_text()
    assert output_of("object_cache.py", pool.address).startswith("there before: True\nfound: True\n")


@pytest.mark.parametrize("example", ["ask.py", "embed_engine.py", "object_cache.py"])
def test_without_its_argument_an_example_says_how_to_run_it(example):
    with pytest.raises(SystemExit, match=f"python {example} "):
        output_of(example)


class Machine(Process):
    """`pd-cache up` on a host."""

    def __init__(self, host, file):
        super().__init__(f"up on {host.name}", host.inside(*program("up", "-c", file)))

    @property
    def ready(self):
        """The addresses of its nodes."""
        return dict(line.split()[1:] for line in self.lines if line.startswith("ready "))

    def has(self, *names):
        """Whether exactly these nodes are ready. Raises AssertionError if the machine has ended instead."""
        assert self.process.poll() is None, "".join(self.errors)[-4000:]
        return set(names) == set(self.ready)


@contextmanager
def up(network, folder):
    """Two machines, each with a copy of the same file."""
    text = cli("config", "example", "two-machines").output
    hosts = [network.host(name) for name in ("one", "two")]
    addresses = zip(ADDRESSES, (host.address for host in hosts), strict=True)
    for written, wanted in (*addresses, (STAGING, PATIENT), *SMALLER):
        assert written in text
        text = text.replace(written, wanted)
    with ExitStack() as stack:
        machines = []
        for host in hosts:
            file = folder / f"{host.name}.yaml"
            file.write_text(text)
            machines.append(Machine(host, file))
            stack.callback(machines[-1].stop)
        yield machines


def test_two_machines_share_one_cluster(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with closing(Network()) as network, up(network, tmp_path) as (one, two):
        wait_for(
            lambda: one.has("master", "prefill-0", "proxy") and two.has("decode-0"), "both machines ready"
        )
        assert output_of("ask.py", one.ready["proxy"]) in (EXAMPLES / "README.md").read_text()
