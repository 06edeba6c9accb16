# make demo   trains a real image-text model on the icons that ship, and shows what it learned
# make test   everything that needs no GPU: lint, types, tests      make check   the quick half of it
# make bench  CPU benchmarks    make test-gpu, make bench-gpu   on a machine with a CUDA device
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# On a machine whose Python already holds a CUDA build of torch: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
# Test processes side by side on one GPU (compiling keeps the CPU busy); all cores but two unless told.
GPU_PROCESSES ?=

.PHONY: install lint types check test bench test-gpu bench-gpu demo clean
install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types
	$(BIN)/pytest -q -m "not slow and not group and not gpu" -n 2

test: lint types
	$(BIN)/pytest -q -m "not gpu" -n 2

bench: $(READY)
	$(BIN)/python -m benchmarks.run cpu
	$(BIN)/python -m benchmarks.report

test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m tests.gpu.parallel $(GPU_PROCESSES)

bench-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.run gpu
	PYTHONPATH=src $(GPU_PYTHON) -m reproductions.lm_tables

demo: $(READY)
	$(BIN)/tilewise demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
