"""`import pd_cache`: the names that people import, at run time and as type checkers see them."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pd_cache


def test_what_type_checkers_see_is_what_is_loaded():
    tree = ast.parse(Path(str(pd_cache.__file__)).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == pd_cache._HOMES
    assert sorted(seen) == pd_cache.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pd_cache' has no attribute 'Cache'"):
        pd_cache.Cache  # noqa: B018


def test_an_old_name_works_with_a_warning_that_has_the_new_one():
    with pytest.warns(DeprecationWarning, match="RemoteCache"):
        assert pd_cache.ServerCache is pd_cache.RemoteCache


def test_a_file_of_the_users_that_hides_our_package_is_named(tmp_path):
    (tmp_path / "transfer.py").write_text("")
    (tmp_path / "program.py").write_text("import pd_cache")
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False
    )
    assert f"which {tmp_path}/transfer.py hides: rename that file" in done.stderr


def test_every_public_member_has_a_docstring():
    classes = {
        name: public for name in pd_cache.__all__ if inspect.isclass(public := getattr(pd_cache, name))
    }
    members = [(name, *member) for name, public in classes.items() for member in inspect.getmembers(public)]
    assert [
        f"{name}.{member}"
        for name, member, value in members
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
        if not inspect.getdoc(value)
    ] == []
