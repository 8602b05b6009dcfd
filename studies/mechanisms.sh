#!/usr/bin/env bash
# bash studies/mechanisms.sh
#
# Which attention mechanisms solve two synthetic probes, what do they keep of a text, what does a step cost, and does
# a probe predict their loss as language models? Each mechanism has RoPE, or no positions if it decays or convolves by
# itself. Learning rates are tuned on the same grid, and then fresh seeds run: five on recall, three on parity and as
# language models. The five mechanisms that recall most have other positions, too.
# Time: about three and a half hours on two idle cores. Repeat the command to resume.
# Data: SPEECHFORMER_DATA with the speeches.
# Writes outputs/reference/mechanisms/runs.tar.xz.
# At the end it times a training step of each mechanism on one thread, about two minutes on an idle machine, and writes
# outputs/reference/mechanisms/steps.json.
source "$(dirname "$0")/common.sh"
OUT=outputs/reproduce-mechanisms
scores=softmax,sink,sigmoid,entmax,softpick,differential
hybrid='attention=by_layer attention.layers=[gated_delta,softmax] model=by_layer model.layers=[nope,rope]'
each() { # FOLDER OVERRIDES... : the sweep of each group of mechanisms
    speechformer train --multirun study=mechanisms protocol=clean hydra/launcher=joblib "${@:2}" \
        attention=$scores,linear,retention model=rope "hydra.sweep.dir=$OUT/$1/rope"
    speechformer train --multirun study=mechanisms protocol=clean hydra/launcher=joblib "${@:2}" \
        attention=gated_linear,delta,gated_delta,ssd model=nope "hydra.sweep.dir=$OUT/$1/nope"
    speechformer train --multirun study=mechanisms protocol=clean hydra/launcher=joblib "${@:2}" \
        $hybrid "hydra.sweep.dir=$OUT/$1/hybrid"
    speechformer train --multirun study=mechanisms protocol=clean hydra/launcher=joblib "${@:2}" \
        attention=softmax attention.kv_heads=1 model=rope "hydra.sweep.dir=$OUT/$1/one_key_head"
}
tuned=(task=probe task.longer=1.5 hydra/sweeper=tuned 'recipe.lr=tag(tune,choice(1e-3,3e-3))'
    hydra.sweeper.untuned_seeds=2)
small=(task=lm task.tokens=bpe task.vocab_size=1000 width=64 heads=4 layers=2 ff=256 block_size=128 batch_size=16
    recipe=cosine recipe.lr=3e-3 recipe.warmup_steps=50 trainer.max_steps=600 eval_interval=200 'seed=range(3)')
each recall probe=recall "${tuned[@]}" 'seed=range(5)'
each parity probe=parity "${tuned[@]}" 'seed=range(3)'
positions() { # FOLDER OVERRIDES... : the five that recall most, at the rate that was chosen for each of them
    speechformer train --multirun study=mechanisms_positions protocol=clean hydra/launcher=joblib task=probe \
        probe=recall task.longer=1.5 recipe.lr=3e-3 'seed=range(5)' "${@:2}" "hydra.sweep.dir=$OUT/positions/$1"
}
positions delta attention=delta model=rope
positions scores attention=softmax,entmax,differential model=nope,alibi
positions hybrid_nope ${hybrid/nope,rope/nope,nope}
positions hybrid_alibi ${hybrid/nope,rope/nope,alibi}
each stories "${small[@]}" corpus=stories corpus.documents=20000 corpus.words=200
each speeches "${small[@]}" corpus=speeches
[ "$DRY" ] || "$PYTHON" -m studies.mechanisms $OUT
archive outputs/reference/mechanisms . -name result.json -o -name tuned.json -o -name sweep.json
