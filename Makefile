# Each target sets itself up: `make demo` and `make test` work on a machine that has only Python and make.
#
#   make demo     train a policy on CartPole, its workers kept current by this library
#   make test     run the tests                        make test ARGS="-k patch -x" JOBS=1
#   make test-all run the slow tests, too
#   make test-engines  run the tests with vLLM and SGLang, on the CPU
#   make soak     updates under random faults          make soak ARGS="--scheme shared_mem --seconds 600"
#   make check    format, lint and types, as CI runs them
#   make format   rewrite the files as `make check` wants them
#   make bench    compare our schemes with TorchRL's   make bench ARGS=--help
#   make docs     build docs/_build/html
#   make clean    remove the environment and everything built

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests spend much of their time waiting for processes: four at a time suit two cores.
JOBS ?= 4

# Tests start many interpreters; without cached bytecode each of them compiles the package.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Every install reads constraints.txt: without it pip may fetch a newer torch, of several GB.
INSTALL := $(BIN)/python -m pip install -c constraints.txt
# test/conftest.py says which files begin first. A process of pytest-xdist that dies is a failure, not replaced:
# its successor would run the same test again, without end.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs

.PHONY: demo test test-all test-engines test-engines-vllm test-engines-sglang soak check format bench docs setup clean
.DEFAULT_GOAL := test

setup: $(READY)

$(READY): setup.py constraints.txt $(wildcard weight_update/*/*.c weight_update/*/*/*.c)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[test,lz4,zstd,ray]"
	touch $@

$(DOCS_READY): $(READY)
	$(INSTALL) -e ".[docs]"
	touch $@

demo: $(READY)
	$(BIN)/python examples/train_cartpole.py $(ARGS)

test: $(READY)
	$(PYTEST) $(ARGS)

test-all: JOBS = 2  # limits of time are tighter there
test-all: $(READY)
	$(PYTEST) -m "" $(ARGS)

# vLLM comes without the packages that it names, which are its CUDA stack. PyTorch is that of constraints.txt.
VLLM := .venv-engines-vllm
VLLM_PYTEST := $(VLLM)/bin/python -m pytest -W default

$(VLLM)/.ready: test/engines/requirements-vllm.txt constraints.txt setup.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -c constraints.txt -r test/engines/requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --no-deps vllm==0.33.0 transformers==5.20.2 -e .
	touch $@

test-engines: test-engines-vllm test-engines-sglang

test-engines-vllm: $(VLLM)/.ready
	$(VLLM_PYTEST) test/engines/test_vllm*.py $(ARGS)

# SGLang comes without the packages that it names, which are its CUDA stack; without_gpu stands for two of them.
SGLANG := .venv-engines-sglang

$(SGLANG)/.ready: test/engines/requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --no-deps -r test/engines/requirements-sglang.txt
	touch $@

test-engines-sglang: $(SGLANG)/.ready
	PYTHONPATH=test/engines/without_gpu SGLANG_USE_CPU_ENGINE=1 \
	$(SGLANG)/bin/python -m pytest -W ignore test/engines/test_sglang*.py $(ARGS)

soak: $(READY)
	$(BIN)/python test/soak $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m benchmarks compare $(ARGS)

docs: $(DOCS_READY)
	$(BIN)/python -m sphinx -W -E --keep-going -b html docs docs/_build/html $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find weight_update -name '*.abi3.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
