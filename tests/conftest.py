"""Fixtures that the whole suite shares: real servers for the session, and checks that nothing is left
behind."""

import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

from tests.support.etcd import Etcd, make_certificates
from tests.support.leaks import no_leaks
from tests.support.made import made
from tests.support.needs import NO_OPENSSL
from tests.support.pool import Pool
from tests.support.waiting import PATIENCE_S
from tests.support.warm_jobs import warm
from tests.support.warm_nodes import warm_nodes

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
# Mooncake's own patience, which is part of every recovery: the first store of a process sets it, and that may
# be any test's
MOONCAKES_PATIENCE = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}
for variable, value in MOONCAKES_PATIENCE.items():
    os.environ.setdefault(variable, value)
# how wide the terminal is that runs the tests says nothing of what they print
os.environ.pop("COLUMNS", None)
# how long an example takes says nothing where other programs run, too
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# what runs in the background may have been started with these ignored, and so would be what it starts; tests
# send them
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(scope="session", autouse=True)
def runtime_files():
    """Sockets, notes and versions of this run's processes are nobody else's: ports come again in the next
    run."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    # not in pytest's folder: the path of a socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="pdc-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def cheap_nodes(runtime_files):
    """Nodes that need torch are forks of a process that has imported it."""
    with warm_nodes():
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """A healthy pool that every test may use and none may break."""
    # long enough that a store node of a busy machine, which is late with its sign of life, keeps its segment
    pool = Pool(tmp_path_factory.mktemp("pool"), segment="256MiB", client_ttl_s=60)
    try:
        yield pool.start()
        assert not pool.evicted, "the pool has become too small for the tests"
    finally:
        pool.stop()


@pytest.fixture
def make_pool(tmp_path):
    """Pools of a test's own, to be broken; whatever still runs is killed afterwards."""
    yield from made(partial(Pool, tmp_path), Pool.end)


@pytest.fixture(scope="session")
def etcd(tmp_path_factory):
    """A healthy etcd that every test may use and none may break."""
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    try:
        yield etcd.start()
    finally:
        etcd.stop()


@pytest.fixture
def make_etcd(tmp_path):
    """etcds of a test's own, to be broken; whatever still runs is killed afterwards."""
    yield from made(partial(Etcd, tmp_path), Etcd.stop)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """As of `make_certificates`."""
    if shutil.which("openssl") is None:
        pytest.skip(NO_OPENSSL)
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def patient(monkeypatch):
    """`status` and `doctor`, where a test runs them in its own process, wait for as long as a busy machine
    needs, and no rate that it reaches is too low."""
    monkeypatch.setattr("launch.doctor.probe._SLOW", {"tcp": 0.0, "rdma": 0.0})
    for name in (
        "launch.watch.asker.SYNC_S",
        "launch.watch.asker.TIMEOUT_S",
        "launch.doctor.probe._CONTROL_S",
        "launch.doctor.probe._DEADLINE_S",
        "launch.doctor.probe._OPEN_S",
    ):
        module, _, constant = name.rpartition(".")
        monkeypatch.setattr(
            importlib.import_module(module), constant, PATIENCE_S
        )  # a package may export what it is called


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Jobs are forks of a process that has imported all tests, in the root folder."""
    if sys.platform == "linux" and config.invocation_params.dir == config.rootpath:
        warm(config, specs)


def pytest_collection_modifyitems(items):
    """Files with slow tests go first, those that take longest before all: at the end of a parallel run nobody
    waits for a worker that began a long one last, and what mostly waits does so beside what computes."""
    seconds = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            seconds[item.path] = max(seconds.get(item.path, 0), mark.kwargs.get("seconds", 60))
    items.sort(key=lambda item: -seconds.get(item.path, 0))  # stable: otherwise as collected


def pytest_terminal_summary(terminalreporter):
    """One line says what was not run, and how to have it run."""
    why = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if why:
        told = "; ".join(f"{count} because of {reason}" for reason, count in why.most_common())
        terminalreporter.write_line(f"{why.total()} tests were skipped: {told}.", yellow=True)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every thread and child process that a test started is gone after it; fixtures of wider scope start
    before."""
    with no_leaks():
        yield
