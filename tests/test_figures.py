"""Figures and tables of the report, for a talk or a paper: of any number of rows, nothing is alike, empty or cut."""

from __future__ import annotations

import copy
import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import call
from synthetic import baseline, put, result, tables_of
from test_report import Elements, poisoned

from speechformer.errors import UserError
from speechformer.report.__main__ import main, write_report
from speechformer.report.effects import differences_figure
from speechformer.report.labels import Options, arrange
from speechformer.report.markdown import latex, plain_text
from speechformer.report.plots import FIGURES, plt
from speechformer.report.results import Table
from speechformer.report.style import HERE
from speechformer.report.tables import differences_table, number

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


def table_of(folder: Path, runs: list[dict[str, Any]]) -> Table:
    (table,) = tables_of(put(folder, *runs))
    return table


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def figures_of(table: Table) -> dict[str, Any]:
    """The figures of a table, drawn and laid out."""
    figures = {}
    with plt.style.context(HERE / "figures.mplstyle"):
        for name, draw in FIGURES.items():
            if drawn := draw(table):
                drawn[0].tight_layout()
                drawn[0].canvas.draw()
                figures[name] = drawn[0]
    return figures


def labelled(axis: Any) -> dict[str, Any]:
    """The lines of an axis that a legend names."""
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def one_line(text: Any) -> str:
    return " ".join(text.get_text().split())


def check_layout(figure: Any) -> None:
    """Lines with a label look different, and no label of an axis lies on another one."""
    renderer = figure.canvas.get_renderer()
    assert max(figure.get_size_inches()) <= 20
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


@pytest.mark.parametrize(
    ("settings", "evaluations", "expected"),
    [
        (RATES_ALONE[:1], 1, {"dots"}),
        (RATES_ALONE[:2], 5, {"dots", "curves", "differences"}),
        (RATES_ALONE, 5, {"dots", "curves", "differences", "factors"}),
        (MODELS_BY_RATE, 5, {"dots", "curves", "differences", "factors"}),
        (MODELS_BY_PATTERN, 1, {"dots", "differences", "factors"}),
    ],
    ids=["one row", "two rows", "one factor", "two factors", "two factors without numbers"],
)
def test_figures_of_any_number_of_rows(
    settings: list[dict[str, Any]], evaluations: int, expected: set[str], tmp_path: Path
) -> None:
    """Oracles: the numbers put in, matplotlib's boxes of texts, the labels of the rows."""
    table = table_of(tmp_path, runs_of(settings, evaluations))
    assert len({row.label for row in table.rows}) == len(settings)
    figures = figures_of(table)
    assert figures.keys() == expected
    for figure in figures.values():
        check_layout(figure)
    means = {row.label: row.summary("test_perplexity_mean").mean for row in table.rows if row.finished}  # type: ignore[union-attr]
    axis = figures["dots"].axes[0]
    assert [one_line(text) for text in axis.get_yticklabels()] == [*means]
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines if len(line.get_xdata()) == 1}
    assert points >= {(mean, y) for y, mean in enumerate(means.values())}
    if "curves" in expected:
        lines = labelled(figures["curves"].axes[0])
        assert {*lines} == {*means} and figures["curves"].axes[0].get_yscale() == "log"
        for label, line in lines.items():
            assert line.get_ydata()[[0, -1]] == pytest.approx([4 * means[label], 1.6 * means[label]])


def test_two_factors_are_lines_over_a_number_or_a_heat_map(tmp_path: Path) -> None:
    """Oracle: the means put in; rates give lines over them, one for each model, and patterns a map of cells."""
    table = table_of(tmp_path / "rates", runs_of(MODELS_BY_RATE, seeds=1))
    means = {row.label: row.summary("test_perplexity_mean") for row in table.rows}
    (axis,) = figures_of(table)["factors"].axes
    lines = labelled(axis)
    assert len(lines) == 6 and axis.get_xscale() == "log" and list(lines["RoPE"].get_xdata()) == list(RATES)
    expected = [means[f"RoPE, lr {rate}"].mean for rate in RATES]  # type: ignore[union-attr]
    assert list(lines["RoPE"].get_ydata()) == pytest.approx(expected)
    table = table_of(tmp_path / "patterns", runs_of(MODELS_BY_PATTERN, seeds=1))
    (axis,) = figures_of(table)["factors"].axes
    values = [summary.mean for row in table.rows if (summary := row.summary("test_perplexity_mean"))]
    assert {text.get_text() for text in axis.texts} == {number("perplexity", value) for value in values} | {"–"}
    assert axis.images[0].get_array().shape in ((6, 2), (2, 6))
    nested = [MODELS_BY_PATTERN[place] for place in (0, 3, 5)]  # each model has one pattern: half of a map is empty
    assert "factors" not in figures_of(table_of(tmp_path / "nested", runs_of(nested)))


def test_published_values_and_baselines_are_drawn(tmp_path: Path) -> None:
    """Oracle: Marsol's 395.51 is the best of the first test; the baseline is a line at its value."""
    runs = [result("experiment=marsol_table1_full", f"seed={seed}", value=400.0 + seed) for seed in (0, 1)]
    table = table_of(tmp_path, [*runs, baseline("kneser_ney_5", "task=lm", value=401.5)])
    axis = figures_of(table)["dots"].axes[0]
    marks = {(line.get_marker(), line.get_xdata()[0]) for line in axis.lines}
    assert ("D", 395.51) in marks and ("None", 401.5) in marks


def test_the_forest_of_differences_is_that_of_the_table(tmp_path: Path) -> None:
    """Oracle: the differences put in, their table, and its column of significance; each seed is a dot."""
    runs = runs_of([{"model.name": name} for name in MODELS[:3]], seeds=4)
    for run in runs:
        noise = [0.0, 0.03, -0.02, 0.01][run["seed"]]
        shift = {"nope": 0.0, "alibi": -0.5, "rope": 0.0}[run["config"]["model"]["name"]]
        run["metrics"] = dict.fromkeys(run["metrics"], 3.64 + shift + noise * (-1) ** (shift == 0))
    table = table_of(tmp_path, runs)
    arrange([table], Options(reference="model=nope"))
    (axis,) = differences_figure(table)[0].axes  # type: ignore[index]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["ALiBi", "RoPE"]
    cells = differences_table(table).cells  # type: ignore[attr-defined]
    assert [row[-1] for row in cells[1:]] == ["yes", "–"] and cells[1][3] == "−0.490"
    dots = [line for line in axis.lines if line.get_marker() == "."]
    assert [len(line.get_xdata()) for line in dots] == [4, 4]
    assert [line.get_color() for line in dots] == ["#0072B2", "#8a949e"]  # better, not significant


def test_figures_draw_text_from_outside_as_it_is(tmp_path: Path) -> None:
    """Mathematics that does not end, and names that are too long."""
    for place, text in enumerate(("$x_{\\frac$", "x" * 400)):
        figures = figures_of(table_of(tmp_path / str(place), list(poisoned(text))))
        assert {*figures} == {"dots", "curves", "differences"}
        assert all(max(figure.get_size_inches()) <= 20 for figure in figures.values())


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
    options = ["--reference", "model=rope", "--label", "model=alibi=A = b", "--label", "model=nope=none"]
    call(main, "--no-plots", three, "--output", out, *options, "--order", "none", "RoPE", "--title", "My <talk>")
    assert (out / "report.md").read_text(encoding="utf-8").startswith("# My &#60;talk&#62;\n")
    assert "<title>My &#60;talk&#62;</title>" in (out / "report.html").read_text(encoding="utf-8")
    (results,) = (out / "tables").glob("*_results.csv")
    with open(results, encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)] == ["", "none", "RoPE", "A = b"]
    with open(str(results).replace("results", "differences"), encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)] == ["", "none − RoPE", "A = b − RoPE"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--reference", "model=rop"],
            "The report has no row 'model=rop'; the valid ones are: ALiBi, no positions, RoPE",
        ),
        (["--order", "RoPE", "x"], "The report has no row 'x'"),
        (["--label", "ALiBi="], "--label ALiBi=: expected NAME=LABEL"),
        (["--formats", "png,gif"], "--formats has no choice 'gif'; the valid ones are: png, svg, pdf"),
    ],
)
def test_invalid_options_are_errors(arguments: list[str], message: str, three: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        call(main, "--no-plots", three, "--output", tmp_path / "out", *arguments)
    assert str(error.value.code).startswith(f"Error: {message}") and "\n" not in str(error.value.code)
    assert not (tmp_path / "out").exists()


def test_a_setting_of_several_rows_names_none_of_them(tmp_path: Path) -> None:
    table = table_of(tmp_path, runs_of(MODELS_BY_PATTERN, seeds=1))
    with pytest.raises(UserError, match="model=rope is the setting of several rows; name one of them: RoPE, "):
        arrange([table], Options(reference="model=rope"))


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
    assert text.count("*5-gram (Kneser-Ney)*") == 2 and "1 of them baselines" in text  # results and commands


# Files


def test_every_figure_and_table_has_its_files(three: Path, tmp_path: Path) -> None:
    """The page needs none of them, the same results give the same bytes, and files of another time do not stay."""
    write_report([three], tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    names = {name.partition(".")[0] for name in files}
    assert {name.rpartition("_")[2] for name in names} == {"dots", "differences", "curves"}
    for name in names:
        starts = [files[f"{name}.{form}"][:4] for form in ("png", "svg", "pdf")]
        assert starts == [b"\x89PNG", b"<?xm", b"%PDF"]
    page = Elements(tmp_path / "report.html")
    assert page.counts["table"] == len(list((tmp_path / "tables").glob("*.tex"))) == 4
    assert page.counts["button"] == 2 * page.counts["table"] and page.counts["img"] == 3 and page.foreign == []
    write_report([three], tmp_path, options=Options(formats=("svg",)))
    again = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert again == {name: content for name, content in files.items() if not name.endswith(".pdf")}
    write_report([put(tmp_path / "other", result("task=lm"))], tmp_path, plots=False)
    assert not (tmp_path / "tables" / "differences.csv").exists()  # one row: nothing to compare


def test_latex_is_escaped() -> None:
    """Oracle: LaTeX's rules: outside of commands, none of its special characters is bare, and braces balance."""
    cells = [["", "a & b"], ["100 % #1 $x_{2}^3$ ~\\", "3.64 ± 0.02\n[3.62, 3.66]"]]
    text = latex(cells)
    assert r"a \& b \\" in text and r"\shortstack[r]{3.64 $\pm$ 0.02\\{[}3.62, 3.66]}" in text
    assert r"100 \% \#1 \$x\_\{2\}\textasciicircum{}3\$ \textasciitilde{}\textbackslash{}" in text
    bare = re.sub(r"\\\\|\\[&%$#_{}]", "", text)
    assert bare.count("{") == bare.count("}") and not re.search(r"[%#_~^]", bare)


def test_plain_text_is_what_a_page_shows() -> None:
    assert plain_text("**a** [b](#c_d) `x*y` 1<br>[2, 3] &#42; <code>&#96;</code>") == "a b x*y 1\n[2, 3] * `"
