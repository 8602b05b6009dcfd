"""Show the state of sweeps and runs, from any terminal: `python -m speechformer.status FOLDER [--watch]`.

    finished, diverged, failed, killed    as the result says
    running                               a process holds the run's lock
    damaged                               a file of the run is not as it was written
    interrupted                           a process started it and has ended; the sweep's command resumes it
    left                                  not started yet

FOLDER is a sweep's folder, or any folder above sweeps and runs. This module imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from speechformer import console
from speechformer.errors import ArgumentParser, UserError, run_command
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps

POLL_SECONDS = 2.0


def overview(folder: Path) -> tuple[str, bool]:
    """Describe all sweeps and single runs under a folder; return the text, and whether any run is running."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    groups: list[tuple[str, list[sweeps.Job]]] = []
    single: list[sweeps.Job] = []
    warnings: list[str] = []
    for place, below, files in os.walk(folder):
        here, files = Path(place), [*files, *below]
        below.sort()
        if sweeps.SWEEP in files:
            try:
                groups.append((str(here), sweeps.jobs_of(here)))
                below.clear()
            except runs.DamagedError as error:  # its runs are shown as single ones
                warnings.append(str(error))
        elif runs.OWNER in files or runs.RESULT in files:
            below.clear()
            single.append(sweeps.Job(len(single), here.name, [], here, runs.state(here)))
    if single:
        groups.append((f"{folder}, runs outside sweeps", single))
    if not groups:
        raise UserError(" ".join([f"{folder} contains no sweep and no run.", *warnings]))
    running = any(job.state.status == "running" for _, jobs in groups for job in jobs)
    return "\n\n".join([*warnings, *(f"{title}\n{describe(jobs)}" for title, jobs in groups)]), running


def describe(jobs: list[sweeps.Job]) -> str:
    """Count the jobs by state, estimate the time left, and list those that run or failed."""
    rows = []
    for job in jobs:
        if job.state.status == "running":
            rows.append(("running", job.name, progress(job)))
        elif job.state.status not in ("finished", "left"):
            rows.append((job.state.status, job.name, job.error + (f" ({job.folder.name})" if job.folder else "")))
    first, second = (max((len(row[k]) for row in rows), default=0) for k in (0, 1))
    lines = [f"{len(jobs)} run{'s' if len(jobs) > 1 else ''}: {sweeps.count_states(jobs)}{estimate(jobs)}"]
    return "\n".join([*lines, *(f"  {status:{first}}  {name:{second}}  {text}" for status, name, text in rows)])


def progress(job: sweeps.Job) -> str:
    """Describe how far a running job is, for how long it has run, and where."""
    owner = job.state.owner
    step, steps = owner.get("step"), owner.get("steps")
    done = "" if step is None else f"step {step}{f' of {steps}' if steps else ''}, "
    since = duration(time.time() - owner["since"]) if "since" in owner else "?"
    return f"{done}for {since}, process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def estimate(jobs: list[sweeps.Job]) -> str:
    """Estimate the time left from the duration of finished runs and the number of running ones; empty if unknown."""
    known = [(job.state.result or {}).get("seconds") for job in jobs]
    seconds = [value for value in known if value is not None]
    running = [job.state.owner for job in jobs if job.state.status == "running"]
    waiting = sum(job.state.status in ("left", "interrupted") for job in jobs)
    if not seconds or not running:
        return ""
    mean = sum(seconds) / len(seconds)
    parts = [1 - (owner.get("step") or 0) / owner["steps"] if owner.get("steps") else 0.5 for owner in running]
    return f"; about {duration(mean * (waiting + sum(parts)) / len(running))} left"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def status(folder: Path, watch: bool) -> None:
    """Print the overview of a folder; with `watch` again whenever it changes, until nothing runs."""
    text, running = overview(folder)
    console.say(text)
    while watch and running:
        time.sleep(POLL_SECONDS)
        update, running = overview(folder)
        if update != text:
            sys.stdout.write(console.above(text))
            console.say(update)
        text = update


def main() -> None:
    """Run the command line."""
    about = "Show which runs of a sweep are done, running, failed or left."
    parser = ArgumentParser(prog="python -m speechformer.status", description=about)
    folder = "a sweep's folder, or one with sweeps and runs in it"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("--watch", action="store_true", help="update every other second until nothing runs")
    arguments = parser.parse_args()
    run_command(lambda: status(arguments.folder, arguments.watch))


if __name__ == "__main__":
    main()
