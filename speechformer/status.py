"""How a sweep stands, from any second terminal: `python -m speechformer.status FOLDER [--watch]`.

    finished, diverged, failed, killed    what the result says
    running                               a process holds the run's lock
    interrupted                           a process began it, and is no more; the sweep's command goes on with it
    left                                  nobody has begun it

FOLDER is a sweep's folder, or one with sweeps and runs somewhere in it. No torch here.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from speechformer import console
from speechformer.errors import UserError, run_command
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps

AGAIN = 2.0  # seconds between looks


def look(folder: Path) -> tuple[str, bool]:
    """What is to be said of all sweeps and single runs under a folder, and whether any of it is under way.

    Raises:
        UserError: the folder is not there, or holds neither.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")
    parts, under_way = [], False
    alone: list[sweeps.Job] = []
    for place, below, files in os.walk(folder):
        here = Path(place)
        below.sort()
        if sweeps.SWEEP in files:
            below.clear()
            jobs = sweeps.jobs_of(here)
            parts.append(f"{here}\n{describe(jobs)}")
            under_way |= any(job.state.status == "running" for job in jobs)
        elif runs.OWNER in files or runs.RESULT in files:
            below.clear()
            alone.append(sweeps.Job(len(alone), here.name, [], here, runs.state(here)))
    if alone:
        parts.append(f"{folder}, runs of no sweep\n{describe(alone)}")
        under_way |= any(job.state.status == "running" for job in alone)
    if not parts:
        raise UserError(f"{folder} holds no sweep and no run.")
    return "\n\n".join(parts), under_way


def describe(jobs: list[sweeps.Job]) -> str:
    """How these jobs stand, how long the rest takes, and a line for each that is not just done or left."""
    lines = [f"{len(jobs)} run{'s' if len(jobs) > 1 else ''}: {sweeps.counted(jobs)}{estimate(jobs)}"]
    rows: list[tuple[str, ...]] = []
    for job in jobs:
        owner = job.state.claim
        if job.state.status == "running":
            step, steps = owner.get("step"), owner.get("steps")
            done = "" if step is None else f"step {step}" + (f" of {steps}" if steps else "")
            since = duration(time.time() - owner["since"]) if "since" in owner else "?"
            who = f"{done}, for {since}, process {owner.get('pid', '?')} on {owner.get('host', '?')}".lstrip(", ")
            rows.append(("running", job.name, who))
        elif job.state.status not in ("finished", "left"):
            rows.append((job.state.status, job.name, job.error + (f" ({job.folder.name})" if job.folder else "")))
    widths = [max((len(row[k]) for row in rows), default=0) for k in (0, 1)]
    lines += [f"  {row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2]}" for row in rows]
    return "\n".join(lines)


def estimate(jobs: list[sweeps.Job]) -> str:
    """How long the rest will take, from what the finished runs took and how many run at once; empty if unknown."""
    took = [job.state.result["seconds"] for job in jobs if job.state.result and "seconds" in job.state.result]
    running = [job.state.claim for job in jobs if job.state.status == "running"]
    open_jobs = sum(job.state.status in ("left", "interrupted") for job in jobs)
    if not took or not running:
        return ""
    each = sum(took) / len(took)
    parts = [1 - (owner.get("step") or 0) / owner["steps"] if owner.get("steps") else 0.5 for owner in running]
    return f"; about {duration(each * (open_jobs + sum(parts)) / len(running))} left"


def duration(seconds: float) -> str:
    """A time in the two units that matter."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.status",
        description="How the runs of a sweep stand: done, running, failed, left.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a sweep, or with sweeps and runs in it")
    parser.add_argument("--watch", action="store_true", help="look again every other second until nothing runs")
    given = parser.parse_args()

    def command() -> None:
        text, under_way = look(given.folder)
        console.say(text)
        while given.watch and under_way:
            time.sleep(AGAIN)
            again, under_way = look(given.folder)
            if again != text:
                print(console.above(text), end="")
                console.say(again)
            text = again

    run_command(command)


if __name__ == "__main__":
    main()
