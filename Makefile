# make demo   trains a real image-text model on the icons that ship, and shows what it learned
# make test   everything that needs no GPU: lint, types, tests      make check   the quick half of it
# make bench  CPU benchmarks    make test-gpu, make bench-gpu   on a machine with a CUDA device
# make test-cards    every kernel, compiled for every supported card
# make test-peers    other packages' own tests, with the losses of this one
# make docs   the documentation site in build/site; a warning is an error    make docs-serve   the same, while you write
# make test-matrix   the tests with the oldest and the newest supported torch    make dist   wheel and sdist, checked
PYTHON ?= python3
VENV   ?= .venv
# Flags for the installation of torch alone, for instance an index with CPU builds.
TORCH_FLAGS ?=
# Flags of tools/test_matrix.py, for instance --full or --torch 2.14.1.
MATRIX_FLAGS ?=
# Flags of tools/peers.py, for instance --peer lightly.
PEER_FLAGS ?=
# On a machine whose Python already holds a CUDA build of torch: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
# Test processes side by side on one GPU (compiling keeps the CPU busy); all cores but two unless told.
GPU_PROCESSES ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TRAIN := $(VENV)/.train
READY := $(VENV)/.ready
DOCS  := $(VENV)/.docs
# The theme announces its successor in every build. Packages are pinned in constraints.txt.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.PHONY: install lint types check test test-matrix test-peers test-cards bench test-gpu bench-gpu demo docs docs-serve dist clean
install: $(READY)

# What the demo needs.
$(TRAIN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tilewise needs Python 3.11 or newer. Try: make PYTHON=python3.12")'
	@echo "Installing into $(VENV). The first time this downloads torch: several gigabytes with CUDA."
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_FLAGS) torch
	$(PIP) -e ".[train]"
	@touch $@

# What the tests need as well: linters, libraries to test with, and Triton where torch has not brought it.
$(READY): $(TRAIN) tools/triton_for_tests.py
	$(PIP) -e ".[dev]"
	$(BIN)/python tools/triton_for_tests.py
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types
	$(BIN)/pytest -q -m "not slow and not group and not gpu and not cards" -n 2 --dist worksteal

test: lint types
	$(BIN)/pytest -q -m "not gpu and not cards" -n 2 --dist worksteal

test-peers: $(READY)
	$(BIN)/python tools/peers.py $(PEER_FLAGS)

# Every kernel compiled for every supported card; needs Triton, and no GPU.
test-cards: $(READY)
	$(BIN)/pytest -q -m cards tests/kernels/test_triton_compiles.py

test-matrix:
	$(PYTHON) tools/test_matrix.py $(MATRIX_FLAGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.run cpu
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.charts

test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m tests.gpu.parallel $(GPU_PROCESSES)

bench-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.run gpu
	PYTHONPATH=src $(GPU_PYTHON) -m reproductions.lm_tables

demo: $(TRAIN)
	$(BIN)/tilewise demo

# What the site needs. The reference is read from the sources, which are not imported.
$(DOCS): $(TRAIN)
	$(PIP) -e ".[docs]"
	@touch $@

docs: $(DOCS)
	$(MKDOCS) build --strict

docs-serve: $(DOCS)
	$(MKDOCS) serve

dist: $(TRAIN)
	$(PIP) -e ".[release]"
	$(BIN)/python tools/check_release.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
