"""Reading the file. Strict: a key that nobody knows, a value of the wrong type and a combination that cannot work are one
message, which names file, line, key path, value and what is allowed. Nothing here reads the environment.
"""

from __future__ import annotations

import difflib
import re
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from pd_cache.config.checks import KeyPath, Problem, consistency_problems
from pd_cache.config.schema import ClusterConfig, Endpoint, Name
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize


class Source:
    """A parsed file that still knows where each key stood."""

    def __init__(self, file: Path, tree: Any, lines: dict[KeyPath, int]) -> None:
        self.file = file
        self.tree = tree
        self._lines = lines

    def error(self, problem: Problem) -> ConfigError:
        """The problem as one message: `file:line: key.path: value: what is allowed`."""
        path = problem.path
        line = next((self._lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._lines), 1)
        value = self._value(path)
        shown = "" if value is None or isinstance(value, (dict, list)) else f" {value!r}:"
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "file"
        return ConfigError(f"{self.file}:{line}: {where}:{shown} {problem.message}")

    def _value(self, path: KeyPath) -> Any:
        value = self.tree
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value


def load_config(file: str | Path) -> ClusterConfig:
    """Read and check a cluster's file. ConfigError, with the one message for the user, if it cannot be used."""
    return read_config(file)[0]


def read_config(file: str | Path) -> tuple[ClusterConfig, Source]:
    """As `load_config`, with the source for checks that know more than the file (ports, devices, memory)."""
    source = _parse(Path(file))
    try:
        config = msgspec.convert(source.tree, ClusterConfig, dec_hook=decode_custom)
    except msgspec.ValidationError as error:
        raise source.error(_explain(str(error), source.tree)) from None
    for problem in consistency_problems(config):
        raise source.error(problem)
    return config, source


def dump_config(config: ClusterConfig) -> str:
    """The configuration as YAML text that `load_config` reads back to an equal one."""
    return yaml.safe_dump(msgspec.to_builtins(config, enc_hook=str), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML without the surprise of a key that silently replaces an earlier one."""


def _parse(file: Path) -> Source:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start})") from None
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if root is None:
            raise ConfigError(f"{file}: is empty; it needs at least `nodes`")
        _index(root, (), lines, file, ())
        tree = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{file}:{line}: is not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: is not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return Source(file, tree, lines)


def _index(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path, within: tuple[yaml.Node, ...]
) -> None:
    """Note the line of every key, and refuse what no configuration is: a key twice, a node that contains itself."""
    if any(node is outer for outer in within):
        raise ConfigError(f"{file}:{node.start_mark.line + 1}: an alias stands inside of what it names")
    within = (*within, node)
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.start_mark)
            here = (*path, name)
            line = key.start_mark.line + 1
            if here in lines:
                raise ConfigError(
                    f"{file}:{line}: {'.'.join(map(str, here))}: stands twice, first on line {lines[here]}"
                )
            lines[here] = line
            _index(value, here, lines, file, within)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _index(value, (*path, index), lines, file, within)


def decode_custom(kind: type, value: object) -> object:
    """msgspec's `dec_hook` for the types that a file may hold besides the built-in ones."""
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise NotImplementedError(kind)  # msgspec's way of being told that a type is not ours


_AT = re.compile(r"(?s)(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_IN_WORDS = {meta.pattern: meta.description for kind in (Name, Endpoint) for meta in typing.get_args(kind)[1:]}
"""What a value must look like, by the pattern that checks it."""


def _explain(text: str, tree: Any) -> Problem:
    """msgspec's message as a problem that says what is allowed."""
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
        near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return Problem(path, f"must be one of {', '.join(options)}{hint}")
    for pattern, words in _IN_WORDS.items():
        if repr(pattern) in what:
            return Problem(path, f"must be {words}")
    return Problem(path, what[0].lower() + what[1:])


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
    """The type of what stands under `key` of the file."""
    fields = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    return typing.get_type_hints(struct, include_extras=True).get(fields.get(key, ""))


def _at(kind: Any, path: KeyPath, tree: Any) -> list[type[msgspec.Struct]]:
    """The Struct types that may stand at `path`, narrowed by the tags that the file gives."""
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
    """What a Literal or a tag at `path` allows."""
    if not path or not isinstance(path[-1], str):
        return []
    for struct in _at(kind, path[:-1], tree):
        if path[-1] == struct.__struct_config__.tag_field:
            return [str(s.__struct_config__.tag) for s in _at(kind, path[:-1], None) if s.__struct_config__.tag]
        hint = _hint(struct, path[-1])
        if typing.get_origin(hint) is Literal:
            return [str(option) for option in typing.get_args(hint)]
    return []
