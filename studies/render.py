"""Render the pages from the archives: `make pages`, or `python -m studies.render`.

`studies/pages/*.md` are templates (Jinja) of README.md and of the pages under outputs/reference. Their words are

    value(variant, metric, ...)   a value of a variant, which has its name in claims.yaml or published.yaml
    claim(name)                   a claim: claim(name).verdict, claim(name).effect

and tables of them, the functions below. A page that asks for what the results do not have is an error that names it.
With `--reports`, the report of every archive is written into outputs/pages, too; `make pages` does so.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from jinja2.sandbox import ImmutableSandboxedEnvironment

from speechformer.corpora.files import atomic_write
from speechformer.errors import ArgumentParser, UserError, one_sentence, run_command
from speechformer.report.load import Run
from speechformer.report.page import report
from speechformer.report.statistics import Effect, Summary, contrast
from speechformer.report.tables import (
    NONE,
    estimate,
    is_better_higher,
    mean_and_sd,
    number,
    p_value,
    precision,
    seeds_of,
)
from speechformer.report.tables import test_name as name_of_test
from studies import mechanisms, probes, published
from studies.figures import draw_links
from studies.ladders import ladder_rows, name_variants, step_text, steps_text
from studies.results import (
    HERE,
    OURS,
    Claim,
    PageError,
    Place,
    Results,
    Values,
    baseline_name,
    mixed,
    over_sentences,
    read_yaml,
)
from studies.sentences import over_seeds_and_items, right_answers

ROOT = HERE.parent
REFERENCE = ROOT / "outputs" / "reference"
REPORTS = ROOT / "outputs" / "pages"
ARCHIVES = {
    "reports": "Attention on presidential speeches: three course reports repeated",
    "bottleneck": "The bottleneck of an RNN without attention; TED talks in ten epochs",
    "contexts": "Sparse patterns over long contexts",
    "ladder": "The ladder of the language model",
    "ladder_classify": "The ladder of the classifier",
    "ladder_translate": "The ladder of translation",
}
PROBED = {"probes": probes.TITLE, "mechanisms": mechanisms.TITLE}  # archives of runs of probes, which have maps
PROBED = {name: title for name, title in PROBED.items() if (REFERENCE / name / "runs.tar.xz").exists()}
PAGES = {
    "README": ROOT / "README.md",
    "findings": REFERENCE / "README.md",
    **{name: REFERENCE / name / "README.md" for name in ("bench", "contexts", "ladder", "ladder_classify")},
    **{name: REFERENCE / name / "README.md" for name in ("ladder_translate", "play", "translation", *PROBED)},
}
ACCURACY = "test_accuracy"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the header first: the first column to the left, the others to the right."""
    header, *body = rows
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Words:
    """What a page can say. Its public methods are the functions of a template."""

    def __init__(
        self,
        results: Results,
        cells: Sequence[probes.Cell],
        found: mechanisms.Mechanisms | None = None,
        again: Sequence[probes.Cell] = (),
    ) -> None:
        self.results, self.cells, self._found, self._again = results, cells, found, again
        self.results.claims |= found.claims if found else {}

    def value(self, variant: str, metric: str | None = None, at: float | None = None, **options: Any) -> str:
        """Return a value of a variant; see `Results.value`."""
        return self.results.value(variant, metric, at, **options)

    def claim(self, name: str) -> Claim:
        """Return a judged claim."""
        return self.results.claim(name)

    def claims(self, family: str) -> str:
        """Return the tables of a family of claims: conclusions and reformulations; folded, other parts and tests."""
        claims = [claim for claim in self.results.claims.values() if claim.family == family]
        entries, drawn = read_yaml("claims.yaml")["claims"], published.conclusions(self.results)
        header = ["claim", "verdict", "published", "noise", "ours [95 % confidence interval]", "seeds"]
        first, parts = [header], [header]
        tests = [["claim", "relative", "in-vocabulary tokens", "minimum detectable", "test", "p, Holm"]]
        for claim in claims:
            effect, metric, found = claim.estimated, claim.metric, published.effect(claim)
            like = precision(effect)
            by = "" if claim.by == OURS else f" ({claim.by})"
            noise = NONE if found is None else number(metric, claim.noise, like=like)
            verdict = self.verdict(claim, drawn.get(claim.name))
            cells = [verdict, self.published(claim), noise, claim.effect, seeds_of(effect)]
            is_part = "conclusion" in entries.get(claim.name, {}) and claim.name not in drawn
            (parts if is_part else first).append([claim.says + by, *cells])
            known = estimate(metric, claim.known) if claim.known else ""
            test = "over sentences" if claim.over_sentences else name_of_test(effect)
            detectable = number(metric, effect.detectable, like=like)
            tests.append([claim.says, claim.relative, known, detectable, test, p_value(claim.p)])
        folds = {"Parts of conclusions": parts, "The tests": tests}
        more = (folded(title, filled(rows)) for title, rows in folds.items() if rows[1:])
        return "\n\n".join([markdown(filled(first)), *more]) if claims else ""

    def verdict(self, claim: Claim, drawn: tuple[str, bool] | None = None) -> str:
        """Return the verdict on a claim, or on the conclusion that it opens, with what limits it."""
        own = claim.verdict, claim.by != OURS and published.regime(self.results, claim)
        verdict, is_missing = drawn or own
        limits = {
            "by a part": verdict != claim.verdict,
            "but small": claim.is_small and claim.p < 0.05,
            f"at the ceiling ({number(claim.metric, claim.lowest)} % or more)": claim.is_at_ceiling,
            "exploratory": claim.by == OURS,
            "*published with the opposite sign*": (published.effect(claim) or 0.0) * claim.sign < 0,
            "*regime not reproduced*": is_missing,
        }
        text = verdict if verdict == "inconclusive" else f"**{verdict}**"
        return ", ".join([text, *(words for words, holds in limits.items() if holds)])

    def published(self, claim: Claim) -> str:
        """Return the published effect of a claim."""
        return number(claim.metric, published.effect(claim), True, like=precision(claim.estimated))

    def agreement(self) -> Mapping[str, Any]:
        """Return how far published results agree with ours, and how much single runs vary; see `published.facts`."""
        return published.facts(self.results)

    def of_reports(self, table: str, *arguments: str) -> str:
        """Return a table of `published.py`: "curves", "finals", "verdicts", or "search" of a row."""
        rows = published.TABLES[table](self.results, *arguments)
        return markdown(rows) if rows else ""

    def strongest(self, metric: str) -> Mapping[str, str]:
        """Return the best model of the reports by a metric, and the best baseline beside it.

        The keys are `value`, `baseline`, `counted` (its value) and `less` (the model less the baseline).
        """
        best = max if is_better_higher(metric) else min
        rows = published.reported(self.results).values()
        means = [(Summary(known).mean, place) for place in rows if (known := place.values(metric).values())]
        mean, place = best(means, key=lambda pair: pair[0])
        counted = {own: run for run in place.study.counted if (own := run.metrics.get(metric)) is not None}
        baseline = counted[best(counted)]
        terms = [(1.0, metric, None, place), (-1.0, metric, None, replace(place, baseline=baseline))]
        less = over_sentences(terms) or self.results.effect(terms, 0.0)
        assert less
        named = {
            "value": number(metric, mean),
            "counted": number(metric, best(counted)),
            "less": estimate(metric, less),
        }
        return {**named, "baseline": baseline_name(baseline)}

    def runs(self) -> Mapping[str, Any]:
        """Return `count`, `distinct`, `baselines`, `hours` (of one core) and `origin` of the reports' runs."""
        runs = self.results.runs
        trained = [run for run in runs if not run.baseline]
        sizes = [(run.result.get("machine") or {}).get("ensemble_size") or 1 for run in runs]
        seconds = sum((run.result.get("seconds") or 0) / size for run, size in zip(runs, sizes))
        commits = Counter(run.result.get("commit") or "unknown" for run in trained).most_common()
        origin = " and ".join(f"{name[:7]}{' with changes' * name.endswith('-dirty')} ({n})" for name, n in commits)
        old = sum(run.is_outdated for run in trained)
        return {
            "count": len(trained),
            "distinct": len(distinct(trained)),
            "baselines": len(runs) - len(trained),
            "hours": f"{seconds / 3600:.1f}",
            "origin": f"The runs are of commit {origin}, "
            + (f"{old} of them of an earlier version of the numerics" if old else "all of today's numerics"),
            "threads": ", ".join(sorted({str((run.result.get("machine") or {}).get("threads")) for run in trained})),
        }

    def record(self, path: str, **where: Any) -> Mapping[str, Any]:
        """Return the only line of a CSV file in outputs/reference with these values."""
        lines = pd.read_csv(REFERENCE / path)
        for name, value in where.items():
            lines = lines[lines[name] == value]
        if len(lines) != 1:
            raise PageError(f"{path} has {len(lines)} lines with {where}; record() needs one.")
        return dict(lines.iloc[0])

    def benchmark(self, name: str) -> str:
        """Return the table of a benchmark."""
        command = [sys.executable, f"benchmarks/{name}.py", "--show"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    def ladder(self, name: str, *metrics: str, first: str = "the first rung") -> str:
        """Return the rungs of a ladder, each with the difference to the rung below."""
        return markdown(ladder_rows(self.results, name, metrics, first))

    def steps(self, name: str, metric: str) -> str:
        """Return which steps of a ladder change a metric, for better or worse."""
        return steps_text(self.results, name, metric)

    def step(self, name: str, metric: str, step: str) -> str:
        """Return whether a step of a ladder changes a metric, for better or worse, and by how much."""
        return step_text(self.results, name, metric, step)

    def ratio(self, variant: str, metric: str, *baselines: str, mixture: bool = False) -> str:
        """Return a perplexity as a ratio to that of the best of some baselines beside it."""
        place = self.results.place(variant)
        best = min(value_of(self.results.place(variant, baseline=name), metric) for name in baselines)
        return f"{Summary(values_of(place, metric, mixture).values()).mean / best:.3f}"

    def against(self, variants: Mapping[str, str], *baselines: str) -> str:
        """Return what variants (by what they are called) have less than baselines, on each text.

        A variant that is called "with counts" is the mixture.
        """
        texts = [
            name.removeprefix("test_perplexity_")
            for name in self.results.place(next(iter(variants.values()))).study.columns
            if name.startswith("test_perplexity_")
        ]
        rows = [["", "ratio to, minus", *texts]]
        for called, variant in variants.items():
            for baseline in baselines:
                counted = self.results.place(variant, baseline=baseline)
                for metric, subset in (("test_perplexity", "all words"), ("test_known_perplexity", "known words")):
                    cells = []
                    for name in (f"{metric}_{text}" for text in texts):
                        own = values_of(self.results.place(variant), name, called == "with counts")
                        effect = (
                            contrast([(1, own)], constant=-value_of(counted, name)) if counted.values(name) else None
                        )
                        share = 1 + effect.mean / value_of(counted, name) if effect else math.nan
                        cells.append(f"{share:.3f}<br>{estimate(name, effect)}" if effect else NONE)
                    assert counted.baseline
                    rows.append([f"{called}, {subset}", baseline_name(counted.baseline), *cells])
        return markdown(rows)

    def less(self, variant: str, baseline: str) -> str:
        """Return the accuracy of a variant less that of a baseline, over seeds and sentences."""
        counted = self.results.place(variant, baseline=baseline).baseline
        return estimate(ACCURACY, accuracy_difference(self.results.place(variant), counted))

    def against_baselines(self, variant: str, *baselines: str, called: str) -> str:
        """Return the accuracy of a variant, by what it is called, and of baselines, and what the variant has more."""
        place = self.results.place(variant)
        rows = [["", "test accuracy, %", f"{called} minus the baseline, points"]]
        rows.append([called, mean_and_sd(ACCURACY, Summary(place.values(ACCURACY).values())), NONE])
        for name in baselines:
            run = self.results.place(variant, baseline=name).baseline
            assert run
            rows.append([baseline_name(run), number(ACCURACY, run.metrics[ACCURACY]), self.less(variant, name)])
        return markdown(rows)

    def difficulty(self, variant: str, *baselines: str) -> str:
        """Return how many test sentences most seeds of a variant and baselines get right: all, none, some."""
        model = right_answers(self.results.place(variant).runs).mean(axis=0) > 0.5
        counted = [run for name in baselines for run in self.results.place(variant, baseline=name).runs]
        right = np.stack([model, *right_answers(counted)])
        shares = {
            "all are right": right.all(axis=0),
            "at least one is right": right.any(axis=0),
            "none is right": ~right.any(axis=0),
            "the transformer alone is right": right[0] & ~right[1:].any(axis=0),
            "the transformer alone is wrong": ~right[0] & right[1:].all(axis=0),
        }
        rows = [[words, str(own.sum()), number(ACCURACY, own.mean())] for words, own in shares.items()]
        return markdown([["", "sentences", "%"], *rows])

    def learning_curve(self, variants: Sequence[str], *baselines: str) -> str:
        """Return the accuracy of variants and of baselines, by the number of sentences in train.

        The last row has what a doubling of train adds, by the largest, the last one, and about half of it.
        """
        rows, means = [], []
        for variant in variants:
            place = self.results.place(variant)
            summary, train = Summary(place.values(ACCURACY).values()), place.study.counts["train"]
            counted = [value_of(self.results.place(variant, baseline=name), ACCURACY) for name in baselines]
            rows.append([str(train), mean_and_sd(ACCURACY, summary), *(number(ACCURACY, own) for own in counted)])
            means.append((math.log2(train), summary.mean, *counted))
        smaller = [own for own in means if own[0] < means[-1][0] - 0.9]  # in doublings
        doublings, *gains = (last - before for before, last in zip(smaller[-1], means[-1]))
        doubling = f"for each doubling from {rows[len(smaller) - 1][0]} to {rows[-1][0]} sentences"
        rows.append([doubling, *(number(ACCURACY, gain / doublings, True) for gain in gains)])
        heads = [baseline_name(self.results.place(variants[0], baseline=name).runs[0]) for name in baselines]
        return markdown([["sentences in train", "the transformer", *heads], *rows])

    def probes(self, by: str = "model", fixed: Mapping[str, Any] | None = None, **lengths: int) -> str:
        """Return the accuracies on probes, each at one length, by encoding or along another axis of the map."""
        return markdown(probes.accuracies(self.cells, by, fixed or {}, lengths))

    def mechanisms(self) -> mechanisms.Mechanisms:
        """Return the results of the study of mechanisms, whose rows `table` shows."""
        if self._found is None:
            raise PageError("there are no results of studies/mechanisms.sh.")
        return self._found

    def table(self, rows: Sequence[Sequence[str]]) -> str:
        """Return rows as a table."""
        return markdown(rows)

    def longer(self) -> str:
        """Return the table of what Kazemnejad et al. conclude about longer texts."""
        return markdown(probes.longer(self.cells))

    def separations(self, beyond: bool, without: Sequence[str] = ()) -> str:
        """Return what each probe separates, at the longest length of training or the longest beyond it."""
        return markdown(probes.separations(self.cells, beyond, without))

    def retuned(self, probe: str, length: int) -> str:
        """Return what encodings have on a probe with the settings that more tuning seeds chose."""
        return markdown(probes.retuned(self.cells, self._again, probe, length))

    def tuning(self, beyond: bool) -> str:
        """Return what tuning changes on each probe, at the longest length of training or the longest beyond it."""
        return markdown(probes.tuning_gains(self.cells, beyond))


def folded(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table that a reader opens."""
    return f"<details><summary>{title}</summary>\n\n{markdown(rows)}\n\n</details>"


def filled(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Return a table without the columns that are empty."""
    columns = [column for column in zip(*rows) if {*column[1:]} - {"", NONE}]
    return [*zip(*columns)]


def value_of(place: Place, metric: str) -> float:
    """Return the value of a baseline.

    Raises:
        PageError: it has no such metric.
    """
    if None not in (own := place.values(metric)):
        raise PageError(f"the baseline {place.baseline and place.baseline.baseline} has no {metric}.")
    return own[None]


def values_of(place: Place, metric: str, mixture: bool) -> Values:
    """Return a metric by seed, of the model or of its mixture with counts."""
    return mixed(place.study, place.variant.label, metric) if mixture else place.values(metric)


def accuracy_difference(place: Place, baseline: Run | None) -> Effect:
    """Return the accuracy of a variant less that of a baseline, over both seeds and sentences."""
    assert baseline
    own = right_answers(place.runs)
    effect = over_seeds_and_items([(1, own), (-1, right_answers([baseline]))])
    return effect if len(own) > 1 else Effect(effect.n, effect.mean)  # one seed says nothing about others


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Return the different runs: of those that are repeated under the name of another study, the first."""
    free = set(read_yaml("published.yaml")["free"])
    different: dict[tuple[object, ...], Run] = {}
    for run in runs:
        settings = tuple(sorted((key, repr(value)) for key, value in run.settings.items() if key not in free))
        different.setdefault((run.protocol, run.corpus_key, run.baseline, run.seed, settings), run)
    return list(different.values())


def unpack(folder: Path) -> None:
    """Unpack all archives, each into a folder of its name; the many runs that tuned encodings are no results."""
    for name in (*ARCHIVES, *PROBED):
        archive = REFERENCE / ("" if name == "reports" else name) / "runs.tar.xz"
        with tarfile.open(archive) as file:
            members = [member for member in file.getmembers() if "_probes-tuning_" not in member.name]
            file.extractall(folder / name, members, filter="data")


def read(folder: Path) -> Words:
    """Unpack all archives into a folder and return what the pages can say."""
    unpack(folder)
    results = Results([folder / name for name in ARCHIVES])
    name_variants(results)
    found = mechanisms.Mechanisms(folder / "mechanisms") if "mechanisms" in PROBED else None
    cells, again = (probes.read_cells(folder / "probes", study) for study in ("probes", "probes_tuning_rule"))
    return Words(results, cells, found, again)


def pages(words: Words) -> Iterator[tuple[Path, str]]:
    """Yield each page with its text."""
    for name, page in PAGES.items():
        yield page, render(name, words)


def render(name: str, words: Words) -> str:
    """Return a page.

    Raises:
        UserError: the template is invalid, or asks for what the results do not have.
    """
    loader = jinja2.FileSystemLoader(HERE / "pages")
    strict: Any = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    environment = ImmutableSandboxedEnvironment(loader=loader, **strict)
    functions = {function: getattr(words, function) for function in vars(Words) if not function.startswith("_")}
    try:
        text = environment.get_template(f"{name}.md").render(functions)
    except Exception as error:  # whatever an expression of the template raises
        raise UserError(f"studies/pages/{name}.md: {one_sentence(error) or type(error).__name__}") from error
    return f"<!-- Rendered from studies/pages/{name}.md by make pages. -->\n{text}"


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m studies.render", description="Render the pages from the archives.")
    parser.add_argument(
        "--reports", action="store_true", help="also write the report of each archive to outputs/pages"
    )
    arguments = parser.parse_args()

    def command() -> None:
        with tempfile.TemporaryDirectory() as place:
            words = read(Path(place))
            for page, text in pages(words):
                draw_links(text if page.parent.name not in PROBED else "", page.parent, words.results)
                with atomic_write(page) as file:
                    file.write(text.encode())
                print(page.relative_to(ROOT))
            probes.write_map(words.cells, REFERENCE / "probes")
            if "mechanisms" in PROBED:
                words.mechanisms().write(REFERENCE / "mechanisms")
            for name, title in {**ARCHIVES, **PROBED}.items() if arguments.reports else ():
                report([Path(place) / name], REPORTS / name, title=title, formats=["png"])
                print((REPORTS / name / "report.html").relative_to(ROOT))

    run_command(command)


if __name__ == "__main__":
    main()
