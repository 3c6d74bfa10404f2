#!/usr/bin/env bash
# Sets up the virtual environment of the LMCache tests: LMCache and vLLM's CPU build beside pd-cache, and LMCache's own tests. Idempotent.
#   PYTHON=python3.11 LMCACHE_VENV=.venv-lmcache bash tools/install-lmcache.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
LMCACHE_VENV=${LMCACHE_VENV:-.venv-lmcache}
LMCACHE=${LMCACHE:-0.5.6}   # docs/adapters.md names the versions that are tested

VLLM_VENV=$LMCACHE_VENV PYTHON=$PYTHON bash tools/install-vllm.sh

pip() { "$LMCACHE_VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT

# The wheel asks for CUDA's packages, and for older versions of some that vLLM asks for newer ones of. On a CPU it imports and uses only these.
echo "installing LMCache $LMCACHE into $LMCACHE_VENV" >&2
pip install --no-deps "lmcache==$LMCACHE"
pip install aiofile aiofiles blake3 cachetools "numpy<=2.2.6" nvtx httptools py-cpuinfo redis sortedcontainers \
    opentelemetry-sdk opentelemetry-exporter-otlp opentelemetry-exporter-prometheus "setuptools>=77.0.3,<81" setuptools_scm

# Its tests are in the source distribution only. pip wants that one's metadata, for which its build must not look for compilers.
NO_NATIVE_EXT=1 NO_CUDA_EXT=1 "$LMCACHE_VENV/bin/python" -m pip --disable-pip-version-check -q download --no-deps --no-binary :all: \
    --no-build-isolation -d "$download" "lmcache==$LMCACHE"
rm -rf "$LMCACHE_VENV/lmcache-sources"
mkdir "$LMCACHE_VENV/lmcache-sources"
tar -xzf "$download"/lmcache-*.tar.gz --strip-components=1 -C "$LMCACHE_VENV/lmcache-sources"
