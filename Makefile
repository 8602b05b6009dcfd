# make train, make test: the first one sets up .venv; later ones install nothing. The studies are in studies/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp

.PHONY: train test test-slow lint pages check clean

# `make train seed=1 model=rope` and `make train ARGS="seed=1 model=rope"` are the same command.
OVERRIDES := $(filter-out ARGS=% PYTHON=%,$(MAKEOVERRIDES)) $(ARGS)

train: $(STAMP)
	$(BIN)/python -m speechformer.train $(if $(filter model=%,$(OVERRIDES)),,model=alibi) $(OVERRIDES)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# What takes long: exhaustive kills, sweeps in processes of their own, browsers, notebooks.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not slurm" $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python tests/lint.py

# Make the reports in outputs/pages, and the results in the pages, from the archives of all runs.
pages: $(STAMP)
	$(BIN)/python -m studies.render --reports

# Recompute the numbers of the pages from the archives, by other code.
check: $(STAMP)
	$(BIN)/python -m studies.check

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), only this once: a minute or more, 1.8 GB or more (torch)."
	@$(PYTHON) -c 'import sys; sys.exit("speechformer needs Python 3.11 or newer. Try: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
