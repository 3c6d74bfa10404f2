"""How a role starts."""

from __future__ import annotations

import gc
from typing import NoReturn

import pytest

from launch.roles.run import _imports


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
