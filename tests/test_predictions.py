"""The predictions of a run beside its metrics, which are computed without the file, and beside `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, compose
from pages import IS_CHECKOUT

from speechformer.analysis.load import load
from speechformer.baselines import measure
from speechformer.report.load import Run, read_runs
from speechformer.runs.folder import PREDICTIONS, RESULT, DamagedError
from speechformer.training.run import execute, execute_ensemble

if not IS_CHECKOUT:
    pytest.skip("needs studies/, which an installed package has not", allow_module_level=True)
from studies.sentences import predictions


@pytest.fixture(scope="module")
def leaky(little: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a corpus with 7 test sentences that are in train, too."""
    folder = tmp_path_factory.mktemp("leaky")
    for file in little.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with open(folder / "test_CLS.tsv", "ab") as test:
        test.writelines((folder / "train_CLS.tsv").read_bytes().splitlines(keepends=True)[:7])
    own = ["corpus=speeches", f"corpus.root={folder}", "corpus.classes=[ann,bob lee,cy]", "trainer.max_epochs=2"]
    return [*TINY[1:], *own, "recipe.lr=1e-2"]


def only_run(folder: Path) -> Run:
    (run,), _ = read_runs([folder])
    return run


def check(folder: Path, in_train: int) -> None:
    """The file has the metrics of the run, which are computed in single precision."""
    run = only_run(folder)
    right, leaked = predictions(run)  # type: ignore[misc]
    assert leaked.sum() == in_train and run.metrics["test_accuracy"] == pytest.approx(right.mean(), rel=1e-6)
    for name, chosen in (("in_train", leaked), ("not_in_train", ~leaked)):
        accuracy = run.metrics[f"test_accuracy_{name}"]
        assert accuracy == (pytest.approx(np.mean(right[chosen]), rel=1e-6) if chosen.any() else None)


def test_the_metrics_follow_from_the_predictions(leaky: list[str], tmp_path: Path) -> None:
    execute(compose(*leaky, "protocol=clean"), tmp_path / "clean")
    check(tmp_path / "clean", 0)
    folder = tmp_path / "alone"
    execute(compose(*leaky), folder)
    check(folder, 7)
    written = (folder / PREDICTIONS).read_bytes()
    for name in (PREDICTIONS, RESULT):  # the run was killed before it wrote its result; its training is over
        (folder / name).unlink()
    execute(compose(*leaky), folder)
    assert (folder / PREDICTIONS).read_bytes() == written
    folders = [tmp_path / f"member{seed}" for seed in range(2)]
    execute_ensemble([(compose(*leaky, f"seed={seed}"), folder, []) for seed, folder in enumerate(folders)])
    measure([*leaky, "task=classify"], tmp_path)
    for folder in (*folders, tmp_path / "classify_paper_majority", tmp_path / "classify_paper_tfidf_logistic"):
        check(folder, 7)


def test_line_n_is_of_sentence_n(a_classifier: Path, little: Path) -> None:
    """Oracle: `predict`, sentence by sentence."""
    header, *lines = (a_classifier / PREDICTIONS).read_text().splitlines()
    assert header == "label\tpredicted\tin_train"
    run = load(a_classifier)
    for line, sentence in zip(lines, (little / "test_CLS.tsv").read_text().splitlines(), strict=True):
        label, text = sentence.split("\t")
        probabilities = run.predict(text).probabilities
        assert line.split("\t")[:2] == [["ann", "bob", "cy"][int(label)], max(probabilities, key=probabilities.get)]


def test_other_tasks_have_none(a_language_model: Path) -> None:
    assert predictions(only_run(a_language_model)) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is not of this run"),
        (lambda text: text[:-3], "is not of this run"),
        (lambda text: text + "ann\tann\t0\n", "is not of this run: expected .* 60 lines"),
        (lambda text: "label\tpredicted\tin_train\n" + "ann\tann\t0\n" * 60, "and an accuracy of"),
    ],
)
def test_a_damaged_file_is_answered_in_one_sentence(
    damage: Any, message: str, a_classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / RESULT).write_bytes((a_classifier / RESULT).read_bytes())
    assert predictions(only_run(tmp_path)) is None  # as of old runs
    (tmp_path / PREDICTIONS).write_text(damage((a_classifier / PREDICTIONS).read_text()))
    with pytest.raises(DamagedError, match=message):
        predictions(only_run(tmp_path))
