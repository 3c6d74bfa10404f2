"""The one YAML file that describes a cluster: its schema, its reader and its checks.

Reading is strict: a key that nobody knows, a value of the wrong type and a combination that cannot work are one message,
which names file, line, key path, value and what is allowed. Nothing here reads the environment.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import yaml

from pd_cache.errors import ConfigError
from transfer.settings import MIN_SEGMENT, ByteSize, Positive, TransferSettings

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mapping of the file in which only the declared keys may stand."""


# --- cache -----------------------------------------------------------------------------------------------------------


class MooncakeTier(_Section, frozen=True, kw_only=True, tag_field="kind", tag="mooncake"):
    """The shared pool."""


class CacheConfig(_Section, frozen=True, kw_only=True):
    """The `cache` section: what a chunk is, and where chunks live. All nodes that shall share hits must agree on it."""

    chunk_size: Positive = 256
    """Tokens a chunk; a multiple of the engine's block size."""
    hash_mode: Literal["tokens", "blocks"] = "tokens"
    """Name chunks by hashing tokens, or by the engine's own block hashes."""
    hash_seed: str = ""
    tiers: Annotated[tuple[MooncakeTier, ...], msgspec.Meta(min_length=1, max_length=1)] = (MooncakeTier(),)
    """Where chunks live."""


# --- engines ---------------------------------------------------------------------------------------------------------


class RandomModel(_Section, frozen=True, kw_only=True):
    """A Llama with seeded random weights: same numbers, same tokens, on every node. Nothing is downloaded."""

    seed: int = 0
    vocab_size: Positive = 4096
    hidden_size: Positive = 256
    intermediate_size: Positive = 688
    layers: Positive = 4
    heads: Positive = 8
    kv_heads: Positive = 4

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads} must divide hidden_size {self.hidden_size} and be a multiple of "
                f"kv_heads {self.kv_heads}"
            )


class ModelConfig(_Section, frozen=True, kw_only=True):
    """Which model to serve: a local Hugging Face folder, or a random one."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """What clients write into `model`."""
    path: str | None = None
    random: RandomModel | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.random is None):
            raise ValueError("exactly one of `path` (a local folder) and `random` must be given")


class ReferenceEngineConfig(_Section, frozen=True, kw_only=True, tag_field="kind", tag="reference"):
    """The small engine that ships with pd-cache: for trying out, testing and measuring, not for production."""

    model: ModelConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: Positive = 16
    """Tokens a block of the paged cache."""
    num_blocks: Positive = 2048
    max_model_len: Positive = 8192
    """Longest prompt plus output, in tokens."""
    max_running: Positive = 8
    """Requests that compute at the same time."""
    max_queue: Positive = 64
    """Requests that wait; one more is answered 503 with Retry-After."""
    step_tokens: Positive = 256
    """Prompt tokens computed in one step."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Compute threads; 0 leaves it to torch."""


EngineConfig = ReferenceEngineConfig


# --- nodes -----------------------------------------------------------------------------------------------------------


class _Node(_Section, frozen=True, kw_only=True, tag_field="role"):
    name: Name
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """The address that the other nodes reach this one at; also what it binds."""

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class MasterNode(_Node, frozen=True, kw_only=True, tag="master"):
    """Mooncake's master: which key lies where, leases and eviction. Its flags are set explicitly."""

    port: Port = 50051
    metrics_port: Port = 9003
    lease_ttl_ms: Annotated[int, msgspec.Meta(ge=100)] = 10_000
    """How long a key that somebody looked up is safe from eviction; at least 3 times the slowest batch."""
    client_ttl_s: Positive = 5
    """After how many silent seconds a node's segment counts as gone."""
    put_discard_timeout_s: Positive = 5
    """After how many seconds the put of a writer that died no longer blocks the key."""
    eviction_high_watermark: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    eviction_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1


class StoreNode(_Node, frozen=True, kw_only=True, tag="store"):
    """A node that only gives memory to the pool."""

    segment_size: ByteSize


class _EngineNode(_Node, frozen=True, kw_only=True):
    port: Port = 0
    segment_size: ByteSize | None = None
    """Memory that this node gives to the pool; `transfer.segment_size` where it is not set."""


class PrefillNode(_EngineNode, frozen=True, kw_only=True, tag="prefill"):
    """Computes prompts, stores their chunks, and reuses what the pool holds."""


class DecodeNode(_EngineNode, frozen=True, kw_only=True, tag="decode"):
    """Takes prompts' chunks from the pool, computes the rest and streams the output."""


class ProxyNode(_Node, frozen=True, kw_only=True, tag="proxy"):
    """Where clients post their requests."""

    port: Port = 8000


Node = MasterNode | StoreNode | PrefillNode | DecodeNode | ProxyNode
ROLES = ("master", "store", "prefill", "decode", "proxy")
"""In the order in which `up` starts them; it stops them in reverse."""


class ProxyConfig(_Section, frozen=True, kw_only=True):
    """The `proxy` section."""

    request_timeout_s: Seconds = 300.0
    """From a request's arrival to its last byte."""
    prefill_timeout_s: Seconds = 120.0
    """After this the decode node computes the prompt itself."""
    connect_timeout_s: Seconds = 2.0
    max_requests: Positive = 1024
    """Requests in flight; one more is answered 503 with Retry-After."""


class HandoffConfig(_Section, frozen=True, kw_only=True):
    """The `handoff` section: how a decode node takes over a prompt."""

    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 2_000
    """How long a decode node waits for a prefix that the prefill node announced."""


class SupervisorConfig(_Section, frozen=True, kw_only=True):
    """The `supervisor` section: `up` and the processes that it starts."""

    ready_timeout_s: Seconds = 120.0
    stop_grace_s: Seconds = 10.0


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    name: Name = "pd-cache"
    transfer: TransferSettings = TransferSettings()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig | None = None
    """Needed where there are prefill or decode nodes."""
    handoff: HandoffConfig = HandoffConfig()
    proxy: ProxyConfig = ProxyConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    nodes: Annotated[tuple[Node, ...], msgspec.Meta(min_length=1)]

    @property
    def master(self) -> MasterNode:
        return next(node for node in self.nodes if isinstance(node, MasterNode))

    @property
    def master_address(self) -> str:
        return f"{self.master.host}:{self.master.port}"

    def node(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    def by_role(self, role: str) -> list[Node]:
        return [node for node in self.nodes if node.role == role]


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache inside one process needs to know: a node's view of the file, or an embedding program's own."""

    master: str
    """`host:port` of Mooncake's master."""
    host: str = "127.0.0.1"
    cache: CacheConfig = CacheConfig()
    transfer: TransferSettings = TransferSettings()
    segment_size: int = 0

    @classmethod
    def of(cls, config: ClusterConfig, node: Node) -> NodeSettings:
        """The settings of one node of the file."""
        own = getattr(node, "segment_size", None)
        return cls(
            master=config.master_address,
            host=node.host,
            cache=config.cache,
            transfer=config.transfer,
            segment_size=int(config.transfer.segment_size if own is None else own),
        )


# --- reading ---------------------------------------------------------------------------------------------------------

KeyPath = tuple[str | int, ...]


class Problem(NamedTuple):
    """Something in the file that cannot work."""

    path: KeyPath
    message: str


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


def consistency_problems(config: ClusterConfig) -> Iterator[Problem]:
    """What cannot work although each value is allowed, first things first."""
    seen: dict[str, int] = {}
    for index, node in enumerate(config.nodes):
        if node.name in seen:
            yield Problem(
                ("nodes", index, "name"), f"is also the name of nodes[{seen[node.name]}]; names must be unique"
            )
        seen[node.name] = index
    masters = [index for index, node in enumerate(config.nodes) if isinstance(node, MasterNode)]
    if len(masters) != 1:
        path: KeyPath = ("nodes", masters[1]) if masters else ("nodes",)
        yield Problem(path, f"{len(masters)} nodes have the role master; there must be exactly one")
    ports: dict[tuple[str, int], str] = {}
    for index, node in enumerate(config.nodes):
        for field in ("port", "metrics_port"):
            port = getattr(node, field, 0)
            if not port:
                continue
            other = ports.setdefault((node.host, port), node.name)
            if other != node.name or (field == "metrics_port" and getattr(node, "port", 0) == port):
                yield Problem(("nodes", index, field), f"{other} uses this port of {node.host} already")
        size = getattr(node, "segment_size", None)
        if size is not None and (0 < size < MIN_SEGMENT or (size == 0 and isinstance(node, StoreNode))):
            allowed = "at least 16MiB" if isinstance(node, StoreNode) else "0 for none, or at least 16MiB"
            yield Problem(("nodes", index, "segment_size"), f"must be {allowed}, the smallest that Mooncake takes")
    engines = [index for index, node in enumerate(config.nodes) if isinstance(node, _EngineNode)]
    if engines and config.engine is None:
        yield Problem(("engine",), f"missing, but nodes[{engines[0]}] is a {config.nodes[engines[0]].role} node")
    if any(isinstance(node, ProxyNode) for node in config.nodes) and not config.by_role("decode"):
        yield Problem(("nodes",), "a proxy needs at least one decode node to send requests to")
    if config.engine is not None:
        block, chunk = config.engine.block_size, config.cache.chunk_size
        if chunk % block:
            near = sorted({max(1, chunk // block) * block, (chunk // block + 1) * block})
            yield Problem(
                ("cache", "chunk_size"),
                f"must be a multiple of engine.block_size {block}, e.g. {' or '.join(map(str, near))}",
            )
        if config.engine.num_blocks * block < config.engine.max_model_len:
            yield Problem(
                ("engine", "num_blocks"),
                f"{config.engine.num_blocks} blocks of {block} tokens cannot hold one request of max_model_len "
                f"{config.engine.max_model_len}; at least {-(-config.engine.max_model_len // block)} are needed",
            )
    if config.engine is not None and config.cache.hash_mode != "tokens":
        yield Problem(("cache", "hash_mode"), "the reference engine has no block hashes; use tokens")
    slowest = max(config.transfer.timeouts.get_ms, config.transfer.timeouts.put_ms)
    if masters and config.master.lease_ttl_ms < slowest:
        yield Problem(
            ("nodes", masters[0], "lease_ttl_ms"),
            f"a read that outlives its lease is lost, and transfer.timeouts allow one "
            f"{slowest} ms; make this at least that",
        )


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


def _at(kind: Any, path: KeyPath, tree: Any) -> list[type[msgspec.Struct]]:
    """The Struct types that may stand at `path`, narrowed by the tags that the file gives."""
    kinds, here = _structs(kind), tree
    for part in (None, *path):
        if isinstance(part, str):
            hints = [typing.get_type_hints(struct, include_extras=True).get(part) for struct in kinds]
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
        hint = typing.get_type_hints(struct).get(path[-1])
        if typing.get_origin(hint) is Literal:
            return [str(option) for option in typing.get_args(hint)]
    return []
