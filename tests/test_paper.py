"""studies/: an effect is that of its runs, a verdict follows from it, and a page says what the runs say."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EXPERIMENTS, compose, opened
from pages import IS_CHECKOUT
from scipy import stats
from synthetic import baseline, put, result, settings_of

from speechformer.analysis.attention_maps import AttentionMap
from speechformer.errors import UserError
from speechformer.report.figures import plt
from speechformer.report.statistics import Effect
from speechformer.runs.folder import PREDICTIONS, write_json, write_result
from speechformer.runs.predictions import write_predictions

if not IS_CHECKOUT:
    pytest.skip("needs studies/, which an installed package has not", allow_module_level=True)
from studies import figures, ladders, maps, mechanisms, probes, published, render
from studies.results import Claim, PageError, Results, best_values, published_name, read_yaml
from studies.sentences import over_seeds_and_items

NEW = "test_accuracy_not_in_train"
METRIC = "test_perplexity_mean"
DRAWS = stats.norm(0, 0.01).rvs((2, 8), random_state=0)
HIGH, LOW = list(0.56 + DRAWS[0]), list(0.51 + DRAWS[1])
AUTHORS = ("kulkarni", "singhal", "marsol")


def runs(folder: Path, new: list[float], plain: list[float], *metrics: str) -> Path:
    """Runs of Singhal's tables 5 and 1 with these values at the end, one for each seed."""
    written = []
    for experiment, values in (("singhal_table5", new), ("singhal_table1", plain)):
        for seed, value in enumerate(values):
            run = result(f"experiment={experiment}", f"seed={seed}")
            run["metrics"] |= dict.fromkeys(metrics or (NEW,), value)
            run["curve"][-1] |= dict.fromkeys(metrics or (NEW,), value)
            written.append(run)
    return put(folder, *written)


def judged(folder: Path) -> dict[str, Claim]:
    return Results([folder]).claims


# Claims


def test_an_effect_is_that_of_the_runs(tmp_path: Path) -> None:
    """Oracle: scipy's t-tests; Holm's correction leaves the largest of the p-values."""
    claims = judged(runs(tmp_path / "a", HIGH, LOW))
    claim, change = claims["singhal_normal_new"], claims["singhal_overfits_new"]
    test = stats.ttest_rel(HIGH, LOW)  # of common seeds, though these do not correlate
    assert claim.estimated.paired and claim.estimated.p == pytest.approx(test.pvalue)
    assert claim.estimated.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    p_values = [own.estimated.p for own in claims.values() if own.estimated.p == own.estimated.p]
    assert claim.p == claim.estimated.p == max(p_values) and len(p_values) == 3
    assert claim.verdict == change.verdict == "supported"
    # from epoch 11 to 15 of the same runs: 80 to 51 %
    assert change.estimated.paired and change.estimated.p == pytest.approx(stats.ttest_rel(LOW, [0.8] * 8).pvalue)
    fewer = judged(runs(tmp_path / "c", HIGH, LOW[:5]))["singhal_normal_new"].estimated
    assert fewer.n == (5,) and fewer.p == pytest.approx(stats.ttest_rel(HIGH[:5], LOW[:5]).pvalue)
    opposite = judged(runs(tmp_path / "b", LOW, HIGH))["singhal_normal_new"]
    assert opposite.verdict == "contradicted" and opposite.estimated.mean == pytest.approx(-claim.estimated.mean)


@pytest.mark.parametrize(
    ("shift", "spread", "verdict", "is_small"),
    [
        (0.0, 0.1, "equivalent", True),
        (0.0, 2.0, "inconclusive", False),
        (0.004, 0.1, "supported", True),
        (-0.02, 0.1, "contradicted", False),
    ],
)
def test_an_effect_is_small_by_two_one_sided_tests(
    shift: float, spread: float, verdict: str, is_small: bool, tmp_path: Path
) -> None:
    """Oracle: the larger p-value of scipy's one-sided paired tests against one point of accuracy."""
    new, plain = 0.8 + shift + spread * DRAWS[0], 0.8 + spread * DRAWS[1]
    claim = judged(runs(tmp_path, list(new), list(plain), "test_accuracy"))["singhal_normal"]
    above = stats.ttest_rel(new + 0.01, plain, alternative="greater").pvalue
    below = stats.ttest_rel(new - 0.01, plain, alternative="less").pvalue
    assert claim.equivalence == pytest.approx(max(above, below))
    assert (claim.verdict, claim.is_small) == (verdict, is_small)
    at_ceiling = replace(claim, lowest=0.995)  # where a difference of a point does not fit below 100 %
    assert at_ceiling.verdict == ("inconclusive" if verdict == "equivalent" else verdict)


def test_runs_that_collapsed_count_in_no_mean(tmp_path: Path) -> None:
    """Oracle: of four runs one has a train accuracy of 45 %; the mean of the others is 83 %."""
    written = [result("experiment=marsol_classify", f"seed={seed}", value=0.82 + 0.01 * seed) for seed in range(4)]
    for run, train in zip(written, (0.95, 0.9, 0.97, 0.45)):
        run["metrics"]["train_accuracy"] = train
    results = Results([put(tmp_path, *written)])
    place = results.place("marsol_classify")
    assert place.values("test_accuracy") == pytest.approx({0: 0.82, 1: 0.83, 2: 0.84}) and len(place.runs) == 3
    assert "1 of 4 runs of `marsol_classify`" in published.collapses(results)
    assert best_values(place, "test_accuracy") == pytest.approx({0: 0.82, 1: 0.83, 2: 0.84})


def test_an_effect_that_is_not_significant_after_the_correction_is_inconclusive(tmp_path: Path) -> None:
    """Oracle: the two largest p-values are both 0.03, so they are doubled."""
    shift = 0.0
    while stats.ttest_rel(DRAWS[0] + shift, DRAWS[1]).pvalue > 0.03 or shift == 0:
        shift += 0.0002
    folder = runs(tmp_path, list(0.5 + shift + DRAWS[0]), list(0.5 + DRAWS[1]), NEW, "test_accuracy")
    claim = judged(folder)["singhal_normal_new"]
    assert claim.p == pytest.approx(2 * claim.estimated.p) and claim.estimated.p < 0.05 < claim.p
    assert claim.verdict == "inconclusive"


def test_claims_are_about_the_corpus_of_the_reports(tmp_path: Path) -> None:
    other = [result(f"experiment=singhal_table{k}", f"seed={s}", sha256="0" * 64) for k in (1, 5) for s in (0, 1)]
    assert judged(put(tmp_path, *other)) == {}


def write_answers(folder: Path, run: dict[str, Any], right: Any) -> None:
    """Write a run whose answers to 750 sentences, the first 551 of which are in train, are right or wrong."""
    folder.mkdir(parents=True)
    run["metrics"] |= {"test_accuracy": float(right.mean()), NEW: float(right[551:].mean())}
    write_result(folder, run)
    leaked = np.arange(750) < 551
    write_predictions(folder / PREDICTIONS, ["obama", "wbush"], [0] * 750, 1 - right.astype(int), leaked)


def predictions(folder: Path, seeds: int) -> Path:
    """Runs of Singhal's tables 5 and 1 that predict; seeds differ in a few sentences."""
    for experiment, rate in (("singhal_table5", 0.56), ("singhal_table1", 0.5)):
        for seed in range(seeds):
            right = np.where(np.arange(750) < 551, True, np.random.default_rng(seed).random(750) < rate)
            write_answers(folder / f"{experiment}_{seed}", result(f"experiment={experiment}", f"seed={seed}"), right)
    return folder


def test_a_claim_about_sentences_covers_their_choice(tmp_path: Path) -> None:
    """Oracle: the same effect as the metrics', in an interval at least as wide as that of 199 sentences."""
    results = Results([predictions(tmp_path / "six", 6)])
    claim = results.claims["singhal_normal_new"]
    means = [np.mean([*results.place(f"singhal_table{k}").values(NEW).values()]) for k in (5, 1)]
    assert claim.over_sentences and claim.estimated.mean == pytest.approx(means[0] - means[1])
    low, high = claim.estimated.interval
    assert low < claim.estimated.mean < high and 0.02 < high - low < 0.2
    alone = judged(predictions(tmp_path / "one", 1))["singhal_normal_new"]
    assert not alone.over_sentences and math.isnan(alone.estimated.p) and alone.verdict == "inconclusive"


def test_a_baseline_is_compared_on_the_same_sentences(tmp_path: Path) -> None:
    """Oracle: Student's interval of the three seeds, which have 0, 1 and 2 of 199 more right; ours is inside."""
    runs = [result("experiment=kulkarni_part1", f"seed={k}") for k in range(3)]
    for k, run in enumerate([*runs, baseline("tfidf_logistic", "protocol=paper")]):
        write_answers(tmp_path / str(k), run, np.arange(750) < 650 + k % 3)
    claim = judged(tmp_path)["counting_classify"]
    assert claim.over_sentences and claim.estimated.mean == pytest.approx(1 / 199)
    low, high = claim.estimated.interval
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    assert (1 - half) / 199 < low < 1 / 199 < high < (1 + half) / 199


def test_a_picture_shows_published_effects_and_ours_as_claimed(tmp_path: Path) -> None:
    """Oracle: the mean of each claim times its sign, in points, and Singhal's 89.0667 less 86."""
    results = Results([runs(tmp_path, HIGH, LOW, NEW, "test_accuracy")])
    pictures = {"claims_all": results.claims, "claims_classify": ["singhal_normal", "singhal_overfits"]}
    for name, tested in pictures.items():
        axes = figures.draw(name, results).axes
        marks = [line.get_xdata()[0] for axis in axes for line in axis.lines if len(line.get_xdata()) == 1]
        claims = [results.claims[own] for own in tested]
        ours = [100 * own.sign * own.estimated.mean for own in claims if own.estimated.p == own.estimated.p]
        assert {round(float(mark), 6) for mark in marks} >= {*np.round(ours, 6), 3.0667}
    with pytest.raises(PageError, match="there is no figure nothing_dots"):
        figures.draw("nothing_dots", results)
    plt.close("all")


# What was published


def test_each_experiment_of_a_report_is_one_published_row() -> None:
    """Whatever the seed and how often it is evaluated; with any other setting it is none."""
    for name in (name for name in EXPERIMENTS if name.startswith(AUTHORS)):
        expected = {"kulkarni_part3_scales": "kulkarni_part3_scale_0.5"}.get(name, name)
        assert published_name(settings_of(f"experiment={name}")) == expected
        assert read_yaml("published.yaml")["rows"][expected]["study"] == compose(f"experiment={name}").study
    for words, expected in (
        (("eval_interval=100", "seed=3"), "kulkarni_part1"),
        (("architecture.norm=pre",), None),
        (("+trainer.max_time=1",), None),
    ):
        assert published_name(settings_of("experiment=kulkarni_part1", *words)) == expected


def test_published_and_our_values_are_chosen_in_the_same_way(tmp_path: Path) -> None:
    """Oracle: Marsol's figures; sd 10 and t(2) = 4.302653 make the range of one run the mean ± 49.7."""
    written = []
    for seed, (first, last) in enumerate([(390.0, 420.0), (400.0, 430.0), (410.0, 440.0)]):
        run = result("experiment=marsol_table1_full", f"seed={seed}", value=last)
        run["curve"] = [{"step": k, **dict.fromkeys(run["metrics"], v)} for k, v in ((400, first), (500, last))]
        written.append(run)
    results = Results([put(tmp_path, *written)])
    place = results.place("marsol_table1_full")
    lines = {line.chosen: line for line in published.printed() if line.metric == "test_perplexity_obama"}
    values = {chosen: statistics.mean(line.of(place).values()) for chosen, line in lines.items()}
    assert values == {"best": 400, "last": 430}
    reach = 4.302653 * 10 * math.sqrt(4 / 3)
    for shift, inside in ((reach - 0.01, True), (reach + 0.01, False)):
        assert replace(lines["last"], value=430 + shift).inside(place) is inside
    facts = published.facts(results)
    assert (facts["finals"], facts["finals_of"]) == (2, 3)  # of the last values, 492.74 is outside
    place.study.curves.loc[0, "test_perplexity_obama"] = 100.0  # his 438.37 is the mean of the bests of three texts
    assert best_values(place, METRIC)[0] == pytest.approx((100 + 390 + 390) / 3)
    assert results.place("marsol_table1_full").values("test_perplexity_obama / test_perplexity_wbush") == {
        0: 1,
        1: 1,
        2: 1,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kulkarni_alibi", 0.024),
        ("singhal_overfits", 0.86 - 0.854667),
        ("singhal_lm_alibi", (311.7719 + 443.7675 + 355.716 - 358.34 - 465.4696 - 412.154) / 3),
        ("marsol_alibi", 396.74 - 438.37),
        ("kulkarni_alibi_clean", None),
        ("marsol_declines", None),
        ("counting_classify", None),
    ],
)
def test_the_published_effect_is_that_of_the_tables(name: str, expected: float | None) -> None:
    """Oracle: the reports' tables; of another protocol, of a baseline and of what they do not have there is none."""
    claim = Claim(name, "lm", "", "", 1, False, "", Effect((1,), 0.0))
    assert published.effect(claim) == (None if expected is None else pytest.approx(expected, abs=1e-4))


@pytest.mark.parametrize(("delay", "inside"), [(0, 15), (5, 4)])
def test_a_regime_is_reproduced_if_most_of_the_curve_is(delay: int, inside: int, tmp_path: Path) -> None:
    """Oracle: Kulkarni's own curve, or the same some epochs earlier, with a standard deviation of a point."""
    table = next(table for table in read_yaml("published.yaml")["tables"] if table["row"] == "kulkarni_part1")
    names, rows = table["columns"][1:], table["rows"]
    written = []
    for seed, noise in enumerate((-0.01, 0.0, 0.01)):
        for study, more in (("kulkarni_part1", ()), ("search_kulkarni_part1", ("architecture.pool=cls",))):
            run = result("experiment=kulkarni_part1", f"study={study}", *more, f"seed={seed}")
            values = [[0.01 * own + noise for own in rows[min(k + delay, 14)][1:]] for k in range(15)]
            run["curve"] = [{"step": 131 * k, **dict(zip(names, own))} for k, own in enumerate(values, start=1)]
            run["metrics"] |= dict(zip(names, values[-1])) | ({"train_accuracy": 0.5} if more else {})
            written.append(run)
    results = Results([put(tmp_path, *written)])
    assert published.counts(published.curves(results)["kulkarni_part1"]) == [f"{inside} of 15"] * 2
    # the runs of the search end low on train, but have not collapsed
    assert published.search(results, "kulkarni_part1")[1][1:3] == [f"{inside} of 15", f"{inside - 1} of 15"]
    assert published.not_reproduced(results) == ["kulkarni_part1"] * (delay > 0)
    assert published.regime(results, results.claims["kulkarni_generalizes"]) == (delay > 0)
    assert published.noise(results, "test_accuracy") == pytest.approx(stats.t.ppf(0.975, 2) * math.sqrt(2) * 0.01)


def test_conclusions_count_as_their_authors_drew_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one conclusion of two parts, of which one fails, one reformulation, and one claim of ours."""
    entries: dict[str, dict[str, Any]] = {"a": {}, "b": {"conclusion": "a"}, "c": {"reformulates": "a"}, "d": {}}
    results = Results([])
    for name, by, mean in (("a", "A", 1.0), ("b", "A", -1.0), ("c", "A", 1.0), ("d", "this repository", 1.0)):
        entries[name]["effect"] = []
        results.claims[name] = Claim(name, "lm", by, "", 1, False, "", Effect((9,), mean, 0.1, 8), p=0)
    monkeypatch.setitem(read_yaml("claims.yaml"), "claims", entries)
    rows = {row[0]: row[1:] for row in published.verdicts(results)}
    assert rows["our reformulations of them"] == rows["our own claims, exploratory"] == ["1", "0", "0", "0"]
    assert rows["conclusions, regime not rejected"] == ["0", "0", "0", "1"]
    first, parts, _ = render.Words(results, []).claims("lm").split("<details>")
    shown = [line.split("|")[2].strip() for line in first.splitlines()[2:] if line]
    assert shown == ["**contradicted**, by a part", "**supported**", "**supported**, exploratory"]  # as counted
    assert "| **contradicted** |" in parts


def test_the_measures_of_maps() -> None:
    """Oracle: by hand, of two layers, one head and three causal tokens; the first token has no choice."""
    diagonal, even = torch.eye(3), torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    part = AttentionMap("decoder", list("abc"), list("abc"), torch.stack([diagonal, even])[:, None], even > 0)
    inputs = SimpleNamespace(is_cut=False, ids=[[1, 2, 3]])
    run = SimpleNamespace(read=lambda text: inputs, block_size=4, attention=lambda read: [part])
    found = maps.measure(run, ["a b c"])
    expected = {"entropy_layer_1": 0, "entropy_layer_2": 1, "maximum_layer_1": 1, "maximum_later": 5 / 12}
    expected["distance"] = 0.25
    assert {name: found[f"map_{name}"] for name in expected} == pytest.approx(expected)


# Values and pages


def page(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, cells: list[Any] | None = None) -> str:
    """Return what a template gives, after its first line."""
    (folder / "pages").mkdir(exist_ok=True)
    (folder / "pages" / "page.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr(render, "HERE", folder)
    return render.render("page", render.Words(Results([folder / "runs"]), cells or [])).partition("\n")[2]


def test_a_page_follows_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(tmp_path / "runs", HIGH, LOW)
    text = (
        '{{ value("singhal_table5", "test_accuracy_not_in_train") }}; {{ claim("singhal_normal_new").verdict }}; '
        '{{ value("singhal_table5", "test_accuracy", 3, show="mean") }}; '
        '{{ value("singhal_table1", show="seeds") }}; '
        '{{ value("singhal_table5", "test_accuracy_not_in_train", less="singhal_table1") }}; '
        '{{ value("singhal_table1", "counts.train") }}'
    )
    shown = page(text, tmp_path, monkeypatch).split("; ")
    assert shown[0] == f"{100 * np.mean(HIGH):.1f} ± {100 * np.std(HIGH, ddof=1):.1f}"
    assert shown[1:4] == ["supported", "80.0", "8"] and shown[5] == "2,092"
    low, high = stats.ttest_rel(HIGH, LOW).confidence_interval()
    assert shown[4] == f"+{100 * (np.mean(HIGH) - np.mean(LOW)):.2f} [+{100 * low:.2f}, +{100 * high:.2f}]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ('{{ value("nowhere") }}', "there is no finished run of the variant nowhere under protocol=paper"),
        ('{{ value("singhal_table1", "test_bleu") }}', "the variant singhal_table1 has no test_bleu"),
        ('{{ claim("nonsense").verdict }}', "the claim nonsense does not exist"),
        ("{{ nothing }}", "'nothing' is undefined"),
        ('{{ value("singhal_table1", baseline="bigram") }}', "there is no baseline bigram"),
        ('{{ ladder("nowhere", "test_accuracy") }}', "there is no ladder nowhere"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_wrong_template_is_one_sentence(
    template: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(tmp_path / "runs", HIGH[:2], LOW[:2])
    with pytest.raises(UserError, match=re.escape(message)) as error:
        page(template, tmp_path, monkeypatch)
    assert str(error.value).startswith("studies/pages/page.md: ")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('tested("+3.9 [+0.7, +7.0]", "more", "less", "open")', "more"),
        ('tested("−3.9 [−7.0, −0.7]", "more", "less", "open")', "less"),
        ('tested("+0.5 [−1.6, +2.6]", "more", "less", "open")', "open"),
        ('tested("−0.5 [−1.6, +2.6]", "more", "less", "open")', "open"),
        ('tested("+0.5 –", "more", "less", "open")', "open"),
        ('stepped("worse, +1.5 [+1.0, +2.0]", "helps", "hurts", "open")', "hurts"),
        ('stepped("inconclusive after correction, +1.5 [+0.1, +2.0]", "helps", "hurts", "open")', "open"),
        ('effect("inconclusive after correction, +1.5 [+0.1, +2.0]")', "+1.5 [+0.1, +2.0]"),
        ('judged("singhal_normal_new", "as claimed", "not so", "open")', "as claimed"),
    ],
)
def test_a_sentence_follows_its_result(call: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an interval on one side of nought, the verdict of a step, and that of a claim of the fixture."""
    runs(tmp_path / "runs", HIGH, LOW)
    (tmp_path / "pages").mkdir()
    shutil.copy(Path(render.__file__).parent / "pages" / "_macros.md", tmp_path / "pages")
    names = "judged, tested, stepped, effect"
    assert (
        page(f'{{% from "_macros.md" import {names} with context -%}}{{{{ {call} }}}}', tmp_path, monkeypatch) == says
    )


def test_the_tables_by_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: tables counted by hand, from the answers of a model with two seeds and of two baselines."""
    answers = {"seed0": "11110000", "seed1": "11110001", "naive_bayes": "11101111", "tfidf_logistic": "10000011"}
    for name, right in answers.items():
        run = result("protocol=clean", "study=strong_classify")
        is_model = name.startswith("seed")
        run |= {"seed": int(name[4:])} if is_model else {"baseline": {"name": name}, "seed": None}
        run["metrics"] |= {"test_accuracy": right.count("1") / 8, "test_accuracy_in_train": None}
        run["corpus"]["counts"] |= {"test": 8}
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        write_result(folder, run)
        guesses = [1 - int(answer) for answer in right]
        write_predictions(folder / PREDICTIONS, run["corpus"]["classes"], [0] * 8, guesses, [0] * 8)
    names = '"strong_classify", "naive_bayes", "tfidf_logistic"'
    assert page(f"{{{{ difficulty({names}) }}}}", tmp_path, monkeypatch).splitlines()[2:] == [
        "| all are right | 1 | 12.5 |",
        "| at least one is right | 8 | 100.0 |",
        "| none is right | 0 | 0.0 |",
        "| the transformer alone is right | 1 | 12.5 |",
        "| the transformer alone is wrong | 2 | 25.0 |",
    ]
    text = page(f"{{{{ against_baselines({names}, called='the sum') }}}}", tmp_path, monkeypatch)
    model, bayes, _ = text.splitlines()[2:]
    assert model.startswith("| the sum | 56.2 ± 8.8 |")
    assert bayes.startswith("| naive Bayes of words and bigrams | 87.5 | −31.2 [")
    (tmp_path / "runs" / "seed0" / PREDICTIONS).unlink()
    with pytest.raises(UserError, match=r"has no predictions\.tsv"):
        page(f"{{{{ difficulty({names}) }}}}", tmp_path, monkeypatch)


# Ladders

LADDER = ("experiment=ladder_lm", "study=ladder")
RUNGS = """the defaults
model=rope
+ layers=2
++ heads=4
width=96
dropout=0.3
top: task.ngram_mixture=fixed
"""


def test_rungs_stand_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: perplexity falls by 10, 20 and 30 from 400; branches stand beside the first rung; one mixes counts."""
    written, words, value = [], LADDER, 400.0
    for place, step in enumerate(([], ["model=rope"], ["width=96"], ["dropout=3e-1"])):
        words, value = (*words, *step), value - 10 * place
        written += [result(*words, f"seed={seed}", value=value + seed) for seed in range(4)]
        if place == 1:
            for branch, start in ((["layers=2"], 500.0), (["layers=2", "heads=4"], 450.0)):
                written += [result(*words, *branch, f"seed={seed}", value=start - seed) for seed in range(4)]
    top = [result(*words, "task.ngram_mixture=fixed", f"seed={seed}", value=340.0 + seed) for seed in range(4)]
    for run in top:
        run["metrics"]["test_mixture_perplexity_mean"] = 300.0 + run["seed"]
    results = Results([put(tmp_path, *top, *reversed(written))])
    monkeypatch.setitem(read_yaml("claims.yaml")["ladders"], "ladder", RUNGS)
    built = ladders.rungs(results, "ladder")
    assert [rung.path for rung in built if not rung.on_top] == [("layers=2",), ("layers=2", "heads=4")]
    effects = [rung.less(rung.below, METRIC) for rung in built if rung.below]
    # the last one is the mixture, less the model below it
    assert [effect.mean for effect in effects if effect] == pytest.approx([-10, 107, -50, -20, -30, -40])
    rows = ladders.ladder_rows(results, "ladder", [METRIC], "first")[1:]
    assert [row[0] for row in rows][:4] == [
        "first",
        "`model=rope`",
        "*beside:* `layers=2`",
        "*beside:* `layers=2`<br>`heads=4`",
    ]
    assert rows[0][1] == "401.5" and rows[-1][1].startswith("301.5<br>−40.0 ")
    assert ladders.step_text(results, "ladder", METRIC, "width=96") == "inconclusive, −20.0 –"  # no spread
    assert "- **Worse**: `layers=2`, beside (+107.0)." in ladders.steps_text(results, "ladder", METRIC)
    with pytest.raises(PageError, match="the ladder ladder has no step 'width'"):
        ladders.step_text(results, "ladder", METRIC, "width")
    (axis,) = ladders.ladder_figure(results, "ladder").axes
    means = [401.5, 391.5, 498.5, 448.5, 371.5, 341.5, 301.5]
    assert [dot.get_offsets()[0][0] for dot in axis.collections] == pytest.approx(means)
    plt.close("all")


def test_costs_have_a_line_for_each_pattern(tmp_path: Path) -> None:
    """Oracle: perplexity, seconds and bytes by pattern and context."""
    points = {("full", 32): (400.0, 10.0, 1e9), ("full", 64): (300.0, 40.0, 3e9)}
    points |= {("window", 32): (410.0, 9.0, 2e9), ("window", 64): (405.0, 20.0, 2e9)}
    written = []
    for (pattern, context), (value, seconds, peak) in points.items():
        words = ("study=costs", f"pattern={pattern}", f"block_size={context}")
        run = result("experiment=ladder_lm", *words, value=value)
        run["metrics"][figures.SLIDING] = value
        written.append({**run, "seconds_by_phase": {"training": seconds}, "machine": {"peak_bytes": peak}})
    (study,) = Results([put(tmp_path, *written)]).studies
    for axis, cost in zip(figures.cost(study).axes, (1, 2)):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        for pattern, label in (("full", "full attention"), ("window", "window 5")):
            own = [points[pattern, context] for context in (32, 64)]
            assert lines[label] == [[p[cost] * (1e-6 if cost == 2 else 1), p[0]] for p in own]
    plt.close("all")


def test_models_have_a_line_over_the_length_of_the_source(tmp_path: Path) -> None:
    """Oracle: the shares of exact strings of the runs; BLEU where exact translations are rare."""
    exact = {"rnn": [0.9, 0.2], "sinusoidal": [1.0, 0.9]}
    for rate, metric, unit in ((0.5, "test_exact", 100), (0.1, "test_bleu", 1)):
        written = []
        for model, points in exact.items():
            run = result("task=translate", "corpus=digits", "study=digits", f"model={model}")
            run["metrics"] |= {"test_exact": rate, "test_bleu": 50.0}
            for bucket, value in zip(("1-10", "11-20"), points):
                run["metrics"][f"{metric}_at_{bucket}"] = value
            run["corpus"]["counts"] |= {"test_by_length": {"1-10": 5, "11-20": 6}}
            written.append(run)
        (study,) = Results([put(tmp_path / metric, *written)]).studies
        figure = figures.sources(study)
        (axis,), names = figure.axes, [text.get_text() for text in figure.legends[0].get_texts()]
        lines = {name: line.get_ydata().tolist() for name, line in zip(names, axis.lines)}
        assert lines.keys() == {figures.MODELS[model] for model in exact}
        for model, points in exact.items():
            assert lines[figures.MODELS[model]] == pytest.approx([unit * value for value in points])
    plt.close("all")


# Probes

LENGTHS = [10, 20, 40]
CHANCE = 0.1


def probe(model: str, seed: int, accuracies: list[float], *more: str, reached: int = 3) -> dict[str, Any]:
    """A run of copying: its accuracy at each length, of which it reaches some."""
    overrides = ["task=probe", "protocol=clean", "study=probes", f"probe.test_lengths={LENGTHS}", f"model={model}"]
    metrics = {"test_accuracy": 0.5, "validation_accuracy": 0.3, "test_accuracy_length_10_gap_3_4": accuracies[0] / 2}
    for length, accuracy in list(zip(LENGTHS, accuracies))[:reached]:
        metrics |= {f"test_accuracy_length_{length}": accuracy, f"chance_accuracy_length_{length}": CHANCE}
    return result(
        *overrides,
        *more,
        f"seed={seed}",
        metrics=metrics,
        report={"metric": "test_accuracy", "columns": ["test_accuracy"], "compare": ["test_accuracy"]},
        curve=[{"step": 10 * k, "validation_accuracy": k / 10} for k in range(1, 4)],
        corpus={"name": "copy", "sha256": "c" * 64, "counts": {"train": 64, "test": 500, "test_in_train": 0}},
    )


def put_tuned(folder: Path, rate: float, *written: dict[str, Any]) -> Path:
    """Write runs into the folder of a study that chose a learning rate."""
    chosen = {"points": [[f"recipe.lr={rate}"]], "tuning_seeds": [100], "rows": []}
    write_json(put(folder, *written) / "tuned.json", chosen)
    return folder


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three encodings with two seeds, as by default and tuned, and a tuning run that is no cell."""
    accuracies = {"rope": [1.0, 0.9, 0.2], "alibi": [0.9, 0.9, 0.7], "learned": [0.8, 0.8, 0.0]}
    written = [probe("rope", 100, [0.0, 0.0, 0.0], "study=probes_tuning", "recipe.lr=0.007")]
    for model, means in accuracies.items():
        for seed, more in ((0, 0.0), (1, -0.1)):
            values, reached = [mean + more for mean in means], 2 if model == "learned" else 3
            written.append(probe(model, seed, [value - 0.05 for value in values], reached=reached))
            written.append(probe(model, seed, values, "recipe.lr=0.007", reached=reached))
    written += [probe("rope", 0, [k / 10] * 3, f"layers={k}") for k in (1, 3)]
    return put_tuned(tmp_path_factory.mktemp("study"), 0.007, *written)


def test_cells_are_the_accuracies_of_the_runs(probed: Path) -> None:
    """Oracle: the numbers of the fixture. Tables have the best above chance first."""
    cells = probes.read_cells(probed)
    (cell,) = [own for own in cells if own["model"] == "RoPE" and own["tuned"] and own["length"] == 40]
    assert cell["mean"] == pytest.approx(0.15) and cell["chance"] == CHANCE
    assert cell["interval"][0] == pytest.approx(0.15 - 12.706 * 0.1 / 2, abs=1e-3)  # t of one degree of freedom
    assert cell["runs"][0]["curve"] == [(10, 0.1), (20, 0.2), (30, 0.3)] and cell["longest"] == 20
    assert probes.skill(cell) == pytest.approx(0.05 / 0.9)
    rows = [["ALiBi", "65.0 ± 7.1"], ["RoPE", "15.0 ± 7.1"], ["learned positions", "–"]]
    assert probes.accuracies(cells, "model", {}, {"copy": 40})[1:] == rows
    assert ["ALiBi", "60.0 ± 7.1"] in probes.accuracies(cells, "model", {"tuned": False}, {"copy": 40})
    layers = [["3", "30.0"], ["1", "10.0"], ["2", "10.0 ± 7.1"]]
    assert probes.accuracies(cells, "layers", {}, {"copy": 40})[1:] == layers
    with pytest.raises(PageError, match="there is no run of probe=copy at length 41"):
        probes.accuracies(cells, "model", {}, {"copy": 41})
    (axis,) = probes.draw(cells)[0].axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["ALiBi", "RoPE", "learned positions"]
    texts = ["85", "85", "65", "95", "85", "15", "75", "75", "–"]  # by the mean above chance; beyond the positions
    assert [text.get_text() for text in axis.texts][:9] == texts
    gains = probes.tuning_gains(cells, beyond=False)[1]
    assert gains[:5] == ["copy, 20", "76.7", "81.7", "+5.00", "3 of 3"] and gains[5].endswith(" +5.00")
    plt.close("all")


def test_a_choice_that_is_the_default_has_a_cell_in_both_places(tmp_path: Path) -> None:
    """Its runs are those of the row as by default; of another choice they are not, even if no such row has run."""
    written = [
        probe("rope", 0, [0.9, 0.8, 0.7], "recipe.lr=0.003"),
        probe("alibi", 0, [0.5, 0.4, 0.3], "recipe.lr=0.007"),
    ]
    written += [probe("alibi", 0, [0.4, 0.4, 0.3]), probe("nope", 0, [0.6, 0.6, 0.6], "recipe.lr=0.007")]
    written += [probe("rope", 0, [0.2, 0.2, 0.2], "model.base=500"), probe("rope", 0, [0.1, 0.1, 0.1], "width=32")]
    written.append(probe("fire", 0, [0.9, 0.8, 0.7]) | {"status": "diverged"})
    cells = probes.read_cells(put_tuned(tmp_path, 0.003, *written))
    shown = {
        (cell["model"], cell["tuned"], cell["more"]): probes.in_table(cell) for cell in cells if cell["length"] == 10
    }
    assert shown == {
        ("RoPE, base 10000", True, "width 64"): "90.0",
        ("RoPE, base 10000", False, "width 64"): "90.0",
        ("ALiBi", True, "width 64"): "50.0",
        ("ALiBi", False, "width 64"): "40.0",
        ("no positions", True, "width 64"): "60.0",
        ("RoPE, base 500", False, "width 64"): "20.0",
        ("RoPE, base 10000", False, "width 32"): "10.0",
        ("FIRE", False, "width 64"): "×",  # no run has finished
    }


def cell(model: str, values: list[float], length: int = 40, interval: list[float] | None = None) -> dict[str, Any]:
    place = dict(zip(probes.AXES, (model, "softmax", "full", 2, False, "")))
    own = [{"seed": seed, "value": value} for seed, value in enumerate(values)]
    more = {"probe": "copy", "length": length, "longest": 20, "interval": interval, "chance": 0.1, "finished": True}
    return {**place, **more, "mean": statistics.mean(values), "runs": own}


def test_what_is_tuned_again_stands_beside_the_first_choice() -> None:
    """Oracle: three cells by hand; another length, and what the second study has as by default, are no rows."""
    cells = [cell("KERPLE", [0.9]), cell("KERPLE", [0.6]) | {"tuned": True}, cell("KERPLE", [0.7], length=20)]
    again = [cell("KERPLE", [0.8], length) | {"tuned": True} for length in (20, 40)] + [cell("KERPLE", [0.5])]
    assert probes.retuned(cells, again, "copy", 40)[1:] == [["KERPLE", "90.0", "60.0", "80.0"]]


def test_claims_about_longer_texts() -> None:
    """Oracle: scipy's Welch test and Holm's correction by hand; lengths of training do not count."""
    none, alibi, rope, t5 = [0.5, 0.52, 0.49], [0.1, 0.12, 0.13], [0.9, 0.88, 0.91], [0.5, 0.4, 0.6]
    names = {"no positions": none, "ALiBi": alibi, "RoPE": rope, "relative positions": t5}
    cells = [cell(name, values) for name, values in names.items()] + [cell("ALiBi", rope, 20)]
    rows = {row[0]: row[1:] for row in probes.longer(cells)[1:]}
    pairs = {"no positions − ALiBi": (none, alibi), "no positions − RoPE": (none, rope)}
    pairs |= {"no positions − relative positions": (none, t5), "relative positions − ALiBi": (t5, alibi)}
    pairs |= {"relative positions − RoPE": (t5, rope)}
    p = {name: stats.ttest_ind(*pair, equal_var=False).pvalue for name, pair in pairs.items()}
    assert rows.keys() == pairs.keys()
    highest = 0.0
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        highest = max(highest, min(1.0, (5 - rank) * p[name]))
        better, worse = map(statistics.mean, pairs[name])
        places = ["copy 40", "–"] if better > worse else ["–", "copy 40"]
        assert rows[name] == ([*places, "0", "0"] if highest <= 0.05 else ["–", "–", "1", "0"])


def test_separated_pairs_are_those_of_welchs_test_after_holms_correction() -> None:
    """Oracle: scipy's Welch test and Holm's correction by hand over both probes, of which one decides the other.

    Seeds that correlate are not paired, two models whose seeds all agree are not compared, four seeds do not count,
    and an RNN stands beside.
    """
    values = {
        "rope": [0.9, 0.88, 0.91, 0.87, 0.9],
        "alibi": [0.85, 0.81, 0.89, 0.79, 0.86],
        "nope": [0.5, 0.52, 0.48, 0.51, 0.49],
    }
    other = {"rope": [0.9, 0.5, 0.7, 0.6, 0.8], "alibi": [0.8, 0.4, 0.6, 0.5, 0.7]}
    pairs = [(values[one], values[two]) for one, two in itertools.combinations(values, 2)]
    p_values = [stats.ttest_ind(*pair, equal_var=False).pvalue for pair in [*pairs, tuple(other.values())]]
    highest, apart = 0.0, 0
    for rank, p in enumerate(sorted(p_values)):
        highest = max(highest, (len(p_values) - rank) * p)
        apart += highest < 0.05
    assert sum(p < 0.05 for p in p_values) == 3 and apart == 2  # so the correction over both probes decides
    cells = [cell(name, own, 20) for name, own in values.items()]
    cells += [cell("fire", [0.1] * 4, 20), cell("RNN", [0.3] * 5, 20)]
    cells += [{**cell(name, own, 20), "probe": "reverse"} for name, own in other.items()]
    rows = probes.separations(cells, False, ["RNN"])
    assert rows[1] == ["copy, 20", "rope 89.2 ± 1.6", "nope 50.0 ± 1.6", "30.0 ± 0.0", "10.0", "2 of 3"]
    assert rows[2] == ["reverse, 20", "rope 70.0 ± 15.8", "alibi 60.0 ± 15.8", "–", "10.0", "0 of 1"]
    constant = [cell("nope", [0.5] * 5, 20), cell("learned", [0.7] * 5, 20)]
    assert probes.separations(constant, False, [])[1][-1] == "0 of 1"
    longer = [{**own, "length": 40} for own in cells if own["probe"] == "copy"]
    assert probes.separations(longer, True, ["RNN"])[1][0] == "copy, 40 (trained to 20)"


@pytest.mark.slow
def test_the_map_in_a_browser(browser: Any, probed: Path, tmp_path: Path) -> None:
    """A click shows the runs, a head sorts, settings switch, the address keeps the state; no network."""
    probes.write_map(probes.read_cells(probed), tmp_path)
    shown, said = opened(browser, tmp_path / "index.html")
    names = "[...document.querySelectorAll('#map tbody th')].map(own => own.textContent)"
    texts = "[...document.querySelectorAll('#map tbody td')].map(own => own.textContent)"
    assert shown.evaluate(names) == ["ALiBi", "RoPE", "learned positions"]  # by the mean above chance
    assert shown.evaluate(texts) == ["85", "85", "65", "95", "85", "15", "75", "75", "–"]
    shown.locator("[data-sort='copy|10']").click()
    assert shown.evaluate(names) == ["RoPE", "ALiBi", "learned positions"]
    shown.locator("#map td button").last.click()
    panel = shown.locator("aside").inner_text()
    assert "learned positions: copy, length 20" in panel and "chance 10.0 %" in panel and "recipe.lr=0.007" in panel
    shown.locator("select[name=tuned]").select_option("false")
    assert shown.evaluate(texts)[2] == "10"
    again, _ = opened(browser, tmp_path / "index.html")
    again.goto(shown.url)
    assert again.evaluate(texts) == shown.evaluate(texts) and said == []


def test_over_seeds_and_sentences_where_only_one_varies() -> None:
    """Oracle: scipy's tests over seeds, if all sentences are alike, and over sentences of one seed."""
    seeds = np.array([0.51, 0.55, 0.62, 0.58])
    effect = over_seeds_and_items([(1, np.tile(seeds[:, None], (1, 50)))], -0.5)
    test = stats.ttest_1samp(seeds, 0.5)
    assert effect.interval == pytest.approx([end - 0.5 for end in test.confidence_interval()])
    assert effect.p == pytest.approx(test.pvalue)
    first, second = (np.random.default_rng(seed).random(200) < 0.6 for seed in (0, 1))
    effect = over_seeds_and_items([(1, first[None]), (-1, second[None])])
    test = stats.ttest_rel(first.astype(float), second.astype(float))
    assert effect.interval == pytest.approx(list(test.confidence_interval()))


def test_over_seeds_and_sentences_where_all_vary() -> None:
    """Oracle: the spread of 300 simulated estimates, and how often their intervals have the truth."""
    generator = np.random.default_rng(0)
    effects = []
    for _ in range(300):
        items = 0.3 * generator.normal(size=(1, 40))  # the same in both, so they cancel
        first, second = (
            0.1 * generator.normal(size=(5, 1)) + items + generator.normal(size=(5, 40)) for _ in range(2)
        )
        effects.append(over_seeds_and_items([(1, first), (-1, second)]))
    spread = np.std([effect.mean for effect in effects])
    assert math.sqrt(np.mean([effect.error**2 for effect in effects])) == pytest.approx(spread, rel=0.15)
    inside = np.mean([effect.interval[0] <= 0 <= effect.interval[1] for effect in effects])
    assert 0.92 <= inside <= 0.99


# Mechanisms


ATTENTIONS = {
    "attention=softmax model=rope": 2 * 2 * 64 * 1024,  # keys and values of each token: 2 L D T
    "attention=softmax attention.kv_heads=1 model=rope": 2 * 2 * 32 * 1024,  # of one of two heads
    "attention=linear model=rope": 2 * 2 * 32 * 33,  # L N H (H + 1): the state and its normaliser
    "attention=delta model=nope": 2 * (2 * 32 * 32 + 3 * 3 * 64),  # L N H H, three tokens of q, k and v
    "attention=by_layer attention.layers=[delta,softmax] model=by_layer model.layers=[nope,rope]": 2 * 32 * 32
    + 3 * 3 * 64
    + 2 * 64 * 1024,
}


@pytest.mark.parametrize(("words", "numbers"), ATTENTIONS.items())
def test_the_state_of_a_mechanism_is_its_closed_form(words: str, numbers: int) -> None:
    """Oracle: the sizes of keys, values, states and convolutions in the papers, of L = 2 layers of N = 2 heads."""
    config = result("task=probe", "probe=recall", *words.split())["config"]
    assert mechanisms.state_size(config) == numbers
    grows = numbers > 2 * 64 * 1024 - 1
    assert (mechanisms.state_size(config, 512) < numbers) == grows


def test_a_correlation_is_that_of_scipy() -> None:
    """Oracle: `scipy.stats.spearmanr` and its bootstrap, with ties; another draw moves the ends a little."""
    x, y = np.random.default_rng(1).normal(size=(2, 14)).round(1)
    y = y - x
    rho, interval = mechanisms.spearman([*x], [*y])
    assert rho == pytest.approx(stats.spearmanr(x, y).statistic)

    def statistic(first: Any, second: Any) -> float:
        return stats.spearmanr(first, second).statistic

    drawn = stats.bootstrap(
        (x, y), statistic, paired=True, vectorized=False, n_resamples=2000, method="percentile", rng=0
    )
    assert interval == pytest.approx([*drawn.confidence_interval], abs=0.04)
    assert mechanisms.spearman([1.0, 2.0, 3.0], [5.0, 4.0, 3.0])[0] == pytest.approx(-1)
    assert math.isnan(mechanisms.spearman([1.0, 1.0], [1.0, 2.0])[0])


SKILLS = {"softmax": 0.9, "linear": 0.3, "delta": 0.7, "gated_delta": 0.8, "sigmoid": 0.5}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five mechanisms of two positions, and their losses: the higher the score, the lower.

    The first, softmax, also has ALiBi, in a study of its own.
    """
    written, folder = [], tmp_path_factory.mktemp("mechanisms")
    for name, skill in [*SKILLS.items(), ("softmax", 0.4)]:
        words = ["study=mechanisms", f"attention={name}", f"model={'nope' if 'delta' in name else 'rope'}"]
        if skill != SKILLS[name]:
            words = ["study=mechanisms_positions", "attention=softmax", "model=alibi"]
        for seed in range(5):
            accuracies = {8: skill, 16: skill * (1 - seed / 100), 32: skill / 2}
            own = probe(
                "rope", seed, [0.0], "recipe.lr=0.007", "probe=recall", *words, "probe.test_lengths=[8,16,32]"
            )
            for length, accuracy in accuracies.items():
                own["metrics"] |= {f"test_accuracy_length_{length}": accuracy}
                own["metrics"] |= {f"chance_accuracy_length_{length}": CHANCE}
            written.append(own)
        for seed in range(3) if skill == SKILLS[name] else ():
            lm = ["task=lm", "protocol=clean", f"seed={seed}", *words]
            written.append(result(*lm, metrics={"test_perplexity_mean": math.exp(2 - skill * (1 + seed / 100))}))
    return put_tuned(folder, 0.007, *written)


def test_the_results_of_mechanisms(compared: Path, tmp_path: Path) -> None:
    """Oracles: the fixture, in which positions belong to mechanisms, claims and correlations that follow from it."""
    found = mechanisms.Mechanisms(compared, tmp_path / "steps.json")
    assert {(cell["attention"], cell["positions"]) for cell in found.cells if "delta" in cell["attention"]} == {
        ("delta rule", "no positions"),
        ("gated delta rule", "no positions"),
    }
    assert found.compared("speeches") == 5
    text, says = found.correlation("speeches")
    assert text.startswith("−1.00 [−1.00") and says == "excludes"
    assert found.losses["speeches"]["softmax"] == pytest.approx({0: 1.1, 1: 1.091, 2: 1.082})
    claim = found.claims["delta_recalls"]
    assert claim.verdict == "supported" and claim.estimated.mean == pytest.approx(0.5 * 0.98)
    assert found.claims["sigmoid_matches"].verdict == "contradicted"
    assert found.claims.keys() == {"delta_recalls", "sigmoid_matches"}  # the others lack a side, or the stories
    score = np.mean(
        [
            (SKILLS["delta"] + more - CHANCE) / (1 - CHANCE)
            for more in (0, -0.02 * SKILLS["delta"], -SKILLS["delta"] / 2)
        ]
    )
    assert found.scores["delta rule"] == pytest.approx({"recall": score, "mean": score})
    assert found.positions(8) == [["", "ALiBi", "RoPE"], ["softmax", "40.0 ± 0.0", "90.0 ± 0.0"]]
    assert found.two_groups() == "none"
    (softmax,) = (cell for cell in found.tuned if (cell["attention"], cell["length"]) == ("softmax", 8))
    softmax["runs"] = [{"seed": seed, "value": value} for seed, value in enumerate([1.0, 0.99, 0.2, 1.0, 1.0])]
    assert found.two_groups() == "recall, 8: softmax"
    with pytest.raises(PageError, match="steps.json is missing"):
        found.step("delta")


def test_the_map_has_the_mechanisms(compared: Path, tmp_path: Path) -> None:
    """Oracle: the names of labels.yaml; the rows are mechanisms, whose positions are no switch."""
    mechanisms.Mechanisms(compared).write(tmp_path)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r"^const { cells, start } = (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
    names = {"softmax", "linear attention", "delta rule", "gated delta rule", "sigmoid"}
    assert {cell["attention"] for cell in data["cells"]} == names
    assert data["start"]["rows"] == "attention" and len({cell["model"] for cell in data["cells"]}) == 1
    assert f"<title>{mechanisms.TITLE}</title>" in text and (tmp_path / "figures" / "state.png").exists()
