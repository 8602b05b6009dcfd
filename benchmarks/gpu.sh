#!/usr/bin/env bash
# What a GPU must show, in at most nine minutes: benchmarks/gpu.sh FOLDER, or benchmarks/gpu.sh --dry FOLDER on a CPU.
# benchmarks/session.py lists the parts. They need the package's dependencies with its extra `dev`.
cd "$(dirname "$0")/.." || exit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python3 benchmarks/session.py "$@"
