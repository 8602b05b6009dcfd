"""Train baselines without a transformer: `python -m speechformer.baselines [corpus=... protocol=... task=...]`.

    majority         always the majority class of train
    tfidf_logistic   words and bigrams, weighted by TF-IDF, logistic regression (scikit-learn), its strength
                     selected by five-fold cross-validation on train
    naive_bayes      multinomial naive Bayes over the words and bigrams that a sentence has (scikit-learn), every
                     class as likely as the others, its smoothing selected likewise
    unigram          frequencies of words in train, add-one smoothed
    kneser_ney_3, 5  interpolated Kneser-Ney over 3 and 5 words
    kneser_ney_5_unknown   the same, of a text in which words that occur once are <unk> at a rate selected on the
                     held-out part, as with task.unknown_rate; of protocol=clean
    untranslated     the source as its own translation

Baselines use the tokens, splits and vocabulary of the runs, with sentences cut at block_size, and write the same
`result.json`. They are exact and have no seed. With protocol.fold=seed metrics are means over all folds.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer import console
from speechformer.config import as_plain, compose
from speechformer.corpora.files import OutputFolder
from speechformer.corpora.special_tokens import PAD
from speechformer.corpora.splits import number_of_folds
from speechformer.errors import ArgumentParser, UserError, pick
from speechformer.runs import folder as runs
from speechformer.runs import identity
from speechformer.runs.predictions import write_predictions

if TYPE_CHECKING:
    from speechformer.data.pairs import PairData
    from speechformer.data.speeches import SentenceData, StreamData

# by name: metrics, settings, number of parameters; of a classifier also the predicted test classes
Baselines = dict[str, tuple[Any, ...]]


UNKNOWN_RATES = (0.1, 0.2, 0.3, 0.5, 0.7)


def language_models(data: StreamData) -> Baselines:
    """Measure the n-gram models."""
    import torch  # which takes seconds

    from speechformer.models.kneser_ney import KneserNey, Unigram
    from speechformer.tasks.language_model import means_over_tests
    from speechformer.tasks.unknown_words import UnknownWords

    train, words = torch.as_tensor(data.stream), len(data.tokenizer) - 1  # without padding
    models: dict[str, KneserNey] = {"unigram": Unigram(train, words)}
    models |= {f"kneser_ney_{order}": KneserNey(train, order, words) for order in (3, 5)}
    unknown: dict[str, Any] = {}
    if ("validation", "") in data.streams and data.task["tokens"] == "words":
        held_out, fitted = torch.as_tensor(data.streams["validation", ""]), {}
        for rate in UNKNOWN_RATES:
            replaced = UnknownWords(train, data.vocab_size, rate).replace(train, torch.Generator().manual_seed(0))
            fitted[rate] = KneserNey(replaced, 5, words)
        rate = min(fitted, key=lambda rate: fitted[rate].perplexities(held_out)[0])
        models["kneser_ney_5_unknown"] = fitted[rate]
        unknown = {"unknown_rate": rate, "unknown_rates": list(UNKNOWN_RATES)}
    baselines: Baselines = {}
    for name, model in models.items():
        metrics: dict[str, Any] = {"train_perplexity": model.perplexities(train)[0]} | data.reference_metrics()
        for (split, text), stream in data.streams.items():
            end = f"perplexity{text and f'_{text}'}"
            metrics[f"{split}_{end}"], known = model.perplexities(torch.as_tensor(stream))
            if known is not None:
                metrics[f"{split}_known_{end}"] = known
        settings = {"order": model.order, "discounts": model.discounts}
        settings |= unknown if name == "kneser_ney_5_unknown" else {}
        baselines[name] = (metrics | means_over_tests(metrics), settings, model.parameters)
    return baselines


def classifiers(data: SentenceData) -> Baselines:
    """Measure the majority class, logistic regression and naive Bayes."""
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline
    from threadpoolctl import threadpool_limits

    rows_of = {split: rows for (split, _), rows in {**data.monitored, **data.tested}.items()} | {"train": data.train}
    decode = data.tokenizer.tokens
    words = {split: [decode(ids[ids != PAD].tolist()) for ids in rows["ids"]] for split, rows in rows_of.items()}
    labels = {split: rows["labels"].numpy() for split, rows in rows_of.items()}
    smallest = min(counts := Counter(labels["train"].tolist()).values())
    if len(counts) < 2 or smallest < 2:
        where = data.corpus.where
        raise UserError(f"{where}: logistic regression needs at least two classes with two training lines each.")
    of_words: dict[str, Any] = {"analyzer": lambda text: [*text, *map(" ".join, pairwise(text))]}  # and neighbours
    regression = make_pipeline(TfidfVectorizer(**of_words), LogisticRegression(max_iter=2000))
    bayes = make_pipeline(CountVectorizer(binary=True, **of_words), MultinomialNB(fit_prior=False))
    searches = {  # what it selects, on which score
        "tfidf_logistic": (regression, "strength", "logisticregression__C", [0.1, 1.0, 10.0, 100.0], "accuracy"),
        "naive_bayes": (bayes, "smoothing", "multinomialnb__alpha", [0.03, 0.1, 0.3, 1.0], "balanced_accuracy"),
    }
    majority = DummyClassifier(strategy="most_frequent").fit(words["train"], labels["train"])
    models: dict[str, tuple[Any, dict[str, Any], int]] = {"majority": (majority, {}, 0)}
    folds, baselines = min(5, smallest), Baselines()
    with threadpool_limits(1):  # more threads are slower on so little data
        for name, (pipeline, setting, key, values, score) in searches.items():
            search = GridSearchCV(pipeline, {key: values}, cv=folds, scoring=score)
            model = search.fit(words["train"], labels["train"]).best_estimator_
            settings = {"ngrams": [1, 2], f"{setting}s": values, "folds": folds, setting: search.best_params_[key]}
            models[name] = (model, settings, (len(model[0].vocabulary_) + 1) * len(data.corpus.classes))
        for name, (model, *about) in models.items():
            metrics: dict[str, float | None] = {}
            for split, texts in words.items():
                predicted = model.predict(texts)
                is_right, masks = predicted == labels[split], {"": labels[split] >= 0}
                if split != "train":
                    masks |= {f"_of_{name}": labels[split] == k for k, name in enumerate(data.corpus.classes)}
                if split == "test":
                    in_train, of_test = rows_of["test"]["in_train"].numpy(), predicted
                    masks |= {"_in_train": in_train, "_not_in_train": ~in_train}
                for end, mask in masks.items():
                    metrics[f"{split}_accuracy{end}"] = float(is_right[mask].mean()) if mask.any() else None
            baselines[name] = (metrics, *about, of_test)
    return baselines


def untranslated(data: PairData) -> Baselines:
    """Score the sources of the test as translations: what names and numbers alone are worth."""
    from speechformer.metrics.bleu import score_test

    sources, references = zip(*data.corpus.test)
    return {"untranslated": (score_test(sources, sources, references), {}, 0)}


BASELINES: dict[str, Any] = {"classify": classifiers, "lm": language_models, "translate": untranslated}  # by task


def measure(overrides: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """Measure the baselines of one task on one corpus under one protocol.

    Args:
        overrides: as of a training run; task, corpus, protocol, block_size and vocab_size matter.
        directory: gets a folder for each baseline.

    Returns:
        The content of their `result.json`.

    Raises:
        UserError: the config or the corpus is invalid, or the task has no baselines.
    """
    config = as_plain(compose(overrides))
    task, started = config["task"]["name"], time.perf_counter()
    baselines_of = pick(BASELINES, task, "the table of baselines")

    from speechformer.corpora.documents import Documents
    from speechformer.corpora.load import load
    from speechformer.tasks.registry import build_data

    corpus = load(config)
    if isinstance(corpus, Documents):
        raise UserError(f"corpus={corpus.name} may be too large for baselines; use corpus=speeches or sample.")
    by_fold = config["protocol"]["fold"] == "seed"
    seeds = range(number_of_folds(config["protocol"]["validation"])) if by_fold else [config["seed"]]
    folds = [build_data({**config, "seed": seed}, corpus) for seed in seeds]
    data, each, results = folds[0], [baselines_of(fold) for fold in folds], []
    baselines = means(each) if by_fold else each[0]
    about: dict[str, Any] = {"corpus": data.description, "config": config, "overrides": list(overrides), "seed": None}
    about |= {"seconds": time.perf_counter() - started, "commit": identity.commit(), "versions": identity.versions()}
    about["numerics"] = identity.NUMERICS_VERSION
    for name, (metrics, settings, parameters, *predicted) in baselines.items():
        own = {"baseline": {"name": name, **settings}, "parameters": {"total": parameters}}
        results.append({"status": "finished", "task": task, "metrics": metrics, **own, **about})
        output, folder = OutputFolder(directory), f"{task}_{config['protocol']['name']}_{name}{'_folds' * by_fold}"
        for classes in predicted:
            rows = data.tested["test", ""]
            assert isinstance(rows, dict)
            path = output.file(f"{folder}/{runs.PREDICTIONS}")
            write_predictions(path, data.corpus.classes, rows["labels"].tolist(), classes, rows["in_train"].tolist())
        runs.write_result(output.file(f"{folder}/{runs.RESULT}").parent, results[-1])
    console.say(data.corpus_line())
    console.say(console.table(metrics_table(results)))
    return results


def means(folds: Sequence[Baselines]) -> Baselines:
    """Return baselines with the mean of each metric over the folds of a cross-validation, without predictions."""
    baselines: Baselines = {}
    for name, (metrics, _, parameters, *_) in folds[0].items():
        columns = {metric: [fold[name][0].get(metric) for fold in folds] for metric in metrics}
        mean = {metric: None if None in values else sum(values) / len(values) for metric, values in columns.items()}
        baselines[name] = (mean, {"folds": len(folds)}, parameters)
    return baselines


def metrics_table(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of a table of the metrics of all baselines, without intervals."""
    rows: list[tuple[str, ...]] = [("", *(result["baseline"]["name"] for result in results))]
    for name in results[0]["metrics"]:
        values = [result["metrics"][name] for result in results]
        if "_interval" not in name and any(value is not None for value in values):
            rows.append((name, *(console.format_metric(name, value) for value in values)))
    return rows


def tasks(overrides: Sequence[str]) -> list[list[str]]:
    """Return the override for each task that the corpus has files for; an empty one if `overrides` name the task."""
    from speechformer.corpora.load import load
    from speechformer.corpora.speeches import Corpus

    if any(override.startswith("task=") for override in overrides):
        return [[]]
    corpus = load(as_plain(compose(overrides)))
    if not isinstance(corpus, Corpus):
        return [[]]
    files = {"classify": (corpus.classify_train, corpus.classify_test), "lm": (corpus.lm_train, corpus.lm_test)}
    return [[f"task={task}"] for task, parts in files.items() if all(parts)] or [[]]


def measure_all(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    for task in tasks(arguments.overrides):
        measure([*task, *arguments.overrides], arguments.output)
    console.say(f"Folder: {arguments.output}")


def main() -> None:
    """Run the command line."""
    about = "Train baselines without a transformer."
    parser = ArgumentParser(prog="python -m speechformer.baselines", description=about)
    parser.add_argument("overrides", nargs="*", help="as of a run: corpus=speeches task=lm; default: both tasks")
    parser.add_argument("--output", type=Path, default=Path("outputs/baselines"), help="folder (outputs/baselines)")
    parser.run(measure_all)


if __name__ == "__main__":
    main()
