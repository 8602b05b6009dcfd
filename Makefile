# make train, make test: the first one sets up .venv; later ones install nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp

.PHONY: train test chaos reproduce reproduce-translation clean

# `make train seed=1 model=rope` and `make train ARGS="seed=1 model=rope"` are the same command.
OVERRIDES := $(filter-out ARGS=% PYTHON=%,$(MAKEOVERRIDES)) $(ARGS)

train: $(STAMP)
	$(BIN)/python -m speechformer.train $(if $(filter model=%,$(OVERRIDES)),,model=alibi) $(OVERRIDES)

test: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# An hour of random inputs, kills and full disks: make chaos ARGS="--minutes 60"
chaos: $(STAMP)
	$(BIN)/python tests/chaos.py $(ARGS)

# Make every run behind outputs/reference/report.md, as many at once as there are cores, and the report. The same
# command resumes: finished runs are not run again. A failed run does not stop the others (hence the "-"); the report
# shows it.
REPRODUCED := outputs/reproduce
SWEEP := -$(BIN)/python -m speechformer.train --multirun hydra/launcher=joblib \
	'hydra.sweep.dir=$(REPRODUCED)/runs/$${sweep_name:}' corpus=speeches
reproduce: $(STAMP)
	$(BIN)/python -m speechformer.audit corpus=speeches --json $(REPRODUCED)/audit.json
	$(BIN)/python -m speechformer.baselines corpus=speeches --output $(REPRODUCED)/baselines
	$(BIN)/python -m speechformer.baselines corpus=speeches protocol=clean --output $(REPRODUCED)/baselines
	$(SWEEP) 'experiment=glob(marsol_*)' 'seed=range(5)'
	$(SWEEP) 'experiment=glob(singhal_*)' 'seed=range(5)'
	$(SWEEP) experiment=kulkarni_part1,kulkarni_part2 'seed=range(5)'
	$(SWEEP) experiment=kulkarni_part3_absolute,kulkarni_part3_alibi 'seed=range(3)'
	$(SWEEP) experiment=kulkarni_part3_scales
	$(SWEEP) experiment=marsol_classify,singhal_table1,singhal_table3,singhal_table5,kulkarni_part1 \
		protocol=clean 'seed=range(5)'
	$(SWEEP) experiment=kulkarni_part3_absolute,kulkarni_part3_alibi protocol=clean 'seed=range(3)'
	$(SWEEP) experiment=positions_classify
	$(SWEEP) experiment=positions_lm
	$(SWEEP) experiment=patterns_classify
	$(SWEEP) experiment=patterns_lm
	$(SWEEP) experiment=slopes_classify
	$(SWEEP) experiment=slopes_lm
	$(SWEEP) experiment=slopes_learned
	$(SWEEP) experiment=marsol_classify,marsol_table1_full dropout=0 'seed=range(5)'
	$(SWEEP) experiment=singhal_table2,singhal_table6 model=nope 'seed=range(5)'
	$(SWEEP) experiment=singhal_table6 model=alibi 'seed=range(5)'
	$(BIN)/python -m speechformer.report $(REPRODUCED) --output $(REPRODUCED)/report

# The same for translation. It needs the TED pairs and takes hours on a CPU.
TRANSLATED := outputs/reproduce-translation
TRANSLATION := -$(BIN)/python -m speechformer.train --multirun hydra/launcher=joblib \
	'hydra.sweep.dir=$(TRANSLATED)/runs/$${sweep_name:}'
reproduce-translation: $(STAMP)
	$(BIN)/python -m speechformer.baselines task=translate corpus=ted protocol=clean --output $(TRANSLATED)/baselines
	-$(BIN)/python -m speechformer.train experiment=ted 'hydra.run.dir=$(TRANSLATED)/runs/$${run_name:}'
	$(TRANSLATION) experiment=bottleneck_digits 'seed=range(3)'
	$(TRANSLATION) experiment=bottleneck
	$(TRANSLATION) experiment=positions_translate
	-$(BIN)/python -m speechformer.train experiment=sharma_translate 'hydra.run.dir=$(TRANSLATED)/runs/$${run_name:}'
	$(BIN)/python -m speechformer.report $(TRANSLATED) --output $(TRANSLATED)/report

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), only this once: a minute or more, 1.8 GB or more (torch)."
	@$(PYTHON) -c 'import sys; sys.exit("speechformer needs Python 3.11 or newer. Try: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
