"""Try random inputs, kills and full disks for a given time: `make chaos`, or `python tests/chaos.py --minutes 60`.

Random inputs are those of `test_properties.py`. Runs and sweeps are killed at random times, and runs in forked
processes at random points of their file operations (`kills.py`). Others may not write beyond a random size, as on a
full disk. Then the same command runs to its end. Oracle: the run that was not disturbed, to the bit, with the same
files.

The script ends with a table, and with exit code 1 if anything was wrong. It uses one core, as all it starts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from conftest import TINY, compose
from kills import Points, count_points, in_child
from test_fit import essence
from test_kills import names
from test_properties import PROPERTIES, HangError, Workshop, search, workshop

from speechformer.corpora import sample, sample_pairs
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.training.run import execute

RUNS = {
    "classify": "task=classify corpus.classes=[a,b,c] trainer.max_epochs=3 checkpoint_every=4 protocol=clean",
    "lm": "task=lm corpus.classes=[a,b,c] trainer.max_steps=60 eval_interval=15 checkpoint_every=4",
    "translate": "task=translate corpus=ted task.beam=1 task.batch_tokens=60 task.vocab_size=40 trainer.max_epochs=-1"
    " trainer.max_steps=12 eval_interval=3 checkpoint_every=2 task.average_checkpoints=2",
}
LAUNCHERS = ["basic", "joblib hydra.launcher.n_jobs=2", "ensemble"]
COLUMNS = ("accepted", "rejected in one sentence", "resumed", "not disturbed", "wrong")


class Chaos:
    """The runs that are disturbed, and what they should give."""

    def __init__(self, world: Workshop) -> None:
        self.world, self.words, self.whole, self.points = world, {}, {}, {}  # type: tuple[Workshop, Any, Any, Any]
        corpus = world.folder / "small"
        corpus.mkdir()
        for name, content in {**sample.files(0), **sample_pairs.files(0)}.items():
            number = 12 if name.startswith(("dev", "test.")) else 60
            (corpus / name).write_bytes(b"".join(content.splitlines(keepends=True)[:number]))
        for name, words in RUNS.items():
            self.words[name] = ["corpus=speeches", f"corpus.root={corpus}", *TINY[1:], "threads=1", *words.split()]
            folder, cfg = world.folder / "whole" / name, compose(*self.words[name])
            self.points[name] = count_points(lambda: execute(cfg, folder), folder)  # noqa: B023
            self.whole[name] = self.outcome(folder)

    def outcome(self, folder: Path) -> dict[str, Any]:
        """Return what a run leaves: weights, metrics and moments to the bit; the names of its files."""
        left = essence(folder, runs.read_result(folder)) | {"files": names(folder)}
        return {key: value for key, value in left.items() if key not in ("events", "texts")}

    def check(self, name: str, folder: Path) -> None:
        """Require that a run left what the undisturbed one did."""
        left, whole = self.outcome(folder), self.whole[name]
        differing = [key for key in whole if left[key] != whole[key]]
        assert not differing, f"{name}: {', '.join(differing)} differ from the undisturbed run's"

    def start(self, words: list[str], limit: int = resource.RLIM_INFINITY) -> subprocess.Popen[str]:
        """Start `train` in a process of its own; `limit`: the bytes that it may write into one file."""
        own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.world.folder / "cache")}
        return subprocess.Popen(
            [sys.executable, "-m", "speechformer.train", *words],
            env={**os.environ, **own},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def point_killed(self, chance: random.Random) -> bool:
        """A run in a forked process, killed at random points of its file operations."""
        name, folder = chance.choice(list(RUNS)), self.world.new_folder()
        cfg = compose(*self.words[name])
        points = [chance.randint(1, self.points[name]) for _ in range(chance.randint(1, 3))]
        codes = [in_child(lambda: execute(cfg, folder), Points(folder, point), None) for point in points]
        assert {*codes} <= {0, -signal.SIGKILL}, f"exit codes {codes}"
        execute(cfg, folder)
        self.check(name, folder)
        return any(codes)

    def run_killed(self, chance: random.Random) -> bool:
        """A command, killed at random times."""
        name, folder = chance.choice(list(RUNS)), self.world.new_folder()
        words = [*self.words[name], f"hydra.run.dir={folder}"]
        begun = folder / chance.choice(["run.json", "last.ckpt"])
        hits = [disturb(self.start(words), chance, begun) for _ in range(chance.randint(1, 3))]
        finish(self.start(words))
        self.check(name, folder)
        return any(hits)

    def sweep_killed(self, chance: random.Random) -> bool:
        """A sweep, killed at random times: its command or a worker. A job that was given up needs another command."""
        folder, launcher = self.world.new_folder(), chance.choice(LAUNCHERS)
        words = ["-m", *self.words["lm"], "seed=0,1,2", f"hydra.sweep.dir={folder}"]
        words += f"hydra/launcher={launcher}".split()
        hits = [disturb(self.start(words), chance, folder / "sweep.json") for _ in range(chance.randint(1, 3))]
        for _ in range(2):
            self.start(words).communicate(timeout=300)
        finish(self.start(words))
        jobs = sweeps.jobs_of(folder)
        assert [job.state.status for job in jobs] == ["finished"] * 3, launcher
        assert not [path for path in folder.rglob("*") if path.name.endswith(".partial") or path.name == "weights"]
        if launcher != "ensemble":  # its sums have another order
            assert jobs[0].folder is not None
            self.check("lm", jobs[0].folder) if launcher == "basic" else None
            assert runs.read_result(jobs[0].folder)["metrics"] == self.whole["lm"]["metrics"]
        return any(hits)

    def disk_full(self, chance: random.Random) -> bool:
        """A command that cannot write files beyond a random size, and says so in one sentence."""
        name, folder = chance.choice(list(RUNS)), self.world.new_folder()
        words = [*self.words[name], f"hydra.run.dir={folder}"]
        sizes = [path.stat().st_size for path in (self.world.folder / "whole" / name).rglob("*") if path.is_file()]
        process = self.start(words, limit=chance.choice([0, chance.choice(sizes), chance.randrange(max(sizes))]))
        error = process.communicate(timeout=300)[1]
        one_line = error.startswith("Error: ") and error.count("\n") == 1
        assert process.returncode == 0 or (process.returncode == 1 and one_line), error[-1500:]
        finish(self.start(words))
        self.check(name, folder)
        return process.returncode != 0


def disturb(process: subprocess.Popen[str], chance: random.Random, begun: Path) -> bool:
    """Send a signal to a command, or SIGKILL to one of its workers, at a random time; mostly once it has begun.

    Returns:
        Whether the command still ran.
    """
    deadline = time.monotonic() + (120 if chance.random() < 0.8 else 0)
    while process.poll() is None and not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 4))
    still_runs, number = process.poll() is None, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    with contextlib.suppress(OSError):
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if workers and chance.random() < 0.5:
            os.kill(int(chance.choice(workers)), signal.SIGKILL)
        else:
            process.send_signal(number)
    process.communicate(timeout=300)
    return still_runs


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command, which must succeed."""
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, f"exit code {process.returncode}: {error[-1500:]}"


DISTURBANCES = {  # and how many cases a round has
    "run killed at a write": (Chaos.point_killed, 12),
    "run killed at any time": (Chaos.run_killed, 2),
    "sweep killed": (Chaos.sweep_killed, 1),
    "disk full": (Chaos.disk_full, 2),
}


def one_round(chaos: Chaos, kind: str, seed: int) -> dict[str, int]:
    """Try the cases of one kind, and return the counts of outcomes; print what was wrong."""
    chance, count = random.Random(seed), collections.Counter[str]()
    try:
        if kind in PROPERTIES:
            outcomes = search(kind, chaos.world, 4 * PROPERTIES[kind][2], seed)
            return {"accepted": outcomes[True], "rejected in one sentence": outcomes[False]}
        disturb_once, number = DISTURBANCES[kind]
        for _ in range(number):
            count["resumed" if disturb_once(chaos, chance) else "not disturbed"] += 1
    except (Exception, HangError) as error:
        count["wrong"] += 1
        sys.stderr.write(f"WRONG: {kind}. Repeat it with: --kind '{kind}' --seed {seed}\n")
        traceback.print_exception(error)
    return count


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Try random inputs, kills and full disks.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kind", choices=[*PROPERTIES, *DISTURBANCES], help="only this one")
    parser.add_argument("--seed", type=int, help="of one round, to repeat a case")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else [*PROPERTIES, *DISTURBANCES]
    counts = {kind: collections.Counter[str]() for kind in kinds}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    first = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    end, number = time.monotonic() + 60 * arguments.minutes, 0
    warnings.simplefilter("ignore")
    with (
        tempfile.TemporaryDirectory() as name,
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        workshop(Path(name)) as world,
    ):
        chaos = Chaos(world)
        while number == 0 or (arguments.seed is None and time.monotonic() < end):
            for kind in kinds:
                counts[kind].update(one_round(chaos, kind, first + number))
            number += 1
    print(f"{number} rounds, seeds {first} to {first + number - 1}")
    for kind, count in counts.items():
        print(f"{kind:24}" + "".join(f"{count[column]:8} {column}" for column in COLUMNS if count[column]))
    return 1 if any(count["wrong"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
