# make train, make test: each sets up .venv first, once; after that it installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp

.PHONY: train test clean

train: $(STAMP)
	$(BIN)/python -m speechformer.train model=alibi $(ARGS)

test: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: a minute or more, 1.3 GB or more (torch)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
