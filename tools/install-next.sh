#!/usr/bin/env bash
# Sets up the environment of `make test-next`: that of the vLLM tests, with the releases to come before it. Of neither is there a build for CPUs
# yet: of Mooncake it takes the one for CUDA 13, of vLLM the Python code, over the kernels of the release before. And LMCache's, without what it
# asks for on a GPU. Idempotent.
#   VLLM_VENV=.venv-vllm NEXT_VENV=.venv-next bash tools/install-next.sh
set -euo pipefail
cd "$(dirname "$0")/.."

VLLM_VENV=${VLLM_VENV:-.venv-vllm}
NEXT_VENV=${NEXT_VENV:-.venv-next}
MOONCAKE=${MOONCAKE:-mooncake-transfer-engine-cuda13==0.3.14}
VLLM=${VLLM:-0.33.0}
LMCACHE=${LMCACHE:-0.5.7rc2}

purelib() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
pip() { "$NEXT_VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }
# what asks for another name of a distribution finds this one
alias_of() { mkdir -p "$site/$1-$2.dist-info"; printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$2" >"$site/$1-$2.dist-info/METADATA"; }

"$VLLM_VENV/bin/python" -m venv --clear --without-pip "$NEXT_VENV"
site=$(purelib "$NEXT_VENV")
below=$(realpath "$(purelib "$VLLM_VENV")")
echo "import site; site.addsitedir('$below')" >"$site/below.pth"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT

echo "installing $MOONCAKE into $NEXT_VENV" >&2
pip install --no-deps "$MOONCAKE" "nvidia-cuda-runtime==13.*"
alias_of mooncake_transfer_engine_non_cuda "${MOONCAKE##*==}"  # before that of the environment below
# Without NVIDIA's driver a library in its place says to each question that there is no device.
libraries=$(echo "$site"/mooncake_transfer_engine*.libs)
nm -D --undefined-only "$site"/mooncake/*.so | grep -oE '\bcu[A-Z]\w+$' | sort -u | sed 's/.*/int &(void) { return 100; }/' \
    | cc -shared -nostdlib -Wl,-soname,libcuda.so.1 -x c -o "$libraries/libcuda.so.1" -
ln -s "$site"/nvidia/cu13/lib/libcudart.so.13 "$libraries"

echo "installing LMCache $LMCACHE into $NEXT_VENV" >&2
pip install --no-deps "lmcache==$LMCACHE"
pip install --no-warn-conflicts aiofile aiofiles nvtx opentelemetry-exporter-prometheus redis  # of its imports, what vLLM does not bring

# The source distribution has a seventh of the wheel's bytes. pip wants its metadata, which vLLM's setup.py makes.
echo "installing the Python code of vLLM $VLLM into $NEXT_VENV" >&2
pip install setuptools-rust setuptools-scm
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM pip download --no-deps --no-binary :all: --no-build-isolation -d "$download" "vllm==$VLLM"
tar -xzf "$download"/vllm-*.tar.gz --strip-components=1 -C "$download" "vllm-$VLLM/vllm" "vllm-$VLLM/requirements/common.txt"
pip install --no-warn-conflicts -r "$download/requirements/common.txt"
mv "$download/vllm" "$site"
ln -s "$below"/vllm/*.so "$site/vllm"
sed "1s,.*,#!$(realpath "$NEXT_VENV")/bin/python," "$VLLM_VENV/bin/vllm" >"$NEXT_VENV/bin/vllm"
chmod +x "$NEXT_VENV/bin/vllm"
alias_of vllm "$VLLM+cpu"

# what is missing shows here, and not as an error of each test
"$NEXT_VENV/bin/python" - "$VLLM" "${MOONCAKE##*==}" <<'EOF'
import sys

import vllm
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: F401
from mooncake.store import MooncakeDistributedStore  # noqa: F401
from transfer.settings import mooncake_version
from vllm.platforms import current_platform

assert (vllm.__version__, mooncake_version()) == tuple(sys.argv[1:]), (vllm.__version__, mooncake_version())
assert current_platform.is_cpu(), current_platform
EOF
