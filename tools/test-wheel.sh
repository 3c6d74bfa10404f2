#!/usr/bin/env bash
# Installs the wheel of dist/ into an empty environment, and does in an empty folder what README.md shows.
#   make test-wheel     or  PYTHON=python3.12 bash tools/test-wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-2.13.0}
work=$(mktemp -d)
up=
trap '[ -z "$up" ] || kill "$up" 2>/dev/null; wait; rm -rf "$work"' EXIT

step() { echo "== $*" >&2; }

step "installing the wheel"
"$PYTHON" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install "torch==$TORCH+cpu" 2>/dev/null || pip install "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu
pip install "$(echo dist/pd_cache-*.whl)[cpu,bench]"
mkdir "$work/empty"
examples=$PWD/examples
export PATH=$work/venv/bin:$PATH
unset PYTHONPATH
cd "$work/empty"

step "pd-cache"
pd-cache --help
pd-cache config example local >local.yaml
pd-cache config check -c local.yaml
step "pd-cache demo"
pd-cache demo
step "pd-cache bench engine"
pd-cache bench engine --tokens 512 --layers 2 --rounds 5
step "an engine of one's own"
pd-cache config example pool >pool.yaml
pd-cache up -c pool.yaml >ready &
up=$!
for _ in $(seq 600); do
    [ "$(grep -c '^ready ' ready)" = 2 ] && break
    kill -0 "$up"
    sleep 0.1
done
python "$examples/embed_engine.py" 127.0.0.1:50051
