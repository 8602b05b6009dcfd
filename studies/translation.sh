#!/usr/bin/env bash
# bash studies/translation.sh
#
# How well do small models translate, and does attention remove the bottleneck of a recurrent encoder and decoder?
# Time: 13 hours of one core for the runs of the archive, of which ted_faster takes 8.9. Then 2.3 hours of two cores
# for ted, two for positions_translate, and of one core 1.7 for sharma_translate.
# Data: the TED pairs (python -m speechformer.download).
# Writes outputs/reference/bottleneck/runs.tar.xz.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce-translation
RUNS=$OUT/runs
alone() { speechformer train "$1" "hydra.run.dir=$RUNS/\${run_name:}"; }

speechformer baselines task=translate corpus=ted protocol=clean --output $OUT/baselines || exit
alone experiment=ted
sweep experiment=ted_faster 'seed=range(5)'
# Five ensembles of four, each without one seed. The first member, of which the result takes its seed, is another in each.
for seed in 0 1 2 3 4; do
    members=$(for next in 1 2 3 4; do
        find $OUT -path "*ted-faster_seed$(((seed + next) % 5))_*" -name result.json -printf '%h ' 2>/dev/null
    done)
    speechformer evaluate --study ted_ensemble $members --output $OUT/ensembles/without_$seed
done
sweep task=translate corpus=sample protocol=paper model=rnn,rnn_attention,sinusoidal seed=0,1,2
sweep task=translate corpus=sample protocol=paper model=rnn_attention model.attention=bahdanau seed=0,1,2
sweep task=translate corpus=sample protocol=paper recipe=inverse_sqrt model=rnn,rnn_attention seed=0,1,2
sweep experiment=bottleneck_digits 'seed=range(5)'
# as many parameters as the other three
sweep experiment=bottleneck_digits model=rnn_attention model.attention=bahdanau width=101 'seed=range(5)'
sweep experiment=bottleneck
sweep experiment=positions_translate
alone experiment=sharma_translate
archive outputs/reference/bottleneck baselines ensembles runs -name result.json
