#!/usr/bin/env bash
# A small DeepSeek-V4-shaped model in whole engines of vLLM's CPU build 0.32, one rank and two, with and without the
# plugin. Minutes, 3.5 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-vllmcpu
stamp="$venv/.ready-$(cat ci/vllm/setup_cpu.sh pyproject.toml | sha256sum | cut -c 1-16)"
if [ ! -e "$stamp" ]; then
    bash ci/vllm/setup_cpu.sh "$venv"
    touch "$stamp"
fi
PORTABLE_INDEXER_VLLM_TESTS=1 PORTABLE_INDEXER_ENGINE_TEST=1 "$venv/bin/python" -m pytest tests/vllm/test_engine.py -q "$@"
