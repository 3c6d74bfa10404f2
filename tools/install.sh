#!/usr/bin/env bash
# Sets up a virtual environment with everything that the demo and the tests need. Idempotent.
#   PYTHON=python3.12 VENV=.venv bash tools/install.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-cpu,bench,dev}
TORCH=${TORCH:-2.13.0}   # the newest that is tested; any from pyproject.toml's range works

"$PYTHON" - <<'EOF'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"pd-cache needs Python 3.11 to 3.13, and this is {sys.version.split()[0]}; try: make PYTHON=python3.12 install")
EOF

bash tools/system-packages.sh run

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# The CPU build by its own name: plain `torch` brings several gigabytes of CUDA libraries along.
if ! "$VENV/bin/python" -c "import torch" 2>/dev/null; then
    echo "installing torch $TORCH for the CPU" >&2
    pip install "torch==$TORCH+cpu" 2>/dev/null \
        || pip install "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu
fi

# setuptools writes into this folder: environments that are set up at the same time take turns
exec {turn}<pyproject.toml
flock "$turn"
echo "installing pd-cache into $VENV" >&2
pip install -e ".[$EXTRAS]"
