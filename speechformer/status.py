"""Show the state of sweeps and runs, from any terminal: `python -m speechformer.status FOLDER`.

    finished, diverged, failed, killed    as the result says
    running                               a process holds the run's lock
    damaged                               a file of the run is not as it was written
    interrupted                           a process started it and has ended; the sweep's command resumes it
    left                                  not started yet

FOLDER is a sweep's folder, or any folder above sweeps and runs. This module imports no torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from speechformer import console
from speechformer.errors import ArgumentParser, UserError
from speechformer.runs import folder as runs
from speechformer.sweeps import folder as sweeps
from speechformer.sweeps import progress


def read(folder: Path) -> dict[str, list[sweeps.Job]]:
    """Return the jobs of each sweep under a folder, and of the runs outside sweeps, by a title."""
    groups, single = dict[str, list[sweeps.Job]](), list[sweeps.Job]()
    for place, below, files in os.walk(folder):
        below.sort()
        if sweeps.SWEEP in files:
            groups[place] = sweeps.jobs_of(Path(place))
        elif runs.OWNER in files:
            single.append(sweeps.Job(Path(place).name, (), Path(place), runs.state(Path(place))))
        else:
            continue
        below.clear()
    return groups | ({f"{folder}, runs outside sweeps": single} if single else {})


def describe(jobs: list[sweeps.Job]) -> str:
    """Count the jobs by state, estimate the time left, name the best, and list those that run or failed."""
    rows = []
    for job in jobs:
        owner, status = job.state.owner, job.state.status
        if status == "running":
            step = f"step {owner['step']} of {owner.get('steps', '?')}, " if "step" in owner else ""
            since = progress.duration(max(0.0, time.time() - owner["since"])) if "since" in owner else "?"
            where = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
            rows.append(["running", job.name, f"{step}for {since}, {where}"])
        elif status not in ("finished", "left"):
            where = f" ({job.folder.name})" if job.folder.name != job.name else ""
            rows.append([status, job.name, f"{job.error}{where}"])
    first, second = (max((len(row[k]) for row in rows), default=0) for k in (0, 1))
    lines = [f"  {status:{first}}  {name:{second}}  {text}" for status, name, text in rows]
    return "\n".join([progress.describe(jobs), *lines])


def status(folder: Path) -> None:
    """Print the state of the sweeps and single runs under a folder."""
    groups = read(folder)
    if not groups:
        raise UserError(f"{folder} contains no sweep and no run.")
    console.say("\n\n".join(f"{title}\n{describe(jobs)}" for title, jobs in groups.items()))


def main() -> None:
    """Run the command line."""
    about = "Show which runs of a sweep are done, running, failed or left."
    parser = ArgumentParser(prog="python -m speechformer.status", description=about)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a sweep's folder, or one with sweeps and runs in it"
    )
    parser.run(lambda arguments: status(arguments.folder))


if __name__ == "__main__":
    main()
