# Two commands do everything: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install serve test lint clean

help:
	@echo "make serve    install, get the default model and serve it (ARGS='--port 8001 ...')"
	@echo "make test     install, lint and run all tests"
	@echo "make install  make $(BIN)/staffel"

install: $(INSTALLED)

# constraints.txt keeps every machine on the versions that are tested; the kernels are compiled anew
# when their sources change.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/staffel/kernels/source/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The GPU's kernels run in tests under Triton's interpreter. It is large, and nothing else needs it
# here: a CUDA build of torch brings its own.
TRITON := $(VENV)/.triton
$(TRITON): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton
	@touch $@

# exec: Ctrl-C reaches the server itself, and make reports nothing of its own.
serve: install
	@exec $(BIN)/staffel serve $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# Once more without the CPU kernels: whoever has no C compiler is served by torch.
test: lint $(TRITON)
	$(BIN)/python -m pytest
	STAFFEL_KERNELS=off $(BIN)/python -m pytest tests/model/test_families.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
