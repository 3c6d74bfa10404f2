"""An address is one server's alone, and nothing of it is left when the server has stopped."""

import os
from contextlib import ExitStack

import pytest

from pd_cache.errors import CacheServerError
from pd_cache.server.server import own_address


def test_an_orderly_stop_leaves_neither_socket_nor_lock(tmp_path):
    url = f"ipc://{tmp_path}/own/cache.sock"
    with ExitStack() as stack:
        own_address(url, stack)
        (tmp_path / "own" / "cache.sock").touch()  # ZMQ's
        with pytest.raises(CacheServerError, match="another cache server already listens"):
            own_address(url, stack)
    assert os.listdir(tmp_path / "own") == []


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with ExitStack() as stack, pytest.raises(CacheServerError, match="choose another url"):
        own_address(f"ipc://{tmp_path}/file/cache.sock", stack)
