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
from speechformer.errors import ArgumentParser, UserError
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps.progress import describe as summary
from speechformer.sweeps.progress import duration

POLL_SECONDS = 2.0


def overview(folder: Path, watched: set[str] | None = None) -> tuple[str, bool]:
    """Describe the sweeps and single runs under a folder; return the text, and whether any run is running.

    Args:
        watched: titles of what is shown, if any; those with running jobs are added. None shows everything.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    groups: list[tuple[str, list[sweeps.Job]]] = []
    single: list[sweeps.Job] = []
    warnings, others = list[str](), 0
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
            state = runs.state(here)
            if {"baseline", "members"} & (state.result or {}).keys():  # of `baselines` and `evaluate`
                others += 1
            else:
                single.append(sweeps.Job(len(single), here.name, [], here, state))
    if single:
        groups.append((f"{folder}, runs outside sweeps", single))
    if groups and others:
        warnings.append(f"{others} more under {folder} {'is' if others == 1 else 'are'} of baselines or evaluations.")
    if not groups:
        raise UserError(" ".join([f"{folder} contains no sweep and no run.", *warnings]))
    running = [title for title, jobs in groups if any(job.state.status == "running" for job in jobs)]
    if watched is not None:
        watched |= {*running}
    shown = [(title, jobs) for title, jobs in groups if not watched or title in watched]
    if quiet := len(groups) - len(shown):
        warnings.append(f"{quiet} more under {folder}, where nothing runs.")
    return "\n\n".join([*warnings, *(f"{title}\n{describe(jobs)}" for title, jobs in shown)]), bool(running)


def describe(jobs: list[sweeps.Job]) -> str:
    """Count the jobs by state, estimate the time left, name the best, and list those that run or failed."""
    rows = []
    for job in jobs:
        if job.state.status == "running":
            rows.append(("running", job.name, progress(job)))
        elif job.state.status not in ("finished", "left"):
            rows.append((job.state.status, job.name, job.error + (f" ({job.folder.name})" if job.folder else "")))
    first, second = (max((len(row[k]) for row in rows), default=0) for k in (0, 1))
    return "\n".join(
        [summary(jobs), *(f"  {status:{first}}  {name:{second}}  {text}" for status, name, text in rows)]
    )


def progress(job: sweeps.Job) -> str:
    """Describe how far a running job is, for how long it has run, and where."""
    owner = job.state.owner
    step, steps = owner.get("step"), owner.get("steps")
    done = "" if step is None else f"step {step}{f' of {steps}' if steps else ''}, "
    since = duration(time.time() - owner["since"]) if "since" in owner else "?"
    return f"{done}for {since}, process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def status(folder: Path, watch: bool) -> None:
    """Print the overview of a folder; with `watch` again whenever it changes, until nothing runs."""
    watched = set[str]() if watch else None
    text, running = overview(folder, watched)
    console.say(text)
    while watch and running:
        time.sleep(POLL_SECONDS)
        update, running = overview(folder, watched)
        if update != text:
            sys.stdout.write("\x1b[H\x1b[2J" if sys.stdout.isatty() else "\n")
            console.say(update)
        text = update


def main() -> None:
    """Run the command line."""
    about = "Show which runs of a sweep are done, running, failed or left."
    parser = ArgumentParser(prog="python -m speechformer.status", description=about)
    folder = "a sweep's folder, or one with sweeps and runs in it"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("--watch", action="store_true", help="show what runs, every other second until it ends")
    parser.run(lambda arguments: status(arguments.folder, arguments.watch))


if __name__ == "__main__":
    main()
