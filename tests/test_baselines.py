"""Oracles: nltk.lm for Kneser-Ney, sums to one, figures of the same model measured elsewhere."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from commands import call

from speechformer.baselines import main, measure
from speechformer.corpora.load import load
from speechformer.errors import UserError
from speechformer.models import naive_bayes
from speechformer.runs.folder import read_result
from speechformer.tasks.registry import build_data


def test_they_leave_results_like_every_run(tmp_path: Path) -> None:
    for task, protocol in (("classify", "paper"), ("lm", "clean")):
        results = measure([f"task={task}", "corpus=sample", f"protocol={protocol}"], tmp_path)
        for result in results:
            folder = tmp_path / f"{task}_{protocol}_{result['baseline']['name']}"
            assert read_result(folder)["metrics"] == result["metrics"]
            assert {"status", "task", "corpus", "config", "overrides", "commit", "versions"} <= set(result)
    figures = {path.name: read_result(path)["metrics"] for path in tmp_path.iterdir() if path.is_dir()}
    majority, logistic, bayes = (
        figures[f"classify_paper_{name}"] for name in ("majority", "tfidf_logistic", "naive_bayes")
    )
    assert majority["test_accuracy"] == pytest.approx(1 / 3)  # 250 of 750
    # by construction, order decides between two of three speakers: a bag of words and pairs gets beyond chance
    assert all(0.6 < metrics["test_accuracy"] < metrics["train_accuracy"] <= 1 for metrics in (logistic, bayes))
    assert logistic["test_accuracy_in_train"] is None
    unigram, trigram = (figures[f"lm_clean_{name}"] for name in ("unigram", "kneser_ney_3"))
    for name in ("marlowe", "okafor", "vance", "mean"):
        assert 1 < trigram[f"test_perplexity_{name}"] < unigram[f"test_perplexity_{name}"]
        assert 1 < trigram[f"test_known_perplexity_{name}"] <= trigram[f"test_perplexity_{name}"]
        assert 0 <= trigram[f"test_unknown_rate_{name}"] < 0.1
    assert "validation_perplexity" in unigram and "lm_clean_kneser_ney_5_unknown" in figures


def test_naive_bayes_is_that_of_the_models(little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: `NaiveBayes`, which has no scikit-learn. Every class is equally likely, and a word counts once."""
    texts = Path(shutil.copytree(little, tmp_path / "texts"))
    lines = (little / "train_CLS.tsv").read_text(encoding="utf-8").splitlines()
    # classes of different sizes; some sentences say a word three times, or everything twice
    kept = [line for k, line in enumerate(lines) if not line.startswith("0") or k % 4 == 0]
    chosen = [f"{line} {line[2:] * (k % 2)} the the the\n" for k, line in enumerate(kept)]
    (texts / "train_CLS.tsv").write_text("".join(chosen), encoding="utf-8")
    bayes = measure(["task=classify", *speeches_in(texts)], tmp_path)[-1]
    data: Any = build_data(bayes["config"], load(bayes["config"]))
    monkeypatch.setattr(naive_bayes, "SMOOTHING", bayes["baseline"]["smoothing"])
    train, test = data.train, data.tested["test", ""]
    model = naive_bayes.NaiveBayes(*train["ids"].shape, 3, data.vocab_size, weight=1.0)
    model.fit(train["ids"], train["labels"])
    accuracy = float((model(test["ids"]).argmax(dim=1) == test["labels"]).double().mean())
    assert bayes["baseline"]["name"] == "naive_bayes"
    assert bayes["metrics"]["test_accuracy"] == pytest.approx(accuracy, abs=1e-9)


def test_folds_are_averaged(little: Path, tmp_path: Path) -> None:
    halves = ["task=classify", *speeches_in(little), "protocol=clean", "protocol.validation=0.5"]
    each = [measure([*halves, f"protocol.fold={fold}"], tmp_path)[-1]["metrics"] for fold in range(2)]
    mean = measure([*halves, "protocol.fold=seed"], tmp_path / "mean")[-1]["metrics"]
    for name in ("validation_accuracy", "test_accuracy"):
        assert mean[name] == pytest.approx(statistics.mean(metrics[name] for metrics in each))


def speeches_in(folder: Path) -> list[str]:
    return ["corpus=speeches", f"corpus.root={folder}", "corpus.classes=[ann,bob,cy]"]


def test_a_corpus_with_the_files_of_one_task_has_the_baselines_of_that(tmp_path: Path) -> None:
    (tmp_path / "train_LM.txt").write_text("We mend the harbours. We mend the roads.\n" * 4)
    (tmp_path / "test_LM_x.txt").write_text("We mend the bridges.\n")
    call(main, "corpus=speeches", "protocol=paper", f"corpus.root={tmp_path}", "--output", tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == ["lm_paper_kneser_ney_3", "lm_paper_kneser_ney_5", "lm_paper_unigram"]


def test_too_few_lines_for_a_classifier_are_an_error(tmp_path: Path) -> None:
    for name in ("train_CLS.tsv", "test_CLS.tsv"):
        (tmp_path / name).write_text("0\tWe mend.\n0\tWe build.\n")
    with pytest.raises(UserError, match="needs at least two classes with two training lines each"):
        own = ["corpus=speeches", f"corpus.root={tmp_path}", "corpus.classes=[a,b]"]
        measure(["task=classify", "protocol=paper", *own], tmp_path)
