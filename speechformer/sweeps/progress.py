"""How far a sweep is: scores of its runs, the time left, and the line that the console shows meanwhile. No torch."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import Any

from speechformer import console
from speechformer.errors import UserError
from speechformer.runs import folder as runs
from speechformer.sweeps.folder import OPEN, Job, count_states, jobs_of

IN_PROCESS = ("basic", "ensemble")  # launchers whose runs print into the console themselves
POLL_SECONDS, PIPE_SECONDS = 1.0, 60.0  # between looks at the runs; between lines through a pipe


def describe_score(result: dict[str, Any]) -> str:
    """Return the metric that chose the run's checkpoint, as measured at its end, in words; empty without a value.

    Under `protocol=clean` it is of the held-out sentences.
    """
    metric = (result.get("best") or {}).get("metric", "")
    value = (result.get("metrics") or {}).get(metric)
    return "" if value is None else f"{metric.replace('_', ' ')} {console.format_metric(metric, value)}"


def seconds_left(jobs: Sequence[Job], at_once: int = 0) -> float | None:
    """Estimate the seconds left from the runs that have ended; None if unknown.

    Args:
        at_once: how many jobs run at once, if more than the files say.
    """
    seconds = [value for job in jobs if (value := (job.state.result or {}).get("seconds")) is not None]
    owners = [job.state.owner for job in jobs if job.state.status == "running"]
    running = max(len(owners), at_once)
    if not seconds or not running:
        return None
    rest = sum(1 - owner["step"] / owner["steps"] if owner.get("steps") else 0.5 for owner in owners)
    return statistics.mean(seconds) * (rest + sum(job.state.status in OPEN for job in jobs)) / running


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, "0:02:45"."""
    return str(timedelta(seconds=round(seconds)))


def describe(jobs: Sequence[Job], at_once: int = 0) -> str:
    """Return counts of states and the time left in a line; arguments as for `seconds_left`."""
    left = seconds_left(jobs, at_once)
    return f"{len(jobs)} run{'s' * (len(jobs) > 1)}: {count_states(jobs)}" + (
        f"; {duration(left)} left" if left else ""
    )


def outcome(job: Job) -> str:
    """Return how a job ended: "Finished in 12 s: seed=1: validation accuracy 61.3 %"."""
    result, status = job.state.result or {}, job.state.status.capitalize()
    took = f" in {result['seconds']:.0f} s" if result.get("seconds") is not None else ""
    said = describe_score(result) if "error" not in result else job.error
    return ": ".join(filter(None, (status + took, job.name, said)))


@contextlib.contextmanager
def shown(sweep: Path, folders: Set[Path], ended: MutableMapping[Path, runs.State]) -> Iterator[None]:
    """Show how far some runs of a sweep are while other processes run them, and each that ends meanwhile.

    `ended` holds the states of those that have ended already.
    """
    stopped = threading.Event()
    before = {folder: runs.state(folder).result for folder in folders - ended.keys()}

    def look() -> None:
        said, last = time.monotonic(), False
        while not last:
            last = stopped.wait(POLL_SECONDS)
            with contextlib.suppress(UserError, OSError):  # the sweep will say so
                jobs = [job for job in jobs_of(sweep, ended) if job.folder in folders]
                for job in jobs:
                    if job.folder not in ended and job.state.result not in (None, before[job.folder]):
                        ended[job.folder] = job.state
                        console.say(outcome(job))
                if not last and (console.is_terminal() or time.monotonic() - said >= PIPE_SECONDS):
                    said = time.monotonic()
                    console.show_line(describe(jobs))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        console.clear_line()
