#!/usr/bin/env bash
# Makes the virtual environment that compiles with Triton 3.6: ci/setup_triton36.sh FOLDER
set -euo pipefail
venv=$1
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" 'setuptools>=77' wheel
"${pip[@]}" torch==2.13.0 triton==3.6.0 numpy pytest pytest-timeout
"${pip[@]}" --no-build-isolation --no-deps -e .
