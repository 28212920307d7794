# Everything a fresh machine needs lives in .venv, made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types check clean

# Few-shot learning, addition and negation on small pictures; ends with a page in demo-out.
demo: $(READY)
	$(BIN)/aniso demo -o demo-out --overwrite

test: $(READY)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# What has to pass before a change lands; the architecture test is part of `test`.
check: lint types test

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo-out
