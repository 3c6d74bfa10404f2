#!/usr/bin/env bash
# Sets up the virtual environment of the SGLang tests: SGLang's wheel beside pd-cache, with what its HiCache imports on a CPU. Idempotent.
#   PYTHON=python3.11 SGLANG_VENV=.venv-sglang bash tools/install-sglang.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
SGLANG_VENV=${SGLANG_VENV:-.venv-sglang}
SGLANG=${SGLANG:-0.5.23}   # docs/adapters.md names the versions that are tested

VENV=$SGLANG_VENV EXTRAS=cpu,test PYTHON=$PYTHON bash tools/install.sh

pip() { "$SGLANG_VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# The wheel asks for CUDA's packages, several gigabytes of them. Its HiCache imports only these on a CPU, in the versions that SGLang asks
# for where it asks for one. torchvision is one of the CUDA builds on PyPI, of which the Python part is imported and no operator is called
# (tests/support/sglang_pools.py).
packages="aiohttp apache-tvm-ffi compressed-tensors dill einops fastapi gguf ipython msgspec numpy orjson pillow prometheus-client psutil
    pybase64 pydantic python-multipart pyzmq regex requests safetensors sentencepiece setproctitle tiktoken tokenizers tqdm transformers triton
    uvicorn uvloop"
echo "installing SGLang $SGLANG into $SGLANG_VENV" >&2
pip install --no-deps --no-warn-conflicts "sglang==$SGLANG" torchvision
wanted=$("$SGLANG_VENV/bin/python" - $packages <<'EOF'
import importlib.metadata
import sys

from packaging.requirements import Requirement

asked = {one.name.lower(): one for one in map(Requirement, importlib.metadata.requires("sglang") or ()) if one.marker is None}
print(*(f"{name}{asked[name].specifier}" if name in asked else name for name in sys.argv[1:]), sep="\n")
EOF
)
# shellcheck disable=SC2086 # one package a word
pip install --no-warn-conflicts $wanted

# what is missing shows here, and not as an error of each test
"$SGLANG_VENV/bin/python" -c "from tests.support.sglang_pools import import_sglang; import_sglang()"
