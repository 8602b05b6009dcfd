"""What a transformer has to beat: `python -m speechformer.baselines [corpus=... protocol=... task=...]`.

    majority         always the commonest class of train
    tfidf_logistic   words and pairs of words weighted by TF-IDF, logistic regression (scikit-learn), its strength
                     chosen by five-fold cross-validation on train
    unigram          how often each word stands in train, add-one smoothed
    kneser_ney_3, 5  interpolated Kneser-Ney over 3 and 5 words
    untranslated     the source as its own translation

On the tokens, splits and vocabulary of the transformers' runs, sentences cut at block_size like theirs; each leaves a
`result.json` like theirs. Counting is exact and has no seed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from speechformer import console
from speechformer.config import as_plain, compose
from speechformer.errors import UserError, run_command
from speechformer.runs import folder as runs
from speechformer.runs import identity

if TYPE_CHECKING:
    from speechformer.corpora.pairs import Pairs
    from speechformer.data.speeches import SpeechData


class KneserNey:
    """The interpolated n-gram model. Kneser and Ney 1995; Chen and Goodman 1999, section 2.7 and equation 27.

    p(w | h) = max(c(hw) - D, 0) / c(h) + D N(h) / c(h) p(w | h without its first word), where c counts n-grams at the
    highest order and below it the different words that precede one, and N(h) the different words that follow h. Under
    the single words lies 1 / vocabulary. D = n1 / (n1 + 2 n2) for each order, n1 and n2 of which are seen once and
    twice.

    Args:
        stream: the ids of the training text.
        order: n, the max_length n-gram.
        vocabulary: the number of words that may come.
        discounts: D for each order from 1 to n, in [0, 1]; None estimates them.
    """

    def __init__(
        self, stream: Sequence[int], order: int, vocabulary: int, discounts: Sequence[float] | None = None
    ) -> None:
        self.order, self.vocabulary = order, vocabulary
        grams: Counter[tuple[int, ...]] = Counter(zip(*(stream[k:] for k in range(order))))
        self.counts: list[Counter[tuple[int, ...]]] = [grams]
        for _ in range(order - 1):  # of each shorter one, in how many longer ones it ends
            self.counts.insert(0, Counter(gram[1:] for gram in self.counts[0]))
        self.totals: list[Counter[tuple[int, ...]]] = [Counter() for _ in self.counts]
        self.followers = [Counter(gram[:-1] for gram in counts) for counts in self.counts]
        for totals, counts in zip(self.totals, self.counts):
            for gram, count in counts.items():
                totals[gram[:-1]] += count
        self.discounts = list(discounts) if discounts is not None else [self.estimate(c) for c in self.counts]

    @staticmethod
    def estimate(counts: Counter[tuple[int, ...]]) -> float:
        """The discount of one order. Ney, Essen and Kneser 1994; never 0, so that every word stays possible."""
        times = Counter(counts.values())
        return times[1] / (times[1] + 2 * times[2]) if times[1] else 0.5

    def probability(self, word: int, context: tuple[int, ...]) -> float:
        """p(word | context), of which the last order - 1 ids count."""
        p = 1 / self.vocabulary
        for k in range(min(len(context), self.order - 1) + 1):
            history = context[len(context) - k :]
            total = self.totals[k][history]
            if total == 0:
                break  # a history that was never seen: nor was any longer one
            discount = self.discounts[k]
            p = (
                max(self.counts[k][(*history, word)] - discount, 0) / total
                + discount * self.followers[k][history] / total * p
            )
        return p

    def perplexity(self, stream: Sequence[int]) -> float:
        """exp of the mean negative log-probability of every token but the first, as the transformers' is taken."""
        logs = [
            math.log(self.probability(stream[k], tuple(stream[max(0, k - self.order + 1) : k])))
            for k in range(1, len(stream))
        ]
        return math.exp(-sum(logs) / len(logs))


class Unigram(KneserNey):
    """p(w) = (c(w) + 1) / (tokens + vocabulary): Laplace's rule."""

    def __init__(self, stream: Sequence[int], vocabulary: int) -> None:
        super().__init__(stream, 1, vocabulary, [0.0])
        self.tokens = len(stream)

    def probability(self, word: int, context: tuple[int, ...]) -> float:
        return (self.counts[0][(word,)] + 1) / (self.tokens + self.vocabulary)


def language_models(data: SpeechData) -> dict[str, tuple[dict[str, float], dict[str, Any]]]:
    """For each baseline its perplexities, named as a run's, and what it is made of."""
    train = data.encode_stream(data.splits.train, "training", least=2).tolist()
    texts = {f"test_perplexity_{name}": rows for name, rows in data.splits.test.items()}
    if data.splits.validation:
        texts["validation_perplexity"] = data.splits.validation
    streams = {name: data.encode_stream(rows, name, least=2).tolist() for name, rows in texts.items()}
    vocabulary = len(data.tokenizer) - 1  # padding never comes
    models = {
        "unigram": Unigram(train, vocabulary),
        "kneser_ney_3": KneserNey(train, 3, vocabulary),
        "kneser_ney_5": KneserNey(train, 5, vocabulary),
    }
    found = {}
    for name, model in models.items():
        figures = {"train_perplexity": model.perplexity(train)}
        figures |= {figure: model.perplexity(stream) for figure, stream in streams.items()}
        tests = [value for figure, value in figures.items() if figure.startswith("test_perplexity_")]
        figures["test_perplexity_mean"] = sum(tests) / len(tests)
        settings = {"order": model.order, "discounts": model.discounts}
        found[name] = (figures, {"settings": settings, "parameters": sum(map(len, model.counts))})
    return found


def words_and_pairs(text: list[str]) -> list[str]:
    """The words of a text, and each two that stand side by side."""
    return [*text, *map(" ".join, pairwise(text))]


def classifiers(data: SpeechData) -> dict[str, tuple[dict[str, float | None], dict[str, Any]]]:
    """For each baseline its accuracies, named as a run's, and what it is made of."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from threadpoolctl import threadpool_limits

    parts = {split: rows for (split, _), rows in {**data.watched, **data.tested}.items()}
    words = {
        split: [data.tokenizer.decode(ids[ids != 0].tolist()) for ids in rows["ids"]] for split, rows in parts.items()
    }
    labels = {split: rows["labels"].numpy() for split, rows in parts.items()}
    seen = parts["test"]["in_train"].numpy()

    def figures(predictions: dict[str, Any]) -> dict[str, float | None]:
        right = {split: predictions[split] == labels[split] for split in parts}
        found: dict[str, float | None] = {f"{split}_accuracy": float(right[split].mean()) for split in parts}
        for name, chosen in (("in_train", seen), ("not_in_train", ~seen)):
            found[f"test_accuracy_{name}"] = float(right["test"][chosen].mean()) if chosen.any() else None
        return found

    commonest = np.bincount(labels["train"]).argmax()
    majority = figures({split: np.full_like(labels[split], commonest) for split in parts})
    classes = len(data.corpus.classes)

    smallest = Counter(labels["train"].tolist()).most_common()[-1][1]
    if smallest < 2 or len(set(labels["train"].tolist())) < 2:
        raise UserError(
            f"{data.corpus.where}: logistic regression needs at least two classes with two training lines each."
        )
    settings = {"ngrams": [1, 2], "strengths": [0.1, 1.0, 10.0, 100.0], "folds": min(5, smallest)}
    tfidf = TfidfVectorizer(analyzer=words_and_pairs)
    search = GridSearchCV(
        make_pipeline(tfidf, LogisticRegression(max_iter=2000)),
        {"logisticregression__C": settings["strengths"]},
        cv=settings["folds"],
    )
    with threadpool_limits(1):  # half the time of two threads, and a fraction where something else runs too
        model = search.fit(words["train"], labels["train"]).best_estimator_
        logistic = figures({split: model.predict(words[split]) for split in parts})
    chosen = {**settings, "strength": search.best_params_["logisticregression__C"]}
    features = len(model[0].vocabulary_)
    return {
        "majority": (majority, {"settings": {}, "parameters": 0}),
        "tfidf_logistic": (logistic, {"settings": chosen, "parameters": (features + 1) * classes}),
    }


def untranslated(corpus: Pairs) -> dict[str, tuple[dict[str, float], dict[str, Any]]]:
    """The test's sources, scored as translations: what names, numbers and signs alone are worth."""
    from speechformer.metrics.bleu import figures_of_test

    sources, references = zip(*corpus.test)
    return {"untranslated": (figures_of_test(sources, sources, references), {"settings": {}, "parameters": 0})}


def measure(overrides: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """Measure the baselines of one task on one corpus under one protocol.

    Args:
        overrides: as of a training run; task, corpus, protocol, block_size and vocab_size matter.
        directory: each baseline gets a folder in it.

    Returns:
        Their results, as in their `result.json`.

    Raises:
        UserError: the config or the corpus asks for what cannot be.
    """
    config = as_plain(compose(overrides))

    from speechformer.corpora.load import load
    from speechformer.corpora.pairs import Pairs
    from speechformer.data.pairs import PairData
    from speechformer.data.speeches import SpeechData

    corpus, task = load(config), config["task"]["name"]
    arguments = {key: config[key] for key in ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")}
    data: Any
    found: dict[str, Any]
    started = time.perf_counter()
    if isinstance(corpus, Pairs):
        data = PairData(corpus, **arguments)
        found = untranslated(corpus)
    else:
        data = SpeechData(corpus, **arguments)
        found = (classifiers if task == "classify" else language_models)(data)
    seconds = time.perf_counter() - started
    results = []
    for name, (metrics, about) in found.items():
        result = {
            "status": "finished",
            "task": task,
            "baseline": {"name": name, **about["settings"]},
            "metrics": metrics,
            "parameters": {"total": about["parameters"]},
            "corpus": data.description,
            "config": config,
            "overrides": list(overrides),
            "seed": None,
            "seconds": seconds,  # of all baselines of the task
            "commit": identity.commit(),
            "versions": identity.versions(),
        }
        folder = directory / f"{task}_{config['protocol']['name']}_{name}"
        folder.mkdir(parents=True, exist_ok=True)
        runs.write_result(folder, result)
        results.append(result)
    console.say(console.corpus_line(data.description))
    console.say(console.baselines(results))
    return results


def tasks(overrides: Sequence[str]) -> list[list[str]]:
    """The override that names a task, for each task that the corpus has files for; none where one is named."""
    from speechformer.corpora.load import load
    from speechformer.corpora.speeches import Corpus

    if any(override.startswith("task=") for override in overrides):
        return [[]]
    corpus = load(OmegaConf.to_container(compose(overrides), resolve=True))  # type: ignore[arg-type]
    if not isinstance(corpus, Corpus):
        return [[]]
    found = [["task=classify"]] if corpus.classify_train and corpus.classify_test else []
    return found + ([["task=lm"]] if corpus.lm_train and corpus.lm_test else []) or [[]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m speechformer.baselines", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "overrides", nargs="*", help="as of a run: corpus=speeches protocol=clean task=lm; both tasks"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/baselines"), help="folder (outputs/baselines)")
    given = parser.parse_args()

    def command() -> None:
        for own in tasks(given.overrides):
            measure([*own, *given.overrides], given.output)
        console.say(f"Folder: {given.output}")

    run_command(command)


if __name__ == "__main__":
    main()
