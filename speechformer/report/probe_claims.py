"""What Kazemnejad et al. 2023 conclude about longer texts, judged on each probe and each length beyond training.

"The Impact of Positional Encoding on Length Generalization in Transformers": decoders without positional encoding
generalise better than those with ALiBi, RoPE and absolute positions, and T5's bias is the best explicit encoding. It
is their conclusion that is tested, on other tasks and other models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from speechformer.report.labels import in_words
from speechformer.report.markdown import Markdown, lines
from speechformer.report.markdown import table as markdown_table
from speechformer.report.statistics import Effect, contrast, holm
from speechformer.report.tables import NONE, estimate

CLAIMS = (("nope", ("alibi", "rope", "sinusoidal", "relative")), ("relative", ("alibi", "rope", "sinusoidal")))
ABOUT = (
    "Kazemnejad et al. 2023 conclude that decoders without positions generalise to longer texts better than with "
    "explicit ones (ALiBi, RoPE, absolute positions), and that T5's bias is the best explicit one; it is compared "
    "with both. Accuracy per symbol, difference in points with its 95 % confidence interval, at each length beyond "
    "training; verdicts after Holm's correction over all {}."
)
METRIC = "test_accuracy"  # for the number of digits


@dataclass(frozen=True)
class Verdict:
    """One comparison: `better` less `worse` on a probe at a length; `p` is corrected over all of them."""

    probe: str
    length: int
    better: str
    worse: str
    effect: Effect
    p: float

    @property
    def word(self) -> str:
        """Whether the effect has the claimed sign, at 5 % after Holm's correction.

        One seed has no test, nor have values that do not vary over seeds.
        """
        if math.isnan(self.p):
            return "not tested"
        if self.p > 0.05:
            return "inconclusive"
        return "supported" if self.effect.mean > 0 else "contradicted"


def judge(cells: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Judge the claims on cells of `probe_map.usual`; comparisons without runs on both sides are left out."""
    runs = {(own["probe"], own["length"], own["model"]): own["runs"] for own in cells}
    beyond = sorted({(own["probe"], own["length"]) for own in cells if own["length"] > own["longest"]})
    compared: list[tuple[str, int, str, str, Effect]] = []
    for at in beyond:
        for better, others in CLAIMS:
            for worse in others:
                names = [in_words(f"model={name}", {}) for name in (better, worse)]
                values = [{run["seed"]: run["value"] for run in runs.get((*at, name), ())} for name in names]
                effect = contrast([(1, values[0]), (-1, values[1])])
                if effect is not None:
                    compared.append((*at, names[0], names[1], effect))
    corrected = holm([own[-1].p for own in compared])
    return [Verdict(*own, p) for own, p in zip(compared, corrected)]


def sections(cells: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Markdown]]:
    """Yield the parts of the report on these claims: tables by name, others with ""."""
    verdicts = judge(cells)
    if not any(not math.isnan(own.p) for own in verdicts):
        return
    yield "", Markdown("## Longer than in training: are no positions best?")
    tested = sum(not math.isnan(own.p) for own in verdicts)
    yield "", Markdown(ABOUT).format(str(tested))
    for better in dict.fromkeys(own.better for own in verdicts):
        own = [verdict for verdict in verdicts if verdict.better == better]
        others = [*dict.fromkeys(verdict.worse for verdict in own)]
        rows = []
        for probe, length in dict.fromkeys((verdict.probe, verdict.length) for verdict in own):
            at_length = {
                verdict.worse: verdict for verdict in own if (verdict.probe, verdict.length) == (probe, length)
            }
            shown = [cell(at_length[other]) if other in at_length else "–" for other in others]
            rows.append([f"{probe.replace('_', ' ')}, {length}", *shown])
        counts = [Counter(verdict.word for verdict in own if verdict.worse == other) for other in others]
        words = ("supported", "contradicted", "inconclusive", "not tested")
        rows += [[word, *(str(count[word]) for count in counts)] for word in words]
        header = ["probe, length", *(f"{better} − {other}" for other in others)]
        yield f"longer_{better.replace(' ', '_')}", markdown_table(header, rows)


def where_found(cells: Sequence[dict[str, Any]]) -> Markdown:
    """Return the probes and lengths at which each comparison is supported and contradicted, and count the others."""
    compared: dict[str, dict[str, list[str]]] = {}
    for own in judge(cells):
        words = compared.setdefault(f"{own.better} − {own.worse}", {})
        words.setdefault(own.word, []).append(f"{own.probe.replace('_', ' ')} {own.length}")
    rows = []
    for name, words in compared.items():
        named = [", ".join(words.get(word, ())) or NONE for word in ("supported", "contradicted")]
        rows.append([name, *named, *(str(len(words.get(word, ()))) for word in ("inconclusive", "not tested"))])
    return markdown_table(["claim: above 0", "supported", "contradicted", "inconclusive", "not tested"], rows)


def cell(verdict: Verdict) -> Markdown:
    """Return effect, interval and verdict."""
    decided = verdict.word in ("supported", "contradicted")
    word = Markdown("**{}**").format(verdict.word) if decided else verdict.word
    return lines([" ".join(estimate(METRIC, verdict.effect)), word])
