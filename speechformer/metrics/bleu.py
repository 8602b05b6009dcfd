"""How good translations are: BLEU and chrF by sacreBLEU, of detokenized text, as others measure them.

BLEU: Papineni et al. 2002; chrF2: Popović 2015; comparable figures: Post 2018, "A Call for Clarity in Reporting BLEU
Scores". The signature says how it was counted, and belongs beside every figure. Each with its 95 % interval: half the
width that sacreBLEU's bootstrap finds (1,000 resamples of the sentences; Koehn 2004).

A mean over all lengths hides what a model does to long sentences, so each figure is also given by the number of words
of the source, on the sentences of that length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LENGTHS = {"1-10": 10, "11-20": 20, "21-30": 30, "31+": 10**9}  # up to so many words of the source
RESAMPLES = 1000


def bucket(source: str) -> str:
    """The name of the bucket of a source, by its words (what stands between spaces)."""
    words = len(source.split())
    return next(name for name, most in LENGTHS.items() if words <= most)


def signatures() -> dict[str, str]:
    """sacreBLEU's signature of each metric: what to name beside a figure."""
    from sacrebleu.metrics import BLEU, CHRF

    found = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        metric.corpus_score(["a"], [["a"]])  # it knows the number of references only then
        found[name] = str(metric.get_signature())
    return found


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100: cased, 13a tokens, exponential smoothing."""
    from sacrebleu.metrics import BLEU

    return BLEU().corpus_score(list(hypotheses), [list(references)]).score


def measured(hypotheses: Sequence[str], references: Sequence[str], resamples: int = RESAMPLES) -> dict[str, float]:
    """The figures of some translations: BLEU and chrF (0 to 100) with half the width of their 95 % intervals, the
    ratio of lengths (13a tokens of all translations to those of all references), and the share that is right to the
    letter.

    `resamples` of 0 leaves the intervals away.
    """
    from sacrebleu.metrics import BLEU, CHRF

    figures: dict[str, float] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        score: Any = metric.corpus_score(list(hypotheses), [list(references)])
        figures[name] = float(score.score)
        if resamples and len(hypotheses) > 1:
            figures[f"{name}_interval"] = half_width(metric, hypotheses, references, resamples)
        if name == "bleu":
            figures["length_ratio"] = score.sys_len / max(1, score.ref_len)
    figures["exact"] = sum(a == b for a, b in zip(hypotheses, references)) / len(references)
    return figures


def half_width(metric: Any, hypotheses: Sequence[str], references: Sequence[str], resamples: int) -> float:
    """Half the width of the 95 % interval of a score, by sacreBLEU's bootstrap.

    Not by `corpus_score(n_bootstrap=...)`, which does the same and then raises a TypeError where some resamples have
    a chrF of 0 (sacreBLEU 2.6.0).
    """
    from sacrebleu.significance import _bootstrap_resample

    statistics = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
    scores = sorted(float(score.score) for score in _bootstrap_resample(statistics, metric, resamples)[1])
    return (scores[-1 - resamples // 40] - scores[resamples // 40]) / 2


def measured_by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, dict[str, float]]:
    """`measured` for each bucket of source lengths that has a sentence."""
    members: dict[str, list[int]] = {name: [] for name in LENGTHS}
    for index, source in enumerate(sources):
        members[bucket(source)].append(index)
    return {
        name: measured([hypotheses[k] for k in chosen], [references[k] for k in chosen])
        for name, chosen in members.items()
        if chosen
    }


def figures_of_test(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """All figures of a translated test by name: `test_bleu`, ..., and `test_bleu_at_1-10`, ..."""
    figures = {f"test_{name}": value for name, value in measured(hypotheses, references).items()}
    for length, found in measured_by_length(sources, hypotheses, references).items():
        figures |= {f"test_{name}_at_{length}": value for name, value in found.items()}
    return figures
