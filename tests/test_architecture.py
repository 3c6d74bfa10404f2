"""Which way imports point, where each foreign package is at home, and that a word has one meaning."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transfer", "pd_cache", "launch")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

LAYERS = (
    (
        "errors",
        "checksum",
        "runtime",
        "config",
        "metrics",
        "groups",
        "tokens",
        "recent_names",
        "epochs",
        "block_hashes",
        "layout",
        "handoff",
        "weights",
        "decoding",
        "blocks",
        "sparse_log",
        "deadline",
        "tracing",
        "values",
        "deadline",
        "misses",
        "reports",
        "kv_events",
        "pool_contents",
    ),
    ("paged", "backends", "lookup"),
    ("mover", "prompts", "object_cache", "async_objects"),
    ("engine",),
    ("wire", "cluster"),
    ("client", "server"),
    ("vllm", "adapters"),
)
"""Inside pd_cache: a module imports from its own layer and those before it."""

LAUNCH_LAYERS = (
    ("errors", "signals", "access", "openai", "descriptors", "_guardian", "_tethered"),
    ("process", "foreign", "asking", "topology", "exposition"),
    ("masters", "discovery", "supervisor"),
    ("pool_lookups", "pool_events", "figures"),
    ("reachability", "status", "up"),
    ("engines", "proxy"),
    ("roles", "doctor", "demo", "reset", "explain", "top"),
    ("cli", "__main__"),
)
"""The same inside launch."""

STRANGERS = (
    {"paged", "backends", "lookup"},
    {"wire", "cluster"},
    {"client", "server"},
    {"vllm", "adapters"},
    {"reachability", "status", "up"},
    {"engines", "proxy"},
    {"roles", "doctor", "demo", "reset", "explain", "top"},
)
"""Modules and packages of one layer that never import one another."""

HOMES = {
    "mooncake": ("transfer/store.py", "transfer/engine.py"),
    "zmq": ("pd_cache/wire/channel.py", "pd_cache/wire/event_streams.py"),
    "etcd3": ("launch/discovery/",),
    "grpc": ("launch/discovery/etcd.py",),
    "google.protobuf": ("launch/discovery/stubs.py",),
    "click": ("launch/cli.py",),
    "yaml": ("pd_cache/cluster/document.py",),
    "xxhash": ("pd_cache/checksum.py",),
    "numpy": ("pd_cache/paged/cpu.py",),
    "triton": ("pd_cache/paged/cuda.py",),
    "torch.cuda": ("pd_cache/paged/cuda.py", "pd_cache/wire/sharing.py"),
    "opentelemetry": ("pd_cache/tracing.py",),
    "vllm": ("pd_cache/vllm/", "pd_cache/adapters/vllm_tier_manager.py"),
    "sglang": ("pd_cache/adapters/sglang_storage.py", "bench/lib/sglang_pools.py"),
    "lmcache": ("pd_cache/adapters/lmcache_lanes.py",),
    "huggingface_hub": ("pd_cache/vllm/model.py",),
    "transformers": ("launch/engines/reference/huggingface.py", "launch/engines/reference/tokenizer.py"),
    "aiohttp": ("launch/proxy/", "launch/engines/reference/"),
    # what others wrote is decoded with one error; the reference engine refuses NaN, the demo reads its own model's file
    "msgspec.json.decode": ("pd_cache/decoding.py",),
    "msgspec.json.Decoder": ("pd_cache/decoding.py",),
    "msgspec.msgpack.decode": ("pd_cache/decoding.py",),
    "msgspec.msgpack.Decoder": ("pd_cache/decoding.py",),
    "json.load": ("launch/engines/reference/protocol.py", "launch/demo.py"),
    "json.loads": ("launch/engines/reference/protocol.py", "launch/demo.py"),
    "ctypes": (
        "transfer/staging.py",
        "transfer/store.py",
        "pd_cache/wire/sealed.py",
        "pd_cache/wire/freed_memory.py",
        "launch/_tethered.py",
        "launch/doctor/clock.py",
    ),
}

NAMED_ALIKE = {
    "__init__.py": "a package's own module",
    "__main__.py": "what `python -m` runs",
    "base.py": "the interface that its package's other modules implement",
}
"""Names of files that a package may have more than once, and why. `launch/roles/` may repeat any: a file there bears a role's name."""

SAYS_TOO_LITTLE = frozenset(("held",))
"""Words that name nothing by themselves: that something is held does not say what it is, nor by what it is held."""


_BY_ATTRIBUTE = ("torch.cuda", *(name for name in HOMES if name.startswith(("json.", "msgspec."))))
_ATTRIBUTES = frozenset(name.rpartition(".")[2] for name in _BY_ATTRIBUTE)


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imported(file: Path) -> tuple[str, ...]:
    """Dotted names that a file imports, also inside functions; some by attribute, too."""
    return tuple(_imported(file))


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in _ATTRIBUTES
            and (name := ast.unparse(node)) in _BY_ATTRIBUTE
        ):
            yield name


def layer_of(segments: Sequence[str]) -> int | None:
    """The layer of a dotted name below pd_cache or launch: that of its module where this has one of its own, else its package's."""
    layers = {"pd_cache": LAYERS, "launch": LAUNCH_LAYERS}[segments[0]]
    for name in (".".join(segments[1:3]), segments[1]):
        for index, layer in enumerate(layers):
            if name in layer:
                return index
    return None


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_imports_point_one_way() -> None:
    for file in FILES:
        package = file.relative_to(ROOT).parts[0]
        allowed = PACKAGES[: PACKAGES.index(package) + 1]
        for name in imported(file):
            top = name.split(".")[0]
            assert top not in ("bench", "tests"), f"{name_of(file)}: nothing imports {top}"
            assert top not in PACKAGES or top in allowed, f"{name_of(file)}: {package} must not import {name}"


def test_layers_inside_pd_cache_and_launch() -> None:
    for file in FILES:
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "transfer" or (file.name == "__init__.py" and len(parts) == 2):
            continue
        own = parts[1]
        level = layer_of(parts)
        assert level is not None, f"{name_of(file)}: {own} is in no layer"
        for name in imported(file):
            segments = name.split(".")
            if segments[0] != parts[0] or len(segments) < 2:
                continue
            other = layer_of(segments)
            assert other is None or other <= level, f"{name_of(file)}: {own} must not import {name}"
            for strangers in STRANGERS:
                assert own == segments[1] or not {own, segments[1]} <= strangers, (
                    f"{name_of(file)}: {own} must not import {name}"
                )


def test_each_dependency_has_one_home() -> None:
    for file in FILES:
        for name in imported(file):
            for dependency, homes in HOMES.items():
                if name == dependency or name.startswith(dependency + "."):
                    assert name_of(file).startswith(homes), f"{name_of(file)}: {dependency} is at home in {homes}"


def test_no_module_reads_the_environment_when_it_is_imported() -> None:
    def at_import(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from at_import(child)

    for file in FILES:
        for node in at_import(tree(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv"), f"{name_of(file)}: line {node.lineno}"


LIGHT = {
    "pd_cache": ("torch", "mooncake", "msgspec"),
    "pd_cache.config": ("torch", "mooncake", "yaml"),
    "pd_cache.cluster": ("torch", "mooncake", "zmq"),
    "transfer": ("torch", "mooncake"),
    "launch.cli": ("torch", "mooncake", "aiohttp", "transformers"),
    "launch.roles": ("torch", "mooncake", "aiohttp", "transformers", "grpc", "zmq", "prometheus_client", "rich"),
    "launch.status": ("torch", "mooncake", "aiohttp", "transformers", "grpc"),
    "launch.doctor": ("torch", "mooncake", "aiohttp", "transformers", "grpc"),
    "launch.top": ("torch", "mooncake", "aiohttp", "transformers", "grpc"),
    "launch.explain": ("torch", "mooncake", "aiohttp", "transformers", "grpc"),
    "launch.proxy.proxy": ("torch", "mooncake", "transformers", "grpc", "rich", "opentelemetry"),
    "pd_cache.object_cache": ("torch", "mooncake", "zmq", "yaml", "aiohttp", "pd_cache.cluster"),
    "pd_cache.adapters.lmcache": ("torch", "lmcache", "vllm", "mooncake", "zmq"),
    "bench.suites.bandwidth": ("torch",),
    "bench.suites.lookup": ("torch",),
}
"""What importing a module does not import."""
LIGHT_BUT_FOR_TORCH = {
    "pd_cache.engine": ("mooncake", "triton", "zmq", "yaml", "aiohttp", "pd_cache.cluster", "opentelemetry"),
    "pd_cache.vllm.scheduler": ("vllm", "mooncake"),
    "pd_cache.vllm.worker": ("vllm", "mooncake", "zmq"),
}
"""The same for modules that need torch."""

_IMPORTER = """
import importlib, os, sys

for first, light in %r:
    importlib.import_module(first)
    for module, unwanted in light.items():
        if (child := os.fork()) == 0:
            importlib.import_module(module)
            print(module, *(name for name in unwanted if name in sys.modules), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


def test_importing_is_light() -> None:
    """Each module in a process of its own: a fork of one that has imported nothing, or torch, which takes seconds."""
    program = _IMPORTER % [("os", LIGHT), ("torch", LIGHT_BUT_FOR_TORCH)]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == [*LIGHT, *LIGHT_BUT_FOR_TORCH], done.stderr


# --- words -----------------------------------------------------------------------------------------------------------

NAMED = sorted(file for package in (*PACKAGES, "bench") for file in (ROOT / package).rglob("*.py"))


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")
"""A word of a class's name: `PagedKV` has two."""


@functools.cache
def classes() -> tuple[tuple[str, Path], ...]:
    """The name of each class of our code, and its file."""
    return tuple((node.name, file) for file in NAMED for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef))


def glossary() -> dict[str, tuple[str, ...]]:
    """The words of docs/architecture.md, without hyphens, and the files and folders where each is at home."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| ([^|`]+) \| [^|]+ \| ([^|]+) \|$", text.split("\n## Words\n")[1].split("\n## ")[0], re.MULTILINE
    )
    return {
        word.replace("-", ""): tuple(re.findall(r"`([^`]+)`", where))
        for words, where in rows[1:]
        for word in words.split(", ")
    }


def twice(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that several files have, with these files."""
    where = defaultdict(set)
    for name, file in names:
        where[name].add(name_of(file))
    return {name: sorted(files) for name, files in where.items() if len(files) > 1}


def test_a_class_name_has_one_meaning() -> None:
    """No two modules of `transfer`, `pd_cache`, `launch` and `bench` define a class of the same name.

    Private classes count, and neither an underscore in front nor upper and lower case makes it another name: who reads `_Watch` beside
    `Watch` takes them for one. Type variables and aliases are no classes.
    """
    assert not twice((name.lstrip("_").lower(), file) for name, file in classes())


@pytest.mark.parametrize("package", [*PACKAGES, "bench"])
def test_a_file_name_has_one_meaning(package: str) -> None:
    """No two files below a package have one name, so that the name alone says which is meant; `NAMED_ALIKE` has the exceptions."""
    roles = ROOT / "launch" / "roles"
    files = [file for file in (ROOT / package).rglob("*.py") if file.name not in NAMED_ALIKE and file.parent != roles]
    assert not twice((file.name, file) for file in files)


def test_words_of_the_glossary_name_classes_at_home_only() -> None:
    """A class whose name ends in a word of the glossary is what the word means, and lies where the glossary says."""
    words = glossary()
    assert len(words) > 20, "docs/architecture.md has its table of words"
    for homes in words.values():
        assert homes
        assert all((ROOT / home).exists() for home in homes), f"{homes}: no such files"
    elsewhere = [
        f"{name} in {name_of(file)}"
        for name, file in classes()
        if not name_of(file).startswith(words.get(_WORD.findall(name)[-1].lower(), ""))
    ]
    assert not elsewhere


def test_names_say_enough() -> None:
    for file in NAMED:
        text = file.read_text()
        if not any(word in text.lower() for word in SAYS_TOO_LITTLE):
            continue  # to take a file apart takes a hundred times longer
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                assert token.string.strip("_").lower() not in SAYS_TOO_LITTLE, (
                    f"{name_of(file)}: line {token.start[0]}: {token.line.strip()}"
                )
