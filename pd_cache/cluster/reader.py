"""Reads the file strictly. An unknown key, a value of the wrong type or a combination that cannot work raises one error, whose
message names file, line, key path, value and what is allowed. Nothing here reads the environment.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pd_cache import config
from pd_cache.cluster import schema
from pd_cache.cluster.checks import Problem, consistency_problems
from pd_cache.cluster.document import LARGEST, KeyPath, dump_document, parse_document, shown_path, shown_value
from pd_cache.cluster.schema import ClusterConfig
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize


class Source:
    """A parsed file that knows the line of each key."""

    def __init__(self, file: Path, tree: Any, lines: Mapping[KeyPath, int]) -> None:
        self.file = file
        self.tree = tree
        self._lines = lines

    def error(self, problem: Problem) -> ConfigError:
        """Returns the problem as one message: `file:line: key.path: value: what is allowed`."""
        path = problem.path
        line = next((self._lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._lines), 1)
        value = _lookup(self.tree, path)
        shown = "" if value is None or isinstance(value, (dict, list)) else f" {shown_value(value)}:"
        return ConfigError(f"{self.file}:{line}: {shown_path(path)}:{shown} {problem.message}")


def load_config(file: str | Path) -> ClusterConfig:
    """Reads and checks a cluster's file. Raises ConfigError, with one message for the user, if the file cannot be used."""
    return read_config(file)[0]


def read_config(file: str | Path) -> tuple[ClusterConfig, Source]:
    """As `load_config`, but also returns the source, for checks that know more than the file (ports, devices, memory)."""
    return parse_config(_text(Path(file)), file)


def parse_config(text: str, file: str | Path) -> tuple[ClusterConfig, Source]:
    """As `read_config`, for text that was read already; messages name `file`."""
    source = Source(Path(file), *parse_document(text, Path(file)))
    try:
        config = msgspec.convert(source.tree, ClusterConfig, dec_hook=decode_custom)
    except msgspec.ValidationError as error:
        raise source.error(_explain(str(error), source.tree)) from None
    for problem in consistency_problems(config):
        raise source.error(problem)
    return config, source


def dump_config(config: ClusterConfig) -> str:
    """Returns the configuration as YAML text that `load_config` reads back to an equal one."""
    return dump_document(msgspec.to_builtins(config, enc_hook=str))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LARGEST:
        raise ConfigError(f"{file}: is larger than {LARGEST >> 10} KiB, the most that a configuration may have")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start})") from None


def decode_custom(kind: type, value: object) -> object:
    """msgspec's `dec_hook` for the types that a file may hold besides the built-in ones."""
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise NotImplementedError(kind)  # this tells msgspec that a type is not one of ours


_AT = re.compile(r"(?s)(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_IN_WORDS = {
    meta.pattern: meta.description
    for kind in (*vars(schema).values(), *vars(config).values())
    for meta in typing.get_args(kind)[1:]
    if isinstance(meta, msgspec.Meta) and meta.pattern and meta.description
}
"""For each pattern, what a value that matches it looks like."""


def _explain(text: str, tree: Any) -> Problem:
    """Turns msgspec's message into a problem that says what is allowed."""
    match = _AT.fullmatch(text)
    assert match is not None
    what = match["what"]
    path: KeyPath = tuple(
        int(index) if index else name for name, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", match["path"] or "")
    )
    if unknown := _UNKNOWN.fullmatch(what):
        fields = _fields(ClusterConfig, path, tree)
        near = difflib.get_close_matches(unknown["key"], fields, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return Problem((*path, unknown["key"]), f"unknown key{hint} (allowed here: {', '.join(fields)})")
    if missing := _MISSING.fullmatch(what):
        fields = _fields(ClusterConfig, path, tree)
        given = _lookup(tree, path)
        strangers = [str(key) for key in given if key not in fields] if isinstance(given, dict) else []
        near = difflib.get_close_matches(missing["key"], strangers, n=1, cutoff=0.5)
        hint = f"; is {near[0]} meant to be it?" if near else ""
        return Problem(path, f"the key {missing['key']} is missing{hint} (allowed here: {', '.join(fields)})")
    options = _options(ClusterConfig, path, tree)
    if options:
        value = _lookup(tree, path)
        near = difflib.get_close_matches(str(value)[:80], options, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return Problem(path, f"must be one of {', '.join(options)}{hint}")
    for pattern, words in _IN_WORDS.items():
        if repr(pattern) in what:
            return Problem(path, f"must be {words}")
    return Problem(path, what[0].lower() + what[1:400])


def _lookup(tree: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """The Struct types that an annotation allows, through unions, tuples and Annotated."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in typing.get_args(kind) for struct in _structs(part)]


def _hint(struct: type[msgspec.Struct], key: str) -> Any:
    """Returns the type of the value under `key` of the file."""
    fields = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    return typing.get_type_hints(struct, include_extras=True).get(fields.get(key, ""))


def _at(kind: Any, path: KeyPath, tree: Any) -> list[type[msgspec.Struct]]:
    """Returns the Struct types that are allowed at `path`, narrowed by the tags that the file gives."""
    kinds, here = _structs(kind), tree
    for part in (None, *path):
        if isinstance(part, str):
            hints = [_hint(struct, part) for struct in kinds]
            kinds = [struct for hint in hints if hint is not None for struct in _structs(hint)]
        if part is not None:
            here = _lookup(here, (part,))
        if isinstance(here, dict):
            tagged = [s for s in kinds if s.__struct_config__.tag == here.get(s.__struct_config__.tag_field or "")]
            kinds = tagged or kinds
    return kinds


def _fields(kind: Any, path: KeyPath, tree: Any) -> list[str]:
    names: dict[str, None] = {}
    for struct in _at(kind, path, tree):
        if struct.__struct_config__.tag_field:
            names[struct.__struct_config__.tag_field] = None
        names.update(dict.fromkeys(struct.__struct_encode_fields__))
    return list(names)


def _options(kind: Any, path: KeyPath, tree: Any) -> list[str]:
    """Returns the values that a Literal or a tag at `path` allows."""
    if not path or not isinstance(path[-1], str):
        return []
    for struct in _at(kind, path[:-1], tree):
        if path[-1] == struct.__struct_config__.tag_field:
            return [str(s.__struct_config__.tag) for s in _at(kind, path[:-1], None) if s.__struct_config__.tag]
        hint = _hint(struct, path[-1])
        if typing.get_origin(hint) is Literal:
            return [str(option) for option in typing.get_args(hint)]
    return []
