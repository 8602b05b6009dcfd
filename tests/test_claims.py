"""Claims and pages: an effect is that of its runs, a verdict follows from it, and a page says what the runs say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call
from scipy import stats
from synthetic import baseline, markdown_of, put, result, tables_of

from speechformer.errors import UserError
from speechformer.report.__main__ import main, write_report
from speechformer.report.claims import Judgement, judge
from speechformer.report.effects import forest
from speechformer.report.pages import Context, render, update
from speechformer.report.results import Run, build_tables, read_runs
from speechformer.runs.folder import PREDICTIONS, write_result
from speechformer.runs.predictions import write_predictions

NEW = "test_accuracy_not_in_train"
DRAWS = stats.norm(0, 0.01).rvs((2, 8), random_state=0)
HIGH, LOW = list(0.56 + DRAWS[0]), list(0.51 + DRAWS[1])


def runs(folder: Path, new: list[float], plain: list[float], *metrics: str) -> Path:
    """Runs of Singhal's tables 5 and 1 with these values at the end, one for each seed."""
    results = []
    for experiment, values in (("singhal_table5", new), ("singhal_table1", plain)):
        for seed, value in enumerate(values):
            run = result(f"experiment={experiment}", f"seed={seed}")
            run["metrics"] |= dict.fromkeys(metrics or (NEW,), value)
            run["curve"][-1] |= dict.fromkeys(metrics or (NEW,), value)
            results.append(run)
    return put(folder, *results)


def judged(folder: Path) -> dict[str, Judgement]:
    return {judgement.name: judgement for judgement in judge(tables_of(folder))}


def test_an_effect_is_that_of_the_runs(tmp_path: Path) -> None:
    """Oracle: scipy's t-tests; Holm's correction leaves the largest of the p-values."""
    judgements = judged(runs(tmp_path / "a", HIGH, LOW))
    claim, change = judgements["singhal_normal_new"], judgements["singhal_overfits_new"]
    test = stats.ttest_ind(HIGH, LOW, equal_var=False)
    assert not claim.effect.paired and claim.effect.p == pytest.approx(test.pvalue)
    assert claim.effect.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    p_values = [own.effect.p for own in judgements.values() if own.effect.p == own.effect.p]
    assert claim.corrected == claim.effect.p == max(p_values) and len(p_values) == 3
    assert claim.verdict == change.verdict == "supported"
    # from epoch 11 to 15 of the same runs: 80 to 51 %
    assert change.effect.paired and change.effect.p == pytest.approx(stats.ttest_rel(LOW, [0.8] * 8).pvalue)
    opposite = judged(runs(tmp_path / "b", LOW, HIGH))["singhal_normal_new"]
    assert opposite.verdict == "contradicted" and opposite.effect.mean == pytest.approx(-claim.effect.mean)


def test_an_effect_that_is_not_significant_after_the_correction_is_inconclusive(tmp_path: Path) -> None:
    """Oracle: the two largest p-values are both 0.03, so they are doubled."""
    shift = 0.0
    while stats.ttest_ind(DRAWS[0] + shift, DRAWS[1], equal_var=False).pvalue > 0.03 or shift == 0:
        shift += 0.0002
    folder = runs(tmp_path, list(0.5 + shift + DRAWS[0]), list(0.5 + DRAWS[1]), NEW, "test_accuracy")
    claim = judged(folder)["singhal_normal_new"]
    assert claim.corrected == pytest.approx(2 * claim.effect.p) and claim.effect.p < 0.05 < claim.corrected
    assert claim.verdict == "inconclusive"


def test_claims_are_about_the_corpus_of_the_reports(tmp_path: Path) -> None:
    other = [result(f"experiment=singhal_table{k}", f"seed={s}", sha256="0" * 64) for k in (1, 5) for s in (0, 1)]
    assert judge(tables_of(put(tmp_path, *other))) == []


def predictions(folder: Path, seeds: int) -> Path:
    """Runs of Singhal's tables 5 and 1 that predict: of 750 sentences 551 are in train, and seeds differ in a few."""
    for experiment, rate in (("singhal_table5", 0.56), ("singhal_table1", 0.5)):
        for seed in range(seeds):
            leaked = np.arange(750) < 551
            right = np.where(leaked, True, np.random.default_rng(seed).random(750) < rate)
            write_answers(folder / f"{experiment}_{seed}", result(f"experiment={experiment}", f"seed={seed}"), right)
    return folder


def write_answers(folder: Path, run: dict[str, Any], right: Any) -> None:
    """Write a run whose answers to 750 sentences, the first 551 of which are in train, are right or wrong."""
    folder.mkdir(parents=True)
    run["metrics"] |= {"test_accuracy": float(right.mean()), NEW: float(right[551:].mean())}
    write_result(folder, run)
    write_predictions(
        folder / PREDICTIONS, ["obama", "wbush"], [0] * 750, 1 - right.astype(int), np.arange(750) < 551
    )


def test_a_claim_about_sentences_covers_their_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the same effect as the metrics', in an interval at least as wide as that of 199 sentences."""
    claim = judged(predictions(tmp_path / "six", 6))["singhal_normal_new"]
    values = [np.mean([run.metrics[NEW] for run in term.row.finished]) for term in claim.terms]
    assert claim.over_sentences and claim.effect.mean == pytest.approx(values[0] - values[1])
    low, high = claim.effect.interval
    assert low < claim.effect.mean < high and 0.02 < high - low < 0.2
    alone = judged(predictions(tmp_path / "one", 1))["singhal_normal_new"]
    assert not alone.over_sentences and math.isnan(alone.effect.p) and alone.verdict == "inconclusive"
    path = tmp_path / "six" / "singhal_table1_1" / PREDICTIONS
    path.write_text("label\tpredicted\tin_train\nobama\tobama\t1\n")
    assert not judged(tmp_path / "six")["singhal_normal_new"].over_sentences  # but over seeds
    assert str(path) in capsys.readouterr().err


def test_a_baseline_is_compared_on_the_same_sentences(tmp_path: Path) -> None:
    """Oracle: Student's interval of the three seeds, which have 0, 1 and 2 of 199 more right; ours is inside."""
    for k in range(4):
        run = result("experiment=kulkarni_part1", f"seed={k}") if k < 3 else baseline("tfidf_logistic")
        write_answers(tmp_path / str(k), run, np.arange(750) < 650 + k % 3)
    claim = judged(tmp_path)["counting_classify"]
    assert claim.over_sentences and claim.effect.mean == pytest.approx(1 / 199)
    low, high = claim.effect.interval
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    assert (1 - half) / 199 < low < 1 / 199 < high < (1 + half) / 199


def test_the_forest_shows_effects_as_claimed(tmp_path: Path) -> None:
    """Oracle: the mean of each claim times its sign, in points."""
    judgements = [own for own in judge(tables_of(runs(tmp_path, HIGH, LOW))) if own.effect.p == own.effect.p]
    (axis,) = forest(judgements)[0].axes  # type: ignore[index]
    marks = [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 1]
    assert marks == pytest.approx([100 * own.sign * own.effect.mean for own in judgements])
    assert [text.get_text()[0] for text in axis.texts] == ["−" if mark < 0 else "+" for mark in marks]


# Pages

PAGE = """# Findings
<!--= Normal initialization: {{ accuracies("singhal_table5") }}; {{ effect("singhal_normal_new") }}. -->
old text
<!--/-->

<!--= | claim | {{ verdict("singhal_normal_new") }} | -->
<!--/-->
Typed by hand.
"""


def rendered(folder: Path, text: str = PAGE) -> str:
    found_runs, _ = read_runs([folder])
    tables, _ = build_tables(found_runs)
    return render(text, Context(tables, judge(tables), found_runs).functions())


def test_a_page_follows_its_results(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", runs(tmp_path / "runs", HIGH, LOW)
    page.write_text(PAGE, encoding="utf-8")
    words = [folder, "--output", tmp_path / "out", "--no-plots", "--pages", page]
    assert f"{page}: updated" in call(main, *words)[0]
    text = page.read_text(encoding="utf-8")
    assert f"80.0 / 80.0 / **{100 * np.mean(HIGH):.1f} ± {100 * np.std(HIGH, ddof=1):.1f}**; +" in text
    assert "| claim | supported |" in text and "old text" not in text and "Typed by hand." in text
    assert f"{page}: unchanged" in call(main, *words)[0]
    other = rendered(runs(tmp_path / "other", [value - 0.2 for value in HIGH], LOW), text)
    assert f"**{100 * np.mean(HIGH) - 20:.1f} ±" in other and "| claim | contradicted |" in other


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ('{{ mean("nowhere") }}', "there is no finished run of the row nowhere under protocol=paper"),
        ('{{ mean("singhal_table1", "test_bleu") }}', "the row singhal_table1 has no test_bleu"),
        ('{{ verdict("nonsense") }}', "the claim nonsense does not exist"),
        ("{{ nothing }}", "'nothing' is undefined"),
        ('{{ baseline("bigram", "singhal_table1") }}', "there is no baseline bigram"),
    ],
)
def test_a_wrong_template_is_one_sentence_with_its_line(template: str, message: str, tmp_path: Path) -> None:
    folder = runs(tmp_path, HIGH[:2], LOW[:2])
    with pytest.raises(UserError, match=re.escape(message)) as error:
        rendered(folder, f"# Title\n\n<!--= {template} -->\n<!--/-->\n")
    assert str(error.value).startswith("line 3: ")


def shown(page: Path, call: str) -> str:
    """Return what a template gives in a page."""
    page.write_text(f"<!--= {{{{ {call} }}}} -->\n<!--/-->\n", encoding="utf-8")
    update(page, {})
    return page.read_text(encoding="utf-8").partition("\n")[2].removesuffix("\n<!--/-->\n")


def test_a_page_repeats_a_result_of_another_or_a_line_of_a_table(tmp_path: Path) -> None:
    """Oracle: the text below the heading, and the file's values. One of several lines is not shown."""
    text = "## Empty\n\n## Numbers\n\n<!--= {{ 1 + 1 }} -->\nTwo\nlines\n<!--/-->\n"
    (tmp_path / "other.md").write_text(text)
    (tmp_path / "runs.csv").write_text("table,row,seed,bleu\nted,rope,0,21.75\nted,rope,1,20\nted,nope,0,3\n")
    page = tmp_path / "page.md"
    assert shown(page, 'block("other.md", "Numbers")') == "Two\nlines"
    assert shown(page, 'line("runs.csv", table="ted", row="rope", seed=0).bleu') == "21.75"
    for wrong, message in (
        ('block("none.md", "Numbers")', "none.md: No such file"),
        ('block("other.md", "Empty")', "other.md has no template below a heading 'Empty'."),
        ('line("runs.csv", row="rope")', "runs.csv has 2 lines with {'row': 'rope'}; line() needs one."),
        ('line("runs.csv", raw="rope")', "the columns of"),
        ('line("none.csv", row="a")', "none.csv: No such file"),
    ):
        with pytest.raises(UserError, match=rf"line 1: .*{re.escape(message)}"):
            shown(page, wrong)


# What was found


def test_results_of_an_earlier_version_of_the_numbers_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechformer.report.results.NUMERICS_VERSION", 99)
    assert not Run(tmp_path, {**result(), "numerics": 99}, {}).is_outdated
    write_report([runs(tmp_path / "runs", HIGH, LOW)], tmp_path / "out", plots=False)
    assert "16 were computed by an earlier version of the code" in markdown_of(tmp_path / "out")
