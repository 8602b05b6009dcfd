"""Oracles: the result of the run itself, and probabilities that are averaged by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call
from conftest import run_in
from torch.nn.functional import nll_loss

from speechformer.analysis.load import TrainedRun, load
from speechformer.corpora.special_tokens import IGNORE, PAD, UNKNOWN
from speechformer.errors import UserError
from speechformer.evaluate import main
from speechformer.metrics.bleu import bleu
from speechformer.report.load import build_studies, read_runs
from speechformer.training.evaluation import data_of, default_folder, evaluate, prepare, write


@pytest.fixture(scope="module")
def a_mixture(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=lm that is mixed with counts and whose output bias begins with others."""
    options = ["task.ngram_mixture=context", "task.ngram=2", "task.unknown_rate=0.5"]
    options += ["task=lm", "protocol=clean", "architecture.output_bias=unigram", "trainer.max_steps=120", "width=16"]
    return run_in(tmp_path_factory.mktemp("mixture"), *speeches_in(little), *options, "recipe.lr=1e-2")


@pytest.fixture(scope="module")
def a_probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of task=probe."""
    return run_in(tmp_path_factory.mktemp("probe"), "task=probe", "probe=copy", "trainer.max_steps=60")


@pytest.fixture(scope="module")
def on_the_automatic_corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run with corpus=auto: without installed corpora the sample, whose settings are nested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEECHFORMER_DATA", str(tmp_path_factory.mktemp("nothing")))
        yield run_in(tmp_path_factory.mktemp("auto"), "corpus=auto", "task=lm", "trainer.max_steps=2")


def speeches_in(folder: Path) -> list[str]:
    return [f"corpus.root={folder}", "corpus=speeches", "corpus.classes=[ann,bob,cy]"]


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


@pytest.mark.parametrize(
    "name", ["a_classifier", "a_language_model", "a_mixture", "a_translator", "a_probe", "on_the_automatic_corpus"]
)
def test_a_run_that_is_tested_again_has_its_metrics(name: str, request: pytest.FixtureRequest) -> None:
    run = load(request.getfixturevalue(name))
    metrics, expected = evaluate([run])["metrics"], run.result["metrics"]
    assert set(metrics) == set(expected)
    for key, value in expected.items():
        assert metrics[key] == (None if value is None else pytest.approx(value, rel=1e-4)), key


def test_the_mean_probability_of_a_class_decides(a_classifier: Path, tmp_path: Path) -> None:
    runs = [load(a_classifier), noisy(a_classifier, tmp_path / "noisy")]
    tested = data_of(runs[0]).tested["test", ""]
    texts = [ids[ids != PAD].long() for ids in tested["ids"]]
    each = [torch.stack([run.logits(ids).softmax(dim=-1) for ids in texts]) for run in runs]
    right = ((each[0] + each[1]).argmax(dim=1) == tested["labels"]).double().mean().item()
    accuracy = evaluate(runs)["metrics"]["test_accuracy"]
    assert accuracy == pytest.approx(right)
    assert accuracy != evaluate(runs[:1])["metrics"]["test_accuracy"]


@torch.no_grad()
def test_perplexity_is_that_of_the_mean_probability(a_mixture: Path, tmp_path: Path) -> None:
    """Over all words and over known ones; the weights of the mixture with counts are fitted to the ensemble."""
    runs = [load(a_mixture), noisy(a_mixture, tmp_path / "noisy")]
    tested = data_of(runs[0]).tested["test", "vance"]
    rows = tested.rows(torch.arange(len(tested.start)))
    ids, targets = rows["ids"], rows["targets"]
    mean = (runs[0].model(ids).softmax(dim=-1) + runs[1].model(ids).softmax(dim=-1)) / 2
    known_targets = targets.masked_fill(targets == UNKNOWN, IGNORE)
    metrics, alone = evaluate(runs)["metrics"], runs[0].result["metrics"]
    for name, scored in (("test_perplexity_vance", targets), ("test_known_perplexity_vance", known_targets)):
        loss = nll_loss(mean.log().flatten(0, 1), scored.flatten(), ignore_index=IGNORE)
        assert metrics[name] == pytest.approx(loss.exp().item(), rel=1e-4)
    mixed = metrics["test_mixture_perplexity_vance"]
    assert mixed < metrics["test_perplexity_vance"]
    assert mixed != pytest.approx(alone["test_mixture_perplexity_vance"], rel=1e-3)


def test_an_ensemble_translates_as_the_command_does(a_translator: Path, tmp_path: Path) -> None:
    """Oracle: `TrainedRun.translate` with `others`, which has tests of its own."""
    runs = [load(a_translator), noisy(a_translator, tmp_path / "noisy")]
    pairs = data_of(runs[0]).texts["test"]
    written = runs[0].translate([source for source, _ in pairs], others=runs[1:])
    metrics = evaluate(runs)["metrics"]
    assert metrics["test_bleu"] == pytest.approx(bleu(written, [reference for _, reference in pairs]))
    assert runs[0].task.translations["test"] == written  # type: ignore[attr-defined]


def test_the_result_is_one_for_the_report(a_classifier: Path, tmp_path: Path) -> None:
    other, output = another(a_classifier, tmp_path / "copy"), tmp_path / "e"
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "run.json").write_text("{}")
    words = [a_classifier, other, "--study", "both", "--output"]
    with pytest.raises(SystemExit, match="is the folder of a run"):
        call(main, *words, tmp_path / "stopped")
    for _ in range(2):  # the second time over the older one
        assert call(main, *words, output)[0].splitlines()[-1] == str(output / "result.json")
    (run,), (member,) = (read_runs([folder])[0] for folder in (output, a_classifier))
    assert run.metrics == member.metrics and run.study == "both"
    assert run.settings == member.settings | {"ensemble": 2, "checkpoint": "last.ckpt"}
    command = f"python -m speechformer.evaluate {a_classifier} {other} --checkpoint last.ckpt --study both"
    assert run.command == command
    runs = [load(a_classifier), load(other)]
    assert len({default_folder(members) for members in (runs, runs[::-1], runs[:1], runs[1:])}) == 4
    assert (run.folder / "predictions.tsv").read_bytes() == (member.folder / "predictions.tsv").read_bytes()


@pytest.mark.parametrize(
    ("corpus", "config", "reason"),
    [
        ({"languages": ["fr", "en"]}, {}, "another direction than"),
        ({"classes": ["ann", "bob"]}, {}, "another list of classes than"),
        ({"sha256": "0"}, {}, "another corpus than"),
        ({}, {"protocol": {"name": "paper"}}, "another protocol than"),
        ({}, {"seed": 1}, r"another held-out part \(protocol.fold\) than"),
    ],
)
def test_runs_that_learned_from_something_else(
    corpus: dict, config: dict, reason: str, a_mixture: Path, tmp_path: Path
) -> None:
    protocol = {**load(a_mixture).result["config"]["protocol"], "fold": "seed"}
    run = load(another(a_mixture, tmp_path / "run", protocol=protocol))
    other = load(another(a_mixture, tmp_path / "other", **{"protocol": protocol, **config}))
    other.result["corpus"] |= corpus
    with pytest.raises(UserError, match=reason):
        evaluate([run, other])


def test_what_is_no_ensemble(a_classifier: Path, a_language_model: Path) -> None:
    run = load(a_classifier)
    with pytest.raises(UserError, match="is there twice; an ensemble needs different runs"):
        evaluate([run, load(a_classifier)])
    with pytest.raises(UserError, match="has another task than .*; an ensemble needs runs of the same task, corpus"):
        evaluate([run, load(a_language_model)])
    run.result = None
    with pytest.raises(UserError, match="has not finished; repeat its command"):
        evaluate([run])


def test_a_run_with_fewer_positions_comes_first(a_language_model: Path, little: Path, tmp_path: Path) -> None:
    options = ["task=lm", "model=learned", "block_size=4", "trainer.max_steps=1"]
    short = run_in(tmp_path / "short", *speeches_in(little), *options)
    assert evaluate([load(short), load(a_language_model)])["config"]["block_size"] == 4
    with pytest.raises(UserError, match="short reads at most 4 tokens, .* Name the run with the shortest block_size"):
        evaluate([load(a_language_model), load(short)])


def test_how_the_report_shows_evaluations(a_classifier: Path, tmp_path: Path) -> None:
    """Oracle: the rows that a run, itself evaluated, and three ensembles must have; two of these share a run."""
    copies = [another(a_classifier, tmp_path / f"{seed}", seed=seed) for seed in (1, 2)]
    runs = [load(folder) for folder in (a_classifier, *copies, another(a_classifier, tmp_path / "wide", width=128))]
    ensembles = {"alone": runs[:1], "1": runs[:2], "2": runs[1:3], "3": [runs[0], runs[3]]}
    for name, members in ensembles.items():
        write(evaluate(members), members[0], prepare(tmp_path / "e" / name))
    write(evaluate([load(a_classifier, "best.ckpt")]), runs[0], prepare(tmp_path / "e" / "best"))
    found, left_out = read_runs([a_classifier, tmp_path / "e"])
    assert left_out == [f"{tmp_path / 'e' / 'alone'} tests the weights of a run's own result again and is left out."]
    (study,), remarks = build_studies(found)
    labels = [variant.label.rpartition(", ")[2] for variant in study.variants]
    mixed = "ensemble of 2 (width=16; width=128)"
    assert sorted(labels) == ["checkpoint best.ckpt", "ensemble of 2", mixed, "full attention"]
    shared = f"{tmp_path / 'e' / '2'} shares a run with another ensemble and is left out."
    assert remarks == [shared]


def test_a_corpus_that_has_changed(tmp_path: Path, little: Path) -> None:
    shutil.copytree(little, tmp_path / "texts")
    run = load(run_in(tmp_path / "run", *speeches_in(tmp_path / "texts"), "trainer.max_steps=1"))
    with open(tmp_path / "texts" / "train_CLS.tsv", "a") as file:
        file.write("0\tOne more sentence.\n")
    with pytest.raises(UserError, match="sha256 differ. Restore it, name its folder with --root"):
        evaluate([run])
    accuracy = evaluate([run], str(little))["metrics"]["test_accuracy"]
    assert accuracy == pytest.approx(run.result["metrics"]["test_accuracy"])
