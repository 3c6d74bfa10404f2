"""`import pd_cache`: the names that people import, at run time and as type checkers see them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pd_cache


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse(Path(str(pd_cache.__file__)).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == pd_cache._HOMES
    assert sorted(seen) == pd_cache.__all__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pd_cache' has no attribute 'Cache'"):
        pd_cache.Cache  # type: ignore[attr-defined]  # noqa: B018
