"""The predictions of a run beside its metrics, which are computed without the file, and beside `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, compose

from speechformer.analysis.load import load
from speechformer.baselines import measure
from speechformer.report.results import Run, read_run
from speechformer.runs.folder import RESULT, DamagedError
from speechformer.training.fit_ensemble import execute_ensemble
from speechformer.training.run import execute

NAME = "predictions.tsv"


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


def check(run: Run, in_single_precision: bool = True) -> None:
    """The file has the metrics of the run exactly."""
    right, in_train = run.predictions()  # type: ignore[misc]
    number = np.float32 if in_single_precision else float
    assert number(right.mean()) == run.metrics["test_accuracy"]
    for name, chosen in (("in_train", in_train), ("not_in_train", ~in_train)):
        expected = run.metrics[f"test_accuracy_{name}"]
        assert number(right[chosen].mean()) == expected if chosen.any() else expected is None


@pytest.mark.parametrize("protocol", ["paper", "clean"])
def test_the_metrics_follow_from_the_predictions(protocol: str, leaky: list[str], tmp_path: Path) -> None:
    words = [*leaky, f"protocol={protocol}"]
    execute(compose(*words), tmp_path / "alone")
    run = read_run(tmp_path / "alone")
    check(run)
    assert run.predictions()[1].sum() == (7 if protocol == "paper" else 0)  # type: ignore[index]
    written = (tmp_path / "alone" / NAME).read_bytes()
    for name in (NAME, RESULT):  # the run was killed before it wrote its result; its training is over
        (tmp_path / "alone" / name).unlink()
    execute(compose(*words), tmp_path / "alone")
    assert (tmp_path / "alone" / NAME).read_bytes() == written
    folders = [tmp_path / f"one{k}" for k in range(2)]
    jobs = [(compose(*words, f"seed={k}", "trainer.precision=64-true"), folders[k], []) for k in range(2)]
    assert execute_ensemble(jobs) == folders
    for folder in folders:
        check(read_run(folder))


def test_baselines_have_predictions(leaky: list[str], tmp_path: Path) -> None:
    measure([*leaky, "task=classify"], tmp_path)
    for name in ("majority", "tfidf_logistic"):
        check(read_run(tmp_path / f"classify_paper_{name}"), in_single_precision=False)


def test_line_n_is_of_sentence_n(a_classifier: Path, little: Path) -> None:
    """Oracle: `predict`, sentence by sentence."""
    header, *lines = (a_classifier / NAME).read_text().splitlines()
    assert header == "label\tpredicted\tin_train"
    run = load(a_classifier)
    for line, sentence in zip(lines, (little / "test_CLS.tsv").read_text().splitlines(), strict=True):
        label, text = sentence.split("\t")
        probabilities = run.predict(text).probabilities
        assert line.split("\t")[:2] == [["ann", "bob", "cy"][int(label)], max(probabilities, key=probabilities.get)]


def test_other_tasks_and_old_runs_have_none(a_language_model: Path, a_classifier: Path, tmp_path: Path) -> None:
    assert read_run(a_language_model).predictions() is None
    (tmp_path / RESULT).write_bytes((a_classifier / RESULT).read_bytes())
    assert read_run(tmp_path).predictions() is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "predictions.tsv:1: the file is empty"),
        (lambda text: text[:-3], r"predictions.tsv:61: expected two classes of the run and 0 or 1"),
        (lambda text: "\n".join(text.splitlines()[:-1]), "is not of this run: expected .* 60 lines"),
        (lambda text: text + "ann\tann\t0\n", "is not of this run"),
        (lambda text: text.replace("\tann\t", "\tdan\t", 1), r"predictions.tsv:\d+: expected two classes"),
        (lambda text: text.replace("\t0\n", "\t2\n", 1), "predictions.tsv:2: expected two classes"),
        (lambda text: text.replace("label", "class"), r"expected the columns \['label', 'predicted', 'in_train'\]"),
        (lambda text: "label\tpredicted\tin_train\n" + "ann\tann\t0\n" * 60, "and an accuracy of"),
        (lambda text: text.replace("\t", "\0", 1), "there is a NUL character"),
        (lambda text: text.replace("\n", "\n\n", 1), "predictions.tsv:2: the line has no text"),
    ],
)
def test_a_damaged_file_is_answered_in_one_sentence(
    damage: Any, message: str, a_classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / RESULT).write_bytes((a_classifier / RESULT).read_bytes())
    text = (a_classifier / NAME).read_text()
    (tmp_path / NAME).write_text(damage(text))
    with pytest.raises(DamagedError, match=message):
        read_run(tmp_path).predictions()
