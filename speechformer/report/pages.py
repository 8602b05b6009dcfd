"""Pages whose results are computed: `python -m speechformer.report FOLDER --pages README.md`.

A page holds templates (Jinja) in comments, each followed by the text that it gives:

    <!--= RoPE has perplexity {{ mean("lm_rope") }}. -->
    RoPE has perplexity 375.1 ± 4.9.
    <!--/-->

The functions of a template are the methods of `Context` and those of `run_functions`, `probe_functions` and
`study_functions`. `block(PAGE, HEADING)` repeats a result of another page, and `line(FILE, row=...)` is a line of a
committed table of runs. Rows have the names of `published.yaml` and `claims.yaml`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from speechformer.corpora.files import atomic_write
from speechformer.errors import UserError, pick
from speechformer.report import by_sentence, findings, probe_claims, probe_map, published
from speechformer.report.claims import Judgement, find_rows
from speechformer.report.costs import costs_table
from speechformer.report.ladder import (
    Rung,
    against_table,
    by_name,
    ratios_in_words,
    rungs,
    step_in_words,
    steps_in_words,
    steps_table,
)
from speechformer.report.markdown import Markdown
from speechformer.report.probe_map import Cell
from speechformer.report.results import Row, Run, Table
from speechformer.report.statistics import Effect, Summary, contrast
from speechformer.report.tables import estimate, format_interval, mean_and_sd, number

BLOCK = re.compile(r"(<!--=(.*?)-->\n).*?(<!--/-->)", re.DOTALL)
PARTS = ("test_accuracy", "test_accuracy_in_train", "test_accuracy_not_in_train")
TEXTS = ("test_perplexity_obama", "test_perplexity_wbush", "test_perplexity_hbush")


class Context:
    """What templates can show. Metrics are those of `result.json`; without one it is the main metric of the row."""

    def __init__(self, tables: Sequence[Table], judgements: Sequence[Judgement], runs: Sequence[Run]) -> None:
        self.tables, self.judgements, self.runs = tables, judgements, runs
        self.rows = find_rows(tables)

    def functions(self) -> dict[str, Any]:
        """Return the functions by name."""
        return {name: getattr(self, name) for name in vars(Context) if not name.startswith("_")}

    def place(self, row: str, protocol: str = "paper") -> tuple[Table, Row]:
        """Return the table and row of this name.

        Raises:
            UserError: it has no finished run.
        """
        if (row, protocol) not in self.rows or not self.rows[row, protocol][1].finished:
            raise UserError(f"there is no finished run of the row {row} under protocol={protocol}.")
        return self.rows[row, protocol]

    def summary(
        self,
        row: str,
        metric: str | None = None,
        at: float | None = None,
        protocol: str = "paper",
        best: bool = False,
    ) -> tuple[str, Summary]:
        """Return a metric and its statistics over seeds, at the end, at an epoch or step, or the best of each run."""
        table, own = self.place(row, protocol)
        name = metric or table.metric
        values = own.best_values(name) if best else own.values(name, at)
        if not values:
            raise UserError(f"the row {row} has no {name}" + (f" at {at:g}." if at is not None else "."))
        return name, Summary(values.values())

    def mean(self, *where: Any, **options: Any) -> str:
        """Return the mean of `summary` with three significant digits."""
        name, summary = self.summary(*where, **options)
        return number(name, summary.mean)

    def mean_sd(self, *where: Any, **options: Any) -> str:
        """Return "mean ± standard deviation" of `summary`."""
        return mean_and_sd(*self.summary(*where, **options))

    def prediction(self, *where: Any, **options: Any) -> str:
        """Return the 95 % prediction interval of one run, of `summary`."""
        name, summary = self.summary(*where, **options)
        return format_interval(name, summary.prediction_interval, like=summary.mean)

    def accuracies(self, row: str, protocol: str = "paper") -> str:
        """Return "all / in train / **not in train ± sd**", in per cent."""
        *parts, last = (self.summary(row, name, protocol=protocol) for name in PARTS)
        return " / ".join([*(number(name, summary.mean) for name, summary in parts), f"**{mean_and_sd(*last)}**"])

    def texts(self, row: str, at: float | None = None) -> str:
        """Return the perplexities of Obama / W. Bush / H. Bush."""
        values = (self.summary(row, name, at) for name in TEXTS)
        return " / ".join(f"{summary.mean:.0f}" for _, summary in values)

    def seeds(self, row: str, protocol: str = "paper") -> int:
        """Return the number of finished runs of a row."""
        return len(self.place(row, protocol)[1].finished)

    def counts(self, row: str, protocol: str = "paper") -> Mapping[str, Any]:
        """Return the counts of the corpus of a row, as in `result.json`."""
        return self.place(row, protocol)[0].counts

    def difference(
        self, first: str, second: str, metric: str | None = None, at: float | None = None, protocol: str = "paper"
    ) -> str:
        """Return first minus second with its 95 % confidence interval."""
        (table, own), (_, other) = self.place(first, protocol), self.place(second, protocol)
        name = metric or table.metric
        return in_one_cell(name, contrast([(1, own.values(name, at)), (-1, other.values(name, at))]))

    def effect(self, claim: str) -> str:
        """Return the effect of a claim with its 95 % confidence interval."""
        own = self.claim(claim)
        return in_one_cell(own.metric, own.effect)

    def claim(self, name: str) -> Judgement:
        """Return a judged claim.

        Raises:
            UserError: it has not been measured.
        """
        for own in self.judgements:
            if own.name == name:
                return own
        raise UserError(f"the claim {name} does not exist or has not been measured.")

    def verdict(self, name: str) -> str:
        """Return the verdict of a claim."""
        return self.claim(name).verdict

    def claims(self, family: str, page: str = "") -> str:
        """Return the table of a family of claims; `page` has the tables that it links to."""
        return str(findings.claims_table([own for own in self.judgements if own.family == family], page))

    def baseline(self, name: str, row: str, metric: str | None = None, protocol: str = "paper") -> str:
        """Return the metric of a baseline in the table of a row."""
        table, _ = self.place(row, protocol)
        for run in table.baselines:
            if run.baseline == name:
                return number(metric or table.metric, run.metrics.get(metric or table.metric))
        raise UserError(f"there is no baseline {name} beside the row {row}.")

    def count(self) -> Mapping[str, int]:
        """Return the numbers of `runs`, `baselines`, `claims`, and of runs that are not repeats (`distinct`)."""
        trained = [run for run in self.runs if not run.baseline]
        numbers = {"runs": len(trained), "distinct": len(findings.distinct(trained)), "claims": len(self.judgements)}
        return {**numbers, "baselines": len(self.runs) - len(trained)}

    def verdicts(self) -> str:
        """Return how many claims have each verdict, as a sentence."""
        return findings.count_verdicts(self.judgements)

    def agreement(self) -> str:
        """Return how the published results agree with ours, in sentences."""
        return findings.agreement(self.tables)


def short_commit(commit: str | None) -> str:
    """Return the first seven digits of a commit, and whether the code had changes besides."""
    return (commit or "unknown")[:7] + " with changes" * (commit or "").endswith("-dirty")


def run_functions(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the functions of a template that show the runs as a whole."""
    trained = [run for run in runs if not run.baseline]

    def origin() -> str:
        """Return the commits of the runs, and for how many the code has other numbers today."""
        commits = Counter(run.result.get("commit") for run in trained)
        parts = " and ".join(f"{short_commit(commit)} ({number})" for commit, number in commits.most_common())
        old = sum(run.is_outdated for run in trained)
        today = f"other numbers for {old}" if old else "the same numbers for all"
        return f"The runs are of commit {parts}. By the version in their results, today's code gives {today} of them"

    def hours() -> str:
        """Return the hours that all runs took, each on its cores; those of an ensemble share them."""
        members = [(run.result.get("machine") or {}).get("ensemble_size") or 1 for run in runs]
        return f"{sum((run.result.get('seconds') or 0) / n for run, n in zip(runs, members)) / 3600:.1f}"

    def share(first: str, second: str, task: str = "lm") -> str:
        """Return how many different runs on the reports' corpus have a lower first metric than second, "9 of 9"."""
        corpus = published.content()["corpus"]["sha256"]
        own = [run for run in trained if run.task == task and (run.corpus_key or "").startswith(corpus)]
        pairs = [(run.metrics.get(first), run.metrics.get(second)) for run in findings.distinct(own)]
        known = [(one, two) for one, two in pairs if one is not None and two is not None]
        return f"{sum(one < two for one, two in known)} of {len(known)}"

    return {"origin": origin, "hours": hours, "share": share}


def probe_functions(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the functions of a template that show the probes, from the cells of the map."""

    def probes(by: str = "model", fixed: Mapping[str, Any] | None = None, **lengths: int) -> str:
        """Return the table of accuracy by encoding, or along another axis of the map, of each probe at one length.

        Args:
            fixed: values of axes, such as {"layers": 3, "tuned": False}.

        Raises:
            UserError: there is no such axis, or no run of a probe at a length.
        """
        for axis in (by, *(fixed or {})):
            pick(dict.fromkeys(probe_map.AXES), axis, "the axis of probes()")
        at = [cell for cell in cells if all(cell[axis] == value for axis, value in (fixed or {}).items())]
        at = [cell for cell in at if lengths.get(cell["probe"]) == cell["length"]]
        for probe, length in lengths.items():
            if not any(cell["runs"] for cell in at if cell["probe"] == probe):
                raise UserError(f"there is no run of probe={probe} at length {length}.")
        if not lengths:
            raise UserError("probes() needs a probe and its length, such as copy=40.")
        return str(probe_map.lengths_table(probe_map.usual(at, by)[0], by, lengths))

    own = probe_map.usual(cells)[0] if cells else []

    def longer() -> str:
        """Return the table of what Kazemnejad et al. conclude about longer texts."""
        return text_of(probe_claims.where_found(own), "there are no runs that test longer().")

    def separations(beyond: bool, without: Sequence[str] = ()) -> str:
        """Return what each probe separates, at the longest length of training or the longest beyond it."""
        why = f"no probe has {probe_map.SEEDS} seeds of two models."
        return text_of(probe_map.separations(own, beyond, without), why)

    def tuning(beyond: bool) -> str:
        """Return what tuning changes on each probe, at the longest length of training or the longest beyond it."""
        return text_of(probe_map.tuning_gains(cells, beyond), "no probe has two models both tuned and as by default.")

    return {"probes": probes, "longer": longer, "separations": separations, "tuning": tuning}


def all_functions(
    tables: Sequence[Table], judgements: Sequence[Judgement], runs: Sequence[Run], cells: Sequence[Cell]
) -> dict[str, Any]:
    """Return all functions of a template but `block`, by name."""
    functions = Context(tables, judgements, runs).functions() | run_functions(runs)
    return functions | probe_functions(cells) | study_functions(tables)


def text_of(table: Markdown, missing: str) -> str:
    """Return a table as text, or raise a `UserError` that says why it is empty."""
    if not str(table):
        raise UserError(missing)
    return str(table)


def table_of_study(tables: Sequence[Table], study: str) -> Table:
    """Return the first table of a study that has a finished run.

    Raises:
        UserError: there is none.
    """
    for table in tables:
        if table.study == study and table.finished:
            return table
    raise UserError(f"there is no finished run of study={study}.")


def top_of(table: Table) -> Rung:
    """Return a ladder's highest rung."""
    return [rung for rung in rungs(table) if rung.on_top][-1]


def ladder_functions(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the functions of a template that show the rungs of a study."""
    table_of = functools.partial(table_of_study, tables)

    def ladder(study: str, *metrics: str, **options: str) -> str:
        """Return the rungs of a study, each with the difference to the rung below; options of `steps_table`."""
        return str(steps_table(table_of(study), metrics, **options))

    def steps(study: str, metric: str) -> str:
        """Return which steps of a study change a metric, for better or worse."""
        return str(steps_in_words(table_of(study), metric))

    def step_of(study: str, metric: str, step: str) -> str:
        """Return whether a step of a study changes a metric, for better or worse, and by how much."""
        return str(step_in_words(table_of(study), metric, step))

    def on_top(study: str, metric: str) -> str:
        """Return the mean of a metric on the top rung of a study, or "parameters" for their number."""
        own = top_of(table_of(study))
        if metric == "parameters":
            return f"{own.row.finished[0].result['parameters']['total']:,}"
        return number(metric, Summary(own.values(metric).values()).mean)

    def ratios(study: str, *baselines: str, goals: Sequence[float] = ()) -> str:
        """Return the perplexity at the top of a ladder as a ratio to that of the best baseline, in words."""
        return ratios_in_words(table_of(study), baselines, goals)

    def beside(study: str, baseline: str, metric: str) -> str:
        """Return a metric of a baseline in the table of a study."""
        (run,) = by_name(table_of(study), [baseline])
        return number(metric, run.metrics.get(metric))

    def less(study: str, baseline: str) -> str:
        """Return the accuracy at the top of a study less that of a baseline, over seeds and sentences."""
        table = table_of(study)
        return in_one_cell("test_accuracy", by_sentence.less(top_of(table).row, *by_name(table, [baseline])))

    def counts_of(study: str) -> Mapping[str, Any]:
        """Return the counts of the corpus of a study, as in `result.json`."""
        return table_of(study).counts

    functions = [ladder, steps, step_of, on_top, ratios, beside, less, counts_of]
    return {function.__name__: function for function in functions}


def study_functions(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the functions of a template that show one study: a ladder, or what its results cost."""
    table_of = functools.partial(table_of_study, tables)

    def against(study: str, *baselines: str) -> str:
        """Return how the top of a ladder compares with baselines: on each text, or of a classifier by sentence."""
        table = table_of(study)
        if table.task == "classify":
            return str(by_sentence.against_baselines(table, top_of(table).row, baselines))
        return str(against_table(table, baselines))

    def difficulty(study: str, *baselines: str) -> str:
        """Return how many test sentences the top of a ladder and baselines get right."""
        table = table_of(study)
        return str(by_sentence.difficulty(table, top_of(table).row, baselines))

    def learning_curve(study: str, *baselines: str) -> str:
        """Return the accuracy of a study's model and of baselines by the number of training sentences."""
        own = [table for table in tables if table.study == study and table.finished] or [table_of(study)]
        return str(by_sentence.learning_curve(own, baselines))

    def costs(study: str) -> str:
        """Return the results of a study's rows by context, beside the time and memory of their training."""
        return str(costs_table(table_of(study)))

    own = {"costs": costs, "against": against, "difficulty": difficulty, "learning_curve": learning_curve}
    return ladder_functions(tables) | own


def in_one_cell(metric: str, effect: Effect | None) -> str:
    """Format an effect with its 95 % confidence interval."""
    if effect is None:
        raise UserError(f"the rows have no common {metric}.")
    return " ".join(estimate(metric, effect))


def render(text: str, functions: Mapping[str, Any]) -> str:
    """Return a page with the texts of its templates.

    Raises:
        UserError: a template is invalid, or asks for what the results do not have.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)

    def fill(match: re.Match[str]) -> str:
        line = text.count("\n", 0, match.start()) + 1
        try:
            content = environment.from_string(match[2].strip()).render(functions).strip()
        except (jinja2.TemplateError, UserError, TypeError) as error:
            raise UserError(f"line {line}: {error}") from None
        return f"{match[1]}{content}\n{match[3]}"

    return BLOCK.sub(fill, text)


def block_of(page: Path, heading: str) -> str:
    """Return what the first template below a heading of another page gives there.

    Raises:
        UserError: there is no such page, heading or template, or it has not been rendered.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{page}: {error.strerror}.") from None
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    match = section and BLOCK.search(section[1])
    if not match:
        raise UserError(f"{page} has no template below a heading {heading!r}.")
    content = match[0].removeprefix(match[1]).removesuffix(match[3])
    if not content.strip():
        raise UserError(f"{page}: the template below {heading!r} has no content yet. Render that page first.")
    return content


def line_of(path: Path, /, **where: Any) -> dict[str, Any]:
    """Return the only line of a CSV file with these values, such as `row="model=rope"`, as a value for each column.

    Raises:
        UserError: there is no such file or column, or not exactly one such line.
    """
    import pandas as pd

    try:
        lines = pd.read_csv(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    except ValueError as error:  # pandas' own are of this class
        raise UserError(f"{path} is no table: {error}") from None
    for name, value in where.items():
        lines = lines[lines[pick({column: column for column in lines}, name, f"the columns of {path}")] == value]
    if len(lines) != 1:
        raise UserError(f"{path} has {len(lines)} lines with {where}; line() needs one.")
    return dict(lines.iloc[0])


def update(page: Path, functions: Mapping[str, Any]) -> bool:
    """Render a page in place; return whether it changed.

    Raises:
        UserError: there is no such page, or a template is invalid.
    """
    try:
        text = page.read_text(encoding="utf-8")
        files = {
            "block": lambda path, heading: block_of(page.parent / path, heading),
            "line": lambda path, /, **where: line_of(page.parent / path, **where),
        }
        rendered = render(text, {**files, **functions})
    except OSError as error:
        raise UserError(f"{page}: {error.strerror}.") from None
    except UserError as error:
        raise UserError(f"{page}, {error}") from None
    if rendered != text:
        with atomic_write(page) as file:
            file.write(rendered.encode())
    return rendered != text
