"""Oracle: tables counted by hand, from the answers of a model with two seeds and of two baselines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from synthetic import result, single_spaced, tables_of

from speechformer.errors import UserError
from speechformer.report.by_sentence import against_baselines, difficulty
from speechformer.report.results import Table
from speechformer.runs.folder import PREDICTIONS, write_result
from speechformer.runs.predictions import write_predictions

MODEL = ("11110000", "11110001")  # right answers; most seeds are right on the first four
BASELINES = {"naive_bayes": "11101111", "tfidf_logistic": "10000011"}


def tables(folder: Path) -> list[Table]:
    runs = [(f"seed{k}", right, {"seed": k}) for k, right in enumerate(MODEL)]
    runs += [(name, right, {"baseline": {"name": name}, "seed": None}) for name, right in BASELINES.items()]
    for name, right, more in runs:
        run = result("protocol=clean", "study=ladder_classify") | more
        run["metrics"] |= {"test_accuracy": right.count("1") / 8, "test_accuracy_in_train": None}
        run["corpus"]["counts"] |= {"test": 8}
        path = folder / name
        path.mkdir(parents=True)
        write_result(path, run)
        guesses = [1 - int(answer) for answer in right]
        write_predictions(path / PREDICTIONS, run["corpus"]["classes"], [0] * 8, guesses, [0] * 8)
    return tables_of(folder)


def rows_of(text: object) -> list[str]:
    return single_spaced(text).splitlines()[2:]


def test_the_tables(tmp_path: Path) -> None:
    (table,) = tables(tmp_path)
    names = ["naive_bayes", "tfidf_logistic"]
    assert rows_of(difficulty(table, table.rows[0], names)) == [
        "| all are right | 1 | 12.5 |",
        "| at least one is right | 8 | 100.0 |",
        "| none is right | 0 | 0.0 |",
        "| the model alone is right | 1 | 12.5 |",
        "| the model alone is wrong | 2 | 25.0 |",
    ]
    first, bayes, _ = rows_of(against_baselines(table, table.rows[0], names))
    assert first.startswith("| the model | 56.2 ± 8.8 |")
    assert bayes.startswith("| naive Bayes of words and pairs | 87.5 | −31.2 ")
    low, high = (float(end.replace("−", "-")) for end in re.findall(r"[−+][0-9.]+(?=, |&)", bayes)[:2])
    assert low < -31.2 < high
    with pytest.raises(UserError, match="has no baseline majority"):
        difficulty(table, table.rows[0], ["majority"])
    run = table.finished[0]
    run.metrics |= {"test_accuracy_of_obama": 0.5, "test_accuracy_of_wbush": 1.0, "test_accuracy_of_hbush": None}
    assert run.value("test_balanced_accuracy") == 0.75  # the mean over the classes
    (run.folder / PREDICTIONS).unlink()
    with pytest.raises(UserError, match=r"has no predictions\.tsv"):
        difficulty(tables_of(tmp_path)[0], table.rows[0], names)
