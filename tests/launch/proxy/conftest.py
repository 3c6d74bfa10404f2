"""What every test of the proxy is checked for."""

import asyncio

import psutil
import pytest
import uvloop

uvloop.run(asyncio.sleep(0))  # libuv keeps two files open for good


@pytest.fixture(autouse=True)
def no_file_left_open():
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before
