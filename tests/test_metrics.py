"""Metrics of translations against sacreBLEU called by itself; confidence intervals of proportions against scipy."""

from __future__ import annotations

import pytest
import sacrebleu
from scipy.stats import binomtest

from speechformer.corpora.pairs import Pairs
from speechformer.metrics.bleu import bleu, length_bucket, score, score_test, signatures
from speechformer.metrics.intervals import wilson

REFERENCES = ["La maison blanche est grande.", "Où est-ce que tu vas\u00a0?", "Je ne sais pas.", "Il pleut."] * 4
HYPOTHESES = ["La maison est blanche.", "Où vas-tu\u00a0?", "Je ne sais pas.", "Il neige beaucoup ici."] * 4


def test_the_scores_are_sacrebleus_on_the_same_strings() -> None:
    scores = score(HYPOTHESES, REFERENCES)
    theirs = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert scores["bleu"] == bleu(HYPOTHESES, REFERENCES) == theirs.score
    assert scores["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert scores["length_ratio"] == theirs.sys_len / theirs.ref_len
    assert scores["exact"] == 0.25
    assert score(REFERENCES, REFERENCES)["bleu"] == pytest.approx(100)


def test_the_interval_is_that_of_sacrebleus_bootstrap() -> None:
    metric = sacrebleu.metrics.BLEU()
    said = metric.corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=1000).format()  # "... (μ = 28.4 ± 9.1) ..."
    half = float(said.split("±")[1].split(")")[0])
    assert score(HYPOTHESES, REFERENCES)["bleu_interval"] == pytest.approx(half, abs=0.006)
    assert "bleu_interval" not in score(HYPOTHESES, REFERENCES, resamples=0)
    assert "bleu_interval" not in score(HYPOTHESES[:1], REFERENCES[:1])  # one sentence has no spread


def test_translations_that_have_nothing_right_have_an_interval() -> None:
    """sacreBLEU's own raises there."""
    scores = score(["qqq", "qqq", "L"] * 3, ["La", "Où", "Le"] * 3)
    assert scores["bleu"] == 0 and scores["chrf_interval"] > 0


def test_signatures_name_case_tokens_and_version() -> None:
    by_metric = signatures()
    assert by_metric["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert by_metric["chrf"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")


def test_each_bucket_is_measured_on_its_sentences_alone() -> None:
    for words, name in ((1, "1-10"), (10, "1-10"), (11, "11-20"), (30, "21-30"), (31, "31+")):
        assert length_bucket("w " * words) == name
    metrics = score_test(["a b"] * 8 + ["w " * 25] * 8, HYPOTHESES, REFERENCES)
    expected = {f"test_{name}": value for name, value in score(HYPOTHESES, REFERENCES).items()}
    for length, rows in (("1-10", slice(8)), ("21-30", slice(8, 16))):
        scores = score(HYPOTHESES[rows], REFERENCES[rows])
        expected |= {f"test_{name}_at_{length}": value for name, value in scores.items()}
    assert metrics == expected


def test_copying_the_source_of_the_ted_test_scores_next_to_nothing(ted_pairs: Pairs) -> None:
    """Oracle: 1.2, measured with sacreBLEU's own command."""
    sources, references = zip(*ted_pairs.test)
    assert round(bleu(sources, references), 1) == 1.2


def test_tokenized_text_is_scored_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: sacreBLEU, which warns of it at every call, and scores the same."""
    tokenized = ["La maison blanche ."] * 150
    theirs = sacrebleu.corpus_bleu(tokenized, [tokenized])
    assert "forgot to detokenize" in caplog.text
    caplog.clear()
    assert score(tokenized, tokenized, resamples=10)["bleu"] == theirs.score and not caplog.text


@pytest.mark.parametrize("n", [1, 2, 20, 199])
def test_wilson_interval(n: int) -> None:
    for k in range(n + 1):
        interval = binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert wilson(k / n, n) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-12)
