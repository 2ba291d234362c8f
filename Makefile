# `make run` and `make test` do all their set-up themselves: only Python >= 3.11 and pip are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Many processes import the same files: each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-slow test-extras tests checks lint types layers docs clean
.DEFAULT_GOAL := run

run: $(VENV)/run.stamp  ## train the embedded default and print metrics
	$(BIN)/freescale train run.out=runs/default

test: $(VENV)/dev.stamp  ## lint, types, layering, tests: what CI runs, side by side
	@$(MAKE) --no-print-directory --keep-going --jobs 2 checks tests || \
		{ echo "make test: not all is green; 'make checks' and 'make tests' run each part alone"; exit 1; }

test-slow: $(VENV)/dev.stamp  ## the proofs at full length, and many more examples of hypothesis
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile thorough --timeout 1800

test-extras: $(VENV)/dev.stamp  ## tests that need heavy packages
	if [ -f requirements/extras.txt ]; then $(BIN)/pip install -q -r requirements/extras.txt; fi
	$(BIN)/pip install -q --no-deps -r requirements/torchrec.txt  # see there; without it tests of the bridge skip
	$(BIN)/python -m pytest -m extras --timeout 600

tests: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder  # more than cores: many tests wait for silence, or for a rank

# One block of output, also beside tests that print their own; each is run whatever the others find.
checks: $(VENV)/dev.stamp
	@told=$$($(MAKE) --no-print-directory --keep-going lint types layers 2>&1); failed=$$?; \
		printf '\n%s\n' "$$told"; exit $$failed

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
