"""The map of the probes: its cells against accuracies by hand, and its page in a browser."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from conftest import opened
from scipy import stats
from test_report import put, result

from speechformer.errors import UserError
from speechformer.report.__main__ import read, write_report
from speechformer.report.labels import Options
from speechformer.report.pages import probe_functions
from speechformer.report.probe_claims import judge, sections, where_found
from speechformer.report.probe_map import as_text, content, separations, skill, tuning_gains, usual
from speechformer.runs.folder import write_json

LENGTHS = [10, 20, 40]
CHANCE = 0.1


def run(model: str, seed: int, accuracies: list[float], *more: str, reached: int = 3) -> dict[str, Any]:
    """A run of copying: its accuracy at each length, of which it reaches some."""
    overrides = ["task=probe", "protocol=clean", "study=probes", f"probe.test_lengths={LENGTHS}", f"model={model}"]
    ends = [f"length_{length}" for length in LENGTHS]
    metrics: dict[str, float | None] = {"test_accuracy": 0.5, **{f"chance_accuracy_{end}": CHANCE for end in ends}}
    metrics |= {f"test_accuracy_{end}": own for end, own in list(zip(ends, accuracies))[:reached]}
    metrics["test_accuracy_length_10_gap_3_4"] = accuracies[0] / 2
    about: dict[str, Any] = {"metric": "test_accuracy", "columns": ["test_accuracy"], "compare": ["test_accuracy"]}
    about |= {"x_axis": "step", "note": "", "unit": "rows", "higher_is_better": True, "baseline_keys": []}
    curve = [{"step": 10 * k, "validation_accuracy": k / 10} for k in range(1, 4)]
    metrics["validation_accuracy"] = 0.3
    corpus = {"name": "copy", "sha256": "c" * 64, "counts": {"train": 64, "test": 500, "test_in_train": 0}}
    content = {"report": about, "metrics": metrics, "curve": curve, "corpus": corpus}
    return result(*overrides, *more, f"seed={seed}", **content)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three encodings with two seeds, as by default and tuned, and a tuning run that is no cell."""
    folder = tmp_path_factory.mktemp("study")
    accuracies = {"rope": [1.0, 0.9, 0.2], "alibi": [0.9, 0.9, 0.7], "learned": [0.8, 0.8, 0.0]}
    runs = []
    for model, own in accuracies.items():
        for seed, more in ((0, 0.0), (1, -0.1)):
            values, reached = [value + more for value in own], 2 if model == "learned" else 3
            runs.append(run(model, seed, [value - 0.05 for value in values], reached=reached))
            runs.append(run(model, seed, values, "recipe.lr=0.007", reached=reached))
    runs.append(run("rope", 100, [0.0, 0.0, 0.0], "study=probes_tuning", "recipe.lr=0.007"))
    write_json(
        put(folder, *runs) / "tuned.json", {"points": [["recipe.lr=0.007"]], "tuning_seeds": [100], "rows": []}
    )
    return folder


def test_cells_are_the_accuracies_of_the_runs(study: Path) -> None:
    """Oracle: the numbers of the fixture."""
    tables, *_ = read([study], Options())
    cells = content(tables, [study])
    assert len(cells) == 3 * 2 * len(LENGTHS)
    (cell,) = [own for own in cells if own["model"] == "RoPE" and own["tuned"] and own["length"] == 40]
    assert cell["mean"] == pytest.approx(statistics.mean([0.2, 0.1])) and cell["chance"] == CHANCE
    assert [(own["seed"], own["value"]) for own in cell["runs"]] == [(0, 0.2), (1, 0.1)]
    assert cell["interval"][0] == pytest.approx(0.15 - 12.706 * 0.1 / 2, abs=1e-3)  # t of one degree of freedom
    assert cell["runs"][0]["curve"] == [(10, 0.1), (20, 0.2), (30, 0.3)] and cell["longest"] == 20
    assert "recipe.lr=0.007" in cell["command"] and cell["layers"] == 2 and cell["pattern"] == "full attention"
    assert skill(cell) == pytest.approx(0.05 / 0.9)
    (short,) = [own for own in cells if own["model"] == "RoPE" and not own["tuned"] and own["length"] == 10]
    assert short["parts"] == [("gap 3 4", pytest.approx((0.95 + 0.85) / 4))]
    beyond = [own for own in cells if own["model"] == "learned positions" and own["length"] == 40]
    assert [own["runs"] for own in beyond] == [[], []]
    shown, about = usual(cells)
    assert len(shown) == 9 and all(own["tuned"] for own in shown) and about == "full attention, 2 layers, tuned"


def test_a_choice_that_is_the_default_has_a_cell_in_both_places(tmp_path: Path) -> None:
    """Its runs are those of the row as by default; of another choice they are not, even if no such row has run.

    Options and other settings have cells of their own.
    """
    runs = [run("rope", 0, [0.9, 0.8, 0.7], "recipe.lr=0.003"), run("alibi", 0, [0.5, 0.4, 0.3], "recipe.lr=0.007")]
    runs += [run("alibi", 0, [0.4, 0.4, 0.3]), run("rope", 1, [0.9, 0.8, 0.7], "recipe.lr=0.003")]
    runs += [run("rope", 0, [0.2, 0.2, 0.2], "model.base=500"), run("rope", 0, [0.1, 0.1, 0.1], "width=32")]
    runs.append(run("nope", 0, [0.6, 0.6, 0.6], "recipe.lr=0.007"))
    folder = put(tmp_path / "runs", *runs)
    write_json(folder / "tuned.json", {"points": [["recipe.lr=0.003"]], "tuning_seeds": [100], "rows": []})
    cells = content(read([folder], Options())[0], [folder])
    own = {(cell["model"], cell["tuned"], cell["more"]): cell["mean"] for cell in cells if cell["length"] == 10}
    assert own == {
        ("RoPE, base 10000", True, "width 64"): 0.9,
        ("RoPE, base 10000", False, "width 64"): 0.9,
        ("ALiBi", True, "width 64"): 0.5,
        ("ALiBi", False, "width 64"): 0.4,
        ("no positions", True, "width 64"): 0.6,
        ("RoPE, base 500", False, "width 64"): 0.2,
        ("RoPE, base 10000", False, "width 32"): 0.1,
    }
    assert [cell["interval"] for cell in cells if cell["mean"] == 0.9] == [None, None]


@pytest.mark.parametrize("other", ["a", "z"])
def test_a_tuned_run_that_is_repeated_as_by_default_stays_tuned(other: str, tmp_path: Path) -> None:
    """Whichever folder comes first. Oracle: the fixture, with the default rate as the choice."""
    tuned = put(tmp_path / "tuned", run("rope", 0, [0.9, 0.8, 0.7], "recipe.lr=0.003"))
    write_json(tuned / "tuned.json", {"points": [["recipe.lr=0.003"]], "tuning_seeds": [100], "rows": []})
    again = put(tmp_path / other, run("rope", 0, [0.9, 0.8, 0.7]))
    cells = content(read([tmp_path], Options())[0], [tmp_path])
    assert again.exists() and {cell["tuned"] for cell in cells if cell["length"] == 10} == {True, False}


def test_only_runs_of_a_tuned_study_are_tuned(tmp_path: Path) -> None:
    """The same setting on the command line of another study is named; a default one is not."""
    tuned = put(tmp_path / "tuned", run("rope", 0, [0.9, 0.8, 0.7], "recipe.lr=0.003"))
    write_json(tuned / "tuned.json", {"points": [["recipe.lr=0.003"]], "tuning_seeds": [100], "rows": []})
    others = [run("alibi", 0, [0.5, 0.4, 0.3], "recipe.lr=0.007"), run("nope", 0, [0.5, 0.4, 0.3])]
    other = put(tmp_path / "other", *others)
    cells = content(read([tuned, other], Options())[0], [tuned, other])
    names = {(cell["model"], cell["tuned"], cell["more"]) for cell in cells}
    assert names == {
        ("RoPE", True, ""),
        ("RoPE", False, ""),
        ("ALiBi", False, "lr 0.007"),
        ("no positions", False, ""),
    }


def test_a_table_is_along_the_axis_with_the_most_values(study: Path, tmp_path: Path) -> None:
    """Two encodings are tuned; layers differ as by default, where the table of layers is. Oracle: the fixture."""
    more = put(tmp_path / "more", *(run("rope", 0, [k / 10] * 3, f"layers={k}") for k in (1, 3)))
    cells = content(read([study, more], Options())[0], [study, more])
    probes = probe_functions(cells)["probes"]

    def rows(text: str) -> list[str]:
        return [re.sub(" +", " ", line) for line in text.splitlines()][2:]

    assert rows(probes("layers", copy=40)) == ["| 3 | 30.0 |", "| 1 | 10.0 |", "| 2 | 10.0 ± 7.1 |"]
    assert [row.split("|")[1].strip() for row in rows(probes(copy=10))] == ["RoPE", "ALiBi", "learned positions"]
    failed = [{**cell, "runs": [], "tuned": True} for cell in cells[:1]]
    assert usual([*failed, *(cell for cell in cells if not cell["tuned"])])[0][0]["tuned"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "modle", "copy": 40}, "the axis of probes() has no choice 'modle'"),
        ({"fixed": {"layer": 2}, "copy": 40}, "the axis of probes() has no choice 'layer'"),
        ({"copy": 41}, "there is no run of probe=copy at length 41"),
        ({"recall": 8}, "there is no run of probe=recall at length 8"),
        ({}, "probes() needs a probe and its length"),
    ],
)
def test_a_wrong_table_is_one_sentence(arguments: dict[str, Any], message: str, study: Path) -> None:
    probes = probe_functions(content(read([study], Options())[0], [study]))["probes"]
    with pytest.raises(UserError, match=re.escape(message)):
        probes(**arguments)


def test_runs_that_have_not_finished_are_a_cross(tmp_path: Path) -> None:
    failed = run("rope", 0, [0.9, 0.8, 0.7]) | {"status": "diverged"}
    cells = content(read([put(tmp_path, failed, run("nope", 0, [1.0, 1.0, 1.0]))], Options())[0], [])
    assert [(as_text(cell), cell["state"]) for cell in cells if cell["length"] == 10] == [
        ("100", "1"),
        ("×", "0; diverged: seed 0"),
    ]


def test_the_title_is_text(browser: Any, study: Path, tmp_path: Path) -> None:
    title = "<script>alert(1)</script> DATA & DIGEST"
    write_report([study], tmp_path, options=Options(title=title, formats=()))
    shown, said = opened(browser, tmp_path / "index.html")
    assert shown.locator("h1").inner_text() == shown.title() == title
    assert shown.locator("#map tbody tr").count() == 3 and said == []


def test_claims_about_longer_texts() -> None:
    """Oracles: scipy's Welch test, and Holm's correction by hand; lengths of training do not count."""

    def cells(model: str, values: list[float], length: int = 40) -> dict[str, Any]:
        runs = [{"seed": seed, "value": value} for seed, value in enumerate(values)]
        return {"probe": "copy", "length": length, "longest": 20, "model": model, "runs": runs}

    none, alibi, rope, t5 = [0.5, 0.52, 0.49], [0.1, 0.12, 0.13], [0.9, 0.88, 0.91], [0.5, 0.4, 0.6]
    names = {"no positions": none, "ALiBi": alibi, "RoPE": rope, "relative positions": t5}
    study = [cells(name, values) for name, values in names.items()] + [cells("ALiBi", alibi, 20)]
    verdicts = {(verdict.better, verdict.worse): verdict for verdict in judge(study)}
    assert len(verdicts) == 5
    pairs = [(none, alibi), (none, rope), (none, t5), (t5, alibi), (t5, rope)]
    p = [stats.ttest_ind(*pair, equal_var=False).pvalue for pair in pairs]
    assert [own.effect.p for own in verdicts.values()] == pytest.approx(p)
    corrected, highest = {}, 0.0
    for rank, k in enumerate(sorted(range(5), key=lambda k: p[k])):
        highest = max(highest, (5 - rank) * p[k])
        corrected[k] = min(1.0, highest)
    for k, (own, (better, worse)) in enumerate(zip(verdicts.values(), pairs)):
        assert own.p == pytest.approx(corrected[k])
        sign = "supported" if statistics.mean(better) > statistics.mean(worse) else "contradicted"
        assert own.word == (sign if corrected[k] <= 0.05 else "inconclusive")
    assert [own.word for own in verdicts.values()][:3] == ["supported", "contradicted", "inconclusive"]
    text = "\n".join(str(part) for _, part in sections(study))
    assert "| copy, 40" in text and "+38.7 " in text and "correction over all 5" in text
    rows = [re.sub(" +", " ", line) for line in str(where_found(study)).splitlines()]
    assert "| no positions − ALiBi | copy 40 | – | 0 | 0 |" in rows
    assert "| no positions − RoPE | – | copy 40 | 0 | 0 |" in rows
    assert "| no positions − relative positions | – | – | 1 | 0 |" in rows


def test_separated_pairs_are_those_whose_intervals_do_not_overlap() -> None:
    """Oracle: intervals by hand. Equal seeds have a point; two points are not compared; four seeds do not count."""

    def cell(model: str, length: int, values: list[float], interval: list[float] | None) -> dict[str, Any]:
        own = {"model": model, "probe": "flip_flop", "length": length, "longest": 20, "interval": interval}
        return {**own, "mean": statistics.mean(values or [0]), "runs": [{"value": value} for value in values]}

    cells = [
        cell("rope", 20, [1.0] * 5, None),
        cell("learned", 20, [0.95] * 5, None),
        cell("alibi", 20, [0.9, 0.88, 0.9, 0.88, 0.9], [0.8, 0.94]),
        cell("nope", 20, [0.7] * 5, [0.6, 0.85]),
        cell("fire", 20, [0.1] * 4, [0.05, 0.15]),
        cell("rope", 10, [0.1] * 5, None),
        cell("nope", 40, [0.1, 0.2] * 3, [0.05, 0.25]),
        cell("rope", 40, [0.9], None),
        cell("alibi", 40, [0.2, 0.4] * 3, [0.2, 0.4]),
    ]

    def rows(beyond: bool) -> list[str]:
        return [re.sub(" +", " ", line) for line in str(separations(cells, beyond)).splitlines()][2:]

    assert rows(beyond=False) == ["| flip flop, 20 | rope 100.0 ± 0.0 | nope 70.0 ± 0.0 | 4 of 6 |"]
    assert rows(beyond=True) == ["| flip flop, 40 (trained to 20) | alibi 30.0 ± 11.0 | nope 15.0 ± 5.5 | 0 of 1 |"]
    assert str(separations(cells[:1], beyond=False)) == str(separations(cells, True, without=["nope"])) == ""
    with pytest.raises(UserError, match="no probe has 5 seeds of two models"):
        probe_functions([])["separations"](beyond=True)


def test_what_tuning_changes() -> None:
    """Oracle: by hand. A model without untuned runs does not count, one with the same runs has no change."""

    def cell(model: str, tuned: bool, mean: float | None, length: int = 20) -> dict[str, Any]:
        place = {"model": model, "pattern": "full", "layers": 2, "tuned": tuned, "more": "", "probe": "flip_flop"}
        own = {"command": f"{model} {tuned and model != 'fire'}", "runs": [] if mean is None else [{}]}
        return {**place, **own, "length": length, "longest": 20, "mean": mean}

    before = {"rope": 0.5, "alibi": 0.6, "nope": 0.7, "learned": None, "fire": 1.0}
    after = {"rope": 0.9, "alibi": 0.8, "nope": 0.65, "learned": 0.9, "fire": 1.0, "xpos": 1.0}
    cells = [cell(model, False, mean) for model, mean in before.items()]
    cells += [cell(model, True, mean) for model, mean in after.items()]
    cells += [cell(model, tuned, 0.1, length=40) for model in ("rope", "fire") for tuned in (True, False)]
    lines = [re.sub(" +", " ", line) for line in str(tuning_gains(cells, beyond=False)).splitlines()][2:]
    assert lines == ["| flip flop, 20 | 70.0 | 83.8 | 3 of 4 | rope +40.0 | nope −5.00 |"]
    lines = [re.sub(" +", " ", line) for line in str(tuning_gains(cells, beyond=True)).splitlines()][2:]
    assert lines == ["| flip flop, 40 | 10.0 | 10.0 | 1 of 2 | rope 0.0 | rope 0.0 |"]
    assert str(tuning_gains([], False)) == str(tuning_gains(cells[:1] + cells[5:6], False)) == ""
    with pytest.raises(UserError, match="both tuned and as by default"):
        probe_functions([])["tuning"](beyond=False)


def test_the_report_has_the_map(study: Path, tmp_path: Path) -> None:
    write_report([study], tmp_path, options=Options(formats=("svg",)))
    assert "(index.html)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figures" / "probes.png").exists() and (tmp_path / "figures" / "probes.svg").exists()
    page = (tmp_path / "index.html").read_text()
    data = re.search(r"^const { cells, start } = (.*)$", page, re.MULTILINE)
    assert data and len(json.loads(data[1])["cells"]) == 18


def test_a_page_shows_the_accuracies(study: Path, tmp_path: Path) -> None:
    """Oracle: the numbers of the fixture; the best one above chance comes first, a dash is beyond the positions."""
    page = tmp_path / "page.md"
    page.write_text("<!--= {{ probes(copy=40) }} -->\n<!--/-->\n", encoding="utf-8")
    write_report([study], tmp_path / "report", plots=False, pages=[page])
    rows = [re.sub(" +", " ", line) for line in page.read_text(encoding="utf-8").splitlines()]
    assert rows[1] == "| | copy, 40 |"
    assert rows[3:6] == ["| ALiBi | 65.0 ± 7.1 |", "| RoPE | 15.0 ± 7.1 |", "| learned positions | – |"]
    page.write_text('<!--= {{ probes(fixed={"tuned": False}, copy=40) }} -->\n<!--/-->\n', encoding="utf-8")
    write_report([study], tmp_path / "report", plots=False, pages=[page])
    assert "| ALiBi | 60.0 ± 7.1 |" in re.sub(" +", " ", page.read_text(encoding="utf-8"))
    page.write_text("<!--= {{ longer() }} -->\n<!--/-->\n", encoding="utf-8")
    other = put(tmp_path / "other", result("seed=0"))
    with pytest.raises(UserError, match=r"line 1: there are no runs that test longer"):
        write_report([other], tmp_path / "report", plots=False, pages=[page])


def test_the_map_in_a_browser(browser: Any, study: Path, tmp_path: Path) -> None:
    """A click shows the runs, a head sorts, settings switch, keys move, the address keeps the state; no network."""
    write_report([study], tmp_path, options=Options(formats=()))
    shown, said = opened(browser, tmp_path / "index.html")
    names = "[...document.querySelectorAll('#map tbody th')].map(own => own.textContent)"
    texts = "[...document.querySelectorAll('#map tbody td')].map(own => own.textContent)"
    assert shown.evaluate(names) == ["ALiBi", "RoPE", "learned positions"]  # by the mean above chance
    assert shown.evaluate(texts) == ["85", "85", "65", "95", "85", "15", "75", "75", "–"]
    assert shown.locator("th.beyond").all_inner_texts() == ["40"]
    shown.locator("[data-sort='copy|10']").click()
    assert shown.evaluate(names) == ["RoPE", "ALiBi", "learned positions"]
    shown.locator("[data-sort='copy|10']").click()
    assert shown.evaluate(names) == ["learned positions", "ALiBi", "RoPE"]
    shown.locator("#map td button").last.click()
    panel = shown.locator("aside").inner_text()
    assert "RoPE: copy, length 40" in panel and "chance 10.0 %" in panel and "recipe.lr=0.007" in panel
    assert "20.0" in panel and "ccccccc" in panel and shown.locator("aside polyline").count() == 2
    shown.keyboard.press("ArrowUp")
    assert "ALiBi, copy, length 40" in shown.evaluate("document.activeElement.ariaLabel")
    shown.locator("select[name=tuned]").select_option("false")
    assert shown.evaluate(texts)[-1] == "10"
    again, _ = opened(browser, tmp_path / "index.html")
    again.goto(shown.url)
    assert again.evaluate(texts) == shown.evaluate(texts)
    assert again.evaluate("document.querySelector('select[name=tuned]').value") == "false"
    again.set_viewport_size({"width": 390, "height": 800})
    assert again.evaluate("document.documentElement.scrollWidth") == 390 and said == []
