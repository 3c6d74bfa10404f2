"""Reads the file strictly. Only this module knows YAML, and nothing here reads the environment.

Unknown keys, values of the wrong type and combinations that cannot work raise a single error. Its message has
a line for each problem: file, line, key path, value and what is allowed.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml

from pd_cache.cluster.checks import KeyPath, Problem, consistency_problems
from pd_cache.cluster.schema import ClusterConfig, TenantsFile
from pd_cache.errors import ConfigError
from transfer.settings import decode_custom

T = TypeVar("T")

_TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    f"{_TAG}int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)\Z"),
    f"{_TAG}float": re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?\Z"),
}
_SHOWN = 120
"""The most characters of a value in a message."""
_TIMES = {"ms": "milliseconds", "s": "seconds"}
"""The units of numbers, by the ends of their keys."""
_KINDS = {
    "object": "a mapping",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
"""The kinds of values, by msgspec's names."""


class Source:
    """A parsed file: a tree of plain values, and the line of each key."""

    def __init__(self, file: Path, tree: Any, lines: Mapping[KeyPath, int]) -> None:
        self.file = file
        self.tree = tree
        self._lines = lines

    def error(self, *problems: Problem) -> ConfigError:
        """Returns the problems as one message, a line each: `file:line: key.path: value: what is allowed`."""
        return ConfigError("\n".join(map(self._line, problems)))

    def _line(self, problem: Problem) -> str:
        path = problem.path
        line = next((self._lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._lines), 1)
        value = self.tree
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                value = None
        shown = "" if value is None or isinstance(value, (dict, list)) else f" {_shortened(repr(value))}:"
        return f"{self.file}:{line}: {_shown_path(path)}:{shown} {problem.message}"


def load_config(file: str | Path) -> ClusterConfig:
    """Reads and checks a cluster's file. Raises ConfigError, with all problems, if the file cannot be
    used."""
    return read_config(file)[0]


def read_config(file: str | Path) -> tuple[ClusterConfig, Source]:
    """Does the same as `load_config`. Also returns the source, for checks that need more than the file
    (ports, devices, memory)."""
    return parse_config(_text(file), file)


def _text(file: str | Path) -> str:
    try:
        return Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_config(text: str, file: str | Path) -> tuple[ClusterConfig, Source]:
    """Does the same for text. Messages name `file`."""
    source = parse_document(text, Path(file))
    if source.tree is None:
        raise ConfigError(f"{file}: is empty; it needs at least `nodes`")
    config = _converted(source, ClusterConfig)
    if problems := list(consistency_problems(config)):
        raise source.error(*problems)
    return config, source


def read_tenants(file: str) -> TenantsFile:
    """Reads the file that `proxy.tenants_file` names. Raises ConfigError if it cannot be used."""
    return _converted(parse_document(_text(file), Path(file)), TenantsFile)


def _converted(source: Source, kind: type[T]) -> T:
    try:
        return msgspec.convert(source.tree, kind, dec_hook=decode_custom)
    except msgspec.ValidationError:
        raise source.error(*_problems(kind, source.tree, ())) from None


def dump_config(config: ClusterConfig) -> str:
    """Returns the configuration as YAML text. `load_config` reads it back as an equal configuration."""
    return str(yaml.safe_dump(msgspec.to_builtins(config, enc_hook=str), sort_keys=False))


# --- YAML ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprises: a date is text, and so are `010`, which it reads as 8, and `1:30`,
    which it reads as 90."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_document(text: str, file: Path) -> Source:
    """Parses a file's text. Its tree is None if the file is empty. Raises ConfigError with file and line if
    it is not YAML."""
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return Source(file, None, lines)
        _add_lines(root, (), lines, file)
        return Source(file, loader.construct_document(root), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: is not valid YAML: {error.problem or error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, AttributeError, LookupError) as error:
        # PyYAML raises the others for invalid numbers in directives and escapes, for an alias inside its own
        # value, and for `!!bool x`
        raise ConfigError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None


def _add_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> None:
    """Adds the lines of a node and of all nodes below it. Follows aliases, so that each place has its
    line."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _add_lines(value, (*path, index), lines, file)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
                raise ConfigError(f"{file}:{line}: a key must be text; quote it")
            here = (*path, key.value)
            if here in lines:
                raise ConfigError(
                    f"{file}:{line}: {_shown_path(here)}: is given twice, first on line {lines[here]}"
                )
            lines[here] = line
            _add_lines(value, here, lines, file)


def _shown_path(path: KeyPath) -> str:
    """Returns a path of keys as text for people, such as `nodes[0].port`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_shortened(part)}" for part in path)
    return "".join(parts).lstrip(".") or "file"


def _shortened(text: str) -> str:
    """Returns text of the file as a message shows it: on one line, and not long."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


# --- the problems of a tree that is no configuration --------------------------------------------------------


def _problems(kind: Any, value: Any, path: KeyPath) -> Iterator[Problem]:
    """Yields what is wrong with a value of the file that should be a `kind`.

    Converts each part of a value by itself. So the path of each problem is known without parsing msgspec's
    messages. Its messages about a single value are passed on, with this module's names of kinds.
    """
    try:
        msgspec.convert(value, kind, dec_hook=decode_custom)
    except msgspec.ValidationError as error:
        inside = list(_problems_inside(kind, value, path))
        yield from inside or [Problem(path, _in_words(kind, value, path) or _plain(str(error)))]


def _problems_inside(kind: Any, value: Any, path: KeyPath) -> Iterator[Problem]:
    allowed = list(_alternatives(kind))
    structs = [
        choice for choice in allowed if isinstance(choice, type) and issubclass(choice, msgspec.Struct)
    ]
    if structs and isinstance(value, dict):
        yield from _problems_in_section(structs, value, path)
        return
    for choice in allowed:
        if isinstance(value, dict) and typing.get_origin(choice) is dict:
            names, values = typing.get_args(choice)
            for key, part in value.items():
                yield from _problems(names, key, (*path, key))
                yield from _problems(values, part, (*path, key))
        elif isinstance(value, list) and typing.get_origin(choice) in (list, tuple):
            for index, part in enumerate(value):
                yield from _problems(typing.get_args(choice)[0], part, (*path, index))


def _problems_in_section(
    structs: list[type[msgspec.Struct]], value: dict[str, Any], path: KeyPath
) -> Iterator[Problem]:
    """Yields the problems of a mapping that should be one of `structs`, according to its tag."""
    tag = structs[0].__struct_config__.tag_field
    keys = dict.fromkeys(name for struct in structs for name in struct.__struct_encode_fields__)
    allowed = [*([tag] if tag else []), *keys]
    if tag is not None:
        if tag not in value:
            yield _missing(tag, allowed, value, path)
            return
        named = [struct for struct in structs if struct.__struct_config__.tag == value[tag]]
        if not named:
            yield Problem(
                (*path, tag), _one_of([str(struct.__struct_config__.tag) for struct in structs], value[tag])
            )
            return
        allowed = [tag, *named[0].__struct_encode_fields__]
        structs = named
    fields = {field.encode_name: field for field in msgspec.structs.fields(structs[0])}
    listed = f" (allowed here: {', '.join(allowed)})"
    for key, part in value.items():
        if key in fields:
            yield from _problems(fields[key].type, part, (*path, key))
        elif key != tag:
            hint = _near(key, allowed, "; did you mean {}?")
            yield Problem((*path, key), f"unknown key{hint}{listed}")
            listed = ""  # the file may be another program's: its first unknown key is enough
    for name, field in fields.items():
        if field.required and name not in value:
            yield _missing(name, allowed, value, path)


def _missing(key: str, allowed: list[str], value: dict[str, Any], path: KeyPath) -> Problem:
    hint = _near(key, [other for other in value if other not in allowed], "; is {} meant to be it?")
    return Problem(path, f"the key {key} is missing{hint} (allowed here: {', '.join(allowed)})")


def _in_words(kind: Any, value: Any, path: KeyPath) -> str | None:
    """Returns what is allowed in place of a value, if the schema says more than msgspec's message; otherwise
    None."""
    allowed = list(_alternatives(kind))
    unit = _TIMES.get(str(path[-1]).rpartition("_")[2]) if path else None
    if unit and isinstance(value, str):
        return f"must be a number of {unit}, without a unit"
    bounds = [part for part in allowed if isinstance(part, msgspec.Meta)]
    for part in allowed:
        if typing.get_origin(part) is Literal:
            options = [str(option) for option in typing.get_args(part)]
            if int not in allowed:
                return _one_of(options, value)
            least = next((f" of at least {bound.ge}" for bound in bounds if bound.ge is not None), "")
            return f"must be {' or '.join(options)}, or a whole number{least}"
    for bound in bounds:
        if bound.pattern and isinstance(value, str) and not re.search(bound.pattern, value):
            return f"must be {bound.description}"
    return None


def _plain(message: str) -> str:
    """Returns msgspec's message in the words of this module's messages."""

    def named(kinds: re.Match[str]) -> str:
        return kinds[1] + ", ".join(_KINDS.get(kind, kind) for kind in kinds[2].split(" | "))

    return message[0].lower() + re.sub("(xpected |got )`([a-z |]+)`", named, message[1:400])


def _one_of(options: list[str], value: Any) -> str:
    return f"must be one of {', '.join(options)}{_near(str(value)[:80], options, '; did you mean {}?')}"


def _near(word: str, options: list[str], hint: str) -> str:
    """Returns the hint with the option that is most like the word; empty if no option is like it."""
    found = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return hint.format(found[0]) if found else ""


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yields the types that an annotation allows, and their constraints (`msgspec.Meta`)."""
    if typing.get_origin(kind) in (typing.Annotated, typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from _alternatives(part)
    else:
        yield kind
