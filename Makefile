# What a person, pre-commit and CI do with moelet: one target each, listed by `make help`.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.9,torch==2.13.0)
CHECKPOINT ?=
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# With VENV= (empty) the targets use the environment that PYTHON belongs to, and install nothing.
ifeq ($(VENV),)
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  export PYTHONPATH := src$(addprefix :,$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  RUNTIME := $(VENV)/.runtime
  TOOLS := $(VENV)/.tools
endif

OLDEST := .venv-oldest
CUDA_SOURCES = $(shell find cuda -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help serve test test-oldest check fix gpu-test image-test bench wheel clean

help: ## List the targets and the variables they read
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'CHECKPOINT=DIR       what serve serves (default: a small demo that it writes itself)'
	@echo 'ARGS="..."           more arguments for moelet serve, the benchmarks or pytest'
	@echo 'PYTHON=python3.12    the interpreter of the virtual environment'
	@echo 'TORCH="torch==..."   the torch requirement to install first (now: $(TORCH))'
	@echo 'VENV=DIR             the virtual environment; empty: the one that PYTHON belongs to'

serve: $(RUNTIME) ## Serve a checkpoint, by default the demo, on port 8000
	$(PY) -m moelet serve $(if $(CHECKPOINT),"$(CHECKPOINT)",--demo) $(ARGS)

test: check ## Check, then run every test that needs no GPU
	$(PY) -m pytest -m "not gpu" $(ARGS)

test-oldest: ## Run those tests with the oldest versions of all that pyproject.toml asks for
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install uv
	$(OLDEST)/bin/uv pip install --python $(OLDEST) --resolution lowest-direct -r pyproject.toml --extra test
	$(OLDEST)/bin/python -m pytest -m "not gpu" $(ARGS)

check: $(TOOLS) ## Lint, format and types, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(if $(CUDA_SOURCES),$(CLANG_FORMAT) --dry-run -Werror $(CUDA_SOURCES))

fix: $(TOOLS) ## Mend what lint and format can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CUDA_SOURCES),$(CLANG_FORMAT) -i $(CUDA_SOURCES))

gpu-test: $(TOOLS) ## Run the tests that need an NVIDIA GPU
	$(PY) -m pytest -m gpu $(ARGS)

image-test: ## Build the container image and try it out, as root, with buildah and podman
	$(PYTHON) deploy/verify_image.py --torch "$(TORCH)" $(ARGS)

bench: $(TOOLS) ## Run the benchmarks: make bench ARGS="layer --shape qwen3-30b-a3b"
	$(PY) -m benchmarks $(ARGS)

wheel: $(TOOLS) ## Build the wheel into dist/
	rm -rf build
	$(PY) -m build --wheel --no-isolation --outdir dist
	rm -rf build

clean: ## Remove what the other targets made, the virtual environment included
	rm -rf $(VENV) $(OLDEST) build dist moelet-demo src/moelet.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One resolution with torch in it, so that nothing brings another torch in later.
$(VENV)/.runtime: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install "$(TORCH)" --editable .
	@touch $@

$(VENV)/.tools: $(VENV)/.runtime
	$(PY) -m pip install "$(TORCH)" --editable ".[test,dev]"
	@touch $@
