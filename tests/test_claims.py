"""Claims and pages: an effect is that of its runs, a verdict follows from it, and a page says what the runs say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from test_report import put, result, tables_of

from speechformer.config import as_plain, compose
from speechformer.errors import UserError
from speechformer.report import claims, published
from speechformer.report.__main__ import main
from speechformer.report.claims import Judgement, content, judge
from speechformer.report.findings import agreement, claims_table, distinct, found
from speechformer.report.pages import Context, render, update
from speechformer.report.results import Run, build_tables, read_runs
from speechformer.runs.folder import PREDICTIONS, read_json, write_result
from speechformer.runs.identity import fingerprint, numerics
from speechformer.runs.predictions import write_predictions

ROWS = {**published.content()["rows"], **content()["rows"]}
NAMES = list(content()["claims"])


def runs(folder: Path, new: list[float], plain: list[float], *metrics: str) -> Path:
    """Runs of Singhal's tables 5 and 1 with these values at the end, one for each seed."""
    results, metrics = [], metrics or ("test_accuracy_not_in_train",)
    for experiment, values in (("singhal_table5", new), ("singhal_table1", plain)):
        for seed, value in enumerate(values):
            own = result(f"experiment={experiment}", f"seed={seed}")
            own["metrics"] |= dict.fromkeys(metrics, value)
            own["curve"][-1] |= dict.fromkeys(metrics, value)
            results.append(own)
    return put(folder, *results)


TASK_OF = {"perplexity": "lm", "accuracy": "classify", "bleu": "translat", "exact": "translat"}
TASK_OF |= {"seconds": "lm", "megabytes": "lm"}
DRAWS = stats.norm(0, 0.01).rvs((2, 8), random_state=0)
HIGH, LOW = list(0.56 + DRAWS[0]), list(0.51 + DRAWS[1])


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_can_be_tested(name: str) -> None:
    """Its rows have names, its metrics are those of their task, and its family and sign exist."""
    claim = content()["claims"][name]
    assert (
        claim["family"] in content()["families"] and claim["expect"] in claims.SIGNS and claim["by"] and claim["says"]
    )
    line: dict[str, Any] = {}
    for term in claim["effect"]:
        line = {**line, **term}
        assert set(term) <= {"row", "metric", "at", "times", "protocol", "constant", "baseline"}
        task = next(own for word, own in TASK_OF.items() if word in line["metric"])
        own = ROWS[line["row"]]
        assert own["study"] in published.content()["studies"]
        assert own["where"].get("task.name", task) == task and ("lm" in name or claim["family"].startswith(task))


def test_the_rows_that_claims_choose_by_looking_exist() -> None:
    assert {name for entry in content()["chosen"] for name in entry["rows"]} <= set(published.content()["rows"])


def test_an_effect_is_that_of_the_runs(tmp_path: Path) -> None:
    """Oracle: scipy's t-test of the 8 and 8 values; Holm's correction leaves the largest of the p-values."""
    judged = {own.name: own for own in judge(tables_of(runs(tmp_path, HIGH, LOW)))}
    assert set(judged) == {
        "singhal_new_data", "singhal_overfits", "singhal_overfits_new", "singhal_normal_faster", "singhal_normal",
        "singhal_normal_new",
    }  # fmt: skip
    own = judged["singhal_normal_new"]
    test = stats.ttest_ind(HIGH, LOW, equal_var=False)
    assert not own.effect.paired and own.effect.p == pytest.approx(test.pvalue)
    assert own.effect.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    p_values = [claim.effect.p for claim in judged.values() if claim.effect.p == claim.effect.p]
    assert own.corrected == own.effect.p == max(p_values) and len(p_values) == 3
    assert own.verdict == "supported"


def test_a_change_along_a_run_is_paired(tmp_path: Path) -> None:
    """Oracle: scipy's paired test of the values after epochs 15 and 11."""
    folder = runs(tmp_path, HIGH, LOW)
    own = next(own for own in judge(tables_of(folder)) if own.name == "singhal_overfits_new")
    assert own.effect.paired and own.effect.p == pytest.approx(stats.ttest_rel(LOW, [0.8] * 8).pvalue)
    assert own.verdict == "supported"  # from 80 to 51 %


def test_an_effect_that_is_not_significant_after_the_correction_is_inconclusive(tmp_path: Path) -> None:
    """Oracle: the two largest p-values are both 0.03, so they are doubled."""
    shift = 0.0
    while stats.ttest_ind(DRAWS[0] + shift, DRAWS[1], equal_var=False).pvalue > 0.03 or shift == 0:
        shift += 0.0002
    values = (list(0.5 + shift + DRAWS[0]), list(0.5 + DRAWS[1]))
    judged = judge(tables_of(runs(tmp_path, *values, "test_accuracy_not_in_train", "test_accuracy")))
    own = next(own for own in judged if own.name == "singhal_normal_new")
    assert own.corrected == pytest.approx(2 * own.effect.p) and own.effect.p < 0.05 < own.corrected
    assert own.verdict == "inconclusive"


def test_claims_are_about_the_corpus_of_the_reports(tmp_path: Path) -> None:
    other = [{**result(f"experiment=singhal_table{k}", f"seed={s}", sha256="0" * 64)} for k in (1, 5) for s in (0, 1)]
    assert judge(tables_of(put(tmp_path, *other))) == []


def test_three_rows_make_one_effect(tmp_path: Path) -> None:
    """Oracle: learned less twice none plus ALiBi, of the means."""
    means = {"learned": 440.0, "nope": 394.0, "alibi": 391.0}
    folder = put(
        tmp_path,
        *(
            result("task=lm", "study=positions_lm", f"model={model}", f"seed={seed}", value=mean + DRAWS[0, seed])
            for model, mean in means.items()
            for seed in range(5)
        ),
    )
    own = next(own for own in judge(tables_of(folder)) if own.name == "alibi_needs_nothing")
    assert own.effect.mean == pytest.approx(440 - 2 * 394 + 391, abs=1e-6)  # the noise of common seeds cancels


def test_an_effect_on_perplexity_has_one_over_known_words(tmp_path: Path) -> None:
    """Oracle: scipy's test of the values; claims on train or on contexts of other lengths have none."""
    results = []
    for k, experiment in enumerate(("singhal_table2", "singhal_table4")):
        for seed in range(8):
            own = result(f"experiment={experiment}", f"seed={seed}", value=400 - 30 * k)
            own["metrics"] |= {
                "test_known_perplexity_mean": 350 - 20 * k + 100 * DRAWS[k, seed],
                "train_perplexity": 100,
            }
            results.append(own)
    judged = {own.name: own for own in judge(tables_of(put(tmp_path, *results)))}
    known, values = judged["singhal_lm_alibi"].known, [350 - 20 * k + 100 * DRAWS[k] for k in (0, 1)]
    assert known and known.p == pytest.approx(stats.ttest_ind(values[1], values[0], equal_var=False).pvalue)
    assert judged["singhal_lm_alibi_train"].known is None
    table = str(claims_table([judged["singhal_lm_alibi"], judged["singhal_lm_alibi_train"]]))
    assert "effect over known words" in table and f"{known.mean:.1f}".replace("-", "−") in table
    assert "effect over known words" not in str(claims_table([judged["singhal_lm_alibi_train"]]))


def predictions(folder: Path, seeds: int) -> Path:
    """Runs of Singhal's tables 5 and 1 that predict: of 750 sentences 551 are in train, and seeds differ in a few."""
    for experiment, rate in (("singhal_table5", 0.56), ("singhal_table1", 0.5)):
        for seed in range(seeds):
            own = result(f"experiment={experiment}", f"seed={seed}")
            leaked = np.arange(750) < 551
            right = np.where(leaked, True, np.random.default_rng(seed).random(750) < rate)
            new = float(right[~leaked].mean())
            own["metrics"] |= {"test_accuracy": float(right.mean()), "test_accuracy_not_in_train": new}
            path = folder / f"{experiment}_{seed}"
            path.mkdir(parents=True)
            write_result(path, own)
            write_predictions(path / PREDICTIONS, ["obama", "wbush"], [0] * 750, 1 - right.astype(int), leaked)
    return folder


def new_sentences(folder: Path) -> Judgement:
    return next(own for own in judge(tables_of(folder)) if own.name == "singhal_normal_new")


def test_a_claim_about_sentences_covers_their_choice(tmp_path: Path) -> None:
    """Oracle: the same effect as the metrics', in an interval at least as wide as that of 199 sentences."""
    own = new_sentences(predictions(tmp_path, 6))
    values = [np.mean([run.metrics["test_accuracy_not_in_train"] for run in term.row.finished]) for term in own.terms]
    assert own.over_sentences and own.effect.mean == pytest.approx(values[0] - values[1])
    low, high = own.effect.interval
    assert low < own.effect.mean < high and 0.02 < high - low < 0.2


def test_a_baseline_is_compared_on_the_same_sentences(tmp_path: Path) -> None:
    """Oracle: Student's interval of the three seeds, which have 0, 1 and 2 of 199 more right; ours is inside."""
    for k in range(4):
        own = result("experiment=kulkarni_part1", f"seed={k}")
        if k == 3:
            own |= {"baseline": {"name": "tfidf_logistic"}, "seed": None}
        right = np.arange(750) < 650 + k % 3
        own["metrics"] |= {"test_accuracy": right.mean(), "test_accuracy_not_in_train": right[551:].mean()}
        (tmp_path / str(k)).mkdir()
        write_result(tmp_path / str(k), own)
        guesses = 1 - right.astype(int)
        write_predictions(
            tmp_path / str(k) / PREDICTIONS, ["obama", "wbush"], [0] * 750, guesses, np.arange(750) < 551
        )
    (judgement,) = (own for own in judge(tables_of(tmp_path)) if own.name == "counting_classify")
    assert judgement.over_sentences and judgement.effect.mean == pytest.approx(1 / 199)
    low, high = judgement.effect.interval
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    assert (1 - half) / 199 < low < 1 / 199 < high < (1 + half) / 199


def test_one_seed_gives_no_verdict(tmp_path: Path) -> None:
    own = new_sentences(predictions(tmp_path, 1))
    assert not own.over_sentences and np.isnan(own.effect.p) and own.verdict == "inconclusive"


@pytest.mark.parametrize("content", ["", "nonsense", "label\tpredicted\tin_train\nobama\tobama\t1\n"])
def test_damaged_predictions_are_named_and_the_claim_is_over_seeds(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = predictions(tmp_path, 3) / "singhal_table1_1" / PREDICTIONS
    path.write_text(content)
    assert not new_sentences(tmp_path).over_sentences
    assert str(path) in capsys.readouterr().err


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


def test_a_broken_result_changes_verdict_and_page(tmp_path: Path) -> None:
    folder = runs(tmp_path, HIGH, LOW)
    before = rendered(folder)
    mean = 100 * np.mean(HIGH)
    assert f"80.0 / 80.0 / **{mean:.1f} ± {100 * np.std(HIGH, ddof=1):.1f}**; +" in before
    assert "| claim | supported |" in before and "old text" not in before and "Typed by hand." in before
    assert rendered(folder, before) == before  # rendering again changes nothing
    for path in sorted(folder.iterdir()):
        own = read_json(path / "result.json")
        assert own is not None
        if own["config"]["recipe"]["init"] == "normal":
            own["metrics"]["test_accuracy_not_in_train"] -= 0.2
            write_result(path, own)
    after = rendered(folder, before)
    assert f"**{mean - 20:.1f} ±" in after and "| claim | contradicted |" in after


@pytest.mark.parametrize(
    "template, message",
    [
        ('{{ mean("nowhere") }}', "there is no finished run of the row nowhere under protocol=paper"),
        ('{{ mean("singhal_table1", "test_bleu") }}', "the row singhal_table1 has no test_bleu"),
        ('{{ mean("singhal_table1", at=16) }}', "has no test_accuracy at 16"),
        ('{{ verdict("nonsense") }}', "the claim nonsense does not exist"),
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{{ mean( }}", "unexpected '}'"),
        ("{{ mean() }}", "missing 1 required positional argument: 'row'"),
        ('{{ baseline("bigram", "singhal_table1") }}', "there is no baseline bigram"),
    ],
)
def test_a_wrong_template_is_one_sentence_with_its_line(template: str, message: str, tmp_path: Path) -> None:
    folder = runs(tmp_path, HIGH, LOW)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        rendered(folder, f"# Title\n\n<!--= {template} -->\n<!--/-->\n")
    assert str(error.value).startswith("line 3: ")


def test_a_page_repeats_a_result_of_another(tmp_path: Path) -> None:
    """Oracle: the text below the heading; a template of the next section is not one of this."""
    other = tmp_path / "folder" / "other.md"
    other.parent.mkdir()
    other.write_text(
        "# Other\n\n## Empty\n\n## Numbers\n\n<!--= {{ 1 + 1 }} -->\nTwo\nlines\n<!--/-->\n"
        "## New\n\n<!--= {{ 1 + 1 }} -->\n<!--/-->\n",
        encoding="utf-8",
    )
    page = tmp_path / "page.md"
    page.write_text('<!--= {{ block("folder/other.md", "Numbers") }} -->\n<!--/-->\n', encoding="utf-8")
    assert update(page, {}) and page.read_text(encoding="utf-8").endswith("-->\nTwo\nlines\n<!--/-->\n")
    for path, heading, message in (
        ("none.md", "Numbers", "none.md: No such file"),
        ("folder/other.md", "Empty", "other.md has no template below a heading 'Empty'."),
        ("folder/other.md", "New", "other.md: the template below 'New' has no content yet."),
        ("folder/other.md", "umbers", "other.md has no template below a heading 'umbers'."),
    ):
        page.write_text(f'<!--= {{{{ block("{path}", "{heading}") }}}} -->\n<!--/-->\n', encoding="utf-8")
        with pytest.raises(UserError, match=re.escape(message)):
            update(page, {})


def test_a_page_shows_a_line_of_a_committed_table(tmp_path: Path) -> None:
    """Oracle: the file's values; a page never shows one of several lines as if it were the only one."""
    (tmp_path / "runs.csv").write_text("table,row,seed,bleu\nted,rope,0,21.75\nted,rope,1,20\nted,nope,0,3\n")
    page = tmp_path / "page.md"

    def shown(where: str) -> str:
        page.write_text(f'<!--= {{{{ line("runs.csv", {where}).bleu }}}} -->\n<!--/-->\n', encoding="utf-8")
        update(page, {})
        return page.read_text(encoding="utf-8").split("\n")[1]

    assert shown('table="ted", row="rope", seed=0') == "21.75" and shown('row="nope"') == "3.0"
    for where, message in (
        ('row="rope"', "runs.csv has 2 lines with {'row': 'rope'}; line() needs one."),
        ('row="alibi"', "runs.csv has 0 lines with {'row': 'alibi'}"),
        ('raw="rope"', "the columns of"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            shown(where)
    page.write_text('<!--= {{ line("none.csv", row="a") }} -->\n<!--/-->\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"line 1: .*none.csv: No such file"):
        update(page, {})


def test_the_command_renders_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, folder = tmp_path / "page.md", runs(tmp_path / "runs", HIGH, LOW)
    page.write_text(PAGE, encoding="utf-8")
    command = ["report", str(folder), "--output", str(tmp_path / "out"), "--no-plots", "--pages", str(page)]
    monkeypatch.setattr("sys.argv", command)
    main()
    assert page.read_text(encoding="utf-8") == rendered(folder)
    assert f"{page}: updated" in capsys.readouterr().out
    main()
    assert f"{page}: unchanged" in capsys.readouterr().out
    page.write_text("<!--= {{ x }} -->\n<!--/-->\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="page.md, line 1: 'x' is undefined"):
        main()


def test_agreement_counts_each_run_once_and_says_what_was_chosen_by_looking(tmp_path: Path) -> None:
    """Oracle: by hand: Marsol's full attention is printed as last and as best; three texts count, by the last."""
    values = {"obama": 400.0, "wbush": 600.0, "hbush": 430.0}  # published 406.80, 492.74, 432.61
    results = []
    for seed in range(5):
        own = result("experiment=marsol_table1_full", f"seed={seed}")
        for point in (own["metrics"], *own["curve"]):
            point |= {f"test_perplexity_{name}": value + 5 * (seed - 2) for name, value in values.items()}
        results.append(own)
    text = agreement(tables_of(put(tmp_path, *results)))
    assert text.startswith("2 of 3 published final results on test fall inside") and "about 3 would" in text
    assert "For 3 of them, an assumption of ours was chosen" in text and "the place of the norms" in text


def test_a_run_of_two_studies_counts_once(tmp_path: Path) -> None:
    results = [result("task=lm", f"study={study}", f"seed={seed}") for study in ("a", "b") for seed in (0, 1)]
    own, _ = read_runs([put(tmp_path, *results)])
    assert (len(own), len(distinct(own))) == (4, 2)


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [(0.02, "better"), (0.0005, "inconclusive"), (-0.02, "worse")],
    ids=["above", "level", "below"],
)
def test_the_best_row_is_compared_with_the_best_baseline(shift: float, verdict: str, tmp_path: Path) -> None:
    """Oracle: scipy's t-test of the 8 values against that of the baseline, doubled for the two rows."""
    folder = runs(tmp_path / "runs", HIGH, LOW, "test_accuracy")
    own = result("experiment=singhal_table1", "seed=0") | {"baseline": {"name": "naive_bayes"}, "seed": None}
    own["metrics"]["test_accuracy"] = float(np.mean(HIGH)) - shift
    (folder / "baseline").mkdir()
    write_result(folder / "baseline", own)
    test = stats.ttest_1samp(HIGH, own["metrics"]["test_accuracy"])
    assert (2 * test.pvalue < 0.05) == (verdict != "inconclusive")
    (sentence,) = (text for text in map(str, found(tables_of(folder), [])) if "naive Bayes" in text)
    shown = sentence.replace("−", "-").replace("&#91;", "[").replace("&#93;", "]")
    low, high = map(float, re.search(r"less naive Bayes .*: \S+ \[(\S+), (\S+)\]", shown).groups())  # type: ignore[union-attr]
    expected = [100 * (end - own["metrics"]["test_accuracy"]) for end in test.confidence_interval()]
    assert (low, high) == pytest.approx(expected, abs=0.06)
    assert sentence.endswith(f"{verdict}.")


def test_the_report_begins_with_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs(tmp_path / "runs", HIGH, LOW, "test_accuracy")
    sentences = "\n".join(map(str, found(tables_of(folder), judge(tables_of(folder)))))
    assert "best is learned, normal initialisation with 56." in sentences
    assert "8 seeds); significantly better than the other" in sentences
    monkeypatch.setattr("sys.argv", ["report", str(folder), "--output", str(tmp_path / "out")])
    main()
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert text.index("## What was found") < text.index("figures/claims.png") < text.index("How to read it")
    assert (tmp_path / "out/figures/claims.png").exists() and (tmp_path / "out/tables/claims.csv").exists()


def test_results_of_an_earlier_numerics_version_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs(tmp_path / "runs", HIGH, LOW)
    monkeypatch.setattr("speechformer.report.results.NUMERICS_VERSION", 2)
    monkeypatch.setattr("sys.argv", ["report", str(folder), "--output", str(tmp_path / "out"), "--no-plots"])
    main()
    assert "16 were computed by an earlier version of the code" in (tmp_path / "out/report.md").read_text()
    assert Run(tmp_path, {**result(), "numerics": 2}, {}).is_outdated is False


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["task=lm", "width=128"], ["a", "b"]),
        (["task=lm", "width=128", "corpus=text", "corpus.separator=blank_line"], ["blank_line"]),
        (["task=probe", "probe=copy"], {}),
    ],
)
def test_results_are_outdated_by_the_version_in_their_fingerprint(
    overrides: list[str], settings: Any, version: int, tmp_path: Path
) -> None:
    """T5's bias has another start since version 3, while results said 1 for every config."""
    config = as_plain(compose([*overrides, "model=relative", "recipe.init=torch"]))
    assert numerics(config) == 3
    corpus = {"sha256": "ab", "classes": settings if overrides == ["task=lm", "width=128"] else [], "counts": {}}
    identity = fingerprint(config, "ab", settings, version)
    own = {**result(), "numerics": 1, "config": config, "corpus": corpus, "identity": identity}
    assert Run(tmp_path, own, {}).is_outdated is (version == 1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task=lm"], 5),
        (["task=lm", "model=relative", "recipe.init=torch"], 7),
        (["task=lm", "width=96"], 1),
        (["task=lm", "batch_size=8"], 1),  # 256 words a step
        (["task=lm", "recipe.label_smoothing=0.1"], 1),
        (["task=lm", "task.tokens=bytes"], 1),
        (["task=lm", "task.tokens=bpe", "task.vocab_size=3835"], 1),
        (["task=lm", "task.tokens=bpe", "task.vocab_size=3836"], 5),  # and 260 other tokens
        (["task=lm", "task.tokens=bpe", "task.vocab_size=1000", "vocab_size=8192"], 5),
        (["task=classify"], 1),
        (["task=classify", "task.masked_lm=0.1"], 1),  # 512 words a step, 15 % of them masked
        (["task=classify", "task.masked_lm=0.1", "batch_size=128"], 5),
        (["task=classify", "task.masked_lm=0.1", "batch_size=128", "recipe.label_smoothing=0.1"], 5),
        (["task=probe", "probe=copy"], 1),
        (["task=probe", "probe=copy", "vocab_size=8192"], 5),
        (["task=translate", "task.vocab_size=4000", "recipe.label_smoothing=0"], 1),  # width 128
        (["task=translate", "task.vocab_size=4000", "recipe.label_smoothing=0", "width=64", "batch_size=2"], 5),
        (["task=translate", "task.vocab_size=4000", "recipe.label_smoothing=0.1", "width=64"], 1),
    ],
)
def test_only_runs_that_may_take_the_unshifted_loss_have_other_numbers(overrides: list[str], expected: int) -> None:
    """Oracle: the limits of `kernels.loss`: 4,096 tokens, 512 rows, width 64; no label smoothing.

    Batches of `task.batch_tokens` have any number of rows.
    """
    assert numerics(as_plain(compose(overrides))) == expected


@pytest.mark.parametrize(
    ("model", "versions"), [("alibi", {1: True, 5: False}), ("relative", {1: True, 3: True, 7: False})]
)
def test_language_models_of_before_the_unshifted_loss_are_outdated(
    model: str, versions: dict[int, bool], tmp_path: Path
) -> None:
    config = as_plain(compose(["task=lm", f"model={model}", "recipe.init=torch"]))
    corpus = {"sha256": "ab", "classes": ["a", "b"], "counts": {}}
    for version, is_outdated in versions.items():
        identity = fingerprint(config, "ab", ["a", "b"], version)
        own = {**result(), "numerics": 1, "config": config, "corpus": corpus, "identity": identity}
        assert Run(tmp_path, own, {}).is_outdated is is_outdated
