# Two commands on a fresh machine: `make demo` and `make test`. Each sets up $(VENV) by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all lint matrix emulate bench wheel vllm-test clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# A node whose Python has a GPU build of torch keeps it: the venv then sees that torch and adds nothing to it.
$(VENV)/.ready: pyproject.toml ci/constraints.txt ci/setup_venv.sh
	PYTHON="$(PYTHON)" bash ci/setup_venv.sh $(VENV)
	@touch $@

demo: $(VENV)/.ready ## the whole sharded job on 4 ranks, checked byte for byte
	$(BIN)/portable-indexer demo $(DEMO_ARGS)

test: $(VENV)/.ready ## all CPU tests
	$(BIN)/python ci/compile_matrix.py --smoke --python 3.9=$(BIN)/python
	$(BIN)/python ci/run_tests.py test

test-all: $(VENV)/.ready ## the same with the tests marked slow
	$(BIN)/python ci/run_tests.py test --slow

bench: $(VENV)/.ready ## measure this machine: BENCH="scoring" or selection, metadata, sharding
	$(BIN)/portable-indexer bench $(or $(BENCH),scoring)

lint: $(VENV)/.ready ## ruff, mypy --strict, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# The second Triton that the compile matrix covers has a venv of its own.
.venv-triton36/.ready: ci/setup_triton36.sh pyproject.toml
	PYTHON="$(PYTHON)" bash ci/setup_triton36.sh .venv-triton36
	@touch $@

emulate: $(VENV)/.ready ## execute the compiled ROCm kernels on the CPU
	$(BIN)/python ci/run_tests.py emulate

PYTHONS := 3.9=$(BIN)/python 3.6=.venv-triton36/bin/python
matrix: $(VENV)/.ready .venv-triton36/.ready ## compile every kernel for every target and audit the machine code
	$(BIN)/python ci/compile_matrix.py --python $(PYTHONS) $(MATRIX_ARGS)

vllm-test: ## the plugin in real vLLM 0.33 and 0.32 on the CPU (makes .venv-vllm*, 3 GB each)
	PYTHON="$(PYTHON)" bash ci/vllm/run.sh $(VLLM_VERSIONS)

wheel: $(VENV)/.ready ## build a wheel and check what it holds
	rm -rf build dist && $(BIN)/python -m build --wheel --no-isolation -o dist . && $(BIN)/python ci/check_wheel.py dist/*.whl

clean: ## remove what make made
	rm -rf $(VENV) .venv-* build dist *.egg-info
