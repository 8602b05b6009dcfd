"""Oracles: nltk.lm for Kneser-Ney, sums to one, figures of the same model measured elsewhere."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import compose
from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

from speechformer.baselines import KneserNey, Unigram, measure
from speechformer.config import as_plain
from speechformer.corpora.speeches import Corpus
from speechformer.data.speeches import StreamData
from speechformer.runs.folder import read_result


def stream(n: int, words: int, seed: int) -> list[int]:
    """Ids from 1 to `words` in which each depends on the one before."""
    draw = random.Random(seed)
    ids = [1]
    while len(ids) < n:
        ids.append(1 + (ids[-1] * 3 + draw.choice((0, 0, 0, 1, 2, 5))) % words)
    return ids


@pytest.mark.parametrize("order", [2, 3, 4])
def test_kneser_ney_is_that_of_nltk(order: int) -> None:
    """nltk does not mix 1 / vocabulary under the single words, so their discount is 0 here; and it counts followers
    of the text's first words, which nothing precedes, so those come again at its end."""
    ids, words, discount = stream(400, 12, 0), 12, 0.75
    ids += ids[:order]
    oracle = KneserNeyInterpolated(order, discount=discount)
    text = [str(index) for index in ids]
    oracle.fit([list(everygrams(text, max_len=order))], vocabulary_text=text)
    model = KneserNey(ids, order, words, [0.0] + [discount] * (order - 1))
    for k in range(order, 80):
        context = tuple(ids[k - order + 1 : k])
        for word in (ids[k], 1 + (ids[k] + 4) % words):
            expected = oracle.score(str(word), [str(index) for index in context])
            assert model.probability(word, context) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("context", [(), (3,), (3, 4), (99, 4), (4, 99), (99, 99, 99)])
@pytest.mark.parametrize("model", [KneserNey(stream(300, 20, 1), 3, 30), Unigram(stream(300, 20, 1), 30)])
def test_every_distribution_sums_to_one(model: KneserNey, context: tuple[int, ...]) -> None:
    probabilities = [model.probability(word, context) for word in range(1, 31)]
    assert sum(probabilities) == pytest.approx(1)
    assert min(probabilities) > 0  # a word outside the training set is possible


def test_discounts_are_estimated_from_singles_and_doubles() -> None:
    """a a b c c d: once b, d; twice a, c, so D = 2 / (2 + 2 * 2)."""
    assert KneserNey([1, 1, 2, 3, 3, 4], 1, 5).discounts == [pytest.approx(1 / 3)]


def test_the_perplexity_of_known_words_by_hand() -> None:
    """Oracle: add-one smoothed counts. Train is 2 2 3, of the words 1 (unknown), 2 and 3, so p = 1/6, 3/6, 2/6."""
    model = Unigram([2, 2, 3], 3)
    expected = 36 ** (1 / 3), 6**0.5  # of 1, 2, 3 after the first token; of 2 and 3
    assert model.perplexities([2, 1, 2, 3]) == pytest.approx(expected)
    assert model.perplexities([2, 1, 1]) == (pytest.approx(6), None)


def test_the_more_context_the_better_on_text_that_has_it() -> None:
    train, test = stream(5000, 20, 2), stream(1000, 20, 3)
    figures = [model.perplexities(test)[0] for model in (Unigram(train, 20), KneserNey(train, 2, 20))]
    assert figures[1] < figures[0] <= 20.5
    # the source: three choices at 3/6 1/6 1/6 1/6 have an entropy of 1.79 bits
    assert figures[1] == pytest.approx(2**1.7925, rel=0.03)


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
    assert 0.6 < logistic["test_accuracy"] < logistic["train_accuracy"] <= 1
    assert logistic["test_accuracy_in_train"] is None and majority["test_accuracy_in_train"] is None
    unigram, trigram = (figures[f"lm_{protocol}_{name}"] for name in ("unigram", "kneser_ney_3"))
    for name in ("marlowe", "okafor", "vance", "mean"):
        assert 1 < trigram[f"test_perplexity_{name}"] < unigram[f"test_perplexity_{name}"]
        assert 1 < trigram[f"test_known_perplexity_{name}"] <= trigram[f"test_perplexity_{name}"]
        assert 0 <= trigram[f"test_unknown_rate_{name}"] < 0.1
    assert ("validation_perplexity" in unigram) == (protocol == "clean")


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
    done = baselines("corpus=speeches", f"corpus.root={tmp_path / 'own'}", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == ["lm_paper_kneser_ney_3", "lm_paper_kneser_ney_5", "lm_paper_unigram"]


def test_too_few_lines_for_a_classifier_are_an_error_of_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("train_CLS.tsv", "test_CLS.tsv"):
        (tmp_path / "own" / name).write_text("0\tWe mend.\n0\tWe build.\n")
    own = ["corpus=speeches", f"corpus.root={tmp_path / 'own'}", "corpus.classes=[a,b]"]
    done = baselines(*own, "--output", tmp_path / "out")
    assert done.returncode == 1 and "needs at least two classes with two training lines each" in done.stderr
    assert len(done.stderr.splitlines()) == 1
