#!/usr/bin/env bash
# Makes a virtual environment that holds one real vLLM on a CPU build of torch, and this package.
#   bash ci/vllm/setup.sh 0.33.0 .venv-vllm033
# VLLM_WHEELS names a folder that is looked through for the wheel before anything is downloaded.
set -euo pipefail
version=$1
venv=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
pip() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip -c "$here/constraints.txt" -r "$here/requirements.txt"
pip --no-deps xgrammar==0.2.8
wheel=
for found in "${VLLM_WHEELS:-}"/vllm-"$version"-*.whl; do
    [ -f "$found" ] && wheel=$found
done
# --no-deps: vLLM's own list would bring the CUDA build of torch and 10 GB of libraries.
pip --no-deps "${wheel:-vllm==$version}"
pip --no-deps -e "$root"
