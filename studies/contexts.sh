#!/usr/bin/env bash
# bash studies/contexts.sh
#
# What do sparse patterns cost in perplexity, and save in time and memory, in contexts of 512, 2,048 and 8,192 tokens?
# Each run has a process of its own, of whose memory it reports the peak.
# Time: an hour and a half on two cores. Repeat the command to resume.
# Data: stories that the package makes.
# Writes outputs/reference/contexts/runs.tar.xz.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce-contexts

for seed in 0 1 2 3 4; do
    for context in "512 batch_size=16" "2048 batch_size=4" "8192 batch_size=1"; do
        for pattern in full "window pattern.window=64" "window pattern.window=256" "strided pattern.stride=64" \
            "by_layer pattern.layers=[{name:window,window:64},full]"; do
            # Seeds 3 and 4 only where three had left the comparisons with full attention open.
            if [ $seed -lt 3 ] || [ "$context" = "8192 batch_size=1" ]; then
                echo "seed=$seed block_size=$context pattern=$pattern"
            fi
        done
    done
done | two_at_once experiment=patterns_context "hydra.run.dir=$OUT/\${run_name:}"
speechformer train experiment=tiny_stories_like "hydra.run.dir=$OUT/\${run_name:}" # not in the archive
archive outputs/reference/contexts . -path '*patterns-context*/result.json'
