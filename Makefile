# make train, make test: each sets up .venv first, once; after that it installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp

.PHONY: train test clean

# make train seed=1 model=rope and make train ARGS="seed=1 model=rope" are the same
OVERRIDES := $(filter-out ARGS=% PYTHON=%,$(MAKEOVERRIDES)) $(ARGS)

train: $(STAMP)
	$(BIN)/python -m speechformer.train $(if $(filter model=%,$(OVERRIDES)),,model=alibi) $(OVERRIDES)

test: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: a minute or more, 1.3 GB or more (torch)."
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
