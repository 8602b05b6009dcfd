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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import TINY, compose
from kills import Points, count_points, in_child
from test_fit import essence
from test_kills import names
from test_properties import PROPERTIES, HangError, Workshop, search, workshop
from tqdm import tqdm

from speechformer.corpora import sample, sample_pairs
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.training.run import execute

TRAIN = [sys.executable, "-m", "speechformer.train"]
RUNS = {
    "classify": "task=classify trainer.max_epochs=3 checkpoint_every=4 protocol=clean",
    "lm": "task=lm trainer.max_steps=60 eval_interval=15 checkpoint_every=4",
    "translate": "task=translate corpus=ted task.beam=1 task.batch_tokens=60 task.vocab_size=40 trainer.max_epochs=-1"
    " trainer.max_steps=12 eval_interval=3 checkpoint_every=2 task.average_checkpoints=2",
}
LAUNCHERS = ["basic", "joblib hydra.launcher.n_jobs=2", "ensemble"]
COLUMNS = ("cases", "accepted", "rejected in one sentence", "disturbed and resumed", "wrong")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Chaos:
    """The runs that are disturbed, what they should give, and the counts of the table."""

    def __init__(self, world: Workshop) -> None:
        self.world, self.counts = world, collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        corpus = world.folder / "small"
        corpus.mkdir()
        for name, content in {**sample.files(0), **sample_pairs.files(0)}.items():
            number = 12 if name.startswith(("dev", "test.")) else 60
            (corpus / name).write_bytes(b"".join(content.splitlines(keepends=True)[:number]))
        common = ["corpus=speeches", f"corpus.root={corpus}", *TINY[1:], "threads=1"]
        self.words = {name: [*common, *words.split()] for name, words in RUNS.items()}
        for name, words in self.words.items():
            if name != "translate":
                words.append("corpus.classes=[a,b,c]")
        self.whole, self.points = dict[str, tuple[Any, set[str]]](), dict[str, int]()
        for name in self.words:
            folder = world.folder / "whole" / name
            execute(compose(*self.words[name]), folder)
            self.whole[name] = self.outcome(folder)
            scratch = world.folder / "counted" / name
            self.points[name] = count_points(lambda: execute(compose(*self.words[name]), scratch), scratch)  # noqa: B023

    def outcome(self, folder: Path) -> tuple[Any, set[str]]:
        """Return what a run leaves: weights, metrics and moments to the bit; the names of its files."""
        left = essence(folder, runs.read_result(folder))
        return {key: value for key, value in left.items() if key not in ("events", "texts")}, names(folder)

    def check(self, name: str, folder: Path) -> None:
        """Require that a run left what the undisturbed one did."""
        left, files = self.outcome(folder)
        whole, whole_files = self.whole[name]
        differing = [key for key in whole if left[key] != whole[key]]
        assert not differing, f"{name}: {', '.join(differing)} differ from the undisturbed run's"
        assert files == whole_files, f"{name}: other files: {files ^ whole_files}"

    def start(self, words: list[str], limit: int | None = None) -> subprocess.Popen[str]:
        """Start `train` in a process of its own; `limit`: the bytes that it may write into one file."""
        own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.world.folder / "cache")}
        limited = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*TRAIN, *words], env={**os.environ, **own}, preexec_fn=limited, **pipes)

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
        kills = range(chance.randint(1, 3))
        hits = [disturb(self.start(words), chance, folder / chance.choice(["run.json", "last.ckpt"])) for _ in kills]
        finish(self.start(words))
        self.check(name, folder)
        return any(hits)

    def sweep_killed(self, chance: random.Random) -> bool:
        """A sweep, killed at random times: its command or a worker. A job that was given up needs another command."""
        folder = self.world.new_folder()
        launcher = chance.choice(LAUNCHERS)
        words = ["-m", *self.words["lm"], "seed=0,1,2", f"hydra.sweep.dir={folder}"]
        words += f"hydra/launcher={launcher}".split()
        kills = range(chance.randint(1, 3))
        hits = [disturb(self.start(words), chance, folder / "sweep.json") for _ in kills]
        for left in (2, 1, 0):
            process = self.start(words)
            error = process.communicate(timeout=300)[1]
            if process.returncode == 0:
                break
            assert left, f"{launcher}: exit code {process.returncode}: {error[-1500:]}"
        jobs = sweeps.jobs_of(folder)
        assert [job.state.status for job in jobs] == ["finished"] * 3, launcher
        assert not [path for path in folder.rglob("*") if path.name.endswith(".partial") or path.name == "weights"]
        if launcher != "ensemble":  # its sums have another order
            assert runs.read_result(jobs[0].folder)["metrics"] == self.whole["lm"][0]["metrics"]  # type: ignore[arg-type]
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
    deadline, early = time.monotonic() + 120, chance.random() < 0.2
    while not early and process.poll() is None and not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 4))
    runs_still, number = process.poll() is None, chance.choice(SIGNALS)
    with contextlib.suppress(OSError):
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if workers and chance.random() < 0.5:
            os.kill(int(chance.choice(workers)), signal.SIGKILL)
        else:
            process.send_signal(number)
    process.communicate(timeout=300)
    return runs_still


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command, which must succeed."""
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, f"exit code {process.returncode}: {error[-1500:]}"


DISTURBANCES: dict[str, tuple[Callable[[Chaos, random.Random], bool], int]] = {  # and how many cases a round has
    "run killed at a write": (Chaos.point_killed, 12),
    "run killed at any time": (Chaos.run_killed, 2),
    "sweep killed": (Chaos.sweep_killed, 1),
    "disk full": (Chaos.disk_full, 2),
}


def one_round(chaos: Chaos, kind: str, seed: int) -> None:
    """Try the cases of one kind, and count them; print what was wrong."""
    count = chaos.counts[kind]
    try:
        if kind in PROPERTIES:
            outcomes = search(kind, chaos.world, 2 * PROPERTIES[kind][2], seed)
            count.update(cases=sum(outcomes.values()), accepted=outcomes[True])
            count["rejected in one sentence"] += outcomes[False]
            return
        chance = random.Random(seed)
        disturb_once, number = DISTURBANCES[kind]
        for _ in range(number):
            count["cases"] += 1
            count["disturbed and resumed"] += disturb_once(chaos, chance)
    except (Exception, HangError) as error:
        count["wrong"] += 1
        notes = "\n".join(getattr(error, "__notes__", []))
        text = "".join(traceback.format_exception(error)[-4:])
        tqdm.write(f"WRONG: {kind}. Repeat it with: --kind '{kind}' --seed {seed}\n{text}\n{notes}", file=sys.stderr)


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """Return the counts as a table."""
    rows = [["", *COLUMNS], *([kind, *(str(count[name]) for name in COLUMNS)] for kind, count in counts.items())]
    rows.append(["all", *(str(sum(count[name] for count in counts.values())) for name in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Try random inputs, kills and full disks.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kind", choices=[*PROPERTIES, *DISTURBANCES], help="only this one")
    parser.add_argument("--seed", type=int, help="of one round, to repeat a case")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else [*PROPERTIES, *DISTURBANCES]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    first = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    end = time.monotonic() + 60 * arguments.minutes
    warnings.simplefilter("ignore")
    with (
        tempfile.TemporaryDirectory() as name,
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        workshop(Path(name)) as world,
    ):
        chaos, number = Chaos(world), 0
        while number == 0 or (arguments.seed is None and time.monotonic() < end):
            for kind in kinds:
                if number == 0 or time.monotonic() < end:
                    one_round(chaos, kind, first + number)
            number += 1
    print(f"{number} rounds, seeds {first} to {first + number - 1}\n{table(chaos.counts)}")
    return 1 if any(count["wrong"] for count in chaos.counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
