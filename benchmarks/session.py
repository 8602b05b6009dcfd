"""Run what a GPU must show, the most valuable first, each part in a process with a time limit.

FOLDER gets gpu.json, with the measured rows and the parts, and the log of each part. A part that fails or takes too
long is named in the table; the others still run. What a part leaves of its time goes to the next ones.

    benchmarks/gpu.sh [--dry] FOLDER
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from speechformer.corpora.files import write_file
from speechformer.errors import ArgumentParser, run_command

MARKED = sorted(str(file) for file in Path("tests").glob("test_*.py") if "mark.cuda" in file.read_text("utf-8"))
PYTEST = ["-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", *MARKED, "-m", "cuda"]
GPU = "benchmarks/gpu.py"
PARTS: dict[str, tuple[int, list[str]]] = {  # seconds, and arguments of Python
    "tests": (110, PYTEST),  # fast and slow
    "ensemble": (95, [GPU, "ensemble"]),
    "large": (85, [GPU, "large", "optimizer", "--rounds", "2"]),
    "graphs": (45, [GPU, "graphs"]),
    "foreign": (30, [GPU, "foreign", "--rounds", "2"]),
    "mechanisms": (40, [GPU, "mechanisms", "--rounds", "2"]),
    "fsdp": (35, [GPU, "fsdp"]),
    "real": (65, [GPU, "real"]),
    "patterns": (30, [GPU, "patterns", "--rounds", "1"]),
    "limits": (5, ["benchmarks/limits.py"]),
}


def start(arguments: Sequence[str], folder: Path, log: Path, dry: bool) -> "subprocess.Popen[bytes]":
    """Start Python in a group of its own, with its output in a log."""
    if arguments[0] == GPU:
        arguments = [*arguments, "--output", str(folder), *["--dry"] * dry]
    elif arguments[0].startswith("benchmarks"):
        arguments = [*arguments, str(folder)]
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", deadline: float) -> str:
    """Wait for a process, and end its group at the deadline; return how it ended."""
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
        return "done" if status == 0 else f"failed ({status})"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_parts(parts: dict[str, tuple[int, list[str]]], folder: Path, dry: bool) -> list[dict[str, object]]:
    """Run the parts, and return of each its name, how it ended, its seconds and the last line of its log."""
    done: list[dict[str, object]] = []
    deadline = time.monotonic()
    for name, (seconds, arguments) in parts.items():
        deadline += seconds
        began, log = time.monotonic(), folder / f"{name}.log"
        ended = finish(start(arguments, folder, log, dry), deadline)
        text = log.read_text("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        passed, failed = (len(re.findall(f"::.* {word}", text)) for word in ("PASSED", "FAILED"))
        last = f"{passed} passed, {failed} failed" if passed + failed else (lines or [""])[-1][:100]
        done.append({"part": name, "ended": ended, "seconds": round(time.monotonic() - began), "last": last})
        print(f"{name:12} {ended:14} {done[-1]['seconds']:4} s  {last}", flush=True)
        path = folder / "gpu.json"
        content = json.loads(path.read_text("utf-8")) if path.exists() else {"rows": []}
        write_file(path, f"{json.dumps({**content, 'parts': done}, indent=1)}\n".encode())
    return done


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser("benchmarks/gpu.sh", description="Run what a GPU must show, in at most nine minutes.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the logs and of gpu.json")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on any machine: does it work?")
    options = parser.parse_args()

    def run() -> None:
        options.folder.mkdir(parents=True, exist_ok=True)
        folder = options.folder.resolve()
        stories = start([GPU, "prepare"], folder, folder / "prepare.log", options.dry)
        parts = {name: (10 * seconds if options.dry else seconds, rest) for name, (seconds, rest) in PARTS.items()}
        try:
            run_parts(parts, folder, options.dry)
        finally:
            finish(stories, time.monotonic())
        subprocess.run([sys.executable, GPU, "--show", "--output", str(folder)], check=False)

    run_command(run)


if __name__ == "__main__":
    main()
