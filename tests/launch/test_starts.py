"""How a role starts."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import NoReturn

import pytest

from launch.roles import _imports


def _fails_to_import() -> NoReturn:
    with _imports():
        assert not gc.isenabled()
        raise ImportError


def test_no_garbage_is_collected_during_imports_and_it_is_again_after_them_even_if_they_fail() -> None:
    try:
        with pytest.raises(ImportError):
            _fails_to_import()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_role_raises_the_soft_limit_of_open_files_to_the_hard_one() -> None:
    program = "import launch.roles as r, resource as s; r.raise_limit_of_files(); print(*s.getrlimit(s.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 300 && ulimit -Hn 777 && exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["777", "777"]
