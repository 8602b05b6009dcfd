"""BLEU and chrF of detokenized translations, by sacreBLEU.

BLEU: Papineni et al. 2002. chrF2: Popović 2015. Results carry the signature that states how a score was computed, as
Post 2018, "A Call for Clarity in Reporting BLEU Scores", asks for. The 95 % confidence intervals are sacreBLEU's
bootstrap over sentences (Koehn 2004).

A mean over all lengths hides how a model treats long sentences, so each metric is also computed by source length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LENGTHS = {"1-10": 10, "11-20": 20, "21-30": 30, "31+": 10**9}  # bucket: the most words of a source
RESAMPLES = 1000


def length_bucket(source: str) -> str:
    """Return the name of the bucket of a source, by its words (separated by spaces)."""
    words = len(source.split())
    return next(name for name, most in LENGTHS.items() if words <= most)


def metrics() -> dict[str, Any]:
    """Return sacreBLEU's metrics by name. `force` changes no score: it omits a warning about tokenized text."""
    from sacrebleu.metrics import BLEU, CHRF

    return {"bleu": BLEU(force=True), "chrf": CHRF()}


def signatures() -> dict[str, str]:
    """Return sacreBLEU's signature of each metric."""
    by_name = metrics()
    for metric in by_name.values():
        metric.corpus_score(["a"], [["a"]])  # the signature needs the number of references
    return {name: str(metric.get_signature()) for name, metric in by_name.items()}


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return corpus BLEU, 0 to 100: cased, 13a tokens, exponential smoothing."""
    return metrics()["bleu"].corpus_score(list(hypotheses), [list(references)]).score


def score(hypotheses: Sequence[str], references: Sequence[str], resamples: int = RESAMPLES) -> dict[str, float]:
    """Score translations.

    Args:
        resamples: of the bootstrap; 0 omits the confidence intervals.

    Returns:
        `bleu` and `chrf` (0 to 100), `bleu_interval` and `chrf_interval` (half the width of the 95 % confidence
        interval), `length_ratio` (13a tokens of all translations to those of all references), `exact` (fraction of
        translations equal to their reference).
    """
    scores: dict[str, float] = {}
    for name, metric in metrics().items():
        corpus = metric.corpus_score(list(hypotheses), [list(references)])
        scores[name] = float(corpus.score)
        if resamples and len(hypotheses) > 1:
            scores[f"{name}_interval"] = half_width(metric, hypotheses, references, resamples)
        if name == "bleu":
            scores["length_ratio"] = corpus.sys_len / max(1, corpus.ref_len)
    scores["exact"] = sum(a == b for a, b in zip(hypotheses, references)) / len(references)
    return scores


def half_width(metric: Any, hypotheses: Sequence[str], references: Sequence[str], resamples: int) -> float:
    """Return half the width of the 95 % confidence interval of a score, by sacreBLEU's bootstrap.

    `corpus_score(n_bootstrap=...)` computes the same, but raises a TypeError if some resamples have a chrF of 0
    (sacreBLEU 2.6.0).
    """
    from sacrebleu.significance import _bootstrap_resample

    statistics = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
    scores = sorted(float(score.score) for score in _bootstrap_resample(statistics, metric, resamples)[1])
    return (scores[-1 - resamples // 40] - scores[resamples // 40]) / 2


def score_test(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return all metrics of a translated test set by name: `test_bleu`, ..., and `test_bleu_at_1-10`, ..."""
    metrics = {f"test_{name}": value for name, value in score(hypotheses, references).items()}
    for length in LENGTHS:
        rows = [row for row, source in enumerate(sources) if length_bucket(source) == length]
        if rows:
            scores = score([hypotheses[row] for row in rows], [references[row] for row in rows])
            metrics |= {f"test_{name}_at_{length}": value for name, value in scores.items()}
    return metrics
