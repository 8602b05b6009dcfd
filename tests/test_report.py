"""The report: rows and tables hold the right runs, what was published stands beside ours, and nothing is dropped."""

from __future__ import annotations

import collections
import csv
import html
import html.parser
import io
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import call
from hydra.core.override_parser.overrides_parser import OverridesParser
from synthetic import (
    SPEECHES,
    baseline,
    markdown_of,
    put,
    result,
    studies_of,
    study_of,
    translated,
)

from speechformer.report import page, tables
from speechformer.report.__main__ import main
from speechformer.report.labels import in_words, override
from speechformer.report.load import read_results, read_runs
from speechformer.runs.identity import NUMERICS_VERSION, fingerprint
from speechformer.runs.predictions import write_predictions


def states_of(folder: Path) -> list[str]:
    return [tables.state(study, v) for study in studies_of(folder) for v in study.variants]


def test_a_row_names_a_setting_as_the_command_line_takes_it() -> None:
    """Oracle: Hydra's parser."""
    for value in (None, True, 0.5, 3, "geometric", [1.0, 2]):
        words = override("trainer.limit_train_batches", value)
        assert OverridesParser.create().parse_override(words).value() == value
    assert in_words("trainer.limit_train_batches=null", {}) == "all batches"


# Rows and tables


def test_rows_hold_seeds_and_are_named_by_what_differs(tmp_path: Path) -> None:
    runs = [result(f"model={model}", f"seed={seed}") for model in ("rope", "nope") for seed in (0, 1)]
    runs += [result("pattern=window", f"pattern.window={w}", "model=rope") for w in (3, 5)]
    runs += [result("pattern=bigbird", "model=rope", f"seed={seed}") for seed in (0, 1)]  # its links follow the seed
    study = study_of(tmp_path / "a", *runs)
    assert study.runs["variant"].value_counts().to_dict() == {
        "RoPE, full attention": 2,
        "no positions, full attention": 2,
        "RoPE, window 3": 1,
        "RoPE, window 5": 1,
        "RoPE, BigBird, window 3": 2,
    }


def test_a_model_that_training_began_with_is_named_by_its_folder(tmp_path: Path) -> None:
    """And told from another one whose folder has the same name."""
    runs = [result(f"seed={seed}", "model=rope") for seed in range(3)]
    for run, folder, digest in zip(runs, ("/models/tiny", "/elsewhere/tiny", "/models/small"), "aab"):
        run["config"]["init_from"] = {"folder": folder, "sha256": digest * 64}
    study = study_of(tmp_path / "a", *runs)
    assert study.runs["variant"].value_counts().to_dict() == {"from tiny": 2, "from small": 1}
    runs[1]["config"]["init_from"]["sha256"] = "c" * 64
    labels = study_of(tmp_path / "b", *runs).runs["variant"].unique()
    assert {label.partition(" (")[0] for label in labels} == {"from tiny", "from small"} and len(labels) == 3


@pytest.mark.parametrize(
    "runs",
    [
        (("model=alibi",), ("model=alibi", "model.scale=1")),  # a whole number as int and float
        (("corpus=auto",), ("corpus=speeches",)),  # a corpus is what it holds, not how it was asked for
        (("pattern=bigbird", "pattern.seed=0"), ("pattern=bigbird", "pattern.seed=0")),
    ],
)
def test_the_same_settings_make_one_row(runs: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    own = [result(*words, f"seed={seed}") for seed, words in enumerate(runs)]
    own.append(result(*runs[0], status="failed"))  # which finished elsewhere
    assert states_of(put(tmp_path, *own)) == ["2"]


def test_other_corpora_protocols_studies_tasks_and_directions_never_meet(tmp_path: Path) -> None:
    words = ((), ("protocol=paper",), ("protocol.vocabulary=corpus",), ("study=mine",), ("task=lm",))
    runs = [result("seed=1", *own) for own in words] + [result("seed=2", sha256="b" * 64)]
    pairs = [translated("rope", seed, 20.0 + seed) for seed in range(4)]
    pairs[1]["corpus"]["languages"] = ["fr", "en"]
    pairs[2]["corpus"]["counts"]["cleaned"] = {"markup": 5}
    pairs[3]["corpus"]["counts"]["removed_from_validation"] = 11
    built = studies_of(put(tmp_path, *runs, *pairs))
    assert [len(study.runs) for study in built] == [1] * 10
    assert len({study.name for study in built}) == 10
    assert {study.direction for study in built} == {"", "en to fr", "fr to en"}


def test_what_failed_diverged_or_is_missing_is_shown(tmp_path: Path) -> None:
    runs = [result("experiment=marsol_table1_full", f"seed={seed}", value=400.0 + seed) for seed in range(5)]
    runs += [result("experiment=marsol_table1_alibi", "seed=0", value=300.0)]
    runs += [result("experiment=marsol_table1_alibi", "seed=1", value=None)]  # infinite
    runs += [result("experiment=marsol_table1_alibi", "seed=2", status="failed")]
    runs += [result("experiment=marsol_table1_alibi", "seed=4", status="killed")]
    put(tmp_path, *runs)
    put(tmp_path / "again", runs[0])
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "run.json").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text('{"status": "fini')
    (study,) = page.report([tmp_path], tmp_path / "out", draw=False)
    state = "1; diverged: seed 1; failed: seed 2; killed: seed 4; missing: seed 3"
    alibi, full = study.variants
    assert [tables.state(study, variant) for variant in (full, alibi)] == ["5", state]
    alibi = alibi.label
    assert study.values(alibi, "test_perplexity_mean") == {0: 300}
    text = markdown_of(tmp_path / "out")
    for said in (
        f"| {alibi} | {state} |",
        f"Failed: {alibi}, seed 2: it broke",
        "stopped has no result",
        "cut/result.json is damaged: ",
        " repeats ",
    ):
        assert said in text, said


def test_a_run_that_failed_of_its_config_is_shown(tmp_path: Path) -> None:
    runs = [result("task=lm", "task.lengths=[64]", "model=alibi", value=400.0)]
    for key in ("batch_size", "block_size", "task.lengths", "trainer.limit_train_batches", "model.scale"):
        failed = result("task=lm", "model=alibi", status="failed")
        runs.append(json.loads(with_entry(failed, f"config.{key}", ["x"])))
    (study,) = page.report([put(tmp_path, *runs)], tmp_path / "out", draw=False)
    states = sorted(tables.state(study, variant)[:9] for variant in study.variants)
    assert states == ["0; failed"] * 5 + ["1"]


def test_an_epoch_is_a_pass_over_the_rows(tmp_path: Path) -> None:
    """2092 rows, 16 a batch, two batches a step: 131 batches, 66 steps; and half of them: 65 batches, 33 steps."""
    plain = ("trainer.accumulate_grad_batches=2",)
    limited = [result(*plain, "trainer.limit_train_batches=0.5"), result("trainer.limit_train_batches=7")]
    study = study_of(tmp_path, result(*plain), *limited)
    assert sorted(run.steps_per_epoch for run in study.results) == [7, 33, 66]


def test_labels_of_many_settings_leave_out_the_usual_ones(tmp_path: Path) -> None:
    """Oracle: written by hand. The first command has no setting that another one has not."""
    usual = ("recipe=muon", "layers=1", "width=32", "ff=48", "trainer.max_epochs=20", "task.unknown_rate=0.5")
    reports = ("layers=2", "width=64", "ff=100", "trainer.max_epochs=15", "dropout=0")
    others = ((*usual, "dropout=0.3"), usual[:-1], (*usual, "pattern=window"), (*usual, "recipe.label_smoothing=0.2"))
    runs = [result(), result(*reports), result(*usual), *(result(*words) for words in others)]
    study = study_of(tmp_path / "many", *runs)
    places = {Path(folder).name: label for folder, label in zip(study.runs["folder"], study.runs["variant"])}
    labels = [places[str(place)] for place in range(len(runs))]
    assert labels[2:5] == ["the usual settings", "dropout 0.3", "unknown rate 0"], labels
    assert labels[5:] == ["window 5", "label smoothing 0.2"], labels
    assert labels[1].startswith("width 64, layers 2") and labels[1].endswith("unknown rate 0"), labels
    assert "unknown rate 0.5" in study.usual and "dropout 0.1" in study.usual
    assert len({*labels}) == 7 and study.reference == "the usual settings"


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["task=lm attention=delta", "task=lm attention=linear", "task=lm attention=softmax"], "softmax"),
        ([f"model=alibi model.scale={scale}" for scale in (0.5, 1.0, 2.0)], "slopes × 1"),
        (["pattern=window", "pattern=full", "pattern=block"], "full attention"),
        (["model=rope", "model=alibi"], "ALiBi"),  # the default did not run
    ],
)
def test_where_no_settings_are_usual_the_defaults_are_the_reference(
    words: list[str], reference: str, tmp_path: Path
) -> None:
    assert study_of(tmp_path, *(result(*own.split()) for own in words)).reference == reference


def test_baselines_stand_beside_their_own_corpus_protocol_and_task_alone(tmp_path: Path) -> None:
    counting = baseline("kneser_ney_5", "task=lm", value=285.0)
    runs = [result("task=lm", value=400.0), result(), result("task=lm", sha256="b" * 64, value=400.0)]
    runs += [counting, counting, baseline("tfidf_logistic", "block_size=64")]  # twice; and sentences cut elsewhere
    runs.append(baseline("kneser_ney_5", "task=lm", "task.extra_text=true", value=265.0))
    built = studies_of(put(tmp_path, *runs))
    beside = {(study.task, study.sha256[0]): [run.metrics for run in study.counted] for study in built}
    first = SPEECHES[0]
    assert beside == {("lm", first): [counting["metrics"]], ("lm", "b"): [], ("classify", first): []}


def test_results_are_one_row_for_each_run(tmp_path: Path) -> None:
    runs = [result("model=rope", "pattern=window", "pattern.window=3", value=0.5)]
    runs += [result("model=nope", "seed=1", "architecture.norm=post"), result("task=lm", status="failed")]
    runs.append(baseline("majority"))
    frame = read_results(str(put(tmp_path / "a", *runs[:2])), put(tmp_path / "b", *runs[2:]))
    assert frame["model"].tolist() == ["rope", "nope", "sinusoidal", "majority"]
    assert frame["test_accuracy"].tolist()[:2] == [0.5, 0.8] and math.isnan(frame["test_accuracy"][2])
    assert frame["architecture.norm"].tolist() == ["pre", "post", "pre", "pre"]
    assert frame["seed"].isna().tolist() == [False, False, False, True]
    assert frame["folder"].tolist() == [str(tmp_path / place) for place in ("a/0", "a/1", "b/0", "b/1")]


# The document


def test_longer_contexts_tell_untested_from_impossible(tmp_path: Path) -> None:
    words = ("task=lm", "task.lengths=[64,128]")
    able = result(*words, "model=nope", value=400.0)
    able["metrics"] |= {f"test_length_{length}_perplexity_mean": 500.0 for length in (64, 128)}
    runs = [able, result(*words, "model=learned", value=410.0), result("task=lm", "block_size=64", value=380.0)]
    (table,) = tables.lengths(study_of(tmp_path, *runs))
    header, rows = list(table.frame), table.frame.to_numpy().tolist()
    assert header[1:] == ["trained on, tokens", "tested on 32", "tested on 64", "tested on 128"]
    assert sorted(row[1:] for row in rows) == [
        ["32", "400.0", "500.0", "500.0"],
        ["32", "410.0", "cannot run", "cannot run"],
        ["64", "not tested", "380.0", "not tested"],
    ]


def test_translations_are_shown_by_the_length_of_the_source(tmp_path: Path) -> None:
    """Oracle: means and deviations of the figures put in, by hand; more is better."""
    runs = [translated("rope", seed, bleu) for seed, bleu in enumerate((20.0, 22.0, 24.0))]
    floor = translated("rope", 0, 1.2, baseline={"name": "untranslated"})
    study = study_of(tmp_path / "in", *runs, translated("nope", 0, 10.0), floor)
    assert study.metric == "test_bleu" and study.source_lengths() == {"1-10": 300, "11-20": 150, "21-30": 50}
    about = " ".join(page.about(study))
    assert "Trained on 9,000 pairs, tested on 500" in about and "bleu: nrefs:1|tok:13a" in about
    (results,), (by_length,) = tables.results(study), tables.sources(study)
    rope = results.frame.set_index("").loc["RoPE"]
    assert rope["test BLEU ↑"] == "22.0 ± 2.0 †‡\n[17.0, 27.0]" and rope["length ratio"].startswith("0.955 ± 0.000")
    shortest = by_length.frame.set_index("")["1-10 words (300)"]
    assert shortest["RoPE"] == "22.0 ± 2.0\nchrF 44.0 ± 4.0\nratio 1.00 ± 0.00\nexact % 50.0 ± 0.0"
    assert shortest["untranslated source"].startswith("1.20\nchrF 2.40")


def test_the_description_in_a_result_decides_what_is_shown(tmp_path: Path) -> None:
    """A task that the report has never heard of; a baseline takes the description of the others."""
    description = {
        "metric": "test_error",
        "higher_is_better": False,
        "columns": ["test_error", "test_latency"],
        "compare": ["test_latency"],
        "x_axis": "epoch",
        "unit": "recordings",
    }
    runs = []
    for seed, model in enumerate(("rope", "rope", "nope", "nope")):
        run = {**result(f"model={model}", f"seed={seed % 2}"), "task": "listen", "report": description}
        run["metrics"] = {"test_error": 20.0 + seed, "test_latency": 3.0, "hidden": 1.0}
        run["curve"] = [{"step": 131, "test_latency": 4.0}]
        runs.append(run)
    runs.append({**baseline("silence"), "task": "listen", "metrics": {"test_error": 60.0}})
    (study,) = page.report([put(tmp_path / "in", *runs)], tmp_path / "out", draw=False)
    assert study.metric == "test_error"
    text = markdown_of(tmp_path / "out")
    assert "| | runs | test error ↓ | test latency | parameters | seconds |" in text and "hidden" not in text
    assert "| RoPE | 2 | **20.5 ± 0.7 †**" in text and "| silence | exact | 60.0 | – |" in text
    assert "Trained on 2,092 recordings" in text
    assert "| RoPE − no positions | test latency | 2 | 0.0 – |" in text


def test_every_cell_can_be_made_again(tmp_path: Path) -> None:
    runs = [result("experiment=singhal_table3", f"seed={seed}") for seed in (0, 1)]
    (table,) = tables.commands(study_of(tmp_path, *runs))
    ((_, command, seeds, commit),) = table.frame.to_numpy()
    assert command.startswith("python -m speechformer.train experiment=singhal_table3") and "seed=" not in command
    assert (seeds, commit) == ("0, 1", "c" * 10)


def test_a_folder_without_a_result_is_answered_in_one_sentence(tmp_path: Path) -> None:
    for content, message in (
        (None, "no such folder"),
        ("", r"There is no run to report under .* Give the folder of your runs"),
        ("[]", r"There is no run to report under .* is damaged"),
    ):
        if content is not None:
            (tmp_path / "runs").mkdir(exist_ok=True)
        if content:
            (tmp_path / "runs" / "result.json").write_text(content)
        with pytest.raises(SystemExit, match=message) as end:
            call(main, tmp_path / "runs", "--output", tmp_path / "out")
        assert str(end.value).startswith("Error: ") and "\n" not in str(end.value)
    assert not (tmp_path / "out").exists()


# What somebody else wrote into a result

HARMFUL = [
    "</code></td><script>document.title='executed'</script>",
    "<img src=x onerror=document.title='executed'>",
    "[x](javascript:document.title='executed')",
    "![x](http://example.org/x.png)",
    "a|b `c|` ``d`` \\| *e* __f__ ~~g~~ &lt;",
    "<!-- x --> <![CDATA[ <?php {{x}} [a]: http://x",
    "x" * 400,
]
CONTROL = "a\x1b[31m\u202eb\x9b\x02\r\n\n# c"
ELEMENTS = "a body br button code details div em figcaption figure h1 h2 h3 head html img li main meta nav p script "
ELEMENTS += "strong style summary table tbody td th thead title tr ul"


class Elements(html.parser.HTMLParser):
    """What a page holds that the report does not write, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.foreign: list[Any] = []
        self.text = ""
        self.counts = collections.Counter[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        allowed = {"href": ("#", "tables/"), "src": "data:image/png;base64,"}
        self.foreign += [tag] * (tag not in ELEMENTS.split())
        for name, value in attributes:
            if name.startswith("on") or not (value or "").startswith(allowed.get(name, "")):
                self.foreign.append((name, value))

    def handle_data(self, data: str) -> None:
        self.text += data


def poisoned(text: str) -> Iterator[dict[str, Any]]:
    """Results with a text everywhere that a command line, a file name or somebody's editor can put it."""
    runs = [result("model=nope"), result("model=nope", "seed=1"), result("model=rope")]
    runs += [result("model=nope", "seed=2", status="failed"), baseline(text)]
    for run in json.loads(json.dumps(runs)):
        run["config"] |= {"study": text, "note": text if run["config"]["model"]["name"] == "rope" else "-"}
        run |= {"error": text, "commit": text, "overrides": [text], "versions": {"torch": text}}
        if "corpus" in run:
            run["corpus"] |= {"name": text, "languages": [text, "b"]}
            run |= {"scoring": {text: text}}
            run["report"] = {**run.get("report", {}), "note": text, "unit": text, "x_axis": text}
            run["metrics"][f"test_accuracy_of_{text}"] = 0.5
            run["report"]["columns"] = ["test_accuracy", f"test_accuracy_of_{text}"]
        yield run


@pytest.fixture(scope="module")
def harmful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of harmful results."""
    folder = tmp_path_factory.mktemp("harmful")
    runs = [run for text in (*HARMFUL, CONTROL) for run in poisoned(text)]
    page.report([put(folder / "in", *runs)], folder / "out", draw=False)
    return folder / "out"


def test_text_from_outside_is_text(harmful: Path) -> None:
    """Oracle: Python's HTML parser finds the elements that the report writes, and each text as it was."""
    elements = Elements(harmful / "report.html")
    assert elements.foreign == [] and elements.counts["script"] == 0
    for text in HARMFUL:
        assert elements.text.count(text) >= 15, text
    document = (harmful / "report.md").read_text(encoding="utf-8")
    headings = re.findall("^## .*", document, re.MULTILINE)
    assert headings[:2] == ["## What was found", "## Tables"] and len(headings) - 2 == len(HARMFUL) + 1
    for text in (elements.text, html.unescape(document)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text) and "a[31mb # c" in text


def test_studies_of_similar_names_have_files_of_their_own(tmp_path: Path) -> None:
    long = "x" * 399
    studies = ["a b", "a-b", "a/b", f"{long}a", f"{long}b", "É", "e", "E", "..", "../../a b", "日本"]
    runs = [json.loads(with_entry(result(), "config.study", study)) for study in studies]
    built = studies_of(put(tmp_path, *runs))
    assert {study.study for study in built} == set(studies)
    assert len({study.name.lower() for study in built}) == len(studies)
    assert all(re.fullmatch(r"[\w.-]{1,110}", study.name, re.ASCII) for study in built)


# Where in a result, and what stands there instead: one for each kind of check
MALFORMED: list[tuple[str, Any]] = [
    ("status", None),
    ("metrics", None),
    ("seed", 10**30),
    ("metrics.test_accuracy", 1e300),
    ("curve.0.step", -1),
    ("corpus.counts", {"train": 1}),
    ("corpus.sha256", "a b"),
    ("config.batch_size", 0),
    ("config.model", None),
    ("config", {"model.name": [1]}),
    ("members", [{"folder": 1}]),
]
BYTES = [b"", b"{", b"\xff\xfe{", b"[" * 10**5]


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
    for name, make in {"folder": Path.mkdir, "fifo": os.mkfifo}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "result.json")
    runs, remarks = read_runs([tmp_path])
    assert [run.metrics["test_accuracy"] for run in runs] == [0.25]
    for name in (*(f"bad{number}" for number in range(len(contents))), "folder", "fifo"):
        named = [text for text in remarks if text.startswith(f"{tmp_path / name / 'result.json'} is damaged: ")]
        assert len(named) == 1, (name, contents[int(name[3:])] if name.startswith("bad") else "")


@pytest.mark.parametrize(
    ("place", "key"),
    [("config.seed", "identity"), ("config.width", "identity"), ("corpus.sha256", "identity"), ("seed", "seed")],
)
def test_an_edited_result_is_named_and_left_out(
    place: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the fingerprint of the config."""
    run = result("model=nope")
    run["corpus"]["settings"] = run["corpus"]["classes"]
    run |= {"numerics": NUMERICS_VERSION}
    run["identity"] = fingerprint(run["config"], run["corpus"]["sha256"], run["corpus"]["settings"])
    put(tmp_path, run)
    (tmp_path / "edited").mkdir()
    path = tmp_path / "edited" / "result.json"
    path.write_bytes(with_entry(run, place, "ab" if "sha" in place else 7))
    runs, (remark,) = read_runs([tmp_path])
    assert len(runs) == 1 and remark.startswith(f"{path}: {key} is ") and "edited" in remark
    assert capsys.readouterr().err == f"{remark}\n"
    page.report([tmp_path], tmp_path / "out", draw=False)
    assert html.escape(remark, quote=False) in html.unescape((tmp_path / "out" / "report.html").read_text())
    assert capsys.readouterr().err == f"{remark}\n"


@pytest.mark.parametrize("text", ["=1+1", "-cmd|' /C calc'!A0", "\t=1", "＝1"])
def test_no_cell_of_a_csv_file_is_a_formula(text: str, tmp_path: Path) -> None:
    run = result("model=nope")
    run["config"]["study"] = run["error"] = run["commit"] = text
    run["metrics"][text] = run["curve"][0][text] = -0.5
    page.report([put(tmp_path / "in", run)], tmp_path / "out", draw=False)
    tables = tmp_path / "out" / "tables"
    write_predictions(tables / "a.tsv", [text, "-0.5"], [0, 1], [1, 0], [False, True])
    cells = [
        cell
        for path in tables.glob("*.?sv")
        for row in csv.reader(
            io.StringIO(path.read_bytes().decode(), newline=""), delimiter=",\t"[path.suffix == ".tsv"]
        )
        for cell in row
    ]
    assert "-0.5" in cells and any(cell.startswith("'") for cell in cells)
    assert not [cell for cell in cells if cell[:1] in "=+-@\t\r＝" and cell and cell != "-0.5"]
