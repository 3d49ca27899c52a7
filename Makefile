# Every target sets up what it needs. Only Python 3.10+ with pip is required.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help compare test test-all chaos lint format tables clean

help:
	@echo "make compare   set up .venv and compare six optimizers (five minutes)"
	@echo "make test      set up .venv and run the tests (minutes)"
	@echo "make test-all  also run the long tests"
	@echo "make chaos     kill commands and damage files, and write results/chaos.json (ten minutes)"
	@echo "make lint      check formatting, style, types and layers"
	@echo "make format    fix the formatting"
	@echo "make tables    write the generated tables of README and docs"
	@echo "make clean     remove .venv and caches"

compare: $(VENV)/theory
	$(BIN)/gadam compare $(ARGS)

# Two processes with one thread each are faster than one process with two threads. A process that
# has no tests left takes some from the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/test
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/test $(VENV)/triton
	$(PYTEST) --hypothesis-profile thorough $(ARGS)

chaos: $(VENV)/test
	cd tests && PYTHONPATH=. ../$(BIN)/python -m chaos --out ../results/chaos.json $(ARGS)

lint: $(VENV)/test $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(VENV)/theory
	$(BIN)/python -m tools.tables

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "gadam needs Python 3.10 or newer. Choose one with: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[$*]'
	@touch $@
