"""How far a sweep is: scores of its runs, the time left, and the line that the console shows meanwhile. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speechformer import console
from speechformer.errors import UserError
from speechformer.sweeps.folder import OPEN, Job, count_states, own_jobs

IN_PROCESS = ("basic", "ensemble")  # launchers whose runs print into the console themselves
EVERY_SECONDS = {True: 1.0, False: 60.0}  # a line, in a terminal or through a pipe


def score(result: dict[str, Any]) -> tuple[str, float] | None:
    """Return the metric that chose the run's checkpoint, as measured at its end; None without a value.

    Under `protocol=clean` it is of the held-out sentences.
    """
    name = (result.get("best") or {}).get("metric")
    value = (result.get("metrics") or {}).get(name)
    return None if name is None or value is None else (name, value)


def describe_score(result: dict[str, Any]) -> str:
    """Return the score in words, "validation accuracy 61.3 %"; empty without one."""
    if (scored := score(result)) is None:
        return ""
    metric, value = scored
    return f"{metric.replace('_', ' ')} {console.format_metric(metric, value)}"


def best_job(jobs: Sequence[Job]) -> Job | None:
    """Return the finished job with the best score; None without one, or if the scores are of different metrics."""
    results = [(job, job.state.result or {}) for job in jobs if job.state.status == "finished"]
    scored = [(job, result, *pair) for job, result in results if (pair := score(result))]
    if len({metric for _, _, metric, _ in scored}) != 1:
        return None
    sign = 1 if (scored[0][1].get("report") or {}).get("higher_is_better", True) else -1
    return max(scored, key=lambda entry: sign * entry[3])[0]


def seconds_left(jobs: Sequence[Job], at_once: int = 0) -> float | None:
    """Estimate the seconds left, from finished runs or else from the steps of running ones; None if unknown.

    Args:
        at_once: how many jobs run at once, if more than the files say.
    """
    owners = [job.state.owner for job in jobs if job.state.status == "running"]
    shares = [(owner.get("step") or 0) / owner["steps"] if owner.get("steps") else 0.5 for owner in owners]
    known = [value for job in jobs if (value := (job.state.result or {}).get("seconds")) is not None]
    if not known:
        now = time.time()
        begun = [(owner, share) for owner, share in zip(owners, shares) if {"since", "steps"} <= owner.keys()]
        known = [(now - owner["since"]) / share for owner, share in begun if share > 0.02]
    running = max(len(owners), at_once)
    if not known or not running:
        return None
    waiting = sum(job.state.status in OPEN for job in jobs)
    return sum(known) / len(known) * (waiting + len(shares) - sum(shares)) / running


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def describe(jobs: Sequence[Job], at_once: int = 0) -> str:
    """Return counts, the time left and the best run so far, in a line; arguments as for `seconds_left`."""
    parts = [f"{len(jobs)} run{'s' if len(jobs) > 1 else ''}: {count_states(jobs)}"]
    if left := seconds_left(jobs, at_once):
        end = time.strftime("%H:%M", time.localtime(time.time() + left))
        parts.append(f"about {duration(left)} left, until {end}")
    if best := best_job(jobs):
        parts.append(f"best {describe_score(best.state.result or {})} ({best.name})")
    return "; ".join(parts)


class LiveLine:
    """A thread that shows how far the sweep of this command is: one line in a terminal, or a line each minute."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    def start(self, folder: Path) -> None:
        """Show the line until `stop`, if it is not shown already."""
        if self.thread is None:
            self.ended.clear()
            self.thread = threading.Thread(target=self.run, args=(folder,), daemon=True)
            self.thread.start()

    def run(self, folder: Path) -> None:
        """Update the line."""
        done: dict[int, Job] = {}
        while not self.ended.wait(EVERY_SECONDS[console.is_terminal()]):
            try:
                jobs = own_jobs(folder, done)
            except (UserError, OSError):  # the sweep will say so
                continue
            done = {job.number: job for job in jobs if job.state.status not in (*OPEN, "running")}
            console.show_line(describe(jobs))

    def stop(self) -> None:
        """Remove the line."""
        if self.thread is not None:
            self.ended.set()
            self.thread.join()
            self.thread = None
            console.clear_line()


LIVE = LiveLine()
