"""Oracle: tables counted by hand, from the answers of a model with two seeds and of two baselines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_report import result, tables_of

from speechformer.errors import UserError
from speechformer.report.by_sentence import against_baselines, difficulty, learning_curve
from speechformer.report.ladder import rungs
from speechformer.report.results import Table
from speechformer.runs.folder import PREDICTIONS, write_result
from speechformer.runs.predictions import write_predictions

MODEL = ("11110000", "11110001")  # right answers; most seeds are right on the first four
BASELINES = {"naive_bayes": "11101111", "tfidf_logistic": "10000011"}


def tables(folder: Path, overrides: str = "protocol=clean", train: int = 100) -> list[Table]:
    runs = [(f"seed{k}", right, {"seed": k}) for k, right in enumerate(MODEL)]
    runs += [(name, right, {"baseline": {"name": name}, "seed": None}) for name, right in BASELINES.items()]
    for name, right, more in runs:
        own = result(overrides, "study=ladder_classify") | more
        own["metrics"] |= {"test_accuracy": right.count("1") / 8, "test_accuracy_in_train": None}
        own["corpus"]["counts"] |= {"test": 8, "train": train}
        path = folder / overrides / name
        path.mkdir(parents=True)
        write_result(path, own)
        guesses = [1 - int(answer) for answer in right]
        write_predictions(path / PREDICTIONS, own["corpus"]["classes"], [0] * 8, guesses, [0] * 8)
    return tables_of(folder)


def lines(text: object) -> list[str]:
    return [re.sub(" +", " ", line) for line in str(text).splitlines()][2:]


def test_the_tables(tmp_path: Path) -> None:
    (table,) = tables(tmp_path)
    names = ["naive_bayes", "tfidf_logistic"]
    assert lines(difficulty(table, table.rows[0], names)) == [
        "| all are right | 1 | 12.5 |",
        "| at least one is right | 8 | 100.0 |",
        "| none is right | 0 | 0.0 |",
        "| the model alone is right | 1 | 12.5 |",
        "| the model alone is wrong | 2 | 25.0 |",
    ]
    first, bayes, _ = lines(against_baselines(table, table.rows[0], names))
    assert first.startswith("| the model | 56.2 ± 8.8 |")
    assert bayes.startswith("| naive Bayes of words and pairs | 87.5 | −31.2 ")
    low, high = (float(end.replace("−", "-")) for end in re.findall(r"[−+][0-9.]+(?=, |&)", bayes)[:2])
    assert low < -31.2 < high
    with pytest.raises(UserError, match="has no baseline majority"):
        difficulty(table, table.rows[0], ["majority"])
    (tmp_path / "protocol=clean" / "seed1" / PREDICTIONS).unlink()
    with pytest.raises(UserError, match=r"has no predictions\.tsv"):
        difficulty(tables_of(tmp_path)[0], table.rows[0], names)


def test_balanced_accuracy_is_the_mean_over_the_classes(tmp_path: Path) -> None:
    (table,) = tables(tmp_path)
    run = table.finished[0]
    run.metrics |= {"test_accuracy_of_obama": 0.5, "test_accuracy_of_wbush": 1.0, "test_accuracy_of_hbush": None}
    assert run.value("test_balanced_accuracy") == 0.75 and run.value("validation_balanced_accuracy") is None


def test_seeds_with_the_same_fold_are_paired(tmp_path: Path) -> None:
    """Oracle: three folds in common, in each of which the second rung has one more right than the first."""
    for k in range(10):
        for step, more in (([], 0), (["layers=1"], 1), (["layers=1", "width=8"], 1)):
            if k < 3 or not more:
                own = result("protocol=clean", "protocol.fold=seed", "study=ladder_x", *step, f"seed={k}")
                own["metrics"] |= {"test_accuracy": (k * 37 % 10 + more) / 20}
                (tmp_path / f"{len(step)}{k}").mkdir()
                write_result(tmp_path / f"{len(step)}{k}", own)
    (second,) = (rung for rung in rungs(tables_of(tmp_path)[0]) if rung.step == ("layers=1",))
    effect = second.difference("test_accuracy")
    assert effect and effect.paired and effect.mean == pytest.approx(1 / 20)


def test_the_learning_curve_is_by_the_number_of_training_sentences(tmp_path: Path) -> None:
    tables(tmp_path, "protocol=clean", 100)
    both = tables(tmp_path, "protocol.validation=0.5", 50)
    text = lines(learning_curve(both, ["naive_bayes"]))
    assert text == ["| 50 | 56.2 ± 8.8 | 87.5 |", "| 100 | 56.2 ± 8.8 | 87.5 |", "| for each doubling | 0.0 | 0.0 |"]
