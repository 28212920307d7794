# Everything a fresh machine needs lives in .venv, made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
SITE ?= build/site

.PHONY: demo test test-cluster lint types check docs clean

# Few-shot learning, addition and negation on small pictures; ends with a page in demo-out.
demo: $(READY)
	$(BIN)/aniso demo -o demo-out --overwrite

test: $(READY)
	$(BIN)/python -m pytest -n 2

# Experiments on a Ray cluster on this machine, and as jobs.
test-cluster: $(READY)
	$(BIN)/python -m pytest -n 2 -m cluster

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# What has to pass before a change lands; the architecture test is part of `test`.
check: lint types test

# The documentation site, for reading offline. Fails on any warning, broken link or request to another host.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir $(abspath $(SITE))
	@$(BIN)/python scripts/docs/check.py $(SITE)
	@echo "open $(SITE)/index.html"

$(DOCS_READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo-out $(SITE)
