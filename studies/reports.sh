#!/usr/bin/env bash
# bash studies/reports.sh
#
# Do the conclusions of three course reports hold over many seeds, and what lies beyond them?
# Time: 7.8 hours of one core; half of the seeds, in half the time, come first. Repeat the command to resume.
# Data: the presidential speeches (python -m speechformer.download).
# Writes outputs/reference/runs.tar.xz.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce
RUNS=$OUT/runs
speeches() { sweep corpus=speeches "$@"; }
classify=experiment=kulkarni_part1,singhal_table1,singhal_table3,singhal_table5,marsol_classify
language=experiment=kulkarni_part2,singhal_table2,singhal_table4,singhal_table6
hundred_epochs=experiment=kulkarni_part3_absolute,kulkarni_part3_alibi

speechformer audit corpus=speeches --json $OUT/audit.json || exit
speechformer baselines corpus=speeches protocol=paper --output $OUT/baselines || exit
speechformer baselines corpus=speeches protocol=clean --output $OUT/baselines || exit
speeches $classify 'seed=range(5)'
speeches $language 'seed=range(5)'
speeches 'experiment=glob(marsol_table1_*)' 'seed=range(5)'
for study in positions_classify positions_lm patterns_classify patterns_lm slopes_classify slopes_lm slopes_learned; do
    speeches experiment=$study
done
speeches experiment=marsol_classify dropout=0 'seed=range(5)'
speeches experiment=marsol_table1_full dropout=0 'seed=range(5)'
speeches experiment=singhal_table2,singhal_table6 model=nope 'seed=range(5)'
speeches experiment=singhal_table6 model=alibi 'seed=range(5)'
speeches $classify protocol=clean 'seed=range(5)'
speeches $hundred_epochs 'seed=range(3)'
speeches $hundred_epochs protocol=clean 'seed=range(3)'
speeches experiment=kulkarni_part3_scales
sweep corpus=sample protocol=paper task=classify,lm model=nope,alibi,relative,sinusoidal,learned,rope seed=0,1,2
# More seeds: 20 for classification (10 under protocol=clean), 10 for the language models.
speeches $classify 'seed=range(5,20)'
speeches $classify protocol=clean 'seed=range(5,10)'
speeches $language 'seed=range(5,10)'
speeches 'experiment=glob(marsol_table1_*)' 'seed=range(5,10)'
speeches $hundred_epochs 'seed=range(3,20)'
archive outputs/reference baselines runs -name result.json -o -name predictions.tsv
