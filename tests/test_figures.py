"""Figures and tables of the report, for a talk or a paper: of any number of rows, nothing is alike, empty or cut."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import opened
from matplotlib.colors import to_rgb
from test_report import Elements, put, result, tables_of

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
PATTERNS = ("full", "window", "block", "strided", "dilated", "global", "bigbird")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def grid(rows: int, factors: int) -> list[dict[str, Any]]:
    """Settings of rows: one factor that changes no colour, or two: models by learning rates or by patterns."""
    if factors == 1:
        return [{"recipe.lr": round(1e-4 * 1.3**k, 7)} for k in range(rows)]
    second = [("recipe.lr", rate) for rate in RATES] if rows == 30 else [("pattern.name", name) for name in PATTERNS]
    pairs = itertools.product(MODELS, second[: max(1, -(-rows // len(MODELS)))])
    return [{"model.name": model, key: value} for model, (key, value) in pairs][:rows]


def runs_of(settings: list[dict[str, Any]], evaluations: int = 5, seeds: int = 3) -> list[dict[str, Any]]:
    """Results of rows with these settings; of four rows or more, the second failed and the third diverged."""
    base = result("task=lm", value=400.0)
    runs = []
    for (place, own), seed in itertools.product(enumerate(settings), range(seeds)):
        run = copy.deepcopy(base)
        run["seed"] = run["config"]["seed"] = seed
        for key, value in own.items():
            group, name = key.split(".")
            run["config"][group][name] = value
        value = 3.2 + 0.07 * place + 0.01 * ((7 * place + 3 * seed) % 5)
        run["metrics"] = dict.fromkeys(run["metrics"], value)
        run["curve"] = [{"step": 10 * k, **dict.fromkeys(run["metrics"], value * (1 + 3 / k))} for k in range(1, 6)]
        run["curve"] = run["curve"][:evaluations]
        if len(settings) > 3 and place == 1:
            run = {**run, "status": "failed", "error": "it broke", "metrics": {}, "curve": []}
        elif len(settings) > 3 and place == 2:
            run |= {"status": "diverged", "metrics": dict.fromkeys(run["metrics"])}
        runs.append(run)
    return runs


def write_results(folder: Path, runs: list[dict[str, Any]]) -> Path:
    for place, run in enumerate(runs):
        (folder / str(place)).mkdir(parents=True)
        (folder / str(place) / "result.json").write_text(json.dumps(run))
    return folder


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


def lab(colour: Any) -> np.ndarray:
    """CIE L*a*b* of an sRGB colour (IEC 61966-2-1; CIE 15)."""
    linear = np.array(
        [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    )
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.array(matrix) @ linear / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def check_lines(axis: Any) -> None:
    """No two lines with a label look alike: the same dashes and marker, and colours less than 8 apart (CIE 1976)."""
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    for first, second in itertools.combinations(lines, 2):
        alike = first._unscaled_dash_pattern == second._unscaled_dash_pattern
        if alike and first.get_marker() == second.get_marker():
            apart = np.linalg.norm(lab(first.get_color()) - lab(second.get_color()))
            assert apart > 8, (first.get_label(), second.get_label(), apart)


def check_texts(figure: Any) -> None:
    """Every text lies inside what is saved, and labels of one axis do not overlap."""
    renderer = figure.canvas.get_renderer()
    saved = figure.get_tightbbox(renderer)  # in inches; what bbox_inches="tight" writes
    for text in figure.findobj(plt.Text):
        if text.get_visible() and text.get_text().strip():
            assert not {*"…$"} & {*text.get_text()}
    for axis in figure.axes:
        for ticks in (axis.xaxis, axis.yaxis):
            low, high = sorted(ticks.get_view_interval())
            places = zip(ticks.get_ticklocs(), ticks.get_ticklabels())
            labels = [label for place, label in places if low <= place <= high and label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in labels]
            for box in boxes if ticks.get_tick_params().get("labelleft", True) else []:
                low, high = box.min / figure.dpi, box.max / figure.dpi
                assert (low >= saved.min - 0.02).all() and (high <= saved.max + 0.02).all()
            rotated = any(label.get_rotation() for label in labels)
            for first, second in itertools.pairwise(boxes):
                assert rotated or not first.shrunk(0.95, 0.8).overlaps(second.shrunk(0.95, 0.8)), labels
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        assert not any(box.overlaps(axis.get_window_extent(renderer)) for axis in figure.axes)


def is_in_view(line: Any) -> bool:
    """Whether all points of a line lie inside its axes; without a marker, it needs two to be visible."""
    pixels = line.get_transform().transform(line.get_xydata())
    inside = [line.axes.bbox.padded(1).contains(*point) for point in pixels]
    return all(inside) and len({*line.get_xdata()}) > (line.get_marker() in ("", "None"))


def check(table: Table, figures: dict[str, Any]) -> None:
    for figure in figures.values():
        width, height = figure.get_size_inches()
        assert max(width, height) <= 20
        for axis in figure.axes:
            assert any(map(is_in_view, axis.lines)) or axis.images, "an empty axis"
            assert axis.get_xlabel() or axis.get_ylabel() or axis.get_title() or len(figure.axes) == 1
            check_lines(axis)
        if len({axis.get_yscale() for axis in figure.axes}) > 1 or figure.axes[0].get_yscale() == "log":
            assert all("log scale" in axis.get_ylabel() for axis in figure.axes if axis.get_yscale() == "log")
        check_texts(figure)
    rows = {row.label for row in table.rows if row.finished}
    names = {" ".join(text.get_text().split()) for text in figures["dots"].axes[0].get_yticklabels()}
    assert names == rows
    if "curves" in figures and len(rows) > 1:
        (legend,) = figures["curves"].legends
        assert {" ".join(text.get_text().split()) for text in legend.get_texts()} == rows


CASES = [*itertools.product((1, 2, 6, 12, 30), (1, 2), (5,)), (1, 1, 1), (12, 2, 1)]


@pytest.mark.parametrize(("rows", "factors", "evaluations"), CASES)
def test_figures_of_any_number_of_rows(rows: int, factors: int, evaluations: int, tmp_path: Path) -> None:
    """Oracles: CIE's distance of colours, matplotlib's boxes of texts, the labels of the rows."""
    (table,) = tables_of(write_results(tmp_path, runs_of(grid(rows, factors), evaluations)))
    assert len(table.rows) == rows and len({row.label for row in table.rows}) == rows
    figures = figures_of(table)
    finished = sum(bool(row.finished) for row in table.rows)
    expected = {"dots"} | ({"curves"} if evaluations > 1 else set()) | ({"differences"} if rows > 1 else set())
    varied = {len({str(own.get(key)) for own in grid(rows, factors)}) > 1 for key in ("recipe.lr", "pattern.name")}
    if (factors == 1 and finished > 2) or (factors == 2 and rows > 6 and True in varied):
        expected.add("factors")
    assert figures.keys() == expected
    check(table, figures)
    for figure in figures.values():
        plt.close(figure)


@pytest.mark.parametrize("rows", [12, 30])
def test_two_factors_are_lines_over_a_number_or_a_heat_map(rows: int, tmp_path: Path) -> None:
    """Oracle: the means put in; 5 rates give lines over them, one for each model; 2 patterns give a map of cells."""
    (table,) = tables_of(write_results(tmp_path, runs_of(grid(rows, 2), seeds=1)))
    figure = figures_of(table)["factors"]
    (axis,) = figure.axes
    means = {row.label: row.summary("test_perplexity_mean") for row in table.rows}
    if rows == 30:
        lines = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
        assert lines.keys() == {"no positions", "ALiBi", "RoPE", "relative positions", "learned positions"} | {
            "sinusoidal positions"
        }
        assert axis.get_xscale() == "log" and list(lines["RoPE"].get_xdata()) == list(RATES)
        expected = [means[f"RoPE, lr {rate}"].mean for rate in RATES]  # type: ignore[union-attr]
        assert list(lines["RoPE"].get_ydata()) == pytest.approx(expected)
    else:
        shown = {text.get_text() for text in axis.texts}
        assert shown == {number("perplexity", own.mean) for own in means.values() if own} | {"–"}
        assert axis.images[0].get_array().shape in ((6, 2), (2, 6))
    plt.close("all")


def test_a_factor_that_follows_from_the_other_is_not_drawn_against_it(tmp_path: Path) -> None:
    """Each model has one pattern, so a map of both would be half empty; those of a grid are drawn above."""
    nested = [("rope", "full"), ("nope", "window"), ("alibi", "window")]
    settings = [{"model.name": model, "pattern.name": pattern} for model, pattern in nested]
    (table,) = tables_of(write_results(tmp_path, runs_of(settings)))
    assert len(table.rows) == 3 and "factors" not in figures_of(table)
    plt.close("all")


def test_an_evaluation_alone_is_no_curve_and_two_axes_have_one_scale(tmp_path: Path) -> None:
    (table,) = tables_of(write_results(tmp_path / "a", runs_of(grid(2, 1), evaluations=1)))
    assert "curves" not in figures_of(table)
    runs = runs_of(grid(2, 1))
    for run in runs:
        for k, point in enumerate(run["curve"]):
            point["train_perplexity"] = 3.0 - 0.1 * k
    (table,) = tables_of(write_results(tmp_path / "b", runs))
    axes = figures_of(table)["curves"].axes
    assert [axis.get_yscale() for axis in axes] == ["log", "log"]
    assert all(axis.get_ylabel().endswith("log scale") for axis in axes)
    plt.close("all")


def test_the_forest_of_differences_is_that_of_the_table(tmp_path: Path) -> None:
    """Oracle: the differences put in, their table, and its column of significance; each seed is a dot."""
    runs = runs_of([{"model.name": name} for name in MODELS[:3]], seeds=4)
    for run in runs:
        noise = [0.0, 0.03, -0.02, 0.01][run["seed"]]
        shift = {"nope": 0.0, "alibi": -0.5, "rope": 0.0}[run["config"]["model"]["name"]]
        run["metrics"] = dict.fromkeys(run["metrics"], 3.64 + shift + noise * (-1) ** (shift == 0))
    (table,) = tables_of(write_results(tmp_path, runs))
    arrange([table], Options(reference="model=nope"))
    (axis,) = differences_figure(table)[0].axes  # type: ignore[index]
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == ["ALiBi", "RoPE"]
    texts = [text.get_text() for text in axis.texts]
    assert texts[0].startswith("−0.490 [") and texts[1].startswith("0.0")
    cells = differences_table(table).cells  # type: ignore[attr-defined]
    assert [row[-1] for row in cells[1:]] == ["yes", "–"] and cells[1][3] == "−0.490"
    dots = [line for line in axis.lines if line.get_marker() == "."]
    assert [len(line.get_xdata()) for line in dots] == [4, 4]
    assert dots[0].get_color() != dots[1].get_color()
    plt.close("all")


@pytest.mark.parametrize("value", [3.64, 3.8, 3.199, 12.34, 99.96, 395.51, 0.03641, 0.5, 1.0, 9.999, 0.001, 12345.6])
def test_three_significant_digits(value: float) -> None:
    """Oracle: Python's %.3g; larger numbers have one decimal."""
    text = number("test_perplexity_mean", value)
    assert float(text) == (float(f"{value:.3g}") if value < 100 else round(value, 1))
    assert len(text.replace(".", "").lstrip("0")) >= 3
    assert float(number("test_accuracy", value / 100)) == float(text)
    assert number("loss", -value, signed=True) == f"−{text}" and number("loss", value, signed=True) == f"+{text}"


def test_a_deviation_has_the_decimals_of_its_mean() -> None:
    assert number("loss", 0.0123, like=3.64) == "0.01" and number("loss", 0.0, like=3.64) == "0.00"
    assert number("loss", 4.3, like=395.5) == "4.3" and number("loss", 1e9) == "1.00e+09"


# Options


@pytest.fixture
def three(tmp_path: Path) -> Path:
    settings = [{"model.name": name} for name in ("alibi", "rope", "nope")]
    return write_results(tmp_path / "runs", runs_of(settings, seeds=2))


def report(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    main()


def test_reference_labels_order_title(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    options = ["--reference", "model=rope", "--label", "model=alibi=A = b", "--label", "model=nope=none"]
    report(
        monkeypatch, three, "--output", out, "--no-plots", *options, "--order", "none", "RoPE", "--title", "My <talk>"
    )
    text = (out / "report.md").read_text(encoding="utf-8")
    assert (
        text.startswith("# My &#60;talk&#62;\n")
        and "<title>My &#60;talk&#62;</title>" in (out / "report.html").read_text()
    )
    (name,) = [path.name for path in (out / "tables").glob("*_results.csv")]
    with open(out / "tables" / name, encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)] == ["", "none", "RoPE", "A = b"]
    with open(out / "tables" / name.replace("results", "differences"), encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)] == ["", "none − RoPE", "A = b − RoPE"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--reference", "model=rop"],
            "The report has no row 'model=rop'; the valid ones are: ALiBi, no positions, RoPE",
        ),
        (["--order", "RoPE", "x"], "The report has no row 'x'"),
        (["--order", ""], "The report has no row ''"),
        (["--label", "model=alib=x"], "--label model=alib=x: expected NAME=LABEL"),
        (["--label", "ALiBi"], "--label ALiBi: expected NAME=LABEL"),
        (["--label", "ALiBi="], "--label ALiBi=: expected NAME=LABEL"),
        (["--formats", "png,gif"], "--formats has no choice 'gif'; the valid ones are: png, svg, pdf"),
        (["--formats", ""], "--formats has no choice ''"),
    ],
)
def test_invalid_options_are_errors(
    arguments: list[str], message: str, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as error:
        report(monkeypatch, three, "--output", tmp_path / "out", "--no-plots", *arguments)
    assert str(error.value.code).startswith(f"Error: {message}") and "\n" not in str(error.value.code)
    assert not (tmp_path / "out").exists()


def test_a_setting_of_several_rows_names_none_of_them(tmp_path: Path) -> None:
    tables = tables_of(write_results(tmp_path, runs_of(grid(12, 2), seeds=1)))
    with pytest.raises(UserError, match="model=rope is the setting of several rows; name one of them: RoPE, "):
        arrange(tables, Options(reference="model=rope"))


def test_baselines_of_the_corpus_come_by_themselves(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another corpus, task or protocol stay away, and a folder's own baselines are enough."""
    monkeypatch.chdir(tmp_path)
    own = {"baseline": {"name": "kneser_ney_5"}, "seed": None}
    others = [result("task=lm", sha256="b" * 64, value=1.0), result(), result("task=lm", "protocol=clean", value=1.0)]
    put(Path("outputs/baselines"), *({**run, **own} for run in [result("task=lm", value=2.0), *others]))
    report(monkeypatch, three, "--output", "out", "--no-plots")
    text = Path("out/report.md").read_text()
    assert text.count("*5-gram (Kneser-Ney)*") == 2 and "1 of them baselines" in text  # results and commands
    (table,) = write_report([three], Path("out"), options=Options(baselines=Path("outputs/baselines"), formats=()))
    assert [run.metrics["test_perplexity_mean"] for run in table.baselines] == [2.0]


# Files


def test_every_figure_and_table_has_its_files(three: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_report([three], out)
    names = {path.stem for path in (out / "figures").iterdir()}
    assert len(names) == 3  # dots, differences, curves
    for name in names:
        for form, start in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
            assert (out / "figures" / f"{name}.{form}").read_bytes().startswith(start)
    texts = {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    page = Elements()
    page.feed((out / "report.html").read_text(encoding="utf-8"))
    assert page.counts["table"] == len(list((out / "tables").glob("*.tex"))) == 4
    assert page.counts["button"] == 2 * page.counts["table"] and page.counts["img"] == 3
    write_report([three], out, options=Options(formats=("svg",)))
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".svg"}
    same = {path.name for path in (out / "figures").iterdir() if path.read_bytes() == texts[path.name]}
    assert same == {path.name for path in (out / "figures").iterdir()}  # no dates


def test_latex_is_escaped() -> None:
    """Oracle: LaTeX's rules: outside of commands, none of its special characters is bare, and braces balance."""
    cells = [["", "a & b"], ["100 % #1 $x_{2}^3$ ~\\", "3.64 ± 0.02\n[3.62, 3.66]"]]
    text = latex(cells)
    assert r"a \& b \\" in text and r"\shortstack[r]{3.64 $\pm$ 0.02\\{[}3.62, 3.66]}" in text
    assert r"100 \% \#1 \$x\_\{2\}\textasciicircum{}3\$ \textasciitilde{}\textbackslash{}" in text
    bare = re.sub(r"\\\\|\\[&%$#_{}]", "", text)
    assert bare.count("{") == bare.count("}") and not re.search(r"[%#_~^]", bare)
    assert [line.count("&") - line.count(r"\&") for line in text.splitlines() if "&" in line] == [1, 1]


def test_plain_text_is_what_a_page_shows() -> None:
    assert plain_text("**a** [b](#c_d) `x*y` 1<br>[2, 3] &#42; <code>&#96;</code>") == "a b x*y 1\n[2, 3] * `"


def test_a_page_in_a_browser(browser: Any, three: Path, tmp_path: Path) -> None:
    """Contents stay in view, tables are folded, buttons copy, and nothing is cut at 1,400 pixels or on a phone."""
    other = runs_of([{"model.name": name} for name in MODELS], seeds=2)
    for run in other:
        run["config"]["study"] = "other"
    write_results(tmp_path / "other", other)
    write_report([three, tmp_path / "other"], tmp_path / "out", options=Options(formats=()))
    shown, said = opened(browser, tmp_path / "out" / "report.html")
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    cut = "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).length"
    assert shown.locator("details.part[open]").count() == 0
    shown.set_viewport_size({"width": 1400, "height": 900})
    shown.locator("nav a").last.click()
    shown.wait_for_selector("details.part[open]")
    shown.evaluate("document.querySelectorAll('main details').forEach(part => { part.open = true })")
    assert shown.evaluate(cut) == 0
    shown.evaluate("scrollTo(0, 1e6)")
    box = shown.locator("nav").bounding_box()
    assert (box["x"], box["y"]) == (0, 0)
    button = shown.locator("button", has_text="LaTeX").last
    button.click()
    shown.wait_for_timeout(50)
    (name,) = [path for path in (tmp_path / "out" / "tables").glob("other*_commands.tex")]
    assert shown.evaluate("navigator.clipboard.readText()") in [
        path.read_text() for path in (tmp_path / "out" / "tables").glob("*_commands.tex")
    ]
    shown.set_viewport_size({"width": 390, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth") == 390 and said == []
    assert name.exists()


def test_dark_and_light_pages_have_contrast(browser: Any, three: Path, tmp_path: Path) -> None:
    """Oracle: WCAG 2's contrast ratio of text and links on their background is at least 4.5."""
    write_report([three], tmp_path / "out", plots=False)
    shown, _ = opened(browser, tmp_path / "out" / "report.html")
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)
        pairs = {"h1": "body", "main a": "body", "nav a": "nav", ".tools code": "body", "th": "th"}
        for text, ground in pairs.items():
            colours = shown.evaluate(
                "([a, b]) => [getComputedStyle(document.querySelector(a)).color, "
                "getComputedStyle(document.querySelector(b)).backgroundColor]",
                [text, ground],
            )
            light = []
            for colour in colours:
                parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
                linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
                light.append(0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
            assert max(light) / min(light) > 4.5, (scheme, text, colours)
