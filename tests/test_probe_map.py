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
from synthetic import put, result, single_spaced

from speechformer.errors import UserError
from speechformer.report.__main__ import read, write_report
from speechformer.report.labels import Options
from speechformer.report.pages import probe_functions
from speechformer.report.plots import plt
from speechformer.report.probe_claims import judge, sections, where_found
from speechformer.report.probe_map import as_text, content, draw, separations, skill, usual
from speechformer.runs.folder import write_json

LENGTHS = [10, 20, 40]
CHANCE = 0.1
TITLE = "<script>alert(1)</script> DATA & DIGEST"


def run(model: str, seed: int, accuracies: list[float], *more: str, reached: int = 3) -> dict[str, Any]:
    """A run of copying: its accuracy at each length, of which it reaches some."""
    overrides = ["task=probe", "protocol=clean", "study=probes", f"probe.test_lengths={LENGTHS}", f"model={model}"]
    metrics = {"test_accuracy": 0.5, "validation_accuracy": 0.3, "test_accuracy_length_10_gap_3_4": accuracies[0] / 2}
    for length, accuracy in list(zip(LENGTHS, accuracies))[:reached]:
        metrics |= {f"test_accuracy_length_{length}": accuracy, f"chance_accuracy_length_{length}": CHANCE}
    return result(
        *overrides,
        *more,
        f"seed={seed}",
        metrics=metrics,
        report={"metric": "test_accuracy", "columns": ["test_accuracy"], "compare": ["test_accuracy"]},
        curve=[{"step": 10 * k, "validation_accuracy": k / 10} for k in range(1, 4)],
        corpus={"name": "copy", "sha256": "c" * 64, "counts": {"train": 64, "test": 500, "test_in_train": 0}},
    )


def put_tuned(folder: Path, rate: float, *runs: dict[str, Any]) -> Path:
    """Write runs into the folder of a study that chose a learning rate."""
    chosen = {"points": [[f"recipe.lr={rate}"]], "tuning_seeds": [100], "rows": []}
    write_json(put(folder, *runs) / "tuned.json", chosen)
    return folder


def cells_of(*folders: Path) -> list[dict[str, Any]]:
    return content(read([*folders], Options())[0], folders)


def rows_of(table: object) -> list[str]:
    """The lines of a table, without its head."""
    return single_spaced(table).splitlines()[2:]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three encodings with two seeds, as by default and tuned, and a tuning run that is no cell."""
    accuracies = {"rope": [1.0, 0.9, 0.2], "alibi": [0.9, 0.9, 0.7], "learned": [0.8, 0.8, 0.0]}
    runs = [run("rope", 100, [0.0, 0.0, 0.0], "study=probes_tuning", "recipe.lr=0.007")]
    for model, means in accuracies.items():
        for seed, more in ((0, 0.0), (1, -0.1)):
            values, reached = [mean + more for mean in means], 2 if model == "learned" else 3
            runs.append(run(model, seed, [value - 0.05 for value in values], reached=reached))
            runs.append(run(model, seed, values, "recipe.lr=0.007", reached=reached))
    return put_tuned(tmp_path_factory.mktemp("study"), 0.007, *runs)


@pytest.fixture(scope="module")
def report(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study's report."""
    folder = tmp_path_factory.mktemp("report")
    write_report([study], folder, plots=False, options=Options(title=TITLE))
    return folder


def test_cells_are_the_accuracies_of_the_runs(study: Path) -> None:
    """Oracle: the numbers of the fixture."""
    cells = cells_of(study)
    assert len(cells) == 3 * 2 * len(LENGTHS)
    (cell,) = [own for own in cells if own["model"] == "RoPE" and own["tuned"] and own["length"] == 40]
    assert cell["mean"] == pytest.approx(0.15) and cell["chance"] == CHANCE
    assert cell["interval"][0] == pytest.approx(0.15 - 12.706 * 0.1 / 2, abs=1e-3)  # t of one degree of freedom
    assert cell["runs"][0]["curve"] == [(10, 0.1), (20, 0.2), (30, 0.3)] and cell["longest"] == 20
    assert skill(cell) == pytest.approx(0.05 / 0.9)
    shown, about = usual(cells)
    assert len(shown) == 9 and all(own["tuned"] for own in shown) and about == "full attention, 2 layers, tuned"
    (axis,) = draw(cells)[0].axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["ALiBi", "RoPE", "learned positions"]
    texts = ["85", "85", "65", "95", "85", "15", "75", "75", "–"]  # by the mean above chance; beyond the positions
    assert [text.get_text() for text in axis.texts][:9] == texts
    plt.close("all")


def test_a_choice_that_is_the_default_has_a_cell_in_both_places(tmp_path: Path) -> None:
    """Its runs are those of the row as by default; of another choice they are not, even if no such row has run.

    Options and other settings have cells of their own.
    """
    runs = [run("rope", 0, [0.9, 0.8, 0.7], "recipe.lr=0.003"), run("alibi", 0, [0.5, 0.4, 0.3], "recipe.lr=0.007")]
    runs += [run("alibi", 0, [0.4, 0.4, 0.3]), run("nope", 0, [0.6, 0.6, 0.6], "recipe.lr=0.007")]
    runs += [run("rope", 0, [0.2, 0.2, 0.2], "model.base=500"), run("rope", 0, [0.1, 0.1, 0.1], "width=32")]
    cells = cells_of(put_tuned(tmp_path, 0.003, *runs))
    means = {(cell["model"], cell["tuned"], cell["more"]): cell["mean"] for cell in cells if cell["length"] == 10}
    assert means == {
        ("RoPE, base 10000", True, "width 64"): 0.9,
        ("RoPE, base 10000", False, "width 64"): 0.9,
        ("ALiBi", True, "width 64"): 0.5,
        ("ALiBi", False, "width 64"): 0.4,
        ("no positions", True, "width 64"): 0.6,
        ("RoPE, base 500", False, "width 64"): 0.2,
        ("RoPE, base 10000", False, "width 32"): 0.1,
    }


def test_only_runs_of_a_tuned_study_are_tuned(tmp_path: Path) -> None:
    """The same setting on the command line of another study is named; a run that is repeated there stays tuned."""
    tuned = put_tuned(tmp_path / "tuned", 0.003, run("rope", 0, [0.9, 0.8, 0.7], "recipe.lr=0.003"))
    others = [run("alibi", 0, [0.5, 0.4, 0.3], "recipe.lr=0.007"), run("rope", 0, [0.9, 0.8, 0.7])]
    cells = cells_of(tuned, put(tmp_path / "other", *others))
    names = {(cell["model"], cell["tuned"], cell["more"]) for cell in cells}
    assert names == {("RoPE", True, ""), ("RoPE", False, ""), ("ALiBi", False, "lr 0.007")}


def test_a_table_is_along_the_axis_with_the_most_values(study: Path, tmp_path: Path) -> None:
    """Encodings are tuned; layers differ as by default, where their table is. The best above chance is first."""
    more = put(tmp_path / "more", *(run("rope", 0, [k / 10] * 3, f"layers={k}") for k in (1, 3)))
    probes = probe_functions(cells_of(study, more))["probes"]
    assert rows_of(probes("layers", copy=40)) == ["| 3 | 30.0 |", "| 1 | 10.0 |", "| 2 | 10.0 ± 7.1 |"]
    rows = ["| ALiBi | 65.0 ± 7.1 |", "| RoPE | 15.0 ± 7.1 |", "| learned positions | – |"]
    assert rows_of(probes(copy=40)) == rows
    assert "| ALiBi | 60.0 ± 7.1 |" in rows_of(probes(fixed={"tuned": False}, copy=40))
    for arguments, message in (
        ({"by": "modle", "copy": 40}, "the axis of probes() has no choice 'modle'"),
        ({"copy": 41}, "there is no run of probe=copy at length 41"),
        ({}, "probes() needs a probe and its length"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            probes(**arguments)


def test_runs_that_have_not_finished_are_a_cross(tmp_path: Path) -> None:
    failed = run("rope", 0, [0.9, 0.8, 0.7]) | {"status": "diverged"}
    cells = cells_of(put(tmp_path, failed, run("nope", 0, [1.0, 1.0, 1.0])))
    texts = [(as_text(cell), cell["state"]) for cell in cells if cell["length"] == 10]
    assert texts == [("100", "1"), ("×", "0; diverged: seed 0")]


def test_claims_about_longer_texts() -> None:
    """Oracles: scipy's Welch test, and Holm's correction by hand; lengths of training do not count."""

    def cell(model: str, values: list[float], length: int = 40) -> dict[str, Any]:
        runs = [{"seed": seed, "value": value} for seed, value in enumerate(values)]
        return {"probe": "copy", "length": length, "longest": 20, "model": model, "runs": runs}

    none, alibi, rope, t5 = [0.5, 0.52, 0.49], [0.1, 0.12, 0.13], [0.9, 0.88, 0.91], [0.5, 0.4, 0.6]
    names = {"no positions": none, "ALiBi": alibi, "RoPE": rope, "relative positions": t5}
    cells = [cell(name, values) for name, values in names.items()] + [cell("ALiBi", rope, 20)]
    verdicts = judge(cells)
    pairs = [(none, alibi), (none, rope), (none, t5), (t5, alibi), (t5, rope)]
    p = [stats.ttest_ind(*pair, equal_var=False).pvalue for pair in pairs]
    assert [verdict.effect.p for verdict in verdicts] == pytest.approx(p)
    highest = 0.0
    for rank, place in enumerate(sorted(range(5), key=p.__getitem__)):
        highest = max(highest, min(1.0, (5 - rank) * p[place]))
        assert verdicts[place].p == pytest.approx(highest)
        better, worse = map(statistics.mean, pairs[place])
        word = "supported" if better > worse else "contradicted"
        assert verdicts[place].word == (word if highest <= 0.05 else "inconclusive")
    assert "correction over all 5" in "\n".join(str(part) for _, part in sections(cells))
    assert rows_of(where_found(cells))[:3] == [
        "| no positions − ALiBi | copy 40 | – | 0 | 0 |",
        "| no positions − RoPE | – | copy 40 | 0 | 0 |",
        "| no positions − relative positions | – | – | 1 | 0 |",
    ]


def test_separated_pairs_are_those_whose_intervals_do_not_overlap() -> None:
    """Oracle: intervals by hand. Equal seeds have a point; two points are not compared; four seeds do not count."""

    def cell(model: str, length: int, values: list[float], interval: list[float] | None) -> dict[str, Any]:
        place = {"model": model, "probe": "flip_flop", "length": length, "longest": 20, "interval": interval}
        return {**place, "mean": statistics.mean(values), "runs": [{"value": value} for value in values]}

    cells = [
        cell("rope", 20, [1.0] * 5, None),
        cell("learned", 20, [0.95] * 5, None),
        cell("alibi", 20, [0.9, 0.88, 0.9, 0.88, 0.9], [0.8, 0.94]),
        cell("nope", 20, [0.7] * 5, [0.6, 0.85]),
        cell("fire", 20, [0.1] * 4, [0.05, 0.15]),
        cell("nope", 40, [0.1, 0.2] * 3, [0.05, 0.25]),
        cell("alibi", 40, [0.2, 0.4] * 3, [0.2, 0.4]),
    ]
    rows = ["| flip flop, 20 | rope 100.0 ± 0.0 | nope 70.0 ± 0.0 | 4 of 6 |"]
    assert rows_of(separations(cells, beyond=False)) == rows
    rows = ["| flip flop, 40 (trained to 20) | alibi 30.0 ± 11.0 | nope 15.0 ± 5.5 | 0 of 1 |"]
    assert rows_of(separations(cells, beyond=True)) == rows


def test_the_report_has_the_page_of_the_map(report: Path) -> None:
    assert "(index.html)" in (report / "report.md").read_text(encoding="utf-8")
    page = (report / "index.html").read_text(encoding="utf-8")
    data = re.search(r"^const { cells, start } = (.*)$", page, re.MULTILINE)
    assert data and len(json.loads(data[1])["cells"]) == 18
    assert "<h1>&lt;script&gt;alert(1)&lt;/script&gt; DATA &amp; DIGEST" in page and "<script>alert" not in page


@pytest.mark.slow
def test_the_map_in_a_browser(browser: Any, report: Path) -> None:
    """A click shows the runs, a head sorts, settings switch, keys move, the address keeps the state; no network."""
    shown, said = opened(browser, report / "index.html")
    names = "[...document.querySelectorAll('#map tbody th')].map(own => own.textContent)"
    texts = "[...document.querySelectorAll('#map tbody td')].map(own => own.textContent)"
    assert shown.locator("h1").inner_text() == shown.title() == TITLE
    assert shown.evaluate(names) == ["ALiBi", "RoPE", "learned positions"]  # by the mean above chance
    assert shown.evaluate(texts) == ["85", "85", "65", "95", "85", "15", "75", "75", "–"]
    shown.locator("[data-sort='copy|10']").click()
    assert shown.evaluate(names) == ["RoPE", "ALiBi", "learned positions"]
    shown.locator("#map td button").last.click()
    panel = shown.locator("aside").inner_text()
    assert "learned positions: copy, length 20" in panel and "chance 10.0 %" in panel and "recipe.lr=0.007" in panel
    shown.locator("select[name=tuned]").select_option("false")
    assert shown.evaluate(texts)[2] == "10"
    again, _ = opened(browser, report / "index.html")
    again.goto(shown.url)
    assert again.evaluate(texts) == shown.evaluate(texts) and said == []
