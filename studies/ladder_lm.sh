#!/usr/bin/env bash
# bash studies/ladder_lm.sh
#
# Which settings make a small language model of the speeches better than a 5-gram? Each rung adds settings to the one
# below. experiment=strong_lm is the last rung, from which each setting is taken back in turn.
# Time: less than the 3.8 hours of one core of the archive, which has more runs; then 20 members of ensembles. Repeat the command to resume.
# Data: the presidential speeches (python -m speechformer.download).
# Writes outputs/reference/ladder/runs.tar.xz.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce-ladder
members=outputs/reproduce-ladder-members
rung() { sweep experiment=ladder_lm corpus=speeches study=ladder_lm "$@"; }
strong() { sweep experiment=strong_lm corpus=speeches "$@"; }
baselines() { speechformer baselines task=lm corpus=speeches protocol=clean "$@" || exit; }

baselines --output $OUT/baselines
rung 'seed=range(10)'
rungs=("") settings=
for more in model=rope "pattern=window pattern.window=4" "architecture.tied_output=true recipe.init=normal" \
    architecture.output_bias=unigram "architecture.activation=gelu ff=256" \
    "recipe.optimizer=muon recipe.lr=3e-3 recipe.matrix_lr=2e-2 recipe.weight_decay=0.1" recipe.schedule=cosine \
    embedding_dropout=0.2 width=96 task.unknown_rate=0.5 task.ngram_targets=0.5; do
    settings="$settings $more"
    rungs+=("$settings")
    rung $settings 'seed=range(10)'
done

rung ${rungs[10]} task.ngram_mixture=context 'seed=range(10)'
rung ${rungs[11]} task.ngram_mixture=context 'seed=range(10)'
# A sweep would move the second embedding_dropout to the first, and a rung's parent is found by the order of overrides.
mixed="${rungs[10]} embedding_dropout=0.4 trainer.max_steps=800 task.ngram_mixture=context"
for seed in {0..9}; do echo $mixed seed=$seed; done |
    two_at_once experiment=ladder_lm corpus=speeches study=ladder_lm "hydra.run.dir=$OUT/mixed/\${run_name:}" threads=1
rung ${rungs[9]} recipe.label_smoothing=0.2 'seed=range(5)'
rung ${rungs[9]} task.unknown_rate=0.2,0.8 'seed=range(5)'
# The archive also has runs of a setting that is gone (word noise), which the log describes.
for more in layers=2 dropout=0.3 task.ngram_targets=0.8; do rung ${rungs[10]} $more 'seed=range(5)'; done
rung ${rungs[11]} trainer.max_steps=1500 'seed=range(5)'

strong study=strong_lm 'seed=range(10)'
strong study=strong_lm recipe.optimizer=adamw recipe.matrix_lr=null 'seed=range(5)'
for without in model=sinusoidal pattern.window=32 architecture.tied_output=false recipe.init=torch \
    architecture.output_bias=init architecture.activation=relu recipe.schedule=constant embedding_dropout=null \
    width=64 task.unknown_rate=0 task.ngram_targets=0; do
    strong study=strong_lm $without 'seed=range(5)'
done

# More text: the labelled training sentences.
baselines task.extra_text=true --output $OUT/baselines/extra_text
strong study=extra_lm task.extra_text=true 'seed=range(10)'
strong study=extra_lm task.extra_text=true task.ngram_mixture=context task.ngram_targets=0 'seed=range(10)'

# Five ensembles of four. Their members are not in the archive.
for seed in {0..19}; do echo "seed=$seed hydra.run.dir=$members/$seed"; done |
    two_at_once experiment=ladder_lm corpus=speeches study=ladder_lm $mixed threads=1
for k in 0 4 8 12 16; do
    speechformer evaluate --study ensemble_lm $members/{$k,$((k + 1)),$((k + 2)),$((k + 3))} --output $OUT/ensembles/$k
done
archive outputs/reference/ladder . -name result.json
