#!/usr/bin/env bash
# Tests of the plugin in real vLLM: ci/vllm/run.sh [VERSION...] [-- PYTEST ARGUMENTS]; default 0.33.0 and 0.32.0.
# An environment is made once for each version and kept in .venv-vllm<version>.
set -euo pipefail
cd "$(dirname "$0")/../.."
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -gt 0 ] && shift
[ ${#versions[@]} -gt 0 ] || versions=(0.33.0 0.32.0)
export PORTABLE_INDEXER_VLLM_TESTS=1 OMP_NUM_THREADS=1
failed=0
for version in "${versions[@]}"; do
    short=${version%.*}
    venv=.venv-vllm${short/./}
    stamp="$venv/.ready-$(cat ci/vllm/setup.sh ci/vllm/requirements.txt ci/vllm/constraints.txt pyproject.toml | sha256sum | cut -c 1-16)"
    if [ ! -e "$stamp" ]; then
        bash ci/vllm/setup.sh "$version" "$venv"
        touch "$stamp"
    fi
    echo "== vLLM $version"
    "$venv/bin/python" -m pytest tests/vllm -q "$@" || failed=1
done
exit $failed
