PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-oldest bench docs lint format clean

# The main job: learn an unknown layer, certify it, write layer and report to demo/.
demo: $(VENV)/.installed
	$(BIN)/mhalearn demo --out demo

# Everything that is checked every day.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# What is too slow for every day.
test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# The lower bounds of pyproject.toml, in an environment of their own.
test-oldest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow tests/test_install.py -k oldest

# Beside other solvers, in less than half an hour; fails when a figure got worse. build/bench/bench.md
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/bench.py

# The pages, in build/site; a warning fails.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo build dist

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

# torch is pinned: left to itself, pip may choose a build with gigabytes of CUDA beside it.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	touch $@
