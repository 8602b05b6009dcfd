#!/usr/bin/env bash
# What a GPU must show, in at most nine minutes: benchmarks/gpu.sh FOLDER, or benchmarks/gpu.sh --dry FOLDER on a CPU.
#
# The most valuable part comes first. A part that fails or takes too long is named in the table; the others still run.
# It needs the package's dependencies with its extra `dev`. FOLDER gets one log for each part, gpu.json,
# and parts.tsv: a part, its exit status (124: out of time), its seconds.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
dry=false
if [ "${1:-}" = --dry ]; then
    dry=true
    shift
fi
folder=${1:?Name a folder for the results: benchmarks/gpu.sh FOLDER}
mkdir -p "$folder"
printf 'part\tstatus\tseconds\n' >"$folder/parts.tsv"

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" >"$folder/$name.log" 2>&1 || status=$?
    printf '%s\t%s\t%s\n' "$name" "$status" $((SECONDS - begin)) | tee -a "$folder/parts.tsv"
    [ "$status" = 0 ] || tail -n 15 "$folder/$name.log"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run=(python3 -m speechformer.train corpus=sample task=lm model=rope seed=1 eval_interval=50 trainer.max_steps=200)
if $dry; then
    run+=(machine=cpu width=16 heads=2 layers=1 ff=16 compile=default)
    measured=()
else
    run+=(machine=gpu compile=reduce-overhead)
    measured=(large ensemble compiled precision patterns)
fi

interrupted() { # the same run, stopped in its midst by the signal of a cluster, and resumed
    local folder=$1
    shift
    "$@" "hydra.run.dir=$folder" &
    local process=$!
    until [ -s "$folder/last.ckpt" ] || ! kill -0 $process; do sleep 0.05; done
    kill -TERM $process
    wait $process
    "$@" "hydra.run.dir=$folder"
}

same_results() { # two folders: their metrics differ by no more than the order of a GPU's sums explains
    python3 - "$1" "$2" <<'PYTHON'
import json, math, pathlib, sys

first, second = (json.loads((pathlib.Path(folder) / "result.json").read_text())["metrics"] for folder in sys.argv[1:])
for key, value in first.items():
    print(key, value, second[key])
sys.exit(not all(math.isclose(value, second[key], rel_tol=1e-3) for key, value in first.items()))
PYTHON
}
export -f interrupted same_results

part tests 150 python3 -m pytest -m cuda -q -p no:cacheprovider
part whole 90 "${run[@]}" "hydra.run.dir=$work/whole"
part resumed 90 bash -c 'interrupted "$@"' _ "$work/resumed" "${run[@]}"
part same 10 bash -c 'same_results "$@"' _ "$work/whole" "$work/resumed"
for name in ${measured[@]+"${measured[@]}"}; do
    part "$name" 100 python3 benchmarks/gpu.py "$name" --rounds 3 --output "$folder"
done
cat "$folder/parts.tsv"
