#!/usr/bin/env bash
# Makes the virtual environment of `make demo` and `make test`: ci/setup_venv.sh FOLDER
set -euo pipefail
venv=$1
python=${PYTHON:-python3}

gpu_torch() { # does this Python bring a torch that was built for a GPU?
  "$python" -c 'import sys, torch; sys.exit(not (torch.version.cuda or torch.version.hip))' 2>/dev/null
}

extras=cpu,test,lint
if gpu_torch; then
  echo "using the torch of $python: $("$python" -c 'import torch; print(torch.__version__)')"
  "$python" -m venv --system-site-packages "$venv"
  extras=test,lint
else
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
# setuptools is asked for first so that the editable install below needs no build environment of its own.
# With a node's torch the first try must not reach for a registry that such nodes often lack.
if [[ $extras == cpu,* ]]; then
  "${pip[@]}" 'setuptools>=77' wheel
  "${pip[@]}" -c ci/constraints.txt --no-build-isolation -e ".[$extras]"
else
  "${pip[@]}" 'setuptools>=77' wheel || echo "no registry in reach: going on with the packages of $python"
  "${pip[@]}" --no-build-isolation --no-deps -e .
  "${pip[@]}" --no-build-isolation -e ".[$extras]" || echo "test tools could not be installed; \`make demo\` needs none"
fi
