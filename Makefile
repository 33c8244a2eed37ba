# `make demo` and `make test` are the two main commands. Every target sets up .venv first; later runs reuse it.

# The interpreter for .venv: PYTHON if given, else the first supported one on the PATH.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
CANDIDATES := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-package wheel lint types check format docs clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch is installed first and pinned, so that every machine tests the same version.
$(READY): pyproject.toml setup.py
	@for python in $(CANDIDATES); do \
	  if $$python -c '$(SUPPORTED)' 2>/dev/null; then test -x $(BIN)/python || $$python -m venv $(VENV); exit; fi; \
	done; echo "Draftwood needs Python 3.11 to 3.14 and found none as: $(CANDIDATES). Install one, or run make PYTHON=/path/to/python." >&2; exit 1
	@echo "setting up $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)

demo: $(READY)  ## set up, then generate with the default model and compare with plain decoding
	$(BIN)/draftwood generate --compare --max-tokens 160 "Repeat the text exactly: The quick brown fox jumps over the lazy dog. The dog sleeps in the garden, and the fox runs home to its den in the forest."

test: $(READY)  ## set up, then run the tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

test-slow: $(READY)  ## run the tests that take minutes, on the default model and prompt files
	$(BIN)/python -m pytest -m slow

test-package: $(READY)  ## build the wheel and run it in a clean environment without a C compiler
	$(BIN)/python -m pytest -m slow tests/test_package.py

wheel: $(READY)  ## build the wheel for this platform into dist/
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

lint: $(READY)  ## check the code style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## check the static types
	$(BIN)/mypy

check: lint types test  ## lint, types and test: run it before a commit

format: $(READY)  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## regenerate the reference pages, then build the site into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

clean:  ## remove the environment and the files that tools wrote
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
