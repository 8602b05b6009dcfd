"""Oracle: tables counted by hand, from the answers of a model with two seeds and of two baselines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_report import result, tables_of

from speechformer.errors import UserError
from speechformer.report.by_sentence import against_baselines, difficulty, learning_curve
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


def test_the_learning_curve_is_by_the_number_of_training_sentences(tmp_path: Path) -> None:
    tables(tmp_path, "protocol=clean", 100)
    both = tables(tmp_path, "protocol.validation=0.5", 50)
    text = lines(learning_curve(both, ["naive_bayes"]))
    assert text == ["| 50 | 56.2 ± 8.8 | 87.5 |", "| 100 | 56.2 ± 8.8 | 87.5 |"]
