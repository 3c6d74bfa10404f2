"""Imports etcd3 next to a current protobuf.

etcd3 0.12.0 contains stubs that protobuf has refused to run since its version 4. There are two ways around that:

- `PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python` makes protobuf accept them, if it is set before *anything* in the process
  imports protobuf. The whole process then uses the slow implementation, and so does every child, such as vLLM, that inherits
  the variable.
- The stubs hold their own descriptors in serialized form, which every protobuf reads. Message classes made from those are
  what a new `protoc` would generate.

We do the latter. Nothing is set or inherited, the order of imports does not matter, and the descriptors live in a separate pool, where
they cannot clash with another `rpc.proto`. The stubs' files are read, never run.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

_FILES = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""Each file imports those before it."""
_SERIALIZED = re.compile(r"""serialized_pb=_b\('((?:[^'\\]|\\.)*)'\)""")
_lock = threading.Lock()


def load_etcd3() -> Any:
    """Returns the module `etcd3`. Raises ImportError if it or a package that it needs is not installed. Thread-safe."""
    with _lock:
        if "etcd3" not in sys.modules:
            _make_stubs()
        return importlib.import_module("etcd3")


def _make_stubs() -> None:
    """Puts modules with the message classes of etcd3's stubs in their place."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper

    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed")
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        file = Path(spec.submodule_search_locations[0]) / "etcdrpc" / f"{name}.py"
        found = _SERIALIZED.search(file.read_text(encoding="utf-8"))
        if found is None:
            raise ImportError(f"{file}: expected a stub of etcd3 0.12, but it holds no serialized descriptor")
        serialized = found[1].encode("latin1").decode("unicode_escape").encode("latin1")
        content = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        pool.Add(content)
        descriptor = pool.FindFileByName(content.name)
        module = types.ModuleType(f"etcd3.etcdrpc.{name}", "Made from the descriptors of etcd3's own stubs.")
        for message in descriptor.message_types_by_name.values():
            setattr(module, message.name, message_factory.GetMessageClass(message))
        for enum in descriptor.enum_types_by_name.values():
            setattr(module, enum.name, enum_type_wrapper.EnumTypeWrapper(enum))
            for value in enum.values:
                setattr(module, value.name, value.number)
        sys.modules[module.__name__] = module
