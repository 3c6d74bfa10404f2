"""Which way imports point, and where each foreign package is at home."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transfer", "pd_cache", "launch")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

LAYERS = (
    ("cluster", "events", "objects"),
    ("server",),
    ("vllm", "adapters"),
)
"""Inside pd_cache, above the core: a module imports from its own layer and those before it. Every module that
is not named here is core."""

LAUNCH_LAYERS = (
    ("openai", "run._tethered"),
    ("run.supervise", "http", "run.health_server"),
    ("masters", "discovery"),
    ("watch", "run.up"),
    ("engines", "proxy"),
    ("run", "doctor", "demo", "operate"),
    ("cli", "__main__"),
)
"""The same inside launch."""

STRANGERS = (
    {"paged", "tiers", "lookup"},
    {"cluster", "events"},
    {"vllm", "adapters"},
    {"watch", "run.up"},
    {"engines", "proxy"},
    {"run.roles", "doctor", "demo", "operate"},
)
"""Modules and packages of one layer that never import one another."""

HOMES = {
    "mooncake": ("transfer/store.py", "transfer/direct_reads.py"),
    "zmq": ("pd_cache/server/link.py", "pd_cache/events/subscriber.py"),
    "etcd3": ("launch/discovery/",),
    "grpc": ("launch/discovery/etcd.py", "launch/proxy/gateway/picker.py"),
    "google.protobuf": ("launch/discovery/etcd.py", "launch/proxy/gateway/ext_proc.py"),
    "click": ("launch/cli.py",),
    "yaml": ("pd_cache/cluster/reader.py",),
    "xxhash": ("pd_cache/layout.py",),
    "numpy": ("pd_cache/paged/cpu.py",),
    "triton": ("pd_cache/paged/cuda.py", "pd_cache/paged/xxh3.py"),
    "torch.cuda": ("pd_cache/paged/cuda.py", "pd_cache/server/memory.py"),
    "opentelemetry": ("pd_cache/tracing.py",),
    "vllm": ("pd_cache/vllm/", "pd_cache/adapters/vllm_tier.py"),
    "sglang": ("pd_cache/adapters/sglang_hicache.py",),
    "lmcache": ("pd_cache/adapters/lmcache.py",),
    "huggingface_hub": ("pd_cache/vllm/model.py",),
    "transformers": (),
    "aiohttp": ("launch/proxy/", "launch/engines/reference/", "launch/openai.py"),
    # what others wrote is decoded with one error
    "msgspec.json.decode": ("pd_cache/decoding.py",),
    "msgspec.json.Decoder": ("pd_cache/decoding.py",),
    "msgspec.msgpack.decode": ("pd_cache/decoding.py",),
    "msgspec.msgpack.Decoder": ("pd_cache/decoding.py",),
    "json.load": (),
    "json.loads": (),
    "ctypes": (
        "transfer/settings.py",
        "transfer/staging.py",
        "transfer/store.py",
        "launch/run/_tethered.py",
        "launch/proxy/bodies.py",
    ),
}

_BY_ATTRIBUTE = ("torch.cuda", *(name for name in HOMES if name.startswith(("json.", "msgspec."))))
_ATTRIBUTES = frozenset(name.rpartition(".")[2] for name in _BY_ATTRIBUTE)


@functools.cache
def tree(file):
    return ast.parse(file.read_text())


@functools.cache
def imported(file):
    """Dotted names that a file imports, also inside functions; some by attribute, too."""
    names = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in _ATTRIBUTES
            and ast.unparse(node) in _BY_ATTRIBUTE
        ):
            names.append(ast.unparse(node))
    return names


def layer_of(segments):
    """The layer of a dotted name below pd_cache or launch: that of its module where this has one of its own,
    else its package's."""
    layers = {"pd_cache": ((), *LAYERS), "launch": LAUNCH_LAYERS}[segments[0]]
    for name in (".".join(segments[1:3]), segments[1]):
        for index, layer in enumerate(layers):
            if name in layer:
                return index
    return 0 if segments[0] == "pd_cache" else None


def name_of(file):
    return str(file.relative_to(ROOT))


def test_imports_point_one_way():
    for file in FILES:
        package = file.relative_to(ROOT).parts[0]
        allowed = PACKAGES[: PACKAGES.index(package) + 1]
        for name in imported(file):
            top = name.split(".")[0]
            assert top not in ("bench", "tests"), f"{name_of(file)}: nothing imports {top}"
            assert top not in PACKAGES or top in allowed, f"{name_of(file)}: {package} must not import {name}"


def test_layers_inside_pd_cache_and_launch():
    for file in FILES:
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "transfer" or (file.name == "__init__.py" and len(parts) == 2):
            continue
        level = layer_of(parts)
        assert level is not None, f"{name_of(file)} is in no layer"
        for name in imported(file):
            segments = name.split(".")
            if segments[0] != parts[0] or len(segments) < 2:
                continue
            other = layer_of(segments)
            assert other is None or other <= level, f"{name_of(file)} must not import {name}"
            for strangers in STRANGERS:
                own, imports = ({names[1], ".".join(names[1:3])} & strangers for names in (parts, segments))
                assert own == imports or not own or not imports, f"{name_of(file)} must not import {name}"


def test_each_dependency_has_one_home():
    for file in FILES:
        for name in imported(file):
            for dependency, homes in HOMES.items():
                if name == dependency or name.startswith(dependency + "."):
                    assert name_of(file).startswith(homes), (
                        f"{name_of(file)}: {dependency} is at home in {homes}"
                    )


def test_no_module_reads_the_environment_when_it_is_imported():
    def at_import(node):
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
    "launch.cli": ("torch", "mooncake", "aiohttp"),
    "launch.run.roles": ("torch", "mooncake", "aiohttp", "grpc", "zmq", "prometheus_client", "rich"),
    "launch.watch.asker": ("torch", "mooncake", "aiohttp", "grpc", "rich"),
    "launch.doctor": ("torch", "mooncake", "aiohttp", "grpc"),
    "launch.operate.top": ("torch", "mooncake", "aiohttp", "grpc"),
    "launch.operate.explain": ("torch", "mooncake", "aiohttp", "grpc"),
    "launch.proxy.app": ("torch", "mooncake", "grpc", "rich", "opentelemetry"),
    "pd_cache.reasons": ("pd_cache.versions",),
    "pd_cache.objects.object_cache": ("torch", "mooncake", "zmq", "yaml", "aiohttp", "pd_cache.cluster"),
    "bench.suites.bandwidth": ("torch",),
    "bench.suites.lookup": ("torch",),
}
"""What importing a module does not import."""
LIGHT_BUT_FOR_TORCH = {
    "pd_cache.cache": ("mooncake", "triton", "zmq", "yaml", "aiohttp", "pd_cache.cluster", "opentelemetry"),
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


def test_importing_is_light():
    """Each module in a process of its own: a fork of one that has imported nothing, or torch, which takes
    seconds."""
    program = _IMPORTER % [("os", LIGHT), ("torch", LIGHT_BUT_FOR_TORCH)]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines() == [*LIGHT, *LIGHT_BUT_FOR_TORCH], done.stderr


def test_the_functions_on_a_requests_way_are_where_the_page_says():
    page = (ROOT / "docs/architecture.md").read_text()
    way = page.partition("```text\n")[2].partition("```")[0]
    for file, functions in re.findall(r"(\S+\.py) +(.+)", way):
        source = (ROOT / ("" if file.startswith("transfer/") else "pd_cache") / file).read_text()
        for name in re.findall(r"(?<!Mooncake's )\b(?:[A-Z]\w+\.\w+|\w*_\w+)", functions):
            *owner, function = name.split(".")
            assert f"def {function}(" in source, f"{file}: no {name}"
            assert not owner or f"class {owner[0]}" in source, f"{file}: no {name}"
