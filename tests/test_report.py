"""The report: what was published is what the reports print, statistics are the textbook's, and nothing is dropped."""

from __future__ import annotations

import ast
import collections
import csv
import functools
import html
import html.parser
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import EXPERIMENTS, compose, opened, processor_seconds
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from scipy import stats

from speechformer.config import CONF
from speechformer.errors import UserError
from speechformer.report import published
from speechformer.report.__main__ import main, write_report
from speechformer.report.labels import in_words, override
from speechformer.report.results import Row, Run, build_tables, read_results, read_runs
from speechformer.report.statistics import Summary, contrast, detectable, holm, over_seeds_and_items
from speechformer.report.style import styles
from speechformer.runs import folder as runs_folder
from speechformer.runs.folder import write_result
from speechformer.runs.identity import flatten

SEEDS = Path(os.environ.get("SPEECHFORMER_DATA", "nowhere")).resolve().parent / "seeds"
OF_A_REPORT = [name for name in EXPERIMENTS if name.startswith(("kulkarni", "singhal", "marsol"))]


SPEECHES = published.content()["corpus"]["sha256"]


# What was published


AUTHORS = {"kulkarni": "Anay Kulkarni", "singhal": "Sanidhya Singal", "marsol": "Marsol Torrent"}


def text_of(report: str) -> str:
    """The text of an author's report."""
    author = AUTHORS[report.lower()]
    (text,) = (text for path in SEEDS.iterdir() if author in (text := path.read_text(encoding="utf-8"))[:400])
    return text


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the reports' texts are not here")
@pytest.mark.parametrize(
    "table", published.content()["tables"], ids=lambda t: f"{t['report']} {t['table']} {t['row']}"
)
def test_every_published_row_is_a_line_of_its_report(table: dict[str, Any]) -> None:
    text = text_of(table["report"])
    lines = [[float(number) for number in re.findall(r"\d+\.?\d*", line)] for line in text.splitlines()]
    for row in table["rows"]:
        # in one line and in this order; other figures (another row's column) may stand between
        assert any(all(value in rest for value in row) for line in lines for rest in [iter(line)]), row


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the reports' texts are not here")
def test_no_row_of_a_reports_table_is_left_out() -> None:
    """Every line of a report that is three or more numbers with decimals is published here."""
    have = [set(row) for table in published.content()["tables"] for row in table["rows"]]
    for report in AUTHORS:
        for line in text_of(report).splitlines():
            cells = [cell.strip() for cell in line.split("\t")]
            numbers = {float(cell) for cell in cells if re.fullmatch(r"\d+\.?\d*", cell)}
            if len(cells) >= 3 and len(numbers) >= len(cells) - 4 and len(numbers) >= 3:
                assert set().union(*(row for row in have if row <= numbers)) == numbers, line


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the reports' texts are not here")
def test_every_published_count_of_parameters_is_in_its_report() -> None:
    counts = {name: row["parameters"] for name, row in published.content()["rows"].items() if "parameters" in row}
    assert len(counts) == 9
    for name, count in counts.items():
        assert f"{count:,}" in text_of(name.partition("_")[0]), name


def settings_of(*overrides: str) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(compose(*overrides), resolve=True)
    about = {"task": config["task"]["name"], "seed": config["seed"], "overrides": list(overrides)}
    return Run(Path(), about, dict(flatten(config))).settings


@pytest.mark.parametrize("experiment", OF_A_REPORT)
def test_each_experiment_of_a_report_is_one_published_row(experiment: str) -> None:
    expected = {"kulkarni_part3_scales": "kulkarni_part3_scale_0.5"}.get(experiment, experiment)
    assert published.row_of(settings_of(f"experiment={experiment}")) == expected
    assert published.content()["rows"][expected]["study"] == compose(f"experiment={experiment}").study


@pytest.mark.parametrize(
    "change",
    [
        "width=128",
        "architecture.norm=pre",
        "recipe.schedule=cosine",
        "trainer.max_steps=2",
        "dropout=0",
        "+trainer.max_time=1",
    ],
)
def test_another_setting_is_another_row(change: str) -> None:
    assert published.row_of(settings_of("experiment=kulkarni_part1", change)) is None


@pytest.mark.parametrize("value", [None, True, 0.5, 3, "geometric", [1.0, 2]])
def test_a_row_names_a_setting_as_the_command_line_takes_it(value: Any) -> None:
    """Oracle: Hydra's parser."""
    parsed = OverridesParser.create().parse_override(override("trainer.limit_train_batches", value))
    assert parsed.value() == value
    assert in_words("trainer.limit_train_batches=null", {}) == "all batches"


def test_what_is_free_is_free() -> None:
    assert (
        published.row_of(settings_of("experiment=kulkarni_part1", "eval_interval=100", "seed=3")) == "kulkarni_part1"
    )


def test_every_study_of_an_experiment_has_a_title_and_every_title_a_study() -> None:
    studies = {OmegaConf.to_container(compose(f"experiment={name}"), resolve=True)["study"] for name in EXPERIMENTS}
    assert studies - {None} == set(published.content()["studies"])  # None: an experiment without a study


def test_figures_that_a_report_ends_with() -> None:
    assert published.final("marsol_table1_full", "test_perplexity_obama", "last") == 406.80
    assert published.final("marsol_table1_full", "test_perplexity_obama", "best") == 395.51
    assert published.final("marsol_table1_full", "test_perplexity_mean", "best") == 438.37
    assert published.final("kulkarni_part2", "test_perplexity_mean", "last") == pytest.approx(
        (371.26 + 452.25 + 398.97) / 3
    )
    assert published.final("kulkarni_part2", "test_perplexity_mean", "best") is None
    (figure,) = published.figures("marsol_classify")
    assert (figure.value, figure.chosen, figure.at, figure.final) == (0.86, "best", 12, True)
    assert published.curve("kulkarni_part1", "test_accuracy")[0] == (1, pytest.approx(0.3373))
    steps, means = zip(*published.curve("singhal_table2", "test_perplexity_mean"))
    assert steps == (100, 200, 300, 400, 500)
    assert means[-1] == pytest.approx((412.154 + 358.34 + 465.4696) / 3)


# Statistics


def test_summary_is_the_textbooks() -> None:
    """1 ... 5: sd sqrt(2.5), t(4) = 2.776445."""
    summary = Summary([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (summary.n, summary.mean, summary.extremes) == (5, 3, (1, 5))
    assert summary.sd == pytest.approx(math.sqrt(2.5))
    assert summary.confidence_interval == pytest.approx(
        (3 - 2.776445 * math.sqrt(0.5), 3 + 2.776445 * math.sqrt(0.5))
    )
    half = 2.776445 * math.sqrt(2.5 * 1.2)
    assert summary.prediction_interval == pytest.approx((3 - half, 3 + half))
    assert summary.predicts(3 + 0.99 * half) is True and summary.predicts(3 - 1.01 * half) is False


def test_intervals_cover_as_often_as_they_say() -> None:
    """5 draws, 2000 times: the mean's interval holds the true mean and one run's range the next draw, 95 % each."""
    draws = stats.norm(10, 2).rvs((2000, 6), random_state=0)
    summaries = [Summary(list(row[:5])) for row in draws]
    mean = sum(low <= 10 <= high for low, high in (summary.confidence_interval for summary in summaries)) / 2000
    one = sum(bool(summary.predicts(row[5])) for summary, row in zip(summaries, draws)) / 2000
    assert mean == pytest.approx(0.95, abs=0.02) and one == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.1, 0.1, 0.1], [0.88133335, 0.8813333, 0.88133337]])
def test_without_a_spread_there_is_no_interval(values: list[float]) -> None:
    summary = Summary(values)
    assert summary.mean == pytest.approx(values[0])
    assert (
        all(map(math.isnan, (*summary.confidence_interval, *summary.prediction_interval)))
        and summary.predicts(2.0) is None
    )


def by_seed(values: Iterable[float]) -> dict[int | None, float]:
    return dict(enumerate(map(float, values)))


def test_equal_differences_tell_nothing_apart() -> None:
    """Three sentences of 750 more with either seed, in single precision."""
    first, second = (by_seed(np.float32([a / 750, b / 750])) for a, b in ((662, 659), (659, 656)))
    effect = contrast([(1, first), (-1, second)], same_runs=True)
    assert effect is not None and effect.mean == pytest.approx(3 / 750, rel=1e-4) and math.isnan(effect.p)


def test_pairs_are_the_common_seeds_alone() -> None:
    """Oracle: differences 1, 2, 3 over seeds 1-3: mean 2, t(2) = 4.302653, half 4.302653 / sqrt(3)."""
    first, second = {0: 99.0, 1: 11.0, 2: 22.0, 3: 33.0}, {1: 10.0, 2: 20.0, 3: 30.0, 4: 0.0}
    effect = contrast([(1, first), (-1, second)], same_runs=True)
    assert effect is not None and (effect.n, effect.mean, effect.paired) == ((3,), 2, True)
    half = 4.302653 / math.sqrt(3)
    assert effect.interval == pytest.approx((2 - half, 2 + half))


DRAWS = stats.norm(0, 1).rvs((3, 12), random_state=1)


def test_a_difference_of_unrelated_runs_is_welchs_test() -> None:
    """Oracle: scipy's ttest_ind."""
    first, second = 3 + DRAWS[0], 2 + 3 * DRAWS[1, :7]
    effect = contrast([(1, by_seed(first)), (-1, by_seed(second))])
    test = stats.ttest_ind(first, second, equal_var=False)
    assert effect is not None and (effect.n, effect.paired) == ((12, 7), False)
    assert effect.p == pytest.approx(test.pvalue) and effect.interval == pytest.approx(test.confidence_interval(0.95))
    assert effect.correlation == pytest.approx(np.corrcoef(first[:7], second)[0, 1])


def test_seeds_that_correlate_are_paired() -> None:
    """Oracle: scipy's ttest_rel."""
    first, second = 10 + DRAWS[0], 9 + DRAWS[0] + 0.3 * DRAWS[1]
    effect = contrast([(1, by_seed(first)), (-1, by_seed(second))])
    test = stats.ttest_rel(first, second)
    assert effect is not None and effect.paired
    assert effect.p == pytest.approx(test.pvalue) and effect.interval == pytest.approx(test.confidence_interval(0.95))


def test_a_contrast_of_three_is_the_difference_of_a_difference() -> None:
    """Oracle: a - 2 b + c of constants plus noise; its variance by hand, Satterthwaite's degrees by hand."""
    a, b, c = (5 + DRAWS[0, :6], 1 + DRAWS[1], 2 * DRAWS[2, :9])
    effect = contrast([(1, by_seed(a)), (-2, by_seed(b)), (1, by_seed(c))], constant=0.5)
    parts = [a.var(ddof=1) / 6, 4 * b.var(ddof=1) / 12, c.var(ddof=1) / 9]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 5 + parts[1] ** 2 / 11 + parts[2] ** 2 / 8)
    mean = a.mean() - 2 * b.mean() + c.mean() + 0.5
    assert effect is not None and effect.n == (6, 12, 9) and effect.mean == pytest.approx(mean)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    assert effect.interval == pytest.approx((mean - half, mean + half))


def test_one_mean_is_tested_against_a_constant() -> None:
    """Oracle: scipy's ttest_1samp."""
    effect = contrast([(1, by_seed(DRAWS[0]))], constant=-0.5)
    assert effect is not None and effect.p == pytest.approx(stats.ttest_1samp(DRAWS[0], 0.5).pvalue)
    assert contrast([(1, {0: 1.0}), (-1, {})]) is None
    assert math.isnan(contrast([(1, {0: 1.0}), (-1, {0: 2.0})]).p)  # type: ignore[union-attr]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_to_pair_where_seeds_correlate_keeps_the_error_rate(correlation: float) -> None:
    """Oracle: simulation; of 2,000 differences of zero, about 5 % are significant."""
    draws = stats.norm(0, 1).rvs((2000, 2, 8), random_state=2)
    draws[:, 1] = correlation * draws[:, 0] + math.sqrt(1 - correlation**2) * draws[:, 1]
    effects = [contrast([(1, by_seed(first)), (-1, by_seed(second))]) for first, second in draws]
    assert np.mean([effect.p < 0.05 for effect in effects if effect]) == pytest.approx(0.05, abs=0.016)


def test_the_detectable_effect_is_found_four_times_in_five() -> None:
    """Oracle: simulation with an effect of that size; sd 1, 6 runs against 6, 10 degrees of freedom."""
    size = detectable(10) * math.sqrt(2 / 6)
    draws = stats.norm(0, 1).rvs((4000, 2, 6), random_state=3)
    p = stats.ttest_ind(draws[:, 0] + size, draws[:, 1], axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("freedom", [1, 1.3, 3, 40, 1000])
def test_every_number_of_seeds_detects_something(freedom: float) -> None:
    assert 2.7 < detectable(freedom) < 100


def test_holm_corrects_for_the_number_of_tests() -> None:
    """Oracle: by hand: 0.01 x 4, 0.02 x 3, then its own x 2 and x 1 or as large as before; NaN does not count."""
    assert holm([0.03, 0.01, math.nan, 0.02, 0.04]) == pytest.approx([0.06, 0.04, math.nan, 0.06, 0.06], nan_ok=True)
    assert holm([]) == [] and holm([0.7, 0.8]) == [1.0, 1.0]


def test_an_effect_over_seeds_and_sentences() -> None:
    """Oracle: the variance of a two-way layout of independent effects of seeds and sentences."""
    generator = np.random.default_rng(0)
    seeds, sentences = generator.normal(0, 0.2, 300), generator.normal(0, 1.0, 400)
    value = seeds[:, None] + sentences[None]
    effect = over_seeds_and_items([(1, value), (-1, np.zeros((5, 400)))])
    error = math.sqrt(seeds.var(ddof=1) / 300 + sentences.var(ddof=1) / 400)
    assert effect.mean == pytest.approx(value.mean())
    assert effect.interval == pytest.approx((value.mean() - 1.96 * error, value.mean() + 1.96 * error), abs=0.01)
    assert 0 < effect.p <= 1 and effect.error == pytest.approx(error, rel=1e-3)
    # the same sentences in both: their effect cancels
    effect = over_seeds_and_items([(1, value + 2), (-1, value)])
    assert effect.interval[1] - effect.interval[0] < 0.2 and effect.p < 0.001


def test_an_effect_of_few_seeds_has_the_interval_of_student() -> None:
    """Oracle: `scipy.stats`, if all sentences are alike, so that only seeds vary; then only sentences."""
    seeds = np.array([0.51, 0.55, 0.62, 0.58])
    effect = over_seeds_and_items([(1, np.tile(seeds[:, None], (1, 50)))], -0.5)
    test = stats.ttest_1samp(seeds, 0.5)
    assert effect.interval == pytest.approx([end - 0.5 for end in test.confidence_interval()])
    assert effect.p == pytest.approx(test.pvalue)
    first, second = (np.random.default_rng(seed).random(200) < 0.6 for seed in (0, 1))
    effect = over_seeds_and_items([(1, first[None]), (-1, second[None])])
    test = stats.ttest_rel(first.astype(float), second.astype(float))
    assert effect.interval == pytest.approx(list(test.confidence_interval()))


@pytest.mark.parametrize(("of_seeds", "of_items", "of_answers"), [(1, 0, 0), (0.2, 1, 0), (0, 0, 1), (0.1, 0.3, 1)])
def test_the_error_over_seeds_and_sentences(of_seeds: float, of_items: float, of_answers: float) -> None:
    """Oracle: the spread of 300 simulated estimates, and how often their intervals have the truth."""
    generator = np.random.default_rng(0)
    effects = []
    for _ in range(300):
        items = of_items * generator.normal(size=(1, 40))
        first, second = (
            of_seeds * generator.normal(size=(5, 1)) + items + of_answers * generator.normal(size=(5, 40))
            for _ in range(2)
        )
        effects.append(over_seeds_and_items([(1, first), (-1, second)]))
    spread = np.std([effect.mean for effect in effects])
    assert math.sqrt(np.mean([effect.error**2 for effect in effects])) == pytest.approx(spread, rel=0.15)
    inside = np.mean([effect.interval[0] <= 0 <= effect.interval[1] for effect in effects])
    assert 0.92 <= inside <= 0.99


# Tables


def result(
    *overrides: str, value: float | None = 0.8, sha256: str = SPEECHES, status: str = "finished", **more: Any
) -> dict[str, Any]:
    """A `result.json` as a run leaves it; `value` is its main figure."""
    seeds = [word for word in overrides if word.startswith("seed=")]
    cfg = compose(*(word for word in overrides if word not in seeds))  # which is fast a second time
    cfg.seed = int(seeds[-1].removeprefix("seed=")) if seeds else cfg.seed
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    task = config["task"]["name"]
    if task == "classify":
        metrics = {"test_accuracy": value, "test_accuracy_in_train": value, "test_accuracy_not_in_train": value}
    else:
        names = ("test_perplexity_mean", "test_perplexity_obama", "test_perplexity_wbush", "test_perplexity_hbush")
        metrics = {name: value for name in names}
    about = {"status": status, "task": task, "config": config, "seed": config["seed"], "overrides": list(overrides)}
    if status in ("failed", "killed"):
        return {**about, "error": "it broke", "commit": "c" * 40}
    counts = {"train": 2092, "test": 750, "test_in_train": 551}
    corpus = {"name": "speeches", "sha256": sha256, "classes": ["obama", "wbush", "hbush"], "counts": counts}
    curve = [{"step": 131 * k, **metrics} for k in range(1, 16)]
    own = {"metrics": metrics, "curve": curve, "corpus": corpus, "parameters": {"total": 7}, "seconds": 2.5}
    return {**about, **own, "commit": "c" * 40, "versions": {"torch": "2", "python": "3", "lightning": "2"}, **more}


def put(folder: Path, *results: dict[str, Any]) -> Path:
    for k, content in enumerate(results):
        (folder / str(k)).mkdir(parents=True)
        write_result(folder / str(k), content)
    return folder


def markdown_of(path: Path) -> str:
    """The text of a report, without the spaces that align its columns."""
    return re.sub(" +", " ", path.read_text(encoding="utf-8"))


def tables_of(folder: Path) -> list:
    return build_tables(read_runs([folder])[0])[0]


def test_rows_hold_seeds_and_are_named_by_what_differs(tmp_path: Path) -> None:
    runs = [result(f"model={model}", f"seed={seed}") for model in ("rope", "nope") for seed in (0, 1)]
    runs += [result("pattern=window", f"pattern.window={w}", "model=rope") for w in (3, 5)]
    runs += [result("pattern=bigbird", "model=rope", f"seed={seed}") for seed in (0, 1)]  # its links follow the seed
    (table,) = tables_of(put(tmp_path, *runs))
    assert {row.label: len(row.runs) for row in table.rows} == {
        "RoPE, full attention": 2,
        "no positions, full attention": 2,
        "RoPE, window 3": 1,
        "RoPE, window 5": 1,
        "RoPE, BigBird": 2,
    }


@pytest.mark.parametrize(
    "other",
    [
        {"sha256": "b" * 64},
        {"overrides": ("protocol=clean",)},
        {"overrides": ("protocol.vocabulary=task",)},
        {"overrides": ("study=mine",)},
        {"overrides": ("task=lm",)},
    ],
)
def test_other_corpora_protocols_studies_and_tasks_never_meet(other: dict[str, Any], tmp_path: Path) -> None:
    overrides = other.pop("overrides", ())
    tables = tables_of(put(tmp_path, result(value=0.2), result(*overrides, "seed=1", value=0.8, **other)))
    assert [len(row.runs) for table in tables for row in table.rows] == [1, 1]
    assert len({table.name for table in tables}) == 2
    write_report([tmp_path], tmp_path / "out", plots=False)
    assert "50.0 ±" not in markdown_of(tmp_path / "out" / "report.md")


def test_what_failed_diverged_or_is_missing_is_shown(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", f"seed={seed}", value=400.0 + seed) for seed in range(5)]
    runs += [result("experiment=marsol_table1_alibi", "seed=0", value=300.0)]
    runs += [result("experiment=marsol_table1_alibi", "seed=1", value=None, status="diverged")]
    runs += [result("experiment=marsol_table1_alibi", "seed=2", status="failed")]
    runs += [result("experiment=marsol_table1_alibi", "seed=4", status="killed")]
    put(tmp_path, *runs)
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "run.json").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text('{"status": "fini')
    (tmp_path / "again").mkdir()
    write_result(tmp_path / "again", runs[0])
    (table,) = write_report([tmp_path], tmp_path / "out", plots=False)
    full, alibi = table.rows
    assert (full.label, alibi.label) == ("full attention", "ALiBi")
    assert full.state == "5"
    assert alibi.state == "1; diverged: seed 1; failed: seed 2; killed: seed 4; missing: seed 3"
    assert list(alibi.values("test_perplexity_mean").values()) == [300]
    assert table.expected == ["window 5", "window 3", "block sparse"]
    text = markdown_of(tmp_path / "out" / "report.md")
    for said in (
        "| window 5 | not run |",
        "diverged: seed 1; failed: seed 2; killed: seed 4; missing: seed 3",
        "Failed: ALiBi, seed 2: it broke",
        "Killed: ALiBi, seed 4: it broke",
        "stopped has no result",
        f"{Path('cut') / 'result.json'} is damaged: ",
        " repeats ",
    ):
        assert said in text, said


def test_runs_that_failed_before_they_read_a_corpus_are_different_ones(tmp_path: Path) -> None:
    """Oracle: three commands whose corpus differs, and one of them again."""
    runs = [result("corpus=speeches", f"corpus.classes=[{own}]", status="failed") for own in ("a", "b", "c", "c")]
    (table,), remarks = build_tables(read_runs([put(tmp_path, *runs)])[0])
    assert [len(row.runs) for row in table.rows] == [3] and len(remarks) == 1


def test_the_reference_of_a_study_comes_first(tmp_path: Path) -> None:
    runs = [
        result("experiment=positions_lm", f"model={model}", f"seed={k}")
        for model in ("alibi", "rope", "nope")
        for k in (0, 1)
    ]
    (table,) = tables_of(put(tmp_path, *runs))
    assert [row.label for row in table.rows] == ["no positions", "ALiBi", "RoPE"]


def test_published_and_our_values_are_chosen_in_the_same_way(tmp_path: Path) -> None:
    runs = []
    for seed, (first, last) in enumerate([(390.0, 420.0), (400.0, 430.0), (410.0, 440.0)]):
        run = result("experiment=marsol_table1_full", f"seed={seed}", value=last)
        run["curve"] = [
            {"step": step, **dict.fromkeys(run["metrics"], value)} for step, value in ((400, first), (500, last))
        ]
        runs.append(run)
    write_report([put(tmp_path, *runs)], tmp_path / "out", plots=False)
    with open(tmp_path / "out" / "tables" / "published.csv", encoding="utf-8") as file:
        rows = {(row["metric"], row["chosen"]): row for row in csv.DictReader(file)}
    best, last = rows["test_perplexity_obama", "best"], rows["test_perplexity_obama", "last"]
    assert (float(best["published"]), float(best["mean"])) == (395.51, 400)
    assert (float(last["published"]), float(last["mean"])) == (406.80, 430)
    # sd 10, t(2) = 4.302653: the range of one run is the mean ± 49.7
    assert (best["inside_prediction_interval"], last["inside_prediction_interval"]) == ("True", "True")
    assert float(last["prediction_low_95"]) == pytest.approx(430 - 4.302653 * 10 * math.sqrt(4 / 3))


def test_nothing_published_is_left_out(tmp_path: Path) -> None:
    runs = [result("experiment=kulkarni_part2", f"seed={seed}", value=400.0 + seed) for seed in (0, 1)]
    write_report([put(tmp_path, *runs)], tmp_path / "out", plots=False)
    with open(tmp_path / "out" / "tables" / "published.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 6  # every line of the table and every column
    assert {row["n"] for row in rows if row["metric"] == "train_perplexity_obama"} == {"0"}
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "| train, obama | Kulkarni, Part 2, perplexity results (last) | 172.0 | not measured |" in text
    assert "1 of 3 published final results on test fall inside" in text  # 398.97 of 400.5 ± 11


@pytest.mark.parametrize(
    "change",
    [{"sha256": "b" * 64}, {"protocol": "protocol.remove_test_sentences=true"}, {"protocol": "protocol=clean"}],
)
def test_theirs_does_not_stand_beside_another_corpus_or_protocol(change: dict[str, str], tmp_path: Path) -> None:
    own = [change.pop("protocol")] if "protocol" in change else []
    runs = [result("experiment=marsol_table1_full", f"seed={k}", *own, value=400.0 + k, **change) for k in (0, 1)]
    write_report([put(tmp_path, *runs)], tmp_path / "out")
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "full attention" in text and "438.4" not in text
    assert (
        "Comparison with published results" not in text and "published" not in text.split("*Mean over seeds")[1][:80]
    )


@pytest.mark.parametrize(
    ("sha256", "theirs"), [(SPEECHES, " (that of the reports: 5,755)"), ("b" * 64, ""), (None, None)]
)
def test_the_vocabulary_is_disclosed_beside_that_of_the_reports(
    sha256: str | None, theirs: str | None, tmp_path: Path
) -> None:
    run = result("task=lm", sha256=sha256 or SPEECHES)
    tests = {"obama": {"tokens": 300, "unknown_tokens": 9}, "hbush": {"tokens": 100, "unknown_tokens": 1}}
    run["corpus"]["counts"] |= {"vocabulary": 5634, "tests": tests if sha256 else {"obama": {"tokens": 300}}}
    write_report([put(tmp_path, run)], tmp_path / "out", plots=False)
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    sentence = f"The vocabulary has 5,634 entries{theirs}; 2.50 % of the test words are unknown."
    assert (sentence in text) if sha256 else ("The vocabulary has" not in text)  # an old result did not count them


def test_columns_of_known_words(tmp_path: Path) -> None:
    run = result("task=lm", value=400.0)
    run["metrics"] |= {"test_known_perplexity_mean": 341.26, "test_unknown_rate_mean": 0.0206}
    run["report"] = {"columns": [*run["metrics"]]}
    write_report([put(tmp_path, run)], tmp_path / "out", plots=False)
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "| known words, mean | unknown words, % |" in text and "| 341.3 | 2.06 |" in text


def test_an_infinite_perplexity_is_no_finished_run(tmp_path: Path) -> None:
    runs = [result("task=lm", f"seed={seed}", value=400.0 if seed else None) for seed in range(3)]
    (table,) = write_report([put(tmp_path, *runs)], tmp_path / "out")
    assert table.rows[0].state == "2; diverged: seed 0"
    everything = [result("task=lm", f"seed={seed}", value=None) for seed in range(2)]
    write_report([put(tmp_path / "all", *everything)], tmp_path / "out2")
    assert "0; diverged: seed 0, 1" in markdown_of(tmp_path / "out2" / "report.md")


def test_a_gap_in_a_curve_is_passed_over(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", f"seed={k}", value=400.0 + k) for k in (0, 1)]
    runs[0]["curve"][0] = {"step": 131, **dict.fromkeys(runs[0]["metrics"])}
    (table,) = write_report([put(tmp_path, *runs)], tmp_path / "out")
    assert table.rows[0].best_values("test_perplexity_mean") == {0: 400, 1: 401}
    assert 131 not in table.rows[0].curve("test_perplexity_mean")


def test_the_best_mean_is_the_mean_of_the_bests(tmp_path: Path) -> None:
    """As Marsol's table: his 438.37 is the mean of the three in its row, each the best of its own text."""
    run = result("experiment=marsol_table1_full", value=400.0)
    names = ("obama", "wbush", "hbush")
    columns = {"obama": (1, 9), "wbush": (8, 2), "hbush": (7, 6)}
    run["curve"] = [{"step": k, **{f"test_perplexity_{n}": columns[n][k] for n in names}} for k in (0, 1)]
    (table,) = tables_of(put(tmp_path, run))
    assert table.rows[0].best_values("test_perplexity_mean") == {0: 3}


def test_a_result_of_an_older_version_is_named_and_left(tmp_path: Path) -> None:
    old = result(value=0.5)
    del old["curve"]
    older = result("seed=1")
    del older["metrics"]
    write_report([put(tmp_path, old, older)], tmp_path / "out")
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "is damaged: lacks 'metrics'" in text and "50.0" in text


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"status": "finished", "task": "lm", "seed": 0, "config": {}, "metrics": null}']
)
def test_what_is_no_result_is_named_also_where_there_is_no_other(content: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text(content)
    with pytest.raises(UserError, match=r"No readable result\.json under .* is damaged"):
        write_report([tmp_path], tmp_path / "out")


def test_what_is_of_another_time_does_not_stay(tmp_path: Path) -> None:
    write_report([put(tmp_path / "a", *(result(f"model={name}") for name in ("nope", "rope")))], tmp_path / "out")
    assert (tmp_path / "out" / "tables" / "differences.csv").exists()
    write_report([put(tmp_path / "b", result("study=other"))], tmp_path / "out")
    assert {path.name.split("_")[0] for path in (tmp_path / "out" / "figures").iterdir()} == {"other"}
    assert not (tmp_path / "out" / "tables" / "differences.csv").exists()  # one row: nothing to compare


def test_an_epoch_is_a_pass_over_the_rows(tmp_path: Path) -> None:
    """2092 rows, 16 a batch, two batches a step: 131 batches, 66 steps; and half of them: 65 batches, 33 steps."""
    plain = ("trainer.accumulate_grad_batches=2",)
    runs = [
        result(*plain),
        result(*plain, "trainer.limit_train_batches=0.5"),
        result("trainer.limit_train_batches=7"),
    ]
    (table,) = tables_of(put(tmp_path, *runs))
    assert sorted(row.runs[0].steps_per_epoch for row in table.rows) == [7, 33, 66]


def test_longer_contexts_tell_untested_from_impossible(tmp_path: Path) -> None:
    own = ("task=lm", "task.lengths=[64,128]")
    able = result(*own, "model=nope", value=400.0)
    able["metrics"] |= {f"test_length_{length}_perplexity_mean": 500.0 for length in (64, 128)}
    runs = [able, result(*own, "model=learned", value=410.0), result("task=lm", "block_size=64", value=380.0)]
    write_report([put(tmp_path, *runs)], tmp_path / "out")
    text = markdown_of(tmp_path / "out" / "report.md")
    cells = {
        line.split(" | ")[0]: line.split(" | ")[1:]
        for line in text.splitlines()
        if "| 400.0 |" in line or "run |" in line or "not tested" in line
    }
    rows = list(cells.values())
    assert ["32", "400.0", "500.0", "500.0 |"] in rows
    assert ["32", "410.0", "cannot run", "cannot run |"] in rows
    assert ["64", "not tested", "380.0", "not tested |"] in rows


def test_labels_of_many_settings_leave_out_the_usual_ones_and_say_what_a_row_is_without(tmp_path: Path) -> None:
    """Oracle: written by hand. The first command has no setting that another one has not."""
    usual = ("recipe=muon", "layers=1", "width=32", "ff=48", "trainer.max_epochs=20", "task.unknown_rate=0.5")
    reports = ("layers=2", "width=64", "ff=100", "trainer.max_epochs=15", "dropout=0")
    others = ((*usual, "dropout=0.3"), usual[:-1], (*usual, "pattern=window"), (*usual, "recipe.label_smoothing=0.2"))
    runs = [result(), result(*reports), result(*usual), *(result(*words) for words in others)]
    (table,) = tables_of(put(tmp_path / "many", *runs))
    labels = [row.label for row in sorted(table.rows, key=lambda row: int(row.runs[0].folder.name))]
    assert labels[2:5] == ["the usual settings", "dropout 0.3", "without unknown rate 0.5"], labels
    assert labels[5:] == ["window", "label smoothing 0.2"], labels
    assert "unknown rate 0.5" in table.usual and "layers 1" in table.usual and "dropout 0.1" in table.usual
    assert labels[1].startswith("width 64, layers 2") and labels[1].endswith("without unknown rate 0.5"), labels
    assert len({*labels}) == 7 and table.reference.label == "the usual settings"
    own = [result(*usual, "recipe.lr=1e-3", f"model={name}", f"heads={n}") for n, name in ((2, "rope"), (4, "alibi"))]
    own += [result("model=nope", "layers=2", "dropout=0")]
    (table,) = tables_of(put(tmp_path / "models", *own))  # what is under study differs in each row
    assert [{"RoPE", "ALiBi", "no positions"} & {*row.label.split(", ")} for row in table.rows] == [
        {word} for word in ("ALiBi", "no positions", "RoPE")
    ], [row.label for row in table.rows]
    part = [
        result(*usual, "model=rope", *more) for more in (["model.fraction=0.5"], ["model.fraction=0.5", "ff=64"], [])
    ]
    (table,) = tables_of(put(tmp_path / "options", *part, result(*reports)))
    assert sum("1 of each head rotated" in row.label for row in table.rows) == 1, [row.label for row in table.rows]
    base = [result(*more) for more in (["model=alibi"], [], ["width=32"], ["dropout=0"])]
    (table,) = tables_of(put(tmp_path / "short", *base))
    assert not table.usual and table.reference.name == "model=sinusoidal width=64 dropout=0.1"
    (table,) = tables_of(put(tmp_path / "few", result("width=32"), result("width=64")))
    assert table.usual == "" and {row.label for row in table.rows} == {"width 32", "width 64"}


def test_a_seed_of_its_own_makes_its_own_row_and_labels_stay_unlike(tmp_path: Path) -> None:
    own = [result("pattern=bigbird", "pattern.seed=0", f"seed={seed}") for seed in range(3)]
    (table,) = tables_of(put(tmp_path / "a", *own))
    assert [row.state for row in table.rows] == ["3"]
    (table,) = tables_of(put(tmp_path / "b", result(), result("+trainer.max_time=00:01:00:00")))
    assert sorted(row.label for row in table.rows) == [
        "max time 00:01:00:00",
        "sinusoidal positions, full attention",
    ]


def test_a_whole_number_is_the_same_setting_as_int_and_float(tmp_path: Path) -> None:
    (table,) = tables_of(put(tmp_path, result("model=alibi"), result("model=alibi", "model.scale=1", "seed=1")))
    assert [row.state for row in table.rows] == ["2"]


def test_a_corpus_is_what_it_holds_and_not_how_it_was_asked_for(tmp_path: Path) -> None:
    (table,) = tables_of(put(tmp_path, result("corpus=auto"), result("corpus=speeches", "seed=1")))
    assert [row.state for row in table.rows] == ["2"]


def test_a_run_that_failed_once_and_finished_elsewhere_is_finished(tmp_path: Path) -> None:
    (table,) = tables_of(put(tmp_path, result(value=0.7), result("seed=1"), result(status="failed")))
    assert [row.state for row in table.rows] == ["2"]


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    write_report([put(tmp_path / "in", result("study=../../a b"))], tmp_path / "out" / "deep")
    assert not list(tmp_path.glob("*.png")) and not list((tmp_path / "out").glob("*.png"))
    assert len(list((tmp_path / "out" / "deep" / "figures").glob("*.png"))) == 2


def test_baselines_stand_beside_their_own_corpus_protocol_and_task_alone(tmp_path: Path) -> None:
    counting = {**result("task=lm", value=285.0), "baseline": {"name": "kneser_ney_5"}, "seed": None}
    runs = [result("task=lm", value=400.0), result(), result("task=lm", sha256="b" * 64, value=400.0), counting]
    runs.append(counting)  # there twice
    bags = {"baseline": {"name": "tfidf_logistic"}, "seed": None}
    runs.append({**result("block_size=64"), **bags})  # sentences cut elsewhere
    more_text = {**result("task=lm", "task.extra_text=true", value=265.0), "baseline": {"name": "kneser_ney_5"}}
    runs.append({key: value for key, value in more_text.items() if key != "report"})  # which baselines do not have
    runs[0]["report"] = {"baseline_keys": []}  # of a run before there were these keys
    tables = tables_of(put(tmp_path, *runs))
    beside = {(table.task, table.sha256[0]): [run.metrics for run in table.baselines] for table in tables}
    first = SPEECHES[0]
    assert beside == {("lm", first): [counting["metrics"]], ("lm", "b"): [], ("classify", first): []}


def test_every_cell_can_be_made_again(tmp_path: Path) -> None:
    runs = [result("experiment=singhal_table3", f"seed={seed}") for seed in (0, 1)]
    write_report([put(tmp_path, *runs)], tmp_path / "out", plots=False)
    text = markdown_of(tmp_path / "out" / "report.md")
    assert f"| `python -m speechformer.train experiment=singhal_table3` | 0, 1 | {'c' * 10} |" in text


def test_the_page_needs_no_other_file_and_every_picture_is_there(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", f"seed={seed}", value=400.0 + seed) for seed in (0, 1)]
    lengths = {f"test_length_{length}_perplexity_mean": 500.0 for length in (64, 128)}
    longer = [result("task=lm", "task.lengths=[64,128]", f"seed={seed}", value=400.0) for seed in (0, 1)]
    for run in longer:
        run["metrics"] |= lengths
    write_report([put(tmp_path, *runs, *longer)], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    pictures = sorted((tmp_path / "out" / "figures").glob("*.png"))
    kinds = [path.stem.rpartition("_")[2] for path in pictures]
    assert sorted(kinds) == ["curves", "curves", "dots", "dots", "lengths"]
    assert page.count("data:image/png;base64,") == len(pictures) == 5
    text = markdown_of(tmp_path / "out" / "report.md")
    assert all(f"(figures/{path.name})" in text for path in pictures)
    assert "| trained on, tokens | tested on 32 | tested on 64 | tested on 128 |" in text


def test_a_variant_looks_the_same_everywhere_and_unlike_its_neighbours() -> None:
    """A colour is a function of the settings alone; rows of one colour in one table differ in line and marker."""
    values = {
        "model": [
            "nope",
            "sinusoidal",
            "learned",
            "relative",
            "rope",
            "alibi",
            "xpos",
            "kerple",
            "fire",
            "forgetting",
        ],
        "pattern": ["full", "window", "block", "strided", "dilated", "global", "bigbird", "sinks"],
        "model.scale": ["0.25", "0.5", "1", "1.1", "2", "4"],
    }
    for key, choices in values.items():
        base = ["model=alibi"] if key == "model.scale" else []
        rows = [Row(name, settings_of(*base, f"{key}={name}"), []) for name in choices]
        colours = [style.colour for style in styles(rows)]
        assert len(set(colours)) == len(choices), key
        assert [style.colour for style in styles(rows[::-1])] == colours[::-1]
    alike = [Row(lr, settings_of(f"recipe.lr={lr}"), []) for lr in ("1e-4", "1e-3", "1e-2")]
    of_alike = styles(alike)
    assert len({style.colour for style in of_alike}) == 1 and len(set(of_alike)) == 3
    assert len({style[1:] for style in of_alike}) == 3


def test_a_hundred_times_the_runs_take_less_than_four_times_as_long_and_no_torch(tmp_path: Path) -> None:
    models = ("nope", "sinusoidal", "learned", "relative", "rope")
    kinds = [result("task=lm", f"model={model}", f"study=s{k}") for model in models for k in range(10)]
    for name, some, seeds in (("many", kinds, 10), ("few", kinds[:1], 5)):
        for k, kind in enumerate(some):
            for seed in range(seeds):
                folder = tmp_path / name / f"{k}_{seed}"
                folder.mkdir(parents=True)
                run = {**kind, "config": {**kind["config"], "seed": seed}, "seed": seed}
                (folder / "result.json").write_text(json.dumps(run))
    program = (
        "import sys; from pathlib import Path; from speechformer.report.__main__ import write_report;"
        "tables = write_report([Path(sys.argv[1])], Path(sys.argv[1]) / 'out', plots=False);"
        "assert sum(len(row.runs) for table in tables for row in table.rows) == int(sys.argv[2]);"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )

    def seconds(name: str, runs: int) -> float:
        return processor_seconds("-c", program, tmp_path / name, str(runs))

    # Half of the time is that of imports; quadratic work would take far more.
    assert any(seconds("many", 500) < 4 * seconds("few", 5) for _ in range(3))


@pytest.mark.parametrize("content", [None, {}])
def test_a_folder_without_runs_is_answered_in_one_sentence(content: dict | None, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    if content is not None:
        folder.mkdir()
    with pytest.raises(UserError, match="no such folder" if content is None else r"No readable result\.json under"):
        write_report([folder], tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "speechformer.report", folder, "--output", tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_committed_report_is_of_every_study() -> None:
    reference = CONF.parent / "outputs" / "reference"
    if not reference.is_dir():
        pytest.skip("not a checkout")
    folders = (reference, *(reference / name for name in ("translation", "bottleneck", "contexts")))
    reports = {folder: folder / "report.md" for folder in folders}
    texts = {folder: file.read_text(encoding="utf-8") for folder, file in reports.items() if file.is_file()}
    for name, study in published.content()["studies"].items():
        assert any(f"## {study['title']}" in text for text in texts.values()), name
    for folder, text in texts.items():
        for path in re.findall(r"!\[.*?\]\((.*?)\)", text):
            assert (folder / path).is_file(), path


def translated(model: str, seed: int, bleu: float, **more: Any) -> dict[str, Any]:
    """The result of a translation: BLEU falls by 1 from one length to the next."""
    config = OmegaConf.to_container(
        compose("task=translate", "corpus=sample", f"model={model}", f"seed={seed}"), resolve=True
    )
    lengths = {"1-10": 300, "11-20": 150, "21-30": 50, "31+": 0}
    metrics = {"test_bleu": bleu, "test_bleu_interval": 0.8, "test_chrf": 2 * bleu, "test_length_ratio": 0.955}
    metrics |= {"test_exact": 0.25, "validation_bleu": bleu - 1, "validation_perplexity": 9.0}
    for k, (name, count) in enumerate(lengths.items()):
        if count:
            metrics |= {f"test_bleu_at_{name}": bleu - k, f"test_chrf_at_{name}": 2 * bleu - k}
            metrics |= {f"test_length_ratio_at_{name}": 1.0, f"test_exact_at_{name}": 0.5 - 0.1 * k}
            metrics |= {f"test_bleu_interval_at_{name}": 0.5, f"test_chrf_interval_at_{name}": 0.5}
    counts = {"train": 9000, "test": 500, "test_in_train": 3, "test_by_length": lengths}
    curve = [{"step": step, "validation_bleu": bleu - 10 / step, "validation_perplexity": 9.0} for step in (5, 10)]
    corpus = {"name": "sample", "sha256": "5" * 64, "classes": [], "languages": ["en", "fr"], "counts": counts}
    about = {"status": "finished", "task": "translate", "metrics": metrics, "curve": curve, "corpus": corpus}
    about |= {"config": config, "seed": seed, "parameters": {"total": 1000}, "seconds": 60.0, "versions": {}}
    return {**about, "overrides": [], "commit": "c" * 40, "scoring": {"bleu": "nrefs:1|tok:13a"}, **more}


def test_translations_are_shown_by_the_length_of_the_source(tmp_path: Path) -> None:
    """Oracle: means and deviations of the figures put in, by hand; more is better."""
    runs = [translated("rope", seed, bleu) for seed, bleu in enumerate((20.0, 22.0, 24.0))]
    floor = translated("rope", 0, 1.2, baseline={"name": "untranslated"})
    folder = put(tmp_path / "in", *runs, translated("nope", 0, 10.0), floor)
    (table,) = write_report([folder], tmp_path / "out")
    assert table.metric == "test_bleu" and table.source_lengths() == {"1-10": 300, "11-20": 150, "21-30": 50}
    (row,) = (row for row in table.rows if row.label.startswith("RoPE"))
    assert row.best_values("validation_bleu") == {0: 19.0, 1: 21.0, 2: 23.0}
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "Trained on 9,000 pairs, tested on 500" in text and "bleu: <code>nrefs:1&#124;tok:13a</code>" in text
    lines = [line for line in text.splitlines() if line.startswith("| RoPE")]
    assert (
        "| 22.0 ± 2.0<br>[17.0, 27.0] | 0.800 ± 0.000" in lines[0]
        and "0.955 ± 0.000" in lines[0]
        and "25.0" in lines[0]
    )
    by_length = next(line for line in lines if "chrF" in line)
    assert "22.0 ± 2.0<br>chrF 44.0 ± 4.0<br>ratio 1.00 ± 0.00<br>exact % 50.0 ± 0.0" in by_length
    assert "20.0 ± 2.0<br>chrF 42.0 ± 4.0" in by_length and "| 1-10 words (300) | 11-20 words (150) |" in text
    assert "| *untranslated source* | 1.20<br>chrF 2.40" in text
    drawn = {path.stem.rpartition("_")[2] for path in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {"dots", "curves", "sources", "differences"}


def test_directions_and_rules_of_cleaning_never_meet(tmp_path: Path) -> None:
    runs = [translated("rope", 0, 20.0), translated("rope", 1, 21.0), translated("rope", 2, 22.0)]
    runs[1]["corpus"] = {**runs[1]["corpus"], "languages": ["fr", "en"]}
    runs[2]["corpus"] = {**runs[2]["corpus"], "counts": {**runs[2]["corpus"]["counts"], "cleaned": {"markup": 5}}}
    runs.append(translated("rope", 3, 23.0))
    runs[3]["corpus"] = {
        **runs[3]["corpus"],
        "counts": {**runs[3]["corpus"]["counts"], "removed_from_validation": 11},
    }
    tables = write_report([put(tmp_path / "in", *runs)], tmp_path / "out")
    assert len(tables) == 4 and len({table.name for table in tables}) == 4
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "Corpus sample, fr to en, sha256 5555" in text and "Corpus sample, en to fr, sha256 5555" in text


# Results that describe themselves, and those from before they did


def test_the_description_in_a_result_decides_what_is_shown(tmp_path: Path) -> None:
    """A task that the report has never heard of; a failed run and a baseline take the description of the others."""
    description = {
        "metric": "test_error",
        "higher_is_better": False,
        "columns": ["test_error", "test_latency"],
        "compare": ["test_latency"],
        "x_axis": "epoch",
        "note": "Lower is better.",
        "unit": "recordings",
    }
    runs = []
    for seed, model in enumerate(("rope", "rope", "nope", "nope")):
        run = {**result(f"model={model}", f"seed={seed % 2}"), "task": "listen", "report": description}
        run["metrics"] = {"test_error": 20.0 + seed, "test_latency": 3.0, "hidden": 1.0}
        run["curve"] = [{"step": 131, "test_latency": 4.0}]
        runs.append(run)
    runs.append({**result("model=nope", "seed=2", status="failed"), "task": "listen"})
    for name, error in (("silence", 60.0), ("hmm", 30.0)):
        baseline = {**result(), "task": "listen", "baseline": {"name": name}, "seed": None}
        runs.append({**baseline, "metrics": {"test_error": error}})
    (table,) = write_report([put(tmp_path / "in", *runs)], tmp_path / "out")
    assert table.metric == "test_error"
    text = markdown_of(tmp_path / "out" / "report.md")
    assert "| | runs | test, error | test, latency | parameters | seconds |" in text and "hidden" not in text
    assert "| RoPE | 2; missing: seed 2 | 20.5 ± 0.7" in text and "| *silence* | exact | 60.0 | – |" in text
    assert "Trained on 2,092 recordings" in text and "Lower is better." in text
    assert "| RoPE − no positions | test, latency | 2 | 0.0 |" in text
    with open(tmp_path / "out" / "tables" / "curves.csv", encoding="utf-8") as file:
        assert {(row["x_axis"], row["x"]) for row in csv.DictReader(file)} == {("epoch", "1")}


def old(result: dict[str, Any]) -> dict[str, Any]:
    """The same result as a version before 0.2 wrote it."""
    text = json.dumps(result).replace("architecture.", "core.").replace('"architecture":', '"core":')
    text = text.replace("accuracy_not_in_train", "accuracy_unseen").replace("accuracy_in_train", "accuracy_seen")
    text = text.replace('"test_in_train"', '"test_seen_in_train"').replace('"vocab_size": 1000', '"size": 1000')
    return json.loads(text.replace('"average_checkpoints"', '"average"'))


def test_old_results_are_reported_as_new_ones(tmp_path: Path) -> None:
    runs = [result("experiment=kulkarni_part1", "architecture.norm=post", f"seed={k}") for k in (0, 1)]
    runs += [result("experiment=marsol_table1_full", f"seed={k}", value=400.0 + k) for k in (0, 1)]
    runs += [translated("rope", seed, 20.0 + seed) for seed in (0, 1)]
    olds = [old(run) for run in runs]
    assert all("core" in run["config"] for run in olds) and "test_accuracy_seen" in olds[0]["metrics"]
    assert olds[-1]["config"]["task"].keys() >= {"size", "average"}
    for name, content in (("new", runs), ("old", olds)):
        write_report([put(tmp_path / name, *content)], tmp_path / f"out_{name}")
    pages = [(tmp_path / f"out_{name}" / "report.md").read_text(encoding="utf-8") for name in ("new", "old")]
    assert pages[0] == pages[1] and "train experiment=kulkarni_part1 architecture.norm=post`" in pages[1]
    mixed, _ = build_tables(read_runs([put(tmp_path / "mixed", runs[0], olds[1])])[0])
    assert [row.state for table in mixed for row in table.rows] == ["2"]


# Results as a table


def test_results_are_one_row_for_each_run(tmp_path: Path) -> None:
    runs = [result("model=rope", "pattern=window", "pattern.window=3", value=0.5)]
    runs += [result("model=nope", "seed=1", "architecture.norm=post"), result("task=lm", status="failed")]
    runs += [{**result(), "baseline": {"name": "majority"}, "seed": None, "seconds": None}]
    frame = read_results(str(put(tmp_path / "a", *runs[:2])), put(tmp_path / "b", *runs[2:]))
    about = ["status", "task", "model", "pattern", "protocol", "corpus", "seed"]
    metrics = ["test_accuracy", "test_accuracy_in_train", "test_accuracy_not_in_train"]
    assert list(frame)[:10] == about + metrics and list(frame)[-2:] == ["seconds", "folder"]
    assert frame.loc[0, about].tolist() == ["finished", "classify", "rope", "window", "paper", "speeches", 0]
    assert frame["model"].tolist() == ["rope", "nope", "sinusoidal", "majority"]
    assert frame["status"].tolist() == ["finished", "finished", "failed", "finished"]
    assert frame["test_accuracy"].tolist()[:2] == [0.5, 0.8] and math.isnan(frame["test_accuracy"][2])
    assert frame["architecture.norm"].tolist() == ["pre", "post", "pre", "pre"]
    assert frame["pattern.window"].tolist()[0] == 3 and math.isnan(frame["pattern.window"][1])
    assert frame["seed"].isna().tolist() == [False, False, False, True]
    assert "width" not in frame and "model.name" not in frame
    assert frame["folder"].tolist() == [str(tmp_path / place) for place in ("a/0", "a/1", "b/0", "b/1")]
    assert frame.groupby("model")["test_accuracy"].mean()["nope"] == 0.8


def test_results_of_a_missing_folder_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_results(tmp_path / "missing")


# What somebody else wrote into a result

HARMFUL = [
    "</code></td><script>document.title='executed'</script>",
    "<img src=x onerror=document.title='executed'>",
    "[x](javascript:document.title='executed')",
    "![x](http://example.org/x.png)",
    "a|b `c|` ``d`` \\| *e* __f__ ~~g~~ &lt;",
    "<!-- x --> <![CDATA[ <?php {{x}} [a]: http://x",
    "$x_{\\frac$",
    "x" * 400,
]
ELEMENTS = "a body br button code details div em figcaption figure h1 h2 h3 head html img li main meta nav p script "
ELEMENTS += "strong style summary table tbody td th thead title tr ul"


class Elements(html.parser.HTMLParser):
    """What a page holds that the report does not write, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[Any] = []
        self.text = ""
        self.counts = collections.Counter[str]()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        own = {"href": "#", "src": "data:image/png;base64,"}
        self.foreign += [tag] * (tag not in ELEMENTS.split())
        for name, value in attributes:
            if name.startswith("on") or not (value or "").startswith(own.get(name, "")):
                self.foreign.append((name, value))

    def handle_data(self, data: str) -> None:
        self.text += data


@functools.cache
def five_runs() -> str:
    runs = [result("model=nope"), result("model=nope", "seed=1"), result("model=rope")]
    return json.dumps([*runs, result("model=nope", "seed=2", status="failed"), {**result(), "seed": None}])


def poisoned(text: str) -> list[dict[str, Any]]:
    """Results with a text everywhere that a command line, a file name or somebody's editor can put it."""
    runs = json.loads(five_runs())
    runs[-1]["baseline"] = {"name": text}
    for run in runs:
        run["config"] |= {"study": text, "note": text if run["config"]["model"]["name"] == "rope" else "-"}
        run |= {"error": text, "commit": text, "overrides": [text], "versions": {"torch": text}}
        if "corpus" in run:
            run["corpus"] |= {"name": text, "languages": [text, "b"]}
            run |= {"scoring": {text: text}, "report": {"note": text, "unit": text, "x_axis": text}}
            run["metrics"][f"test_accuracy_of_{text}"] = 0.5
            run["report"]["columns"] = ["test_accuracy", f"test_accuracy_of_{text}"]
    return runs


def test_text_from_outside_is_text(tmp_path: Path) -> None:
    """Oracle: Python's HTML parser finds the elements that the report writes, and each text as it was."""
    runs = [run for text in HARMFUL for run in poisoned(text)]
    tables = write_report([put(tmp_path / "in", *runs)], tmp_path / "out", plots=False)
    page = Elements()
    page.feed((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert page.foreign == [] and page.counts["script"] == 1
    for text in HARMFUL:
        assert page.text.count(text) >= 15, text
    document = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    headings = re.findall("^## .*", document, re.MULTILINE)
    assert headings[:2] == ["## What was found", "## Tables"] and len(headings) - 2 == len(tables) == len(HARMFUL)


def test_a_figure_draws_text_from_outside_as_it_is(tmp_path: Path) -> None:
    runs = [run for text in HARMFUL[-2:] for run in poisoned(text)]
    write_report([put(tmp_path / "in", *runs)], tmp_path / "out")
    names = [path.name for path in (tmp_path / "out" / "figures").glob("*.png")]
    assert len(names) == 6 and max(map(len, names)) < 120
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 6


def test_no_control_character_reaches_the_report(tmp_path: Path) -> None:
    write_report(
        [put(tmp_path / "in", *poisoned("a\x1b[31m\u202eb\x9b\x02\r\n\n# c"))], tmp_path / "out", plots=False
    )
    for name in ("report.md", "report.html"):
        text = html.unescape((tmp_path / "out" / name).read_text(encoding="utf-8"))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text) and "a[31mb # c" in text


def test_a_browser_executes_nothing_of_a_report(browser: Any, tmp_path: Path) -> None:
    runs = [run for text in HARMFUL for run in poisoned(text)]
    write_report([put(tmp_path / "in", *runs)], tmp_path / "out", plots=False)
    shown, said = opened(browser, tmp_path / "out" / "report.html")
    assert shown.title() == "Results of 40 runs" and said == []
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    (tmp_path / "raw.html").write_text(page.replace("<body>", f"<body>{HARMFUL[0]}{HARMFUL[1]}"), encoding="utf-8")
    shown, said = opened(browser, tmp_path / "raw.html")  # if something passed after all
    assert shown.title() == "Results of 40 runs" and all("Content Security Policy" in line for line in said) and said


def test_what_is_trusted_as_markup_is_in_the_source() -> None:
    """`Markdown(...)` escapes nothing, so its argument is a literal, outside the module that defines it."""
    for path in Path(published.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Markdown" and path.stem != "markdown":
                methods = "methods.md" in ast.unparse(node)
                assert methods or all(isinstance(own, ast.Constant | ast.Name) for own in node.args), ast.unparse(
                    node
                )


@pytest.mark.parametrize(
    "studies", [("a b", "a-b", "a/b"), ("x" * 399 + "a", "x" * 399 + "b"), ("É", "e", "E", "..", "日本")]
)
def test_studies_of_similar_names_have_files_of_their_own(studies: tuple[str, ...], tmp_path: Path) -> None:
    runs = [result() for _ in studies]
    for run, study in zip(runs, studies):
        run["config"]["study"] = study
    tables = tables_of(put(tmp_path, *runs))
    assert {table.study for table in tables} == set(studies)
    assert len({table.name.lower() for table in tables}) == len(studies)
    assert all(re.fullmatch(r"[\w.-]{1,110}", table.name, re.ASCII) for table in tables)


GROUPS = ("model", "pattern", "corpus", "protocol", "task")
# Where in a result, and what stands there instead
MALFORMED: list[tuple[str, Any]] = [
    *((key, None) for key in ("status", "task", "config", "metrics", "corpus", "parameters")),
    *((key, [1]) for key in ("metrics", "curve", "corpus", "parameters", "config", "report", "task", "seconds")),
    *((key, "x") for key in ("metrics", "corpus", "seconds", "seed", "report", "versions", "overrides", "curve")),
    *(("seconds", value) for value in (-1, 1e999, math.nan, True, {})),
    *(("seed", value) for value in (0.5, True, 10**30, [0])),
    *(("metrics.test_accuracy", value) for value in ("0.5", [], {}, True, math.nan, 1e999, 10**400, 1e300)),
    *(("curve.0.step", value) for value in (None, "1", -1, 0.5, [])),
    *(("curve.0.test_accuracy", value) for value in ("1", [1], 1e300)),
    *(("curve.0", value) for value in (None, 1, [], {})),
    *(("corpus.counts.train", value) for value in (None, -1, "9", 0.5, [1])),
    *(("corpus.counts", value) for value in (None, {}, [], {"train": 1})),
    *(("corpus.sha256", value) for value in (None, 1, "a b")),
    *(("parameters.total", value) for value in (None, "7", -7, 0.5)),
    *(("config.batch_size", value) for value in (None, 0, -1, "8")),
    *(("config.block_size", value) for value in (None, "x", [32])),
    *(("config.task.lengths", value) for value in ("x", [0], [None], {"a": 1})),
    *(("config.trainer.limit_train_batches", value) for value in ("x", -1, [1], 1e999)),
    *(("config.trainer.accumulate_grad_batches", value) for value in (0, None, {"4": 2})),
    *(
        (f"config.{group}", value)
        for group in ("model", "pattern", "corpus", "protocol", "task")
        for value in (None, "x")
    ),
    *(
        (f"config.{group}.name", value)
        for group in ("model", "pattern", "corpus", "protocol")
        for value in (None, [1])
    ),
    ("config", {"model.name": [1]}),
    *((f"report.{key}", 1) for key in ("metric", "columns", "compare", "x_axis", "note", "unit", "baseline_keys")),
    ("error", "\ud800"),
]
BYTES = [b"", b"{", b"[]", b"null", b"\xff\xfe{", b"[" * 10**5, b'{"a":' * 2000, b"\0" * 9]


def with_entry(content: dict[str, Any], place: str, value: Any) -> bytes:
    content = json.loads(json.dumps(content))
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    target: Any = content
    for key in path:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target[key]
    target[last] = value
    return json.dumps(content).encode()


def test_a_malformed_result_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    sound = result("model=nope", value=0.25)
    contents = [with_entry({**sound, "seed": 1}, place, value) for place, value in MALFORMED] + BYTES
    put(tmp_path, sound)
    for number, content in enumerate(contents):
        (tmp_path / f"bad{number}").mkdir()
        (tmp_path / f"bad{number}" / "result.json").write_bytes(content)
    for name, make in {"folder": Path.mkdir, "fifo": os.mkfifo, "link": lambda path: path.symlink_to("x")}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "result.json")
    (table,) = write_report([tmp_path], tmp_path / "out", plots=False)
    assert [row.values("test_accuracy") for row in table.rows] == [{0: 0.25}]
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    for name in (*(f"bad{number}" for number in range(len(contents))), "folder", "fifo", "link"):
        assert text.count(f"- {tmp_path / name / 'result.json'} is damaged: ") == 1, (name, contents[int(name[3:])])


UNUSUAL: list[tuple[str, Any]] = [
    *(("config.trainer.limit_train_batches", value) for value in (0, 0.0)),
    ("corpus.counts.train", 0),
    ("curve", []),
    ("curve.0.step", 0),
    ("config.study", 2024),
    ("config.model.scale", [1, 2]),
    ("metrics.test_accuracy", 1e38),
    *((key, None) for key in ("seconds", "report", "error")),
]


def test_an_unusual_result_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = result("model=alibi")
    for number, change in enumerate(UNUSUAL):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "result.json").write_bytes(with_entry({**run, "seed": number}, *change))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--output", str(tmp_path / "out")])
    main()
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert f"{len(UNUSUAL)} results, 0 of them baselines ({len(UNUSUAL)} finished), in 2 tables." in text
    assert "Left out" not in text and "2024 (speeches, paper)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key", ["batch_size", "block_size", "task.lengths", "trainer.limit_train_batches", "model.scale", "seed"]
)
def test_a_run_that_failed_of_its_config_is_shown(key: str, tmp_path: Path) -> None:
    put(tmp_path, result("task=lm", "task.lengths=[64]", "model=alibi", value=400.0))
    failed = with_entry(result("task=lm", "model=alibi", status="failed"), f"config.{key}", ["x"])
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "result.json").write_bytes(failed)
    (table,) = write_report([tmp_path], tmp_path / "out")
    assert sorted(row.state[:9] for row in table.rows) == ["0; failed", "1"] or key == "seed"


def test_the_schema_is_json_schema() -> None:
    """Oracle: another library agrees which results are valid."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(runs_folder.__file__).parent / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    other = jsonschema.Draft7Validator(schema | {"$ref": "#/definitions/reported"})
    sound = result()
    for place, value in [("seconds", 1), *MALFORMED]:
        content = json.loads(with_entry(sound, place, value))
        try:
            runs_folder.validator("reported")(content)
            valid = True
        except ValueError:
            valid = False
        assert valid == other.is_valid(content), place
