#!/usr/bin/env bash
# A small DeepSeek-V4-shaped model in whole engines of vLLM's CPU build, one rank and two, with and without the plugin.
#   bash ci/vllm/run_engine.sh [VERSION...] [-- PYTEST ARGUMENTS]; default 0.32 and 0.33
# Minutes each, 4 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/../.."
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -gt 0 ] && shift
[ ${#versions[@]} -gt 0 ] || versions=(0.32 0.33)
venv=.venv-vllmcpu
stamp="$venv/.ready-$(cat ci/vllm/setup_cpu.sh pyproject.toml | sha256sum | cut -c 1-16)"
if [ ! -e "$stamp" ]; then
    bash ci/vllm/setup_cpu.sh "$venv"
    touch "$stamp"
fi
export PORTABLE_INDEXER_VLLM_TESTS=1 PORTABLE_INDEXER_ENGINE_TEST=1
failed=0
for version in "${versions[@]}"; do
    echo "== an engine of vLLM $version"
    over=
    [ "$version" = 0.33 ] && over=$PWD/$venv/vllm-0.33
    PORTABLE_INDEXER_ENGINE_VERSION=$version PORTABLE_INDEXER_ENGINE_PATH=$over \
        "$venv/bin/python" -m pytest tests/vllm/test_engine.py -q "$@" || failed=1
done
exit $failed
