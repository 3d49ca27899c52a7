# Everything sets itself up: a Python 3.10+ with pip is all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help compare test test-all lint format clean

help:
	@echo "make compare   set up .venv and show what iterate averaging does (five minutes)"
	@echo "make test      set up .venv and run the test-suite (minutes)"
	@echo "make test-all  the long tests too"
	@echo "make lint      formatting, style and types"
	@echo "make format    write the formatting"
	@echo "make clean     remove .venv and caches"

compare: $(VENV)/theory
	$(BIN)/gadam compare $(ARGS)

# Two processes with one thread each beat one with two.
test: $(VENV)/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-all: $(VENV)/test $(VENV)/triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/test $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "gadam needs Python 3.10 or newer; say which with: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[$*]'
	@touch $@
