#!/usr/bin/env bash
# Sets up the virtual environment of the SGLang tests: SGLang's wheel beside pd-cache, with what its HiCache imports on a CPU. Idempotent.
#   PYTHON=python3.11 SGLANG_VENV=.venv-sglang bash tools/install-sglang.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
SGLANG_VENV=${SGLANG_VENV:-.venv-sglang}
SGLANG=${SGLANG:-0.5.23}   # docs/sglang.md names the versions that are tested

VENV=$SGLANG_VENV EXTRAS=cpu,test PYTHON=$PYTHON bash tools/install.sh

pip() { "$SGLANG_VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# The wheel asks for CUDA's packages, several gigabytes of them. Its HiCache imports only these on a CPU; torchvision is one of the
# CUDA builds on PyPI, of which the Python part is imported and no operator is called (tests/support/sglang_host.py).
echo "installing SGLang $SGLANG into $SGLANG_VENV" >&2
pip install --no-deps "sglang==$SGLANG" torchvision
pip install aiohttp apache-tvm-ffi compressed-tensors einops fastapi gguf ipython msgspec numpy orjson pillow prometheus-client psutil \
    pybase64 pydantic python-multipart pyzmq regex requests safetensors sentencepiece setproctitle tiktoken tqdm transformers triton \
    uvicorn uvloop
