# What the studies share. Each of them sources this file, and sets OUT, the folder of its runs.
#
# DRY=1 prints the commands instead of running them. A command that fails does not stop the others; its run is missing
# from the archive. The same command again makes only what is missing.
set -uf # no globs: overrides such as model.layers=[rope,nope] have brackets
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
PYTHON=.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=python3
DRY=${DRY:-}
trap 'exit 130' INT TERM # a run that saves its state at Ctrl-C exits by itself, so bash would start the next one

speechformer() { module "speechformer.$1" "${@:2}"; } # COMMAND ARGUMENTS...

module() { # MODULE ARGUMENTS...
    local command=("$PYTHON" -m "$@")
    if [ "$DRY" ]; then printf '%q ' "${command[@]}" && echo; else "${command[@]}"; fi
}

sweep() { # OVERRIDES... : as many runs at once as there are cores
    speechformer train --multirun hydra/launcher=joblib "hydra.sweep.dir='${RUNS:-$OUT}/\${sweep_name:\${hydra.overrides.task}}'" "$@"
}

two_at_once() { # OVERRIDES... : a process for each line of stdin, which has more overrides and no trailing blank
    local command=("$PYTHON" -m speechformer.train "$@") processes=2
    if [ "$DRY" ]; then
        command=(bash -c 'printf "%q " "$@" && echo' _ "${command[@]}") processes=1
    fi
    xargs -P $processes -L 1 "${command[@]}"
}

archive() { # FOLDER ARGUMENTS OF FIND... : put files of OUT into FOLDER/runs.tar.xz, unless it holds more of them
    [ "$DRY" ] && return
    local archive=$PWD/$1/runs.tar.xz files before=1
    files=$(cd "$OUT" && find "${@:2}" | sort)
    [ -e "$archive" ] && before=$(tar -tJf "$archive" | wc -l)
    if [ "$(grep -c . <<<"$files")" -lt "$before" ]; then
        echo "$OUT has no results, or fewer than $archive, which stays. Repeat the command to make the missing runs, or delete the archive to replace it." >&2
        exit 1
    fi
    mkdir -p "$1"
    tar --sort=name --mtime=2000-01-01 --owner=0 --group=0 -C "$OUT" -cJf "$archive" --files-from=- <<<"$files"
    echo "$archive is written. \`make pages\` shows its results."
}
