"""What every test of the proxy is checked for."""

import asyncio
import gc
import tempfile
from pathlib import Path

import psutil
import pytest
import uvloop

from tests.support import proxy
from tests.support.gateway import envoy
from tests.support.waiting import wait_for

uvloop.run(asyncio.sleep(0))  # libuv keeps two files open for good


@pytest.fixture(autouse=True)
def no_file_left_open():
    before = psutil.Process().num_fds()
    yield
    if psutil.Process().num_fds() > before:
        gc.collect()  # grpc closes its files with its last object, which may be in a cycle
        wait_for(lambda: psutil.Process().num_fds() <= before, "all files are closed")


@pytest.fixture(scope="session")
def gateway():
    # not in pytest's folder: the path of a socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="pdc-") as folder, envoy(Path(folder)) as running:
        yield running


@pytest.fixture(params=["proxy", "picker"])
def face(request, gateway, monkeypatch):
    """A test that uses this runs twice: clients talk to the proxy, or to Envoy, which asks its picker."""
    if request.param == "picker":
        monkeypatch.setattr(proxy, "GATEWAY", gateway)
