# Every target sets up what it needs. Only Python 3.10+ with pip is required.
PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
EXE := .exe
else
BIN := $(VENV)/bin
endif
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help compare test test-all chaos chaos-scale lint prose docs format tables sdist release-check test-torch clean

help:
	@echo "make compare        set up .venv and compare six optimizers (five minutes)"
	@echo "make test           set up .venv and run the tests (minutes)"
	@echo "make test-all       also run the long tests"
	@echo "make test-torch     run the core's tests with the oldest and the newest torch"
	@echo "make chaos          kill commands and damage files, and write results/chaos.json (half an hour)"
	@echo "make chaos-scale    do the same to runs on several ranks and on Ray (results/chaos-scale.json)"
	@echo "make lint           check formatting, style, types, layers and prose"
	@echo "make prose          check spelling, links and phrases only"
	@echo "make docs           build the documentation site in build/site"
	@echo "make format         fix the formatting"
	@echo "make tables         write the generated tables and pictures of README and docs"
	@echo "make release-check  build the packages, and try them in new environments"
	@echo "make clean          remove .venv and caches"

compare: $(VENV)/theory
	$(BIN)/gadam compare $(ARGS)

# Two processes with one thread each are faster than one process with two threads. A process that
# has no tests left takes some from the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/test
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/test $(VENV)/triton
	$(PYTEST) --hypothesis-profile thorough $(ARGS)

test-torch:
	$(PYTHON) scripts/torch_matrix $(ARGS)

chaos: $(VENV)/test
	cd tests && PYTHONPATH=. ../$(BIN)/python -m chaos --out ../results/chaos.json $(ARGS)

chaos-scale: $(VENV)/test
	cd tests && PYTHONPATH=. ../$(BIN)/python -m chaos --scale --out ../results/chaos-scale.json $(ARGS)

lint: $(VENV)/test $(VENV)/docs $(VENV)/lint prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/mypy
	$(BIN)/lint-imports

prose: $(VENV)/lint
	$(BIN)/codespell
	$(BIN)/python -m tools.prose

SITE := build/site
docs: $(VENV)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 docs $(SITE)
	$(BIN)/python -m tools.site_check $(SITE)

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(VENV)/theory
	$(BIN)/python -m tools.tables
	$(BIN)/python -m tools.site_pictures

sdist: $(VENV)/release
	$(BIN)/python -m build --sdist

release-check: $(VENV)/release
	$(BIN)/python -m tools.release_check $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python$(EXE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "gadam needs Python 3.10 or newer. Choose one with: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/%: pyproject.toml constraints.txt | $(BIN)/python$(EXE)
	$(PIP_INSTALL) --editable '.[$*]'
	@touch $@
