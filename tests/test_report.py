"""The report: what was published is what the reports print, statistics are the textbook's, and nothing is dropped."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import EXPERIMENTS, compose
from omegaconf import OmegaConf
from scipy import stats

from speechformer.config import CONF
from speechformer.refusals import UserError
from speechformer.report import published
from speechformer.report.__main__ import write_report
from speechformer.report.plots import look
from speechformer.report.results import build_tables, flat, read_runs
from speechformer.report.statistics import paired, summarise
from speechformer.runs import write_result

SEEDS = Path(os.environ.get("SPEECHFORMER_DATA", "nowhere")).resolve().parent / "seeds"
OF_A_REPORT = [name for name in EXPERIMENTS if name.startswith(("kulkarni", "singhal", "marsol"))]


# What was published


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the reports' texts are not here")
@pytest.mark.parametrize(
    "table", published.content()["tables"], ids=lambda t: f"{t['report']} {t['table']} {t['row']}"
)
def test_every_published_row_is_a_line_of_its_report(table: dict[str, Any]) -> None:
    author = {"Kulkarni": "Anay Kulkarni", "Singhal": "Sanidhya Singal", "Marsol": "Marsol Torrent"}[table["report"]]
    (text,) = (text for path in SEEDS.iterdir() if author in (text := path.read_text(encoding="utf-8"))[:400])
    lines = [[float(found) for found in re.findall(r"\d+\.?\d*", line)] for line in text.splitlines()]
    for row in table["rows"]:
        # in one line and in this order; other figures (another row's column) may stand between
        assert any(all(value in rest for value in row) for line in lines for rest in [iter(line)]), row


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the reports' texts are not here")
def test_no_row_of_a_reports_table_is_left_out() -> None:
    """Every line of a report that is three or more numbers with decimals is published here."""
    have = [tuple(row) for table in published.content()["tables"] for row in table["rows"]]
    for path in SEEDS.iterdir():
        text = path.read_text(encoding="utf-8")
        if not any(name in text[:400] for name in ("Anay Kulkarni", "Sanidhya Singal", "Marsol Torrent")):
            continue
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split("\t")]
            numbers = [float(cell) for cell in cells if re.fullmatch(r"\d+\.?\d*", cell)]
            if len(numbers) >= 3 and len(numbers) >= len(cells) - 1:
                inside = [row for row in have if set(row) <= set(numbers)]
                assert set().union(*inside) == set(numbers), line


@pytest.mark.parametrize("experiment", OF_A_REPORT)
def test_each_experiment_of_a_report_is_one_published_row(experiment: str) -> None:
    config = OmegaConf.to_container(compose(f"experiment={experiment}"), resolve=True)
    matching = {
        name
        for name, row in published.content()["rows"].items()
        if all(dict(flat(config)).get(key) == value for key, value in row["where"].items())
    }
    expected = {"kulkarni_part3_scales": "kulkarni_part3_scale_0.5"}.get(experiment, experiment)
    assert matching == {expected}
    assert published.content()["rows"][expected]["study"] == config["study"]


def test_every_study_of_an_experiment_has_a_title_and_every_title_a_study() -> None:
    studies = {OmegaConf.to_container(compose(f"experiment={name}"), resolve=True)["study"] for name in EXPERIMENTS}
    studies.add("slopes_lm")
    assert studies == set(published.content()["studies"])


def test_figures_that_a_report_ends_with() -> None:
    finals = {(figure.name, figure.chosen): figure.value for figure in published.final_figures("marsol_table1_full")}
    assert finals[("test_perplexity_obama", "last")] == 406.80
    assert finals[("test_perplexity_obama", "best")] == 395.51
    (figure,) = published.final_figures("marsol_classify")
    assert (figure.value, figure.chosen) == (0.86, "best")
    assert published.curve("kulkarni_part1", "test_accuracy")[0] == (1, pytest.approx(0.3373))


# Statistics


def test_summary_is_the_textbooks() -> None:
    """1 ... 5: sd sqrt(2.5), t(4) = 2.776445."""
    summary = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (summary.n, summary.mean, summary.extremes) == (5, 3, (1, 5))
    assert summary.sd == pytest.approx(math.sqrt(2.5))
    assert summary.interval == pytest.approx((3 - 2.776445 * math.sqrt(0.5), 3 + 2.776445 * math.sqrt(0.5)))
    half = 2.776445 * math.sqrt(2.5 * 1.2)
    assert summary.range == pytest.approx((3 - half, 3 + half))


def test_intervals_cover_as_often_as_they_say() -> None:
    """5 draws, 2000 times: the mean's interval holds the true mean and one run's range the next draw, 95 % each."""
    draws = stats.norm(10, 2).rvs((2000, 6), random_state=0)
    summaries = [summarise(list(row[:5])) for row in draws]
    mean = sum(low <= 10 <= high for low, high in (summary.interval for summary in summaries)) / 2000
    one = sum(s.range[0] <= row[5] <= s.range[1] for s, row in zip(summaries, draws)) / 2000
    assert mean == pytest.approx(0.95, abs=0.02) and one == pytest.approx(0.95, abs=0.02)


def test_one_value_and_equal_values() -> None:
    assert summarise([2.0]).mean == 2 and math.isnan(summarise([2.0]).sd)
    assert summarise([2.0, 2.0]).interval == (2, 2)
    assert paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}).interval == (1, 1)  # type: ignore[union-attr]


def test_paired_differences_use_common_seeds_alone() -> None:
    """Differences 1, 2, 3 over seeds 1-3: mean 2, t(2) = 4.302653, half 4.302653 / sqrt(3)."""
    difference = paired({0: 99.0, 1: 11.0, 2: 22.0, 3: 33.0}, {1: 10.0, 2: 20.0, 3: 30.0, 4: 0.0})
    assert difference is not None and (difference.n, difference.mean) == (3, 2)
    half = 4.302653 / math.sqrt(3)
    assert difference.interval == pytest.approx((2 - half, 2 + half))
    assert difference.apart is False
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert paired({0: 1.0}, {0: 2.0}).apart is None  # type: ignore[union-attr]


# Tables


def result(
    *overrides: str, value: float | None = 0.8, sha256: str = "a" * 64, status: str = "finished", **more: Any
) -> dict[str, Any]:
    """A `result.json` as a run leaves it; `value` is its main figure."""
    config: Any = OmegaConf.to_container(compose(*overrides), resolve=True)
    task = config["task"]["name"]
    if task == "classify":
        metrics = {"test_accuracy": value, "test_accuracy_seen": value, "test_accuracy_unseen": value}
    else:
        names = ("test_perplexity_mean", "test_perplexity_obama", "test_perplexity_wbush", "test_perplexity_hbush")
        metrics = {name: value for name in names}
    about = {"status": status, "task": task, "config": config, "seed": config["seed"], "overrides": list(overrides)}
    if status == "failed":
        return {**about, "error": "it broke", "commit": "c" * 40}
    counts = {"train": 2092, "test": 750, "test_seen_in_train": 551}
    corpus = {"name": "speeches", "sha256": sha256, "classes": ["obama", "wbush", "hbush"], "counts": counts}
    curve = [{"step": 131 * k, **{name: v for name, v in metrics.items() if v is not None}} for k in (1, 2)]
    own = {"metrics": metrics, "curve": curve, "corpus": corpus, "parameters": {"total": 7}, "seconds": 2.5}
    return {**about, **own, "commit": "c" * 40, "versions": {"torch": "2", "python": "3", "lightning": "2"}, **more}


def put(folder: Path, *results: dict[str, Any]) -> Path:
    for k, content in enumerate(results):
        (folder / str(k)).mkdir(parents=True)
        write_result(folder / str(k), content)
    return folder


def tables_of(folder: Path) -> list:
    return build_tables(read_runs([folder])[0])[0]


def test_rows_hold_seeds_and_are_named_by_what_differs(tmp_path: Path) -> None:
    runs = [result(f"model={model}", f"seed={seed}") for model in ("rope", "nope") for seed in (0, 1)]
    runs += [result("pattern=window", f"pattern.window={w}", "model=rope") for w in (3, 5)]
    runs += [result("pattern=bigbird", "model=rope", f"seed={seed}") for seed in (0, 1)]  # its links follow the seed
    (table,) = tables_of(put(tmp_path, *runs))
    assert {row.label: len(row.runs) for row in table.rows} == {
        "model=rope pattern=full": 2,
        "model=nope pattern=full": 2,
        "model=rope pattern=window pattern.window=3": 1,
        "model=rope pattern=window pattern.window=5": 1,
        "model=rope pattern=bigbird": 2,
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
    assert "50.0 ±" not in (tmp_path / "out" / "report.md").read_text()


def test_what_failed_diverged_or_is_missing_is_shown(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", f"seed={seed}", value=400.0 + seed) for seed in range(4)]
    runs += [result("experiment=marsol_table1_alibi", "seed=0", value=300.0)]
    runs += [result("experiment=marsol_table1_alibi", "seed=1", value=None, status="diverged")]
    runs += [result("experiment=marsol_table1_alibi", "seed=2", status="failed")]
    put(tmp_path, *runs)
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text('{"status": "fini')
    (tmp_path / "again").mkdir()
    write_result(tmp_path / "again", runs[0])
    (table,) = write_report([tmp_path], tmp_path / "out", plots=False)
    full, alibi = table.rows
    assert (full.label, alibi.label) == ("full attention", "ALiBi")
    assert full.state == "4"
    assert alibi.state == "1; diverged: seed 1; failed: seed 2; missing: seed 3"
    assert summarise(list(alibi.values("test_perplexity_mean").values())).mean == 300
    assert table.expected == ["window 5", "window 3", "block sparse"]
    text = (tmp_path / "out" / "report.md").read_text()
    for said in (
        "| window 5 | not run |",
        "diverged: seed 1; failed: seed 2; missing: seed 3",
        "Failed: ALiBi, seed 2: it broke",
        "stopped has no result",
        f"{Path('cut') / 'result.json'} is no result",
        "is the same run as",
    ):
        assert said in text, said


def test_the_reference_of_a_study_comes_first(tmp_path: Path) -> None:
    runs = [
        result("experiment=positions_lm", f"model={model}", f"seed={k}")
        for model in ("alibi", "rope", "nope")
        for k in (0, 1)
    ]
    (table,) = tables_of(put(tmp_path, *runs))
    assert [row.label for row in table.rows] == ["model=nope", "model=alibi", "model=rope"]


def test_theirs_stands_beside_ours_chosen_in_the_same_way(tmp_path: Path) -> None:
    runs = []
    for seed, (first, last) in enumerate([(390.0, 420.0), (400.0, 430.0), (410.0, 440.0)]):
        run = result("experiment=marsol_table1_full", f"seed={seed}", value=last)
        run["curve"] = [
            {"step": step, **dict.fromkeys(run["metrics"], value)} for step, value in ((400, first), (500, last))
        ]
        runs.append(run)
    write_report([put(tmp_path, *runs)], tmp_path / "out", plots=False)
    with open(tmp_path / "out" / "tables" / "published.csv", encoding="utf-8") as file:
        rows = {(row["figure"], row["chosen"]): row for row in csv.DictReader(file)}
    best, last = rows["test_perplexity_obama", "best"], rows["test_perplexity_obama", "last"]
    assert (float(best["theirs"]), float(best["mean"])) == (395.51, 400)
    assert (float(last["theirs"]), float(last["mean"])) == (406.80, 430)
    # sd 10, t(2) = 4.302653: the range of one run is the mean ± 49.7
    assert (best["theirs_in_range"], last["theirs_in_range"]) == ("True", "True")
    assert float(last["one_run_low_95"]) == pytest.approx(430 - 4.302653 * 10 * math.sqrt(4 / 3))


def test_theirs_does_not_stand_beside_another_setting(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", "width=128", f"seed={seed}", value=400.0) for seed in (0, 1)]
    (table,) = tables_of(put(tmp_path, *runs))
    assert table.rows[0].published is None


def test_baselines_stand_beside_their_own_corpus_protocol_and_task_alone(tmp_path: Path) -> None:
    counting = {**result("task=lm", value=285.0), "baseline": {"name": "kneser_ney_5"}, "seed": None}
    runs = [result("task=lm", value=400.0), result(), result("task=lm", sha256="b" * 64, value=400.0), counting]
    tables = tables_of(put(tmp_path, *runs))
    beside = {(table.task, table.sha256[0]): [run.metrics for run in table.baselines] for table in tables}
    assert beside == {("lm", "a"): [counting["metrics"]], ("lm", "b"): [], ("classify", "a"): []}


def test_every_cell_can_be_made_again(tmp_path: Path) -> None:
    runs = [result("experiment=singhal_table3", f"seed={seed}") for seed in (0, 1)]
    write_report([put(tmp_path, *runs)], tmp_path / "out", plots=False)
    text = (tmp_path / "out" / "report.md").read_text()
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
    pictures = sorted((tmp_path / "out" / "figures").iterdir())
    kinds = [path.stem.rpartition("_")[2] for path in pictures]
    assert sorted(kinds) == ["bars", "bars", "curves", "curves", "lengths"]
    assert page.count("data:image/png;base64,") == len(pictures) == 5
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(f"(figures/{path.name})" in text for path in pictures)
    assert "| 32 (trained) | 64 | 128 |" in text


def test_a_variant_looks_the_same_everywhere_and_unlike_its_neighbours() -> None:
    """Within a study no two variants share a look; a look is a function of the settings alone."""
    values = {
        "model": ["nope", "sinusoidal", "learned", "relative", "rope", "alibi"],
        "pattern": ["full", "window", "block", "strided", "dilated", "global", "bigbird"],
        "experiment": [name for name in EXPERIMENTS if name.startswith("marsol_table1")],
        "recipe": ["adam", "normal"],
    }
    for group, choices in values.items():
        looks = [
            look(dict(flat(OmegaConf.to_container(compose(f"{group}={name}"), resolve=True)))) for name in choices
        ]
        assert len(set(looks)) == len(choices), group
    scales = [f"model.scale={scale}" for scale in (0.25, 0.5, 1, 1.1, 2, 4)] + ["model.slopes=learned"]
    looks = [
        look(dict(flat(OmegaConf.to_container(compose("model=alibi", scale), resolve=True)))) for scale in scales
    ]
    assert len(set(looks)) == len(scales)


def test_five_hundred_runs_in_three_seconds_and_without_torch(tmp_path: Path) -> None:
    models = ("nope", "sinusoidal", "learned", "relative", "rope")
    kinds = [result("task=lm", f"model={model}", f"study=s{k}") for model in models for k in range(10)]
    for k, kind in enumerate(kinds):
        for seed in range(10):
            (tmp_path / f"{k}_{seed}").mkdir()
            run = {**kind, "config": {**kind["config"], "seed": seed}, "seed": seed}
            (tmp_path / f"{k}_{seed}" / "result.json").write_text(json.dumps(run))
    program = (
        "import sys; from pathlib import Path; from speechformer.report.__main__ import write_report;"
        "tables = write_report([Path(sys.argv[1])], Path(sys.argv[1]) / 'out', plots=False);"
        "assert sum(len(row.runs) for table in tables for row in table.rows) == 500;"
        "print('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
        assert done.stdout == "False\n", done.stderr
    assert min(seconds) < 3, seconds


@pytest.mark.parametrize("content", [None, {}])
def test_a_folder_without_runs_is_answered_in_one_sentence(content: dict | None, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    if content is not None:
        folder.mkdir()
    with pytest.raises(UserError, match="no such folder" if content is None else r"no result\.json under"):
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
    text = (reference / "report.md").read_text(encoding="utf-8")
    for study in published.content()["studies"].values():
        assert f"## {study['title']}" in text
    for path in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (reference / path).is_file(), path
