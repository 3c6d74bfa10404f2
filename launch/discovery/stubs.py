"""Imports etcd3 next to a protobuf of today.

etcd3 0.12.0 carries stubs that protobuf has refused to run since its version 4. Two ways around that were open:

- `PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python` makes protobuf accept them, if it is set before *anything* in the process
  imports protobuf, which then is the slow one for everything in the process; it would have to be kept from every child, or
  vLLM inherits it.
- The stubs hold their own descriptors in serialized form, which every protobuf reads. Message classes made from those are
  what a new `protoc` would generate.

We do the latter: nothing is set, inherited or in anybody's way, the order of imports does not matter, and the descriptors
live in a pool of their own, where they cannot clash with another `rpc.proto`. The stubs' files are read, never run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

_FILES = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""Each imports those before it."""


def load_etcd3() -> Any:
    """The module `etcd3`. ImportError if it, or what it needs, is not installed."""
    if "etcd3" not in sys.modules:
        for name, module in _message_modules().items():
            sys.modules.setdefault(name, module)
    return importlib.import_module("etcd3")


def _message_modules() -> dict[str, types.ModuleType]:
    from google.protobuf import descriptor_pool

    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    return {f"etcd3.etcdrpc.{name}": _module(name, folder / f"{name}.py", pool) for name in _FILES}


def _module(name: str, file: Path, pool: Any) -> types.ModuleType:
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.internal import enum_type_wrapper

    content = descriptor_pb2.FileDescriptorProto.FromString(_serialized(file))
    pool.Add(content)
    descriptor = pool.FindFileByName(content.name)
    module = types.ModuleType(f"etcd3.etcdrpc.{name}", "Made from the descriptors of etcd3's own stubs.")
    for message in descriptor.message_types_by_name.values():
        setattr(module, message.name, message_factory.GetMessageClass(message))
    for enum in descriptor.enum_types_by_name.values():
        setattr(module, enum.name, enum_type_wrapper.EnumTypeWrapper(enum))
        for value in enum.values:
            setattr(module, value.name, value.number)
    return module


def _serialized(file: Path) -> bytes:
    """The argument `serialized_pb=_b('...')` of a stub."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            text = ast.literal_eval(node.value.args[0])
            return bytes(text.encode("latin1"))
    raise ImportError(f"{file} is not a stub as etcd3 0.12 has them: it holds no serialized descriptor")
