"""What is concluded from the runs: the claims of `claims.yaml`, judged.

A claim is about an effect, a contrast of means over seeds. It is *supported* or *contradicted* if the effect is
significant at 5 % after Holm's correction within its family, and *inconclusive* otherwise.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from speechformer import console
from speechformer.report import published
from speechformer.report.results import ABSENT, Row, Run, Table
from speechformer.report.statistics import Effect, contrast, holm, over_seeds_and_items
from speechformer.runs.folder import DamagedError

FILE = Path(__file__).parent / "claims.yaml"
Places = dict[tuple[str, str], tuple[Table, Row]]  # by the name of a row and its protocol
VERDICTS = ("supported", "inconclusive", "contradicted")
OURS = "this repository"  # says the claims that are not of others
SIGNS = {"more": 1, "less": -1}
PARTS = {"test_accuracy": None, "test_accuracy_in_train": True, "test_accuracy_not_in_train": False}


@dataclass(frozen=True)
class Term:
    """One summand of an effect: `times` the mean of a row's metric, at an epoch or step or (None) at the end."""

    times: float
    metric: str
    at: float | None
    table: Table
    row: Row


class Answered(NamedTuple):
    """The runs of a summand, a row or a baseline, which may have answered sentence by sentence."""

    times: float
    metric: str
    at: float | None
    runs: Sequence[Run]


@dataclass(frozen=True)
class Judgement:
    """A claim with its measured effect.

    Attributes:
        terms: what the effect is made of.
        known: of perplexities, the same effect over known words; None without one.
        corrected: the p-value after Holm.
    """

    name: str
    family: str
    by: str
    says: str
    sign: int
    over_sentences: bool
    effect: Effect
    terms: Sequence[Term]
    known: Effect | None = None
    corrected: float = math.nan

    @property
    def metric(self) -> str:
        """The metric of the effect; that of the first term."""
        return self.terms[0].metric

    @property
    def verdict(self) -> str:
        if math.isnan(self.corrected) or self.corrected >= 0.05:
            return "inconclusive"
        return "supported" if self.effect.mean * self.sign > 0 else "contradicted"


@functools.cache
def content() -> dict[str, Any]:
    """Return the file: `families`, `chosen`, `untested`, `rows` and `claims`, explained at its top."""
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def judge(tables: Sequence[Table]) -> list[Judgement]:
    """Return the claims whose runs are all there, on the corpus of the reports, in the order of the file."""
    rows = find_rows(tables)
    measured = [measure(name, claim, rows) for name, claim in content()["claims"].items()]
    judged: list[Judgement] = []
    for family in content()["families"]:
        claims = [claim for claim in measured if claim and claim.family == family]
        corrected = holm([claim.effect.p for claim in claims])
        judged += [replace(claim, corrected=p) for claim, p in zip(claims, corrected)]
    return judged


def find_rows(tables: Sequence[Table]) -> Places:
    """Return tables and rows by name and protocol: on the corpus of the reports, unless the name says another."""
    known, rows = published.content()["corpus"]["sha256"], Places()
    usual = sorted(tables, key=lambda table: "fold" in table.protocol_settings)  # before those of other folds
    for table, row in ((own, row) for own in usual for row in own.rows):
        names = [row.published] if row.published and table.sha256 == known else []
        for name, own in content()["rows"].items():
            here = own["corpus"] == table.corpus if "corpus" in own else table.sha256 == known
            same = all(row.settings.get(key, ABSENT) == value for key, value in own["where"].items())
            names += [name] if here and same and own["study"] == table.study else []
        for name in names:
            rows.setdefault((name, table.protocol), (table, row))
    return rows


def measure(
    name: str, claim: Mapping[str, Any], rows: Mapping[tuple[str, str], tuple[Table, Row]]
) -> Judgement | None:
    """Return a claim with its effect, uncorrected; None if a row has no runs or not this metric."""
    terms, counted, constant, line = list[Term](), list[Answered](), 0.0, dict[str, Any]()
    for own in claim["effect"]:
        line = {"protocol": "paper", "at": None, **line, "times": 1, **own}
        if "constant" in own:
            constant += own["constant"]
        elif (line["row"], line["protocol"]) not in rows:
            return None
        elif "baseline" in own:
            table, _ = rows[line["row"], line["protocol"]]
            runs = [run for run in table.baselines if run.baseline == own["baseline"]]
            if not runs or runs[0].metrics.get(line["metric"]) is None:
                return None
            counted.append(Answered(line["times"], line["metric"], line["at"], runs[:1]))
        else:
            terms.append(Term(line["times"], line["metric"], line["at"], *rows[line["row"], line["protocol"]]))
    same_runs = len({id(term.row) for term in terms}) == 1
    exact = sum(own.times * (own.runs[0].metrics[own.metric] or 0) for own in counted)
    values = [(term.times, term.row.values(term.metric, term.at)) for term in terms]
    effect = contrast(values, constant + exact, same_runs)
    if effect is None:
        return None
    wanted = claim.get("over") == "sentences" and not math.isnan(effect.p)  # one seed says nothing about others
    answered = [Answered(term.times, term.metric, term.at, term.row.finished) for term in terms]
    over_sentences = wanted and bool(right := right_answers([*answered, *counted]))
    if over_sentences:
        both = over_seeds_and_items(right, constant)
        effect = replace(effect, interval=both.interval, p=both.p, error=both.error, freedom=both.freedom)
    about = (claim["family"], claim["by"], claim["says"], SIGNS[claim["expect"]])
    known = effect_over_known_words(terms, counted, constant, same_runs)
    return Judgement(name, *about, over_sentences, effect, terms, known)


def effect_over_known_words(
    terms: Sequence[Term], counted: Sequence[Answered], constant: float, same_runs: bool
) -> Effect | None:
    """Return the effect of a claim on perplexities of a test, over known words; None if it is on something else."""
    metrics = [own.metric for own in terms] + [own.metric for own in counted]
    names = {metric: re.sub(r"\btest_perplexity", "test_known_perplexity", metric) for metric in metrics}
    if any("test_length" in metric for metric in metrics) or all(name == known for name, known in names.items()):
        return None
    exact = [own.runs[0].metrics.get(names[own.metric]) for own in counted]
    if any(value is None for value in exact):
        return None
    values = [(own.times, own.row.values(names[own.metric], own.at)) for own in terms]
    return contrast(values, constant + sum(own.times * (value or 0) for own, value in zip(counted, exact)), same_runs)


def right_answers(terms: Sequence[Answered]) -> list[tuple[float, Any]]:
    """Return coefficient and right answers [runs, sentences] of each term; none if some runs have no predictions."""
    import numpy as np

    answers: list[tuple[float, Any]] = []
    for term in terms:
        try:
            predictions = [run.predictions() for run in term.runs]
        except DamagedError as error:  # the other claims and tables are shown all the same
            console.warn(str(error))
            return []
        if term.at is not None or term.metric not in PARTS or any(own is None for own in predictions):
            return []
        right, leaked = (np.array(column) for column in zip(*predictions))
        part = PARTS[term.metric]
        answers.append((term.times, right if part is None else right[:, leaked[0] == part]))
    return answers if len({right.shape[1] for _, right in answers}) == 1 else []
