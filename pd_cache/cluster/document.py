"""Parses YAML text into a tree of plain values, with the line of every key. Only this module knows YAML.

Limits apply before any value is built: on bytes, depth, nodes (an alias counts as all that it stands for) and digits. The tree holds only
dicts with text keys, lists, texts, numbers, booleans and None. Tags are refused, and a date is text. Numbers that YAML 1.1 reads in a way
that few people expect (`010` is 8, `1:30` is 90) are refused, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pd_cache.errors import ConfigError

LARGEST = 256 << 10
"""The most bytes of a file."""
DEEPEST = 32
MOST_NODES = 20_000
"""The most keys and values of a file. A node of a cluster has about ten."""
LONGEST_NUMBER = 20
"""The most characters of a number."""

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_SHOWN = 120


_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
"""The types of plain scalars, as in YAML 1.1 but without dates."""


class Document(NamedTuple):
    """A parsed file."""

    tree: Any
    lines: Mapping[KeyPath, int]


def parse_document(text: str, file: Path) -> Document:
    """Parses a file's text. Raises ConfigError with file and line if it is not YAML or exceeds a limit above."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{file}: is empty; it needs at least `nodes`")
            index = _Index(file)
            index.add(root)
            return Document(loader.construct_document(root), index.lines)
        finally:
            loader.dispose()
    except _OutOfBounds as error:
        raise ConfigError(f"{file}:{_line(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{file}:{_line(error)}: is not valid YAML: {_printable(str(error.problem or error))}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{file}:{line}: is not valid YAML: the character {error.character!r} is not allowed"
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML's scanner raises ValueError and OverflowError for invalid numbers in directives and escapes
        raise ConfigError(f"{file}: is not valid YAML: {_printable(str(error))}") from None


def dump_document(tree: Any) -> str:
    """Returns the tree as YAML text."""
    return str(yaml.safe_dump(tree, sort_keys=False))


def shown_path(path: KeyPath) -> str:
    """Returns a path of keys as text for people, such as `nodes[0].port`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in path)
    return "".join(parts).lstrip(".") or "file"


def shown_value(value: object) -> str:
    """Returns a value as text for people: one line, of bounded length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _OutOfBounds(yaml.MarkedYAMLError):
    """The text is valid YAML, but contains more than a configuration may."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(None, None, problem, mark)


class _Loader(yaml.SafeLoader):
    """Composes nodes. Refuses tags, and more nodes or levels than a configuration may have."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = _RESOLVERS
        self._depth = 0
        self._composed = 0

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Refuses surplus brackets in the scanner, because its time grows with the number of open levels for each character."""
        if self.flow_level >= DEEPEST:
            raise _OutOfBounds(f"is nested more than {DEEPEST} levels deep", self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise _OutOfBounds(f"the tag {_printable(event.tag)} is not allowed here", event.start_mark)
        self._depth += 1
        self._composed += 1
        if self._depth > DEEPEST:
            raise _OutOfBounds(f"is nested more than {DEEPEST} levels deep", event.start_mark)
        if self._composed > MOST_NODES:
            raise _OutOfBounds(f"has more than {MOST_NODES} keys and values", event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Index:
    """Collects the line of every key, and checks every key and value before any value is built."""

    def __init__(self, file: Path) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._file = file
        self._within: list[yaml.Node] = []
        self._visited = 0

    def add(self, node: yaml.Node, path: KeyPath = ()) -> None:
        """Notes the lines of a node and of all nodes below it. Follows aliases, so that each place has its line."""
        self._visited += 1
        if self._visited > MOST_NODES:
            raise self._error(node, (), f"its aliases stand for more than {MOST_NODES} keys and values")
        if any(node is outer for outer in self._within):
            raise self._error(node, (), "an alias stands inside the value that it refers to")
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._within.append(node)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._add_key(key, value, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self.add(value, (*path, index))
        elif isinstance(node, yaml.ScalarNode) and (problem := _scalar_problem(node)):
            raise self._error(node, path, f"{shown_value(node.value)}: {problem}")
        self._within.pop()

    def _add_key(self, key: yaml.Node, value: yaml.Node, path: KeyPath) -> None:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
            found = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise self._error(key, path, f"a key must be text, got {_printable(found)}; quote it")
        if not key.value.isprintable():
            raise self._error(key, path, f"the key {shown_value(key.value)} must not hold control characters")
        here = (*path, key.value)
        if here in self.lines:
            raise self._error(key, here, f"is given twice, first on line {self.lines[here]}")
        self.lines[here] = key.start_mark.line + 1
        self.add(value, here)

    def _error(self, node: yaml.Node, path: KeyPath, problem: str) -> ConfigError:
        where = f" {shown_path(path)}:" if path else ""
        return ConfigError(f"{self._file}:{node.start_mark.line + 1}:{where} {problem}")


def _scalar_problem(node: yaml.ScalarNode) -> str | None:
    """Returns why a scalar is refused, or None if it is not."""
    value, kind = str(node.value), str(node.tag).removeprefix(_TAG)
    if kind in ("int", "float") and len(value) > LONGEST_NUMBER:
        return f"is a number of more than {LONGEST_NUMBER} digits; quote it if it is text"
    if (kind == "int" and not _DECIMAL.fullmatch(value)) or (kind == "float" and ":" in value):
        return "YAML 1.1 reads this as another number; write plain digits, or quote it if it is text"
    if kind == "float" and not _finite(value):
        return "must be a finite number; quote it if it is text"
    if _UNPRINTABLE.search(value):
        return "must not hold control characters"
    return None


def _finite(value: str) -> bool:
    if value.lower().lstrip("+-") in (".inf", ".nan"):
        return False
    return math.isfinite(float(value.replace("_", "")))


def _printable(text: str) -> str:
    """Returns text of the file for use in a message: one line, of bounded length."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _line(error: yaml.MarkedYAMLError) -> int:
    return int(error.problem_mark.line) + 1 if error.problem_mark else 1
