"""What some tests need of the machine. Each reason says how to have it; the end of a run lists them
(`tests/conftest.py`)."""

import os
import shutil
import sys
from pathlib import Path

import pytest

NO_ETCD = "no etcd; `make test` installs Debian's etcd-server as root"
NO_OPENSSL = "no openssl; `make test` installs it as root"
NO_IPROUTE = "no ip and tc; `make test` installs Debian's iproute2 as root"
NO_ROOT = "not root, which network namespaces and mounts take; run `make test` as root"
NO_LMCACHE = "no LMCache in this environment; `make test-lmcache` runs its tests in one of their own"
NO_GPU = "no CUDA device; run `make test` on a machine with one, with a torch built for it"
NO_VLLM = "no vLLM in this environment; run `make test-vllm`"
NO_SGLANG = "no SGLang in this environment; run `make test-sglang`"

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason=NO_ETCD)

_TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def tool(name):
    """Returns the path of a program that tools/deploy-tools.sh puts beside this Python, or that is in
    PATH."""
    return shutil.which(name, path=_TOOLS)


def needed(name):
    """The same, and skips the test where there is none."""
    return tool(name) or pytest.skip(f"no {name}; `make test` installs it by tools/deploy-tools.sh")
