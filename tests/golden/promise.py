"""What users rely on, as text: the golden files beside this module hold it. `python -m tests.golden.promise`
writes them anew.

A line that goes from a golden file is something taken from users: CHANGELOG.md says under *Removed* what to
use instead.
"""

import ast
import hashlib
import inspect
import json
import types
import typing
from pathlib import Path

import click
import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def yaml_keys():
    """Yields each key of the cluster's file with its default."""
    from pd_cache.cluster import ClusterConfig

    return _keys(ClusterConfig, "")


def _keys(kind, path):
    for one in _parts(kind):
        if not (isinstance(one, type) and issubclass(one, msgspec.Struct)):
            continue
        config = one.__struct_config__
        where = f"{path}<{config.tag}>" if config.tag else path
        yield from [f"{where}.{config.tag_field}"] if config.tag else []
        for field in msgspec.structs.fields(one):
            inner = list(_keys(field.type, f"{where}.{field.encode_name}"))
            if inner:
                yield from inner
            else:
                default = "required" if field.required else repr(field.default)
                if field.default_factory is not msgspec.NODEFAULT:
                    default = repr(field.default_factory())
                yield f"{where}.{field.encode_name} = {default}"


def _parts(kind):
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        yield from _parts(arguments[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType, tuple, list):
        for one in arguments:
            yield from _parts(one)
    else:
        yield kind


def command_line():
    """Yields each command of the CLI with its options and arguments."""
    from launch.cli import main

    return _commands(main, "pd-cache")


def _commands(command, path):
    for one in command.params:
        yield f"{path} {' / '.join([*one.opts, *one.secondary_opts]) if isinstance(one, click.Option) else one.name.upper()}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield f"{path} {name}"
            yield from _commands(inner, f"{path} {name}")


_FAMILIES = (
    "Counter",
    "Gauge",
    "Histogram",
    "CounterMetricFamily",
    "GaugeMetricFamily",
    "HistogramMetricFamily",
)


def metric_names():
    """Yields the metrics of all our processes with their labels."""
    from pd_cache.metrics import COUNTERS, HISTOGRAMS

    counted = {**COUNTERS, **HISTOGRAMS}
    yield from (f"pd_cache_{family}{{{','.join(labels)}}}" for family, (labels, _) in counted.items())
    for package in ("pd_cache", "launch"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id[:1].upper() + node.func.id[1:] in _FAMILIES
                ):
                    continue
                name = node.args[0] if node.args else None
                if isinstance(name, ast.Call) and name.args and isinstance(name.args[0], ast.Constant):
                    spelled = f"pd_cache_reference_{name.args[0].value}"
                elif isinstance(name, ast.Constant):
                    spelled = str(name.value)
                else:
                    continue
                labels = [ast.literal_eval(one) for one in node.args[2:3] if isinstance(one, ast.List)]
                yield spelled + (f"{{{','.join(labels[0])}}}" if labels else "")


def public_api():
    """Yields the names that `pd_cache` and `transfer` export, with the signatures of their methods."""
    import pd_cache
    import transfer

    for module, name in ((one, name) for one in (pd_cache, transfer) for name in one.__all__):
        value = getattr(module, name)
        yield f"{module.__name__}.{name}"
        if not inspect.isclass(value):
            continue
        yield f"{module.__name__}.{name}{_signature(value)}"
        for method, member in inspect.getmembers(value):
            if method.startswith("_") or method in dir(Exception) or issubclass(value, (int, tuple)):
                continue
            shown = _signature(member) if callable(member) else ""
            yield f"{module.__name__}.{name}.{method}{shown}"


def _signature(value):
    """Returns the names of the parameters, and which have a default."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    shown, keywords = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not keywords:
            shown.append("*")
        keywords = keywords or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(star + one.name + ("" if one.default is one.empty else "=…"))
    return f"({', '.join(shown)})"


def names_and_objects():
    """Yields the names, keys, namespaces and objects of some prompts, as JSON."""
    from pd_cache import CacheConfig, CacheMetadata
    from pd_cache.chunks import (
        BlockHasher,
        ChunkedTokenDatabase,
        LayerGroup,
        describe_hashes,
        fold_names,
        salt_keys,
    )
    from pd_cache.tiers.memory import seal

    half = {
        "kv_dtype": "float16",
        "page_format": "heads4.block16.bytes64x1",
        "block_size": 16,
        "page_bytes": 1024,
    }
    plain = CacheMetadata(model="model@1f", layers=6, **half)
    ranks = CacheMetadata(
        model="model@1f", kv_dtype="bfloat16", page_format="heads8.block16.bytes256x2", layers=32, block_size=16,
        page_bytes=65536, world_size=4, rank=1, shards_per_rank=2,
    )  # fmt: skip
    group = LayerGroup(layers="0-2", keeps="the last 256 tokens", tail=1, ahead=1)
    window = CacheMetadata(model="model@1f", layers=3, group=group, **half)
    tokens = [(7 * index) % 32000 for index in range(1000)]
    found = {}
    for label, metadata in (("plain", plain), ("ranks", ranks), ("window", window)):
        database = ChunkedTokenDatabase(metadata.namespace(CacheConfig(chunk_size=256)))
        for isolation in ((), salt_keys("tenant"), ("a", b"b", 3)):
            names = database.name_chunks(tokens, None, isolation)
            found[f"{label} {isolation!r}"] = {
                "names": [name.hex() for name in names],
                "keys": database.keys(names[:1]),
                "keys of another version": database.keys(names[:1], label="0a1b2c3d-7"),
            }
        found[f"{label} namespace"] = [database.manifest_key, database.namespace.manifest().decode()]
    by_blocks = CacheConfig(chunk_size=64, hash_mode="blocks", hash_seed="sha256_cbor:0")
    blocks = ChunkedTokenDatabase(plain.namespace(by_blocks))
    hashes = [hashlib.sha256(bytes([index])).digest() for index in range(9)]
    found["blocks"] = [name.hex() for name in blocks.name_chunks(None, hashes)]
    described = describe_hashes("sha256", "vllm-none-hash", "")
    vllm = BlockHasher(16, described).hashes(tokens[:64], "tenant")
    found["block hashes of vLLM"] = [described, *(one.hex() for one in vllm)]
    found["folded"] = [name.hex() for name in fold_names(blocks.name_chunks(None, hashes), b"adapter")]
    payload = bytes(range(256)) * 4
    buffer = memoryview(bytearray(payload) + bytearray(64))
    size = seal("pdc1/0123456789abcdef/0/00112233445566778899aabbccddeeff", buffer, len(payload))
    found["object"] = bytes(buffer[len(payload) : size]).hex()
    yield json.dumps(found, indent=1)


PROMISE = {
    "yaml_keys.txt": yaml_keys,
    "command_line.txt": command_line,
    "metric_names.txt": metric_names,
    "public_api.txt": public_api,
    "names_and_objects.json": names_and_objects,
}


def promised(file):
    return "".join(f"{line}\n" for line in sorted(set(PROMISE[file]())))


if __name__ == "__main__":
    for file in PROMISE:
        (HERE / file).write_text(promised(file))
