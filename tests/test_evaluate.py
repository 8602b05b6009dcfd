"""Oracles: the result of the run itself, and probabilities that are averaged by hand."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_in

from speechformer.analysis.evaluation import data_of, evaluate, prepare, with_defaults, write
from speechformer.analysis.load import TrainedRun, load
from speechformer.corpora.special_tokens import IGNORE, PAD, UNKNOWN
from speechformer.errors import UserError
from speechformer.evaluate import main
from speechformer.metrics.bleu import bleu
from speechformer.report.results import build_tables, read_run, read_runs


@pytest.fixture(scope="module")
def a_mixture(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=lm that is mixed with counts and whose output bias begins with others."""
    own = [
        "task=lm",
        "protocol=clean",
        "task.ngram_mixture=context",
        "task.ngram=2",
        "task.unknown_rate=0.5",
        "architecture.output_bias=unigram",
    ]
    corpus = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[ann,bob,cy]"]
    return run_in(
        tmp_path_factory.mktemp("mixture"), *corpus, *own, "trainer.max_steps=120", "width=16", "recipe.lr=1e-2"
    )


@pytest.fixture(scope="module")
def a_probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=probe."""
    return run_in(tmp_path_factory.mktemp("probe"), "task=probe", "probe=copy", "trainer.max_steps=60")


@pytest.mark.parametrize(
    "own", [["task=lm", "trainer.max_steps=20"], ["task=translate", "trainer.max_steps=20"]], ids=str
)
def test_a_run_on_the_automatic_corpus_is_evaluated_again(
    own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: its own metrics. Without installed corpora, `auto` is the sample, whose settings are nested."""
    monkeypatch.setenv("SPEECHFORMER_DATA", str(tmp_path / "nothing"))
    run = load(run_in(tmp_path / "run", "corpus=auto", *own))
    again = evaluate([run])
    for name, value in (run.result or {})["metrics"].items():
        if name.startswith("test_") and value is not None:
            assert again["metrics"][name] == pytest.approx(value, rel=1e-5)


def another(folder: Path, place: Path, **config: Any) -> Path:
    """The folder of a copy of a run that seems to be another run, with other entries of its config."""
    shutil.copytree(folder, place)
    result = json.loads((place / "result.json").read_text())
    changed = {"identity": place.name, "config": result["config"] | config}
    (place / "result.json").write_text(json.dumps(result | changed))
    return place


def noisy(folder: Path, place: Path) -> TrainedRun:
    """A copy of a run whose weights differ a little."""
    run = load(another(folder, place))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return run


@pytest.mark.parametrize("name", ["a_classifier", "a_language_model", "a_mixture", "a_translator", "a_probe"])
def test_a_run_that_is_tested_again_has_the_metrics_of_its_result(name: str, request: pytest.FixtureRequest) -> None:
    run = load(request.getfixturevalue(name))
    assert run.result is not None
    metrics, expected = evaluate([run])["metrics"], run.result["metrics"]
    assert set(metrics) == set(expected)
    for key, value in expected.items():
        assert metrics[key] == (None if value is None else pytest.approx(value, rel=1e-4)), key


def test_the_mean_probability_of_a_class_decides(a_classifier: Path, tmp_path: Path) -> None:
    runs = [load(a_classifier), noisy(a_classifier, tmp_path / "noisy")]
    assert runs[0].result is not None
    tested = data_of(runs[0], runs[0].result["config"]).tested["test", ""]
    predicted = []
    for ids in tested["ids"]:
        each = [run.logits(ids[ids != PAD].long()).softmax(dim=-1) for run in runs]
        predicted.append(int((each[0] + each[1]).argmax()))
    right = (torch.tensor(predicted) == tested["labels"]).double().mean().item()
    metrics = evaluate(runs)["metrics"]
    assert metrics["test_accuracy"] == pytest.approx(right)
    assert metrics["test_accuracy"] != evaluate([load(a_classifier)])["metrics"]["test_accuracy"]


@pytest.mark.parametrize("name", ["a_language_model", "a_mixture"])
def test_perplexity_is_that_of_the_mean_probability(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(name)
    runs = [load(folder), noisy(folder, tmp_path / "noisy")]
    assert runs[0].result is not None
    rows = data_of(runs[0], runs[0].result["config"]).tested["test", "vance"]
    logs, known = [], []
    for ids, targets in zip(rows["ids"].long(), rows["targets"].long()):
        each = torch.stack([run.model(ids[None])[0].softmax(dim=-1) for run in runs]).mean(dim=0)
        scored = targets != IGNORE
        logs.append(each[scored].gather(1, targets[scored][:, None])[:, 0].log())
        known.append(targets[scored] != UNKNOWN)
    metrics, all_logs = evaluate(runs)["metrics"], torch.cat(logs)
    assert metrics["test_perplexity_vance"] == pytest.approx((-all_logs.mean()).exp().item(), rel=1e-4)
    of_known = all_logs[torch.cat(known)]
    assert metrics["test_known_perplexity_vance"] == pytest.approx((-of_known.mean()).exp().item(), rel=1e-4)
    if name == "a_mixture":  # whose weights are fitted to the ensemble
        alone = runs[0].result["metrics"]
        assert metrics["test_mixture_perplexity_vance"] < metrics["test_perplexity_vance"]
        assert metrics["test_mixture_perplexity_vance"] != pytest.approx(
            alone["test_mixture_perplexity_vance"], rel=1e-3
        )


def test_an_ensemble_translates_as_the_command_does(a_translator: Path, tmp_path: Path) -> None:
    """Oracle: `TrainedRun.translate` with `others`, which has tests of its own."""
    runs = [load(a_translator), noisy(a_translator, tmp_path / "noisy")]
    assert runs[0].result is not None
    pairs = data_of(runs[0], runs[0].result["config"]).texts["test"]
    written = runs[0].translate([source for source, _ in pairs], others=runs[1:])
    metrics = evaluate(runs)["metrics"]
    assert metrics["test_bleu"] == pytest.approx(bleu(written, [reference for _, reference in pairs]))
    assert runs[0].task.translations["test"] == written  # type: ignore[attr-defined]


def test_the_result_is_one_for_the_report(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options, other = ["--output", str(tmp_path / "e"), "--study", "both"], another(a_classifier, tmp_path / "copy")
    monkeypatch.setattr(sys, "argv", ["evaluate", str(a_classifier), str(other), *options])
    main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("accuracy") and said[-1] == str(tmp_path / "e" / "result.json")
    run, member = read_run(tmp_path / "e"), read_run(a_classifier)
    assert run.metrics == member.metrics and run.study == "both"
    assert run.settings == member.settings | {"ensemble": 2, "checkpoint": "last.ckpt"}
    assert (
        run.command == f"python -m speechformer.evaluate {a_classifier} {other} --checkpoint last.ckpt --study both"
    )
    own, expected = run.predictions(), member.predictions()
    assert own is not None and expected is not None and (own[0] == expected[0]).all()


def test_what_is_no_ensemble(
    a_classifier: Path, a_language_model: Path, little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is there twice; an ensemble needs different runs"):
        evaluate([load(a_classifier), load(a_classifier)])
    with pytest.raises(UserError, match="has another task than .*; an ensemble needs runs of the same task, corpus"):
        evaluate([load(a_classifier), load(a_language_model)])
    own = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[ann,bob,cy]", "protocol=clean"]
    run_in(tmp_path / "clean", *own, "trainer.max_steps=1")
    with pytest.raises(UserError, match="has another protocol than"):
        evaluate([load(a_classifier), load(tmp_path / "clean")])
    unfinished = load(tmp_path / "clean")
    unfinished.result = None
    with pytest.raises(UserError, match="has not finished; repeat its command"):
        evaluate([unfinished])
    with pytest.raises(UserError, match=r"another held-out part \(protocol.fold\) than"):
        config = {"protocol": {**load(tmp_path / "clean").result["config"]["protocol"], "fold": "seed"}}  # type: ignore
        each = [another(tmp_path / "clean", tmp_path / str(seed), seed=seed, **config) for seed in (0, 1)]
        evaluate([load(folder) for folder in each])


@pytest.mark.parametrize(
    ("name", "key", "values", "reason"),
    [
        ("a_translator", "languages", [["fr", "en"]], "another direction than"),
        ("a_classifier", "classes", [["ann", "bob"]], "another list of classes than"),
        ("a_language_model", "sha256", ["0"], "another corpus than"),
    ],
)
def test_runs_that_learned_from_something_else(
    name: str, key: str, values: list[Any], reason: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(name)
    other = load(another(folder, tmp_path / "other"))
    assert other.result is not None and key in other.result["corpus"]
    other.result["corpus"][key] = values[0]
    with pytest.raises(UserError, match=reason):
        evaluate([load(folder), other])


def test_a_run_with_fewer_positions_comes_first(a_language_model: Path, little: Path, tmp_path: Path) -> None:
    own = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[ann,bob,cy]", "task=lm"]
    short = run_in(tmp_path / "short", *own, "model=learned", "block_size=4", "trainer.max_steps=1")
    assert evaluate([load(short), load(a_language_model)])["config"]["block_size"] == 4
    with pytest.raises(UserError, match="short reads at most 4 tokens, .* Name the run with the shortest block_size"):
        evaluate([load(a_language_model), load(short)])


def test_where_a_result_goes(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "result.json").write_text("{}")
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "run.json").write_text("{}")
    for folder, reason in {"mine": "speechformer has not written it", "stopped": "is the folder of a run"}.items():
        monkeypatch.setattr(sys, "argv", ["evaluate", str(a_classifier), "--output", str(tmp_path / folder)])
        with pytest.raises(SystemExit, match=reason):
            main()
    assert (tmp_path / "mine" / "result.json").read_text() == "{}"
    monkeypatch.chdir(tmp_path)
    folders = [str(another(a_classifier, tmp_path / name)) for name in "ab"]
    for arguments in ([folders[0]], folders, [str(a_classifier), folders[1]], [folders[0], str(a_classifier)]):
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        main()
    assert len(set((tmp_path / "outputs" / "evaluate").iterdir())) == 4
    written = [line for line in capsys.readouterr().out.splitlines() if line.endswith("result.json")]
    monkeypatch.setattr(sys, "argv", ["evaluate", folders[1], "--output", str(Path(written[0]).parent)])
    main()  # over an older one
    assert read_run(Path(written[0]).parent).result["members"][0]["folder"] == folders[1]


def test_how_the_report_shows_evaluations(a_classifier: Path, tmp_path: Path) -> None:
    """Oracle: the rows that a run, itself evaluated, and three ensembles must have; two of these share a run."""
    folders = [
        a_classifier,
        *(another(a_classifier, tmp_path / name, seed=k) for k, name in enumerate("abc", start=1)),
    ]
    wide = another(a_classifier, tmp_path / "wide", width=128)
    runs = [load(folder) for folder in (*folders, wide)]
    ensembles = {"alone": runs[:1], "1": runs[:2], "2": runs[2:4], "3": runs[1:3], "4": [runs[0], runs[4]]}
    for name, own in ensembles.items():
        write(evaluate(own), own[0], prepare(tmp_path / "e" / name))
    (table,), remarks = build_tables(read_runs([a_classifier, tmp_path / "e"])[0])
    rows = {row.label.rpartition(", ")[2]: (len(row.runs), row.missing) for row in table.rows}
    mixed = "ensemble of 2 (width=16; width=128)"
    assert rows == {
        "full attention": (1, []), "checkpoint last.ckpt": (1, []), "ensemble of 2": (2, []), mixed: (1, [])
    }  # fmt: skip
    assert remarks == [
        f"{tmp_path / 'e' / '3'} shares a run with {tmp_path / 'e' / '1'}, another ensemble, and is left out."
    ]


def test_a_corpus_that_has_changed(tmp_path: Path, little: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in little.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    own = [f"corpus.root={folder}", "corpus=speeches", "corpus.classes=[ann,bob,cy]", "trainer.max_steps=1"]
    run_in(tmp_path / "run", *own)
    with open(folder / "train_CLS.tsv", "a") as file:
        file.write("0\tOne more sentence.\n")
    with pytest.raises(UserError, match="sha256 differ. Restore it, name its folder with --root"):
        evaluate([load(tmp_path / "run")])
    expected = load(tmp_path / "run").result
    assert expected is not None
    accuracy = evaluate([load(tmp_path / "run")], str(little))["metrics"]["test_accuracy"]
    assert accuracy == pytest.approx(expected["metrics"]["test_accuracy"])


def test_a_config_of_an_older_version_gets_the_keys_that_it_lacks(a_language_model: Path) -> None:
    """Oracle: the config of a run of today by default, before keys were taken from it."""
    result = load(a_language_model).result
    assert result is not None
    config, older = result["config"], copy.deepcopy(result["config"])
    for key in ("tokens", "ngram_mixture", "extra_text"):
        del older["task"][key]
    del older["embedding_dropout"], older["recipe"]["matrix_lr"]
    assert {**with_defaults(older), "model": None} == {**config, "model": None}
