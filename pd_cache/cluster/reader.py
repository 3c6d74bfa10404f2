"""Reads the file strictly. Only this module knows YAML, and nothing here reads the environment.

An unknown key, a value of the wrong type or a combination that cannot work raises one error. Its message names file, line, key path, value
and what is allowed.
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
from pd_cache.cluster.schema import ClusterConfig, TenantConfig, TenantsFile
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize

T = TypeVar("T")

_HOST_CLIENT = (
    "went in 0.2.0: every process is a client of the pool, so leave it out. For one client a host, give the host a cache-server node "
    "and its engines `cache_server: NAME`"
)
_POOLS_EVENTS = (
    "went in 0.2.0: vLLM nodes publish what their own caches hold (their events_port), and the proxy looks up what the pool holds; "
    "for events of the pool itself, Mooncake's master has --enable_kv_events from 0.3.14 on"
)
_BY_NGINX = (
    "went in 0.2.0: put nginx in front of the proxy, which bounds slow clients and connections (docs/operations.md)"
)
_BY_DEFAULT = "went in 0.2.0: it is always what it was by default; leave it out"
REMOVED: dict[str, str] = {
    "bench": "went in 0.2.0: say `pd-cache bench NAME --serve HOST:PORT` on one machine and --connect HOST:PORT on the other",
    "cache.tiers.disk.sync": "went in 0.2.0: a file that a power failure tears is found by its checksum, and costs a miss; leave it out",
    "cache.tiers.local.blocking": "went in 0.2.0: a store into memory never waits; leave it out",
    "cache.tiers.local.device": "went in 0.2.0: the tier is always in this machine's memory, as with `cpu`; leave it out",
    "cache.tiers.mooncake.pipelined": "went in 0.2.0: the next chunks are always fetched while the last are checked; leave it out",
    "connector.load": "went in 0.2.0: all loads run while other requests compute, as with `async`; leave it out",
    "discovery.timeout_s": _BY_DEFAULT,
    "engine.model.path": "went in 0.2.0: the reference engine has random weights only. Serve a folder with vLLM: `engine: {kind: vllm, model: FOLDER}`",
    "nodes.master.events_chunks": _POOLS_EVENTS,
    "nodes.master.events_interval_ms": _POOLS_EVENTS,
    "nodes.master.events_port": _POOLS_EVENTS,
    "nodes.cache-server.idle_s": "went in 0.2.0: the memory of a chunk size that no engine has is freed when one with another size comes; leave it out",
    "nodes.cache-server.max_in_flight": _BY_DEFAULT,
    "nodes.master.put_discard_timeout_s": _BY_DEFAULT,
    "proxy.body_timeout_s": _BY_NGINX,
    "proxy.breaker_failures": _BY_DEFAULT,
    "proxy.connect_timeout_s": _BY_DEFAULT,
    "proxy.header_timeout_s": _BY_NGINX,
    "proxy.health_interval_s": _BY_DEFAULT,
    "proxy.health_timeout_s": _BY_DEFAULT,
    "proxy.idle_timeout_s": _BY_NGINX,
    "proxy.node_cache_tokens": "went in 0.2.0: nodes report how large their caches are; leave it out",
    "proxy.ui_followers": "went in 0.2.0: 32 browsers may follow; keys decide who (proxy.monitor_keys_file); leave it out",
    "proxy.write_timeout_s": _BY_NGINX,
    "nodes.store.threads": "went in 0.2.0 with transfer.client: host; leave it out",
    "transfer.client": _HOST_CLIENT,
    "transfer.client_address": _HOST_CLIENT,
    "transfer.local_buffer_size": _BY_DEFAULT,
}
"""Keys of earlier versions, and what to do instead. A key of a node is `nodes.ROLE.key`, of a tier `cache.tiers.KIND.key`.

Example: `{"transfer.client": "went in 0.2.0: give the host a cache-server node"}`.
"""


_TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    f"{_TAG}int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)\Z"),
    f"{_TAG}float": re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?\Z"),
}
_SHOWN = 120
"""The most characters of a value in a message."""


class Source:
    """A parsed file: a tree of plain values, and the line of each key."""

    def __init__(self, file: Path, tree: Any, lines: Mapping[KeyPath, int]) -> None:
        self.file = file
        self.tree = tree
        self._lines = lines

    def error(self, problem: Problem) -> ConfigError:
        """Returns the problem as one message: `file:line: key.path: value: what is allowed`."""
        path = problem.path
        line = next((self._lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._lines), 1)
        value = self.tree
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                value = None
        shown = "" if value is None or isinstance(value, (dict, list)) else f" {_shortened(repr(value))}:"
        return ConfigError(f"{self.file}:{line}: {_shown_path(path)}:{shown} {problem.message}")


def load_config(file: str | Path) -> ClusterConfig:
    """Reads and checks a cluster's file. Raises ConfigError, with one message for the user, if the file cannot be used."""
    return read_config(file)[0]


def read_config(file: str | Path) -> tuple[ClusterConfig, Source]:
    """Reads a file as `load_config` does. Also returns the source, for checks that need more than the file (ports, devices, memory)."""
    return parse_config(_text(file), file)


def _text(file: str | Path) -> str:
    try:
        return Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_config(text: str, file: str | Path) -> tuple[ClusterConfig, Source]:
    """Checks text that was already read. Messages name `file`."""
    source = parse_document(text, Path(file))
    if source.tree is None:
        raise ConfigError(f"{file}: is empty; it needs at least `nodes`")
    config = _converted(source, ClusterConfig)
    for problem in consistency_problems(config):
        raise source.error(problem)
    return config, source


def read_tenants(file: str) -> dict[str, TenantConfig]:
    """Reads the file that `proxy.tenants_file` names. Raises ConfigError if it cannot be used."""
    return _converted(parse_document(_text(file), Path(file)), TenantsFile).tenants


def _converted(source: Source, kind: type[T]) -> T:
    try:
        return msgspec.convert(source.tree, kind, dec_hook=decode_custom)
    except msgspec.ValidationError:
        wrong = _first_problem(kind, source.tree, ())
        assert wrong is not None, "a tree that cannot be converted has a problem"
        raise source.error(wrong) from None


def dump_config(config: ClusterConfig) -> str:
    """Returns the configuration as YAML text. `load_config` reads it back as an equal configuration."""
    return str(yaml.safe_dump(msgspec.to_builtins(config, enc_hook=str), sort_keys=False))


def decode_custom(kind: type, value: object) -> object:
    """Converts values of the types that a file may hold besides the built-in ones: msgspec's `dec_hook`."""
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise NotImplementedError(kind)  # says to msgspec that the type is not one of ours


# --- YAML ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprises: a date is text, and so are `010`, which it reads as 8, and `1:30`, which it reads as 90."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_document(text: str, file: Path) -> Source:
    """Parses a file's text. Its tree is None if the file is empty. Raises ConfigError with file and line if it is not YAML."""
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
        # PyYAML raises the others for invalid numbers in directives and escapes, for an alias inside its own value, and for `!!bool x`
        raise ConfigError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None


def _add_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> None:
    """Adds the lines of a node and of all nodes below it. Follows aliases, so that each place has its line."""
    lines.setdefault(path, node.start_mark.line + 1)
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
                raise ConfigError(f"{file}:{line}: {_shown_path(here)}: is given twice, first on line {lines[here]}")
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


# --- the first problem of a tree that is no configuration --------------------------------------------------------------


def _first_problem(kind: Any, value: Any, path: KeyPath) -> Problem | None:
    """Returns the first problem that keeps a value of the file, or a part of it, from being a `kind`; None if there is none.

    Each part of a value is converted by itself, so the path of a problem is known without parsing msgspec's messages. Messages about a
    single value are passed on.
    """
    try:
        msgspec.convert(value, kind, dec_hook=decode_custom)
    except msgspec.ValidationError as error:
        said = str(error)
        return _problem_inside(kind, value, path) or Problem(
            path, _in_words(kind, value) or said[0].lower() + said[1:400]
        )
    return None


def _problem_inside(kind: Any, value: Any, path: KeyPath) -> Problem | None:
    """Returns the first problem of a part of a value."""
    allowed = list(_alternatives(kind))
    structs = [one for one in allowed if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    if structs and isinstance(value, dict):
        return _problem_in_section(structs, value, path)
    parts: list[tuple[Any, Any, KeyPath]] = []
    for one in allowed:
        if isinstance(value, dict) and typing.get_origin(one) is dict:
            names, values = typing.get_args(one)
            for key, part in value.items():
                parts += (names, key, path), (values, part, (*path, key))
        elif isinstance(value, list) and typing.get_origin(one) in (list, tuple):
            parts = [(typing.get_args(one)[0], part, (*path, index)) for index, part in enumerate(value)]
    return next((problem for part in parts if (problem := _first_problem(*part))), None)


def _problem_in_section(structs: list[type[msgspec.Struct]], value: dict[str, Any], path: KeyPath) -> Problem | None:
    """Returns the first problem of a mapping that should be one of `structs`. The mapping's tag says which one."""
    tag = structs[0].__struct_config__.tag_field
    if tag is not None and tag in value:
        named = [struct for struct in structs if struct.__struct_config__.tag == value[tag]]
        if not named:
            return Problem((*path, tag), _one_of([str(one.__struct_config__.tag) for one in structs], value[tag]))
        structs = named
    keys = dict.fromkeys(name for struct in structs for name in struct.__struct_encode_fields__)
    allowed = [*([tag] if tag else []), *keys]
    if tag is not None and tag not in value:
        return _missing(tag, allowed, value, path)
    fields = {field.encode_name: field for field in msgspec.structs.fields(structs[0])}
    for key, part in value.items():
        if key not in allowed:
            if gone := REMOVED.get(_written(path, value, key)):
                return Problem((*path, key), gone)
            hint = _near(key, allowed, "; did you mean {}?")
            return Problem((*path, key), f"unknown key{hint} (allowed here: {', '.join(allowed)})")
        if key in fields and (problem := _first_problem(fields[key].type, part, (*path, key))):
            return problem
    absent = [name for name, field in fields.items() if field.required and name not in value]
    return _missing(absent[0], allowed, value, path) if absent else None


def _written(path: KeyPath, section: dict[str, Any], key: str) -> str:
    """Returns how `REMOVED` writes the key of a section."""
    names = [str(section.get("role") or section.get("kind")) if isinstance(part, int) else str(part) for part in path]
    return ".".join([*names, key])


def _missing(key: str, allowed: list[str], value: dict[str, Any], path: KeyPath) -> Problem:
    hint = _near(key, [other for other in value if other not in allowed], "; is {} meant to be it?")
    return Problem(path, f"the key {key} is missing{hint} (allowed here: {', '.join(allowed)})")


def _in_words(kind: Any, value: Any) -> str | None:
    """Returns what is allowed in place of a value, if the schema says more than msgspec does; otherwise None."""
    allowed = list(_alternatives(kind))
    bounds = [one for one in allowed if isinstance(one, msgspec.Meta)]
    for one in allowed:
        if typing.get_origin(one) is Literal:
            options = [str(option) for option in typing.get_args(one)]
            if int not in allowed:
                return _one_of(options, value)
            least = next((f" of at least {bound.ge}" for bound in bounds if bound.ge is not None), "")
            return f"must be {' or '.join(options)}, or a whole number{least}"
    for bound in bounds:
        if bound.pattern and isinstance(value, str) and not re.search(bound.pattern, value):
            return f"must be {bound.description}"
    return None


def _one_of(options: list[str], value: Any) -> str:
    return f"must be one of {', '.join(options)}{_near(str(value)[:80], options, '; did you mean {}?')}"


def _near(word: str, options: list[str], hint: str) -> str:
    """Returns the hint with the option that is most like the word; empty if none is like it."""
    found = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return hint.format(found[0]) if found else ""


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yields the types that an annotation allows, and their constraints (`msgspec.Meta`)."""
    if typing.get_origin(kind) in (typing.Annotated, typing.Union, types.UnionType):
        for one in typing.get_args(kind):
            yield from _alternatives(one)
    else:
        yield kind
