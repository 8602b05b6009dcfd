"""Oracles: nltk.lm for Kneser-Ney, sums to one, figures of the same model measured elsewhere."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import compose

from speechformer.baselines import measure, tasks
from speechformer.config import as_plain
from speechformer.corpora.load import load
from speechformer.corpora.speeches import Corpus
from speechformer.data.speeches import StreamData
from speechformer.errors import UserError
from speechformer.models.kneser_ney import KneserNey
from speechformer.runs.folder import read_result
from speechformer.tasks.registry import build_data


def test_on_the_speeches_as_measured_elsewhere(speeches: Corpus) -> None:
    """Oracle: another program's 5-gram with discount 0.85 and the same vocabulary, in whole numbers."""
    config = as_plain(compose("task=lm", "corpus=speeches"))
    keys = ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")
    data = StreamData(speeches, **{key: config[key] for key in keys})
    train = data.encode_stream(data.splits.train, "training", 2).tolist()
    model = KneserNey(train, 5, len(data.tokenizer) - 1, [0.85] * 5)
    perplexities = {
        name: model.perplexities(data.encode_stream(rows, name, 2).tolist())[0]
        for name, rows in data.splits.test.items()
    }
    assert perplexities == pytest.approx({"obama": 237, "wbush": 363, "hbush": 255}, abs=1.01)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
def test_they_leave_results_like_every_run(protocol: str, tmp_path: Path) -> None:
    for task in ("classify", "lm"):
        results = measure([f"task={task}", "corpus=sample", f"protocol={protocol}"], tmp_path)
        for result in results:
            folder = tmp_path / f"{task}_{protocol}_{result['baseline']['name']}"
            assert read_result(folder)["metrics"] == result["metrics"]
            assert {"status", "task", "corpus", "config", "overrides", "commit", "versions"} <= set(result)
    figures = {path.name: read_result(path)["metrics"] for path in tmp_path.iterdir() if path.is_dir()}
    majority, logistic = (figures[f"classify_{protocol}_{name}"] for name in ("majority", "tfidf_logistic"))
    assert majority["test_accuracy"] == pytest.approx(1 / 3)  # 250 of 750
    # by construction, order decides between two of three speakers: a bag of words and pairs gets beyond chance
    bayes = figures[f"classify_{protocol}_naive_bayes"]
    assert all(0.6 < own["test_accuracy"] < own["train_accuracy"] <= 1 for own in (logistic, bayes))
    assert logistic["test_accuracy_in_train"] is None and majority["test_accuracy_in_train"] is None
    unigram, trigram = (figures[f"lm_{protocol}_{name}"] for name in ("unigram", "kneser_ney_3"))
    for name in ("marlowe", "okafor", "vance", "mean"):
        assert 1 < trigram[f"test_perplexity_{name}"] < unigram[f"test_perplexity_{name}"]
        assert 1 < trigram[f"test_known_perplexity_{name}"] <= trigram[f"test_perplexity_{name}"]
        assert 0 <= trigram[f"test_unknown_rate_{name}"] < 0.1
    assert ("validation_perplexity" in unigram) == (protocol == "clean")


def test_naive_bayes_is_its_formula_and_folds_are_averaged(tmp_path: Path) -> None:
    """Oracle: P(class | words) by counts of the sentences that have a word or pair, every class equally likely."""
    halves = ["task=classify", "corpus=sample", "protocol=clean", "protocol.validation=0.5"]
    each = [measure([*halves, f"protocol.fold={fold}"], tmp_path)[-1] for fold in range(2)]
    data = build_data(each[0]["config"], load(each[0]["config"]))

    def features(text: str) -> set[tuple[int, ...]]:
        ids = data.tokenizer.encode(text)[: data.block_size]
        return {(k,) for k in ids} | {*itertools.pairwise(ids)}

    counts: list[Counter] = [Counter() for _ in data.corpus.classes]
    for label, text in data.splits.train:
        counts[label].update(features(text))
    known, smoothing = set().union(*counts), each[0]["baseline"]["smoothing"]
    sizes = [own.total() + smoothing * len(known) for own in counts]

    def score(text: str, label: int) -> float:
        return sum(math.log((counts[label][own] + smoothing) / sizes[label]) for own in features(text) & known)

    rows = data.splits.test["test"]
    right = [label == max(range(3), key=lambda guess: score(text, guess)) for label, text in rows]
    assert each[0]["baseline"]["name"] == "naive_bayes"
    assert each[0]["metrics"]["test_accuracy"] == pytest.approx(sum(right) / len(right), abs=1e-9)
    mean = measure([*halves, "protocol.fold=seed"], tmp_path / "mean")[-1]["metrics"]
    for name in ("validation_accuracy", "test_accuracy"):
        assert mean[name] == pytest.approx(statistics.mean(own["metrics"][name] for own in each))


def test_the_command_answers_a_typo_in_one_sentence(tmp_path: Path) -> None:
    done = baselines("protocol=cleen", "--output", tmp_path / "x")
    assert done.returncode == 1 and not (tmp_path / "x").exists()
    assert done.stderr == (
        "Error: protocol has no choice 'cleen'; the valid ones are: clean, paper. Did you mean clean?\n"
    )


def baselines(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "speechformer.baselines", *map(str, arguments)], capture_output=True, text=True
    )


def test_a_corpus_with_the_files_of_one_task_has_the_baselines_of_that(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train_LM.txt").write_text("We mend the harbours. We mend the roads.\n" * 4)
    (tmp_path / "own" / "test_LM_x.txt").write_text("We mend the bridges.\n")
    own = ["corpus=speeches", f"corpus.root={tmp_path / 'own'}"]
    for task in tasks(own):
        measure([*task, *own], tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == ["lm_paper_kneser_ney_3", "lm_paper_kneser_ney_5", "lm_paper_unigram"]


def test_too_few_lines_for_a_classifier_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("train_CLS.tsv", "test_CLS.tsv"):
        (tmp_path / "own" / name).write_text("0\tWe mend.\n0\tWe build.\n")
    own = ["corpus=speeches", f"corpus.root={tmp_path / 'own'}", "corpus.classes=[a,b]"]
    with pytest.raises(UserError, match="needs at least two classes with two training lines each"):
        measure(["task=classify", *own], tmp_path / "out")
