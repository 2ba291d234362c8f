# `make run` and `make test` do all their set-up themselves: only Python >= 3.11 and pip are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-slow lint types layers docs clean
.DEFAULT_GOAL := run

run: $(VENV)/run.stamp  ## train the embedded default and print metrics
	$(BIN)/freescale train run.out=runs/default

test: $(VENV)/dev.stamp lint types layers  ## lint, types, layering, tests
	$(BIN)/python -m pytest -n 2 --dist loadscope

test-slow: $(VENV)/dev.stamp  ## the proofs that take minutes
	$(BIN)/python -m pytest -m slow --timeout 1800

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

layers: $(VENV)/dev.stamp
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/dev.stamp
	$(BIN)/pip install -q -r requirements/docs.txt
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch is installed first and alone, so that nothing after it can pull another build.
$(VENV)/torch.stamp: requirements/run.txt | $(VENV)/bin/python
	$(BIN)/pip install -q --disable-pip-version-check $$(grep '^torch==' requirements/run.txt)
	touch $@

$(VENV)/run.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -r requirements/run.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp requirements/dev.txt
	$(BIN)/pip install -q --disable-pip-version-check -r requirements/dev.txt
	touch $@

clean:
	rm -rf $(VENV) runs site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
