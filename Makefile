# make train, make test: the first one sets up .venv; later ones install nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp

.PHONY: train test test-slow lint reproduce pages reproduce-translation reproduce-probes reproduce-contexts reproduce-ladder \
	reproduce-ladder-classify reproduce-ladder-translate clean

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

# Make every run behind outputs/reference/report.md, as many at once as there are cores. The same command resumes:
# finished runs are not run again. A failed run does not stop the others (hence the "-"); the report shows it.
# First a few seeds of everything, in half the time; then 20 for the classification of the reports (10 under
# protocol=clean) and 10 for their language models.
define NEWLINE


endef
REPRODUCED := outputs/reproduce
REFERENCE := outputs/reference
SWEEP := -$(BIN)/python -m speechformer.train --multirun hydra/launcher=joblib \
	'hydra.sweep.dir=$(REPRODUCED)/runs/$${sweep_name:}'
SPEECHES := $(SWEEP) corpus=speeches
CLASSIFY := experiment=kulkarni_part1,singhal_table1,singhal_table3,singhal_table5,marsol_classify
LANGUAGE := experiment=kulkarni_part2,singhal_table2,singhal_table4,singhal_table6
HUNDRED_EPOCHS := experiment=kulkarni_part3_absolute,kulkarni_part3_alibi
reproduce: $(STAMP)
	$(BIN)/python -m speechformer.audit corpus=speeches --json $(REPRODUCED)/audit.json
	$(BIN)/python -m speechformer.baselines corpus=speeches --output $(REPRODUCED)/baselines
	$(BIN)/python -m speechformer.baselines corpus=speeches protocol=clean --output $(REPRODUCED)/baselines
	$(SPEECHES) $(CLASSIFY) 'seed=range(5)'
	$(SPEECHES) $(LANGUAGE) 'seed=range(5)'
	$(SPEECHES) 'experiment=glob(marsol_table1_*)' 'seed=range(5)'
	$(SPEECHES) experiment=positions_classify
	$(SPEECHES) experiment=positions_lm
	$(SPEECHES) experiment=patterns_classify
	$(SPEECHES) experiment=patterns_lm
	$(SPEECHES) experiment=slopes_classify
	$(SPEECHES) experiment=slopes_lm
	$(SPEECHES) experiment=slopes_learned
	$(SPEECHES) experiment=marsol_classify dropout=0 'seed=range(5)'
	$(SPEECHES) experiment=marsol_table1_full dropout=0 'seed=range(5)'
	$(SPEECHES) experiment=singhal_table2,singhal_table6 model=nope 'seed=range(5)'
	$(SPEECHES) experiment=singhal_table6 model=alibi 'seed=range(5)'
	$(SPEECHES) $(CLASSIFY) protocol=clean 'seed=range(5)'
	$(SPEECHES) $(HUNDRED_EPOCHS) 'seed=range(3)'
	$(SPEECHES) $(HUNDRED_EPOCHS) protocol=clean 'seed=range(3)'
	$(SPEECHES) experiment=kulkarni_part3_scales
	$(SWEEP) corpus=sample task=classify,lm model=nope,alibi,relative,sinusoidal,learned,rope seed=0,1,2
	$(SPEECHES) $(CLASSIFY) 'seed=range(5,20)'
	$(SPEECHES) $(CLASSIFY) protocol=clean 'seed=range(5,10)'
	$(SPEECHES) $(LANGUAGE) 'seed=range(5,10)'
	$(SPEECHES) 'experiment=glob(marsol_table1_*)' 'seed=range(5,10)'
	$(SPEECHES) $(HUNDRED_EPOCHS) 'seed=range(3,20)'
	tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C $(REPRODUCED) -cJf $(REFERENCE)/runs.tar.xz \
		$$(cd $(REPRODUCED) && find baselines runs -name result.json -o -name predictions.tsv | sort)
	$(MAKE) pages

# Make the reports and the results in the pages from the results of all runs, in about four minutes.
PAGES := README.md $(REFERENCE)/README.md
# Publish the archive of a folder: its report, a page, the title of the report, and other options of it.
define PUBLISH
	rm -rf $(REPRODUCED)/$(1)
	mkdir -p $(REPRODUCED)/$(1)
	tar --exclude='*_probes-tuning_*' -xJf $(REFERENCE)/$(1)/runs.tar.xz -C $(REPRODUCED)/$(1)
	$(BIN)/python -m speechformer.report $(REPRODUCED)/$(1) --output $(REFERENCE)/$(1) --formats png \
		--pages $(REFERENCE)/$(2)/README.md --title "$(3)" $(4)
endef
pages: $(STAMP)
	$(call PUBLISH,bottleneck,translation,The bottleneck of an RNN without attention; TED talks in ten epochs)
	$(call PUBLISH,ladder,ladder,The ladder of the language model)
	$(call PUBLISH,ladder_classify,ladder_classify,The ladder of the classifier)
	$(call PUBLISH,ladder_translate,ladder_translate,The ladder of translation)
	$(call PUBLISH,contexts,contexts,Sparse patterns over long contexts,--label "pattern=by_layer=window 64 below full attention")
	$(call PUBLISH,probes,probes,Encodings and patterns on ten probes)
	rm -rf $(REPRODUCED)/archive
	mkdir -p $(REPRODUCED)/archive
	tar -xJf $(REFERENCE)/runs.tar.xz -C $(REPRODUCED)/archive
	$(BIN)/python -m speechformer.report $(REPRODUCED)/archive --output $(REFERENCE) --pages $(PAGES) --formats png \
		--title "Attention on presidential speeches: three course reports repeated"

# The same for translation. It needs the TED pairs and takes hours on a CPU.
TRANSLATED := outputs/reproduce-translation
TRANSLATION := -$(BIN)/python -m speechformer.train --multirun hydra/launcher=joblib \
	'hydra.sweep.dir=$(TRANSLATED)/runs/$${sweep_name:}'
reproduce-translation: $(STAMP)
	$(BIN)/python -m speechformer.baselines task=translate corpus=ted protocol=clean --output $(TRANSLATED)/baselines
	-$(BIN)/python -m speechformer.train experiment=ted 'hydra.run.dir=$(TRANSLATED)/runs/$${run_name:}'
	$(TRANSLATION) experiment=ted_faster 'seed=range(5)'
	-$(BIN)/python -m speechformer.evaluate --study ted_ensemble $$(dirname $$(find $(TRANSLATED) -path "*ted-faster_seed[0234]_*" \
		-name result.json)) --output $(TRANSLATED)/ensembles/ted
	$(TRANSLATION) task=translate corpus=sample model=rnn,rnn_attention,sinusoidal seed=0,1,2
	$(TRANSLATION) task=translate corpus=sample recipe=inverse_sqrt model=rnn,rnn_attention seed=0,1,2
	$(TRANSLATION) experiment=bottleneck_digits 'seed=range(5)'
	$(TRANSLATION) experiment=bottleneck
	$(TRANSLATION) experiment=positions_translate
	-$(BIN)/python -m speechformer.train experiment=sharma_translate 'hydra.run.dir=$(TRANSLATED)/runs/$${run_name:}'
	$(BIN)/python -m speechformer.report $(TRANSLATED) --output $(TRANSLATED)/report

# The study of the probes: encodings tuned on the same grid, then five fresh seeds; patterns and layers as by default.
PROBED := outputs/reproduce-probes
PROBES := -$(BIN)/python -m speechformer.train --multirun task=probe study=probes protocol=clean hydra/launcher=joblib \
	'seed=range(5)'
ENCODINGS := nope,sinusoidal,learned,alibi,rope,xpos,relative,kerple,fire,forgetting,randomised,rnn
reproduce-probes: $(STAMP)
	$(PROBES) 'probe=glob(*)' model=$(ENCODINGS) hydra/sweeper=tuned 'recipe.lr=tag(tune,choice(1e-3,3e-3))' \
		'recipe.init=tag(tune,choice(torch,normal))' hydra.sweeper.untuned_seeds=2 \
		hydra.sweep.dir=$(PROBED)/encodings
	$(PROBES) probe=copy,needle,recall pattern=full,window,block,strided,dilated,global,bigbird,sinks model=rope \
		hydra.sweep.dir=$(PROBED)/patterns
	$(PROBES) probe=copy,needle,recall layers=1,3 model=rope hydra.sweep.dir=$(PROBED)/layers
	$(PROBES) probe=copy,needle,recall layers=3 model=by_layer 'model.layers=[rope,rope,nope],[rope,nope,nope]' \
		hydra.sweep.dir=$(PROBED)/by_layer
	$(PROBES) probe=copy,needle,recall layers=3 model=rope pattern=by_layer \
		'pattern.layers=[window,window,full],[full,window,window]' hydra.sweep.dir=$(PROBED)/patterns_by_layer
	tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C $(PROBED) -cJf $(REFERENCE)/probes/runs.tar.xz \
		$$(cd $(PROBED) && find . -name result.json -o -name tuned.json -o -name sweep.json -o -path '*/jobs/*.json' | sort)
	$(MAKE) pages

# Patterns in contexts of three lengths, an hour and a half on two cores. Each run has a process of its own, of whose
# memory it reports the peak.
IN_CONTEXTS := outputs/reproduce-contexts
reproduce-contexts: $(STAMP)
	-for seed in 0 1 2 3 4; do \
	for context in "512 batch_size=16" "2048 batch_size=4" "8192 batch_size=1"; do \
	for pattern in full "window pattern.window=64" "window pattern.window=256" "strided pattern.stride=64" \
		"by_layer pattern.layers=[{name:window,window:64},full]"; do \
		echo "seed=$$seed block_size=$$context pattern=$$pattern"; done; done; done \
	| grep -v 'seed=[34] block_size=[25]' \
	| xargs -P 2 -L 1 $(BIN)/python -m speechformer.train experiment=patterns_context \
		'hydra.run.dir=$(IN_CONTEXTS)/$${run_name:}'
	-$(BIN)/python -m speechformer.train experiment=tiny_stories_like 'hydra.run.dir=$(IN_CONTEXTS)/$${run_name:}'
	test $$(find $(IN_CONTEXTS) -path '*patterns-context*/result.json' | wc -l) -eq 55 # or keep the older results
	mkdir -p $(REFERENCE)/contexts
	tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C $(IN_CONTEXTS) -cJf $(REFERENCE)/contexts/runs.tar.xz \
		$$(cd $(IN_CONTEXTS) && find . -path '*patterns-context*/result.json' | sort)
	$(MAKE) pages

# From the default language model up: each line adds its settings to those above it.
LADDER := outputs/reproduce-ladder
RUNG := -$(BIN)/python -m speechformer.train --multirun experiment=ladder_lm corpus=speeches study=ladder_lm \
	hydra/launcher=joblib 'hydra.sweep.dir=$(LADDER)/$${sweep_name:}'
STRONG := -$(BIN)/python -m speechformer.train --multirun experiment=strong_lm corpus=speeches study=strong_lm \
	hydra/launcher=joblib 'hydra.sweep.dir=$(LADDER)/$${sweep_name:}'
RUNGS_1 := model=rope
RUNGS_2 := $(RUNGS_1) pattern=window pattern.window=4
RUNGS_3 := $(RUNGS_2) architecture.tied_output=true recipe.init=normal
RUNGS_4 := $(RUNGS_3) architecture.output_bias=unigram
RUNGS_5 := $(RUNGS_4) architecture.activation=gelu ff=256
RUNGS_6 := $(RUNGS_5) recipe.optimizer=muon recipe.lr=3e-3 recipe.matrix_lr=2e-2 recipe.weight_decay=0.1
RUNGS_7 := $(RUNGS_6) recipe.schedule=cosine
RUNGS_8 := $(RUNGS_7) embedding_dropout=0.2
RUNGS_9 := $(RUNGS_8) width=96
RUNGS_10 := $(RUNGS_9) task.unknown_rate=0.5
RUNGS_11 := $(RUNGS_10) task.ngram_targets=0.5
MIXED := $(RUNGS_10) embedding_dropout=0.4 trainer.max_steps=800 task.ngram_mixture=context
# Members of five ensembles of four, which are not in the archive:
MEMBERS := outputs/reproduce-ladder-members
EXTRA := $(subst study=strong_lm,study=extra_lm,$(STRONG)) task.extra_text=true
# experiment=strong_lm is the last rung. Each of its settings is taken back, one at a time:
WITHOUT := model=sinusoidal pattern.window=32 architecture.tied_output=false recipe.init=torch architecture.output_bias=init \
	architecture.activation=relu recipe.schedule=constant embedding_dropout=null width=64 \
	task.unknown_rate=0 task.ngram_targets=0
reproduce-ladder: $(STAMP)
	$(BIN)/python -m speechformer.baselines task=lm corpus=speeches protocol=clean --output $(LADDER)/baselines
	$(RUNG) 'seed=range(10)'
	$(foreach k,1 2 3 4 5 6 7 8 9 10 11,$(RUNG) $(RUNGS_$(k)) 'seed=range(10)'$(NEWLINE)	)
	$(RUNG) $(RUNGS_10) task.ngram_mixture=context 'seed=range(10)'
	$(RUNG) $(RUNGS_11) task.ngram_mixture=context 'seed=range(10)'
	-for seed in $$(seq 0 9); do echo $(MIXED) seed=$$seed; done \
	| xargs -P 2 -L 1 $(BIN)/python -m speechformer.train experiment=ladder_lm corpus=speeches study=ladder_lm \
		'hydra.run.dir=$(LADDER)/mixed/$${run_name:}' threads=1 # a sweep would put the repeated settings into one place
	$(RUNG) $(RUNGS_9) recipe.label_smoothing=0.2 'seed=range(5)'
	$(RUNG) $(RUNGS_9) task.unknown_rate=0.2,0.8 'seed=range(5)'
	$(RUNG) $(RUNGS_10) layers=2 'seed=range(5)'
	$(RUNG) $(RUNGS_10) dropout=0.3 'seed=range(5)'
	$(RUNG) $(RUNGS_10) task.noise=0.1 'seed=range(5)'
	$(RUNG) $(RUNGS_10) task.ngram_targets=0.8 'seed=range(5)'
	$(RUNG) $(RUNGS_11) task.noise=0.1 'seed=range(5)'
	$(RUNG) $(RUNGS_11) trainer.max_steps=1500 'seed=range(5)'
	$(STRONG) 'seed=range(10)'
	$(STRONG) recipe.optimizer=adamw recipe.matrix_lr=null 'seed=range(5)'
	$(foreach other,$(WITHOUT),$(STRONG) $(other) 'seed=range(5)'$(NEWLINE)	)
	$(BIN)/python -m speechformer.baselines task=lm corpus=speeches protocol=clean task.extra_text=true \
		--output $(LADDER)/baselines/extra_text
	$(EXTRA) 'seed=range(10)'
	$(EXTRA) task.ngram_mixture=context task.ngram_targets=0 'seed=range(10)'
	-for seed in $$(seq 0 19); do echo seed=$$seed hydra.run.dir=$(MEMBERS)/$$seed; done \
	| xargs -P 2 -L 1 $(BIN)/python -m speechformer.train experiment=ladder_lm corpus=speeches study=ladder_lm $(MIXED) \
		threads=1
	-for k in 0 4 8 12 16; do $(BIN)/python -m speechformer.evaluate --study ensemble_lm \
		$$(seq -f "$(MEMBERS)/%g" $$k $$((k + 3))) --output $(LADDER)/ensembles/$$k; done
	tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C $(LADDER) -cJf $(REFERENCE)/ladder/runs.tar.xz \
		$$(cd $(LADDER) && find . -name result.json | sort)
	$(MAKE) pages

# From the default classifier up. Another tenth is held out for each seed.
CLASSIFIED := outputs/reproduce-ladder-classify
STEP := -$(BIN)/python -m speechformer.train --multirun corpus=speeches hydra/launcher=joblib \
	'hydra.sweep.dir=$(CLASSIFIED)/$${sweep_name:}'
STEPS_0 := $(STEP) experiment=ladder_classify study=ladder_classify
STEPS_1 := $(STEPS_0) recipe.optimizer=muon recipe.lr=3e-3 recipe.matrix_lr=1e-2 recipe.weight_decay=0.1
STEPS_2 := $(STEPS_1) recipe.init=normal
STEPS_3 := $(STEPS_2) recipe.schedule=cosine
STEPS_4 := $(STEPS_3) layers=1 trainer.max_epochs=20
STEPS_5 := $(STEPS_4) task.unknown_rate=0.5
STEPS_6 := $(STEPS_5) task.balanced=true
STEPS_7 := $(STEPS_6) task.naive_bayes=2
# STEPS_6 is experiment=strong_classify but for protocol.fold; STEPS_7 adds naive Bayes.
BESIDE := trainer.max_epochs=40 layers=2 layers=4 width=128 dropout=0.3 embedding_dropout=0.5 recipe.label_smoothing=0.2 \
	architecture.pool=cls model=nope model=rope model=alibi pattern=window
MASKED_1 := $(STEPS_5) task.masked_lm=0.1
MASKED_2 := $(STEPS_5) task.masked_lm=0.5
MASKED_3 := $(MASKED_2) task.extra_text=true
MASKED_4 := $(STEPS_5) trainer.max_epochs=40 task.pretraining_epochs=20
MASKED_5 := $(MASKED_4) task.extra_text=true
HELD_OUT := 0.01 0.1 0.5 0.75 0.9
COUNTED := $(BIN)/python -m speechformer.baselines task=classify corpus=speeches protocol=clean
reproduce-ladder-classify: $(STAMP)
	$(COUNTED) protocol.fold=seed --output $(CLASSIFIED)/baselines/folds
	$(foreach share,$(HELD_OUT),$(COUNTED) protocol.validation=$(share) --output $(CLASSIFIED)/baselines/$(share)$(NEWLINE)	)
	$(foreach k,0 1 2 3 4 5 6 7,$(STEPS_$(k)) 'seed=range(10)'$(NEWLINE)	)
	$(foreach other,$(BESIDE),$(STEPS_5) $(other) 'seed=range(5)'$(NEWLINE)	)
	$(foreach k,1 2 3 4 5,$(MASKED_$(k)) 'seed=range(5)'$(NEWLINE)	)
	$(STEPS_6) task.naive_bayes=1,4 'seed=range(5)'
	$(STEP) experiment=strong_classify study=strong_classify 'seed=range(10)'
	$(STEP) experiment=strong_classify study=bayes_classify task.naive_bayes=2 'seed=range(10)'
	$(STEP) experiment=strong_classify study=all_classify task.naive_bayes=2 protocol.validation=0.01 'seed=range(10)'
	$(foreach share,$(HELD_OUT),$(STEP) experiment=strong_classify study=sentences_classify protocol.validation=$(share) \
		'seed=range(5)'$(NEWLINE)	)
	mkdir -p $(REFERENCE)/ladder_classify
	tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C $(CLASSIFIED) -cJf $(REFERENCE)/ladder_classify/runs.tar.xz \
		$$(cd $(CLASSIFIED) && find . -name result.json -o -name predictions.tsv | sort)
	$(MAKE) pages

# From a small transformer up, on the TED pairs, which it needs: five hours on two cores. Three steps stand on the third.
TRANSLATES := outputs/reproduce-ladder-translate
RISES_1 := model=rope
RISES_2 := $(RISES_1) recipe.optimizer=muon recipe.matrix_lr=1e-2
reproduce-ladder-translate: $(STAMP)
	-for step in "" "$(RISES_1)" "$(RISES_2)" "$(RISES_2) recipe.schedule=cosine" "$(RISES_2) dropout=0.1" \
		"$(RISES_2) task.bpe_dropout=0.1"; do for seed in 0 1 2 3; do echo seed=$$seed $$step; done; done \
	| xargs -P 2 -L 1 $(BIN)/python -m speechformer.train experiment=ladder_translate study=ladder_translate threads=1 \
		'hydra.run.dir=$(TRANSLATES)/$${run_name:}'
	test $$(find $(TRANSLATES) -name result.json | wc -l) -eq 24 # or keep the older results
	mkdir -p $(REFERENCE)/ladder_translate
	tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C $(TRANSLATES) -cJf $(REFERENCE)/ladder_translate/runs.tar.xz \
		$$(cd $(TRANSLATES) && find . -name result.json | sort)
	$(MAKE) pages

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), only this once: a minute or more, 1.8 GB or more (torch)."
	@$(PYTHON) -c 'import sys; sys.exit("speechformer needs Python 3.11 or newer. Try: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
