"""What every test of the proxy is checked for."""

import psutil
import pytest


@pytest.fixture(autouse=True)
def no_file_left_open():
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before
