"""Benchmark a text of a gigabyte: `python -m speechformer.bench corpus`.

The package makes the text. The first run tokenizes it, the second one finds its tokens; both stop at their first
training step. Then runs of 100 steps on it are compared with runs on the sample corpus.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from speechformer.bench.runs import FIRST_STEP, seconds_until_printed
from speechformer.bench.timing import Comparison, in_processes, medians
from speechformer.config import as_plain, compose
from speechformer.corpora.documents import Documents
from speechformer.corpora.load import load
from speechformer.training.devices import all_threads
from speechformer.training.run import execute

STORIES = 340_000  # of 500 words each: 1.05 GB
TOKENS = ("bpe", "words", "bytes")


def bench_corpus(rounds: int, stories: int = STORIES) -> list[Comparison]:
    """Measure this part."""
    rows = []
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        own = ["corpus=stories", f"corpus.documents={stories}"]
        corpus = load(as_plain(compose(["task=lm", *own])))  # which makes the text
        assert isinstance(corpus, Documents)
        size = sum(path.stat().st_size for paths in corpus.parts.values() for path in paths)
        about = {"text_bytes": size, "cores": all_threads()}
        for tokens in TOKENS:
            what, words = f"{tokens}, {size / 1e9:.2f} GB", [*own, f"task.tokens={tokens}"]
            ((first, peak),) = in_processes(functools.partial(first_step, *words), 1)
            sides = {
                "tokenized before": functools.partial(seconds_to_first_step, *words),
                "sample": functools.partial(seconds_to_first_step, "corpus=sample", f"task.tokens={tokens}"),
            }
            rows.append(
                Comparison("a large text", what, "first start", {"first": first}, {**about, "peak_bytes": peak})
            )
            rows.append(Comparison("a large text", what, "start", medians(sides, rounds), about))
            runs = {"large text": words, "sample": ["corpus=sample", f"task.tokens={tokens}", "protocol=clean"]}
            phases = phases_in_turns(runs, rounds + 2)  # they differ more than starts
            for phase in ("training", "evaluation"):
                turns = [{name: seconds[phase] for name, seconds in turn.items()} for turn in phases]
                middle = {name: statistics.median(turn[name] for turn in turns) for name in runs}
                more = {**about, "processes": turns}
                rows.append(Comparison("a large text", what, f"100 steps, {phase}", middle, more))
    return rows


def first_step(*overrides: str) -> tuple[float, int]:
    """Measure the seconds from the command to its first training step, and the peak of its memory in bytes."""
    import resource

    seconds = seconds_to_first_step(*overrides)
    return seconds, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def seconds_to_first_step(*overrides: str) -> float:
    """Measure the seconds from the command to its first training step."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds_until_printed(FIRST_STEP, "task=lm", *overrides, f"hydra.run.dir={folder}/run")


def phases_in_turns(runs: Mapping[str, Sequence[str]], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Measure the phases of runs in turns, after one to warm up; return for each turn seconds by run and phase."""
    return [{name: seconds_by_phase(*own) for name, own in runs.items()} for _ in range(rounds + 1)][1:]


def seconds_by_phase(*overrides: str) -> dict[str, float]:
    """Measure the phases of a run of 100 steps and one evaluation."""
    size = ["vocab_size=6000"]  # so that both sides have as much to compute
    cfg = compose(["task=lm", "trainer.max_steps=100", "threads=1", *size, *overrides])
    with tempfile.TemporaryDirectory() as folder, mock.patch("speechformer.console.say"):
        return execute(cfg, Path(folder) / "run")["seconds_by_phase"]
