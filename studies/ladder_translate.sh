#!/usr/bin/env bash
# bash studies/ladder_translate.sh
#
# Which settings make a small transformer translate better? Three rungs, and three steps from the third.
# Time: five hours on two cores. Repeat the command to resume.
# Data: the TED pairs (python -m speechformer.download).
# Writes outputs/reference/ladder_translate/runs.tar.xz.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce-ladder-translate

rope=model=rope
muon="$rope recipe.optimizer=muon recipe.matrix_lr=1e-2"
for rung in "" "$rope" "$muon" "$muon recipe.schedule=cosine" "$muon dropout=0.1" "$muon task.bpe_dropout=0.1"; do
    for seed in 0 1 2 3; do echo seed=$seed $rung; done
done | two_at_once experiment=ladder_translate study=ladder_translate threads=1 "hydra.run.dir=$OUT/\${run_name:}"
archive outputs/reference/ladder_translate . -name result.json
