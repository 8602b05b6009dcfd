"""Figures and tables of the report, for a talk or a paper: of any number of rows, nothing is alike, empty or cut."""

from __future__ import annotations

import copy
import csv
import html
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from commands import call
from synthetic import baseline, markdown_of, put, result, study_of
from test_report import Elements, poisoned

from speechformer.errors import UserError
from speechformer.report import tables
from speechformer.report.__main__ import main
from speechformer.report.figures import FIGURES, forest, plt, style
from speechformer.report.load import Study, arrange
from speechformer.report.page import as_latex, report
from speechformer.report.statistics import Summary
from speechformer.report.tables import Table, number

MODELS = ("nope", "alibi", "rope", "relative", "learned", "sinusoidal")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
RATES_ALONE = [{"recipe.lr": round(1e-4 * 1.3**step, 7)} for step in range(30)]
MODELS_BY_RATE = [{"model.name": model, "recipe.lr": rate} for model in MODELS for rate in RATES]
MODELS_BY_PATTERN = [{"model.name": model, "pattern.name": name} for model in MODELS for name in ("full", "window")]


def runs_of(settings: list[dict[str, Any]], evaluations: int = 5, seeds: int = 3) -> list[dict[str, Any]]:
    """Results of rows with these settings; of four rows or more, the second failed and the third diverged."""
    base = result("task=lm", value=400.0)
    runs = []
    for (place, changed), seed in itertools.product(enumerate(settings), range(seeds)):
        run = copy.deepcopy(base)
        run["seed"] = run["config"]["seed"] = seed
        for key, value in changed.items():
            group, name = key.split(".")
            run["config"][group][name] = value
        value = 3.2 + 0.07 * place + 0.01 * ((7 * place + 3 * seed) % 5)
        run["metrics"] = dict.fromkeys(run["metrics"], value)
        steps = range(1, evaluations + 1)
        run["curve"] = [{"step": 10 * k, **dict.fromkeys(run["metrics"], value * (1 + 3 / k))} for k in steps]
        if len(settings) > 3 and place == 1:
            run = {**run, "status": "failed", "error": "it broke", "metrics": {}, "curve": []}
        elif len(settings) > 3 and place == 2:
            run |= {"status": "diverged", "metrics": dict.fromkeys(run["metrics"])}
        runs.append(run)
    return runs


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def figures_of(study: Study) -> dict[str, Any]:
    """The first figure of each kind of a study, drawn and laid out."""
    figures = {}
    with style():
        for draw in FIGURES:
            for figure, _ in draw(study):
                figure.canvas.draw()
                figures.setdefault(draw.__name__, figure)
    return figures


def labelled(axis: Any) -> dict[str, Any]:
    """The lines of an axis that a legend names."""
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def one_line(text: Any) -> str:
    return " ".join(text.get_text().split())


def check_layout(figure: Any) -> None:
    """Lines with a label look different, and no label of an axis lies on another one."""
    renderer = figure.canvas.get_renderer()
    assert figure.get_size_inches()[0] <= 12
    for axis in figure.axes:
        assert axis.lines or axis.images
        looks = [
            (line._unscaled_dash_pattern, line.get_marker(), line.get_color()) for line in labelled(axis).values()
        ]
        assert len({*map(str, looks)}) == len(looks)
        assert axis.get_yscale() != "log" or "log scale" in axis.get_ylabel()
        labels = [label for label in axis.get_yticklabels() if label.get_text()]
        boxes = [label.get_window_extent(renderer).shrunk(0.95, 0.8) for label in labels]
        assert not any(first.overlaps(second) for first, second in itertools.pairwise(boxes)), labels
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        assert not any(box.overlaps(axis.get_window_extent(renderer)) for axis in figure.axes)


def means_of(study: Study) -> dict[str, float]:
    """The mean perplexity of each variant with a finished run."""
    found = {v.label: study.summary(v.label, "test_perplexity_mean") for v in study.variants}
    return {label: summary.mean for label, summary in found.items() if summary}


@pytest.mark.parametrize(
    ("settings", "evaluations", "expected"),
    [
        (RATES_ALONE[:1], 1, {"dots"}),
        (RATES_ALONE[:2], 5, {"dots", "curves", "forest"}),
        (RATES_ALONE, 5, {"dots", "curves", "forest", "factor_grid"}),
        (MODELS_BY_RATE, 5, {"dots", "curves", "forest", "factor_grid"}),
        (MODELS_BY_PATTERN, 1, {"dots", "forest", "factor_grid"}),
    ],
    ids=["one row", "two rows", "one factor", "two factors", "two factors without numbers"],
)
def test_figures_of_any_number_of_rows(
    settings: list[dict[str, Any]], evaluations: int, expected: set[str], tmp_path: Path
) -> None:
    """Oracles: the numbers put in, matplotlib's boxes of texts, the labels of the rows."""
    study = study_of(tmp_path, *runs_of(settings, evaluations))
    assert len({variant.label for variant in study.variants}) == len(settings)
    figures = figures_of(study)
    assert figures.keys() == expected
    for figure in figures.values():
        check_layout(figure)
    means = means_of(study)
    axis = figures["dots"].axes[-1]
    labels = [one_line(text).rstrip("†‡ ") for text in figures["dots"].axes[0].get_yticklabels()]
    assert labels == [*means]
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines if len(line.get_xdata()) == 1}
    assert points >= {(mean, y) for y, mean in enumerate(means.values())}
    if "curves" in expected:
        lines = labelled(figures["curves"].axes[0])
        assert {*lines} == {*[*means][: len(lines)]} and figures["curves"].axes[0].get_yscale() == "log"
        for label, line in lines.items():
            assert line.get_ydata()[[0, -1]] == pytest.approx([4 * means[label], 1.6 * means[label]])


def test_two_factors_are_an_axis_and_colours(tmp_path: Path) -> None:
    """Oracle: the means put in; rates give lines over them, one for each model, and patterns points side by side."""
    study = study_of(tmp_path / "rates", *runs_of(MODELS_BY_RATE, seeds=1))
    means = means_of(study)
    (axis,) = figures_of(study)["factor_grid"].axes
    lines = {bars.get_label(): bars[0] for bars in axis.containers}
    assert len(lines) == 6 and axis.get_xscale() == "log" and list(lines["RoPE"].get_xdata()) == list(RATES)
    expected = [means[f"RoPE, lr {rate}"] for rate in RATES]
    assert list(lines["RoPE"].get_ydata()) == pytest.approx(expected)
    study = study_of(tmp_path / "patterns", *runs_of(MODELS_BY_PATTERN, seeds=1))
    (axis,) = figures_of(study)["factor_grid"].axes
    values = [value for bars in axis.containers for value in bars[0].get_ydata()]
    assert sorted(values) == pytest.approx(sorted(means_of(study).values()))
    nested = [MODELS_BY_PATTERN[place] for place in (0, 3, 5)]  # each model has one pattern: half of a grid is empty
    assert "factor_grid" not in figures_of(study_of(tmp_path / "nested", *runs_of(nested)))


def test_a_baseline_is_a_line_at_its_value(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", f"seed={seed}", value=400.0 + seed) for seed in (0, 1)]
    axis = figures_of(study_of(tmp_path, *runs, baseline("kneser_ney_5", "task=lm", "protocol=paper", value=401.5)))[
        "dots"
    ].axes[0]
    assert ("None", 401.5) in {(line.get_marker(), line.get_xdata()[0]) for line in axis.lines}


def test_the_forest_of_differences_is_that_of_the_table(tmp_path: Path) -> None:
    """Oracle: the differences put in, their table, and its column of significance; each seed is a dot."""
    runs = runs_of([{"model.name": name} for name in MODELS[:3]], seeds=4)
    for run in runs:
        noise = [0.0, 0.03, -0.02, 0.01][run["seed"]]
        shift = {"nope": 0.0, "alibi": -0.5, "rope": 0.0}[run["config"]["model"]["name"]]
        run["metrics"] = dict.fromkeys(run["metrics"], 3.64 + shift + noise * (-1) ** (shift == 0))
    study = study_of(tmp_path, *runs)
    arrange([study], reference="model=nope")
    (((axis,),),) = [[figure.axes] for figure, _ in forest(study)]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["ALiBi", "RoPE"]
    (table,) = tables.differences_table(study)
    assert table.frame["significant at 5 %"].tolist() == ["yes", "–"]
    assert table.frame.iloc[0, 3].startswith("−0.490")
    dots = [line for line in axis.lines if line.get_marker() == "."]
    assert [len(line.get_xdata()) for line in dots] == [4, 4]
    assert [line.get_color() for line in dots] == ["#0072B2", "#8a949e"]  # better, not significant


def test_figures_draw_text_from_outside_as_it_is(tmp_path: Path) -> None:
    """Mathematics that does not end, and names that are too long."""
    for place, text in enumerate(("$x_{\\frac$", "x" * 400)):
        figures = figures_of(study_of(tmp_path / str(place), *poisoned(text)))
        assert {*figures} == {"dots", "curves", "forest"}
        assert all(figure.get_size_inches()[0] <= 12 for figure in figures.values())


def test_three_significant_digits() -> None:
    """Oracle: Python's %.3g; larger numbers have one decimal."""
    for value in (3.64, 3.199, 99.96, 395.51, 0.03641, 0.5, 9.999, 0.001, 12345.6):
        text = number("test_perplexity_mean", value)
        assert float(text) == (float(f"{value:.3g}") if value < 100 else round(value, 1))
        assert len(text.replace(".", "").lstrip("0")) >= 3
        assert float(number("test_accuracy", value / 100)) == float(text)
        assert number("loss", -value, signed=True) == f"−{text}" and number("loss", value, signed=True) == f"+{text}"
    assert number("loss", 0.0123, like=3.64) == "0.01" and number("loss", 4.3, like=395.5) == "4.3"
    assert number("loss", 1e9) == "1.00e+09"


# Options


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = [{"model.name": name} for name in ("alibi", "rope", "nope")]
    return put(tmp_path_factory.mktemp("three"), *runs_of(settings, seeds=2))


def test_reference_labels_order_title(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--reference", "model=rope", "--label", "model=alibi=A b", "--label", "model=nope=none"]
    call(main, "--no-plots", three, "--output", out, *options, "--order", "none", "RoPE", "--title", "My <talk>")
    assert (out / "report.md").read_text(encoding="utf-8").startswith("# My &#60;talk&#62;\n")
    assert "<title>My &#60;talk&#62;</title>" in (out / "report.html").read_text(encoding="utf-8")
    (results,) = (out / "tables").glob("*_results.csv")
    with open(results, encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)] == ["", "none", "RoPE", "A b"]
    with open(str(results).replace("results", "differences"), encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)] == ["", "none − RoPE", "A b − RoPE"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--reference", "model=rop"],
            "The report has no single row 'model=rop'; the valid ones are: ALiBi, no positions, RoPE",
        ),
        (["--order", "RoPE", "x"], "The report has no single row 'x'"),
        (["--label", "ALiBi="], "--label NAME=LABEL has no row or setting 'ALiBi'"),
        (
            ["--columns", "test_bleu"],
            "The report has no column 'test_bleu'; the valid ones are: seconds, parameters, ",
        ),
        (["--formats", "png,gif"], "--formats has no choice 'gif'; the valid ones are: png, svg, pdf"),
    ],
)
def test_invalid_options_are_errors(arguments: list[str], message: str, three: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        call(main, "--no-plots", three, "--output", tmp_path / "out", *arguments)
    assert str(error.value.code).startswith(f"Error: {message}") and "\n" not in str(error.value.code)
    assert not (tmp_path / "out").exists()


def test_a_setting_of_several_rows_names_none_of_them(tmp_path: Path) -> None:
    study = study_of(tmp_path, *runs_of(MODELS_BY_PATTERN, seeds=1))
    with pytest.raises(UserError, match="no single row 'model=rope'; the valid ones are: ALiBi, full "):
        arrange([study], reference="model=rope")


def test_baselines_of_the_corpus_come_by_themselves(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another corpus, task or protocol stay away."""
    monkeypatch.chdir(tmp_path)
    others = [("task=lm",), ("task=classify",), ("task=lm", "protocol=clean")]
    results = [baseline("kneser_ney_5", *words, value=1.0) for words in others]
    results[0]["corpus"]["sha256"] = "b" * 64
    put(Path("outputs/baselines"), baseline("kneser_ney_5", "task=lm", value=2.0), *results)
    call(main, "--no-plots", three, "--output", "out")
    text = Path("out/report.md").read_text(encoding="utf-8")
    assert text.count("| 5-gram (Kneser-Ney)") == 2 and "1 of them baselines" in text  # results and commands


# Files


def test_every_figure_and_table_has_its_files(three: Path, tmp_path: Path) -> None:
    """The page needs none of them, the same results give the same bytes, and files of another time do not stay."""
    report([three], tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    names = {name.partition(".")[0] for name in files}
    assert {name.rpartition("_")[2] for name in names} == {"dots", "forest", "curves"}
    for name in names:
        starts = [files[f"{name}.{form}"][:4] for form in ("png", "svg", "pdf")]
        assert starts == [b"\x89PNG", b"<?xm", b"%PDF"]
    page = Elements(tmp_path / "report.html")
    assert page.counts["table"] == len(list((tmp_path / "tables").glob("*.tex"))) == 3
    assert page.counts["img"] == 3 and page.foreign == []
    report([three], tmp_path, formats=["svg"])
    again = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert again == {name: content for name, content in files.items() if not name.endswith(".pdf")}
    report([put(tmp_path / "other", result("task=lm"))], tmp_path, draw=False)
    assert not (tmp_path / "tables" / "differences.csv").exists()  # one row: nothing to compare


def test_latex_is_escaped_and_has_six_columns_at_most(tmp_path: Path) -> None:
    """Oracle: LaTeX's rules: outside of commands, none of its special characters is bare, and braces balance."""
    frame = pd.DataFrame([["100 % #1 $x_{2}^3$ ~\\", "3.64 ± 0.02\n[3.62, 3.66]"]], columns=["", "a & b"])
    needs, _, text = as_latex(Table("t", "", frame, "50 % of a_b & {c}", {(0, "a & b")})).partition("\n")
    assert needs.startswith("% needs") and r"\caption{50 \% of a\_b \& \{c\}}" in text
    assert r"a \& b \\" in text and r"\textbf{3.64 $\pm$ 0.02}" in text
    bare = re.sub(r"\\\\|\\[&%$#_{}]", "", text.replace(r"$\pm$", ""))
    assert bare.count("{") == bare.count("}") and not re.search(r"[%#^]|(?<!\\)_", bare)
    study = study_of(tmp_path, *runs_of(MODELS_BY_PATTERN))
    for table in (*tables.results(study), *tables.differences_table(study)):
        assert 1 < len(table.latex) <= 6


# Cautions


def test_numbers_are_marked_by_rule(tmp_path: Path) -> None:
    """Oracle: values put in: four seeds, a curve that still falls, two groups of seeds, a seed at chance."""
    values = {"nope": [0.5] * 5, "alibi": [0.8, 0.81, 0.8, 0.82], "rope": [0.86] * 5 + [0.34], "fire": [0.85] * 6}
    runs = []
    for model, own in values.items():
        for seed, value in enumerate(own):
            run = result(f"model={model}", f"seed={seed}", value=value + 0.001 * (seed % 3))
            for k, point in enumerate(run["curve"]):
                point["test_accuracy"] = value - (0.01 * (15 - k) if model == "fire" else 0.01 * k)
            runs.append(run)
    study = study_of(tmp_path, *runs)
    (table,) = tables.results(study)
    cells = {
        label: cell.partition("\n")[0].split()[-1] for label, cell in zip(table.frame[""], table.frame.iloc[:, 2])
    }
    assert cells == {"ALiBi": "†", "FIRE": "‡", "RoPE": "§¶", "no positions": "0.1"}
    summary = study.summary("RoPE", "test_accuracy")
    assert summary is not None and summary.is_bimodal and math.isnan(summary.prediction_interval[0])
    assert all(mark in table.note for mark in "†‡§¶")


def test_two_groups_of_seeds_are_rare_in_normal_samples() -> None:
    """Oracle: 2,000 samples of each size."""
    for n in (5, 10, 20):
        samples = np.random.default_rng(n).normal(size=(2000, n))
        assert sum(Summary(sample).is_bimodal for sample in samples) < 20


def test_one_correction_in_page_files_and_headline(tmp_path: Path) -> None:
    """Oracle: Holm by hand over the differences shown; the headline compares the best with the next alone."""
    runs = runs_of([{"model.name": name} for name in MODELS[:3]], seeds=5)
    (study,) = report([put(tmp_path / "in", *runs)], tmp_path / "out", draw=False)
    found = tables.differences(study)
    order = sorted(found, key=lambda difference: difference.effect.p)
    assert [d.p for d in order] == pytest.approx(
        [2 * order[0].effect.p, max(2 * order[0].effect.p, order[1].effect.p)]
    )
    written = pd.read_csv(tmp_path / "out" / "tables" / "differences.csv")
    assert written["p_holm"].tolist() == pytest.approx([difference.p for difference in found])
    text = html.unescape(markdown_of(tmp_path / "out"))
    assert all(f"| {tables.p_value(difference.p)} " in text for difference in found)
    assert "next is" in tables.headline(study) and study.reference in ("ALiBi", "RoPE", "no positions")


def test_values_that_do_not_vary_and_runs_that_all_diverged_are_said(tmp_path: Path) -> None:
    """Oracle: five seeds of equal values; the best is that on the held-out part; a collapsed row predicts nothing."""
    runs = []
    for model, (held_out, tested) in {"nope": (0.9, 0.8), "rope": (0.8, 1.0), "alibi": (0.7, 1.0)}.items():
        for seed in range(5):
            run = result(
                f"model={model}", f"seed={seed}", value=tested - (0.66 if (model, seed) == ("rope", 0) else 0)
            )
            run["metrics"]["validation_accuracy"] = held_out
            run["report"] = {**run["report"], "columns": ["validation_accuracy", *run["report"]["columns"]]}
            runs.append(run)
    (study,) = report([put(tmp_path / "in", *runs)], tmp_path / "out", draw=False)
    said = tables.headline(study)
    assert said.startswith("no positions is best on the held-out part: 80.0 ± 0.0") and "next is RoPE" in said
    arrange([study], columns=["test_accuracy", "seconds"])
    assert study.held_out == "validation_accuracy" and len(next(tables.results(study)).latex) == 4
    frame = pd.read_csv(tmp_path / "out" / "tables" / "variants.csv").set_index(["variant", "metric"])
    assert np.isnan(frame.loc[("RoPE", "test_accuracy"), "prediction_low_95"])
    diverged = [result("task=lm", f"seed={seed}", value=None) for seed in (0, 1)]
    (study,) = report([put(tmp_path / "diverged", *diverged)], tmp_path / "out", draw=False)
    assert tables.state(study, study.variants[0]) == "0; diverged: seed 0, 1" and tables.headline(study) == ""
    with pytest.raises(UserError, match="1 baselines, but no run to compare with them"):
        report([put(tmp_path / "counted", baseline("majority"))], tmp_path / "out", draw=False)


def test_a_row_of_two_commands_says_which_seeds_each_repeats(tmp_path: Path) -> None:
    runs = [result("model=rope", f"seed={seed}") for seed in range(4)]
    for run in runs[2:]:
        run["overrides"] = ["experiment=mine", *run["overrides"]]
    (table,) = tables.commands(study_of(tmp_path, *runs))
    command = "python -m speechformer.train"
    assert table.frame.iloc[:, 1:3].to_numpy().tolist() == [
        [f"{command} model=rope", "0, 1"],
        [f"{command} experiment=mine model=rope", "2, 3"],
    ]
