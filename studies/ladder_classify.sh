#!/usr/bin/env bash
# bash studies/ladder_classify.sh
#
# Which settings make a small classifier of the speeches better than naive Bayes? Each rung adds settings to the one
# below, and each seed holds out another tenth. experiment=strong_classify is the rung before the last, but for
# protocol.fold.
# Time: less than the 1.4 hours of one core of the archive, which has more runs. Repeat the command to resume.
# Data: the presidential speeches (python -m speechformer.download).
# Writes outputs/reference/ladder_classify/runs.tar.xz.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce-ladder-classify
rung() { sweep corpus=speeches experiment=ladder_classify study=ladder_classify "$@"; }
strong() { sweep corpus=speeches experiment=strong_classify "$@"; }
baselines() { speechformer baselines task=classify corpus=speeches protocol=clean "$@" || exit; }
held_out="0.01 0.1 0.5 0.75 0.9"

baselines protocol.fold=seed --output $OUT/baselines/folds
for share in $held_out; do baselines protocol.validation=$share --output $OUT/baselines/$share; done
rung 'seed=range(10)'
rungs=("") settings=
for more in "recipe.optimizer=muon recipe.lr=3e-3 recipe.matrix_lr=1e-2 recipe.weight_decay=0.1" recipe.init=normal \
    recipe.schedule=cosine "layers=1 trainer.max_epochs=20" task.unknown_rate=0.5 task.balanced=true \
    task.naive_bayes=2; do
    settings="$settings $more"
    rungs+=("$settings")
    rung $settings 'seed=range(10)'
done

# The archive also has runs of settings that are gone (masked language modelling), which the log describes. Delete it
# before you replace it: it holds more runs than this script makes.
for more in trainer.max_epochs=40 layers=2 layers=4 width=128 dropout=0.3 embedding_dropout=0.5 \
    recipe.label_smoothing=0.2 architecture.pool=cls model=nope model=rope model=alibi pattern=window; do
    rung ${rungs[5]} $more 'seed=range(5)'
done
rung ${rungs[6]} task.naive_bayes=1,4 'seed=range(5)'

strong study=strong_classify 'seed=range(10)'
strong study=bayes_classify task.naive_bayes=2 'seed=range(10)'
strong study=all_classify task.naive_bayes=2 protocol.validation=0.01 'seed=range(10)'
for share in $held_out; do strong study=sentences_classify protocol.validation=$share 'seed=range(5)'; done
archive outputs/reference/ladder_classify . -name result.json -o -name predictions.tsv
