"""The pages with results hold what the committed results give, and nothing else."""

from __future__ import annotations

import csv
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from pages import IS_CHECKOUT, PAGES, ROOT, name_of

from speechformer.bench.pages import fill
from speechformer.report.__main__ import write_report
from speechformer.report.labels import Options
from speechformer.report.pages import BLOCK

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a checkout")
REFERENCE = ROOT / "outputs" / "reference"
WORDS = ("supported", "contradicted", "inconclusive", "holds\\b(?! `)", "significant")
WORDS += ("better", "worse", "faster", "halves", "doubles", "outperforms?", "overfits", "beats?")
LABELS = {"contexts": Options(labels=["pattern=by_layer=window 64 below full attention"])}  # as in the Makefile
VERDICT = re.compile(rf"\b({'|'.join(WORDS)})", re.IGNORECASE)
DEFINED = ("- **Verdict.** A claim is", "its family. Otherwise it is")  # lines that say what the words mean
UNITS = "BLEU|GB|MB|MiB|per cent|points|times|ms|seconds|minutes|hours|tokens/s"
FIGURE = re.compile(rf"\d ?±|\d(\.\d+)? ({UNITS})\b|(?<!\b95)(?<!\b80)(?<! 5) %")
PUBLISHED = ('- Kulkarni lets sinusoidal positions peak at 86.00 % "around epoch 70".',)  # what the reports say
CODE = re.compile(r"```.*?```", re.DOTALL)


@pytest.mark.parametrize(
    ("folder", "pages"),
    [
        (REFERENCE, (ROOT / "README.md", REFERENCE / "README.md")),
        (REFERENCE / "contexts", (REFERENCE / "contexts" / "README.md",)),
        (REFERENCE / "ladder", (REFERENCE / "ladder" / "README.md",)),
        (REFERENCE / "ladder_classify", (REFERENCE / "ladder_classify" / "README.md",)),
        (REFERENCE / "ladder_translate", (REFERENCE / "ladder_translate" / "README.md",)),
        (REFERENCE / "bottleneck", (REFERENCE / "translation" / "README.md",)),
    ],
)
def test_the_pages_are_what_the_results_of_the_runs_give(
    folder: Path, pages: tuple[Path, ...], tmp_path: Path
) -> None:
    """Oracle: `make pages` from the committed archive."""
    with tarfile.open(folder / "runs.tar.xz") as archive:
        archive.extractall(tmp_path / "runs", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    copies = {page: tmp_path / page.relative_to(ROOT) for page in pages}
    repeated = [REFERENCE / "probes" / "README.md", *REFERENCE.glob("ladder*/README.md")]
    older = REFERENCE / "translation" / "tables" / "runs.csv"  # of runs that are too long for `make pages`
    for page in (*pages, *repeated, older):
        copy = tmp_path / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copy)
    options = LABELS.get(folder.name)
    write_report([tmp_path / "runs"], tmp_path / "report", plots=False, pages=[*copies.values()], options=options)
    for page, copy in copies.items():
        assert copy.read_text() == page.read_text(), f"{page}: run make pages"


@pytest.mark.parametrize(
    "folder", [REFERENCE / "bench" / own for own in ("", "long", "gpu")], ids=lambda path: path.name
)
def test_the_page_of_a_benchmark_is_what_its_timings_give(folder: Path, tmp_path: Path) -> None:
    """Oracle: `speechformer.bench.pages` from the committed timings."""
    page, copy = folder / "README.md", tmp_path / "page.md"
    shutil.copy(page, copy)
    fill(folder / "bench.json", [copy])
    assert copy.read_text() == page.read_text(), f"run python -m speechformer.bench.pages for {page}"


EXPECTED = {  # experiments of the reports, with their table and row in `tables/rows.csv`
    "kulkarni_part1": ("kulkarni_part1", "sinusoidal"),
    "kulkarni_part2": ("kulkarni_part2", "sinusoidal"),
    "kulkarni_part3_absolute": ("kulkarni_part3", "sinusoidal"),
    "kulkarni_part3_alibi": ("kulkarni_part3", "ALiBi × 1.1"),
    "singhal_table1": ("singhal_classify", "learned"),
    "singhal_table2": ("singhal_lm", "learned"),
    "singhal_table3": ("singhal_classify", "ALiBi"),
    "singhal_table4": ("singhal_lm", "ALiBi"),
    "singhal_table5": ("singhal_classify", "learned, normal initialisation"),
    "singhal_table6": ("singhal_lm", "learned, normal initialisation"),
    "marsol_classify": ("marsol_classify", "learned"),
    "marsol_table1_full": ("marsol_table1", "full attention"),
    "marsol_table1_window5": ("marsol_table1", "window 5"),
    "marsol_table1_window3": ("marsol_table1", "window 3"),
    "marsol_table1_block": ("marsol_table1", "block sparse"),
    "marsol_table1_alibi": ("marsol_table1", "ALiBi"),
}


def test_experiments_of_the_reports_say_what_their_results_are() -> None:
    """Oracle: the table of rows of the report."""
    with (REFERENCE / "tables" / "rows.csv").open(encoding="utf-8") as file:
        rows = {(own["table"].rsplit("_", 1)[0], own["row"], own["metric"]): own for own in csv.DictReader(file)}
    for experiment, (table, row) in EXPECTED.items():

        def shown(metric: str, digits: int, scale: float = 1, key: str = "mean") -> str:
            return f"{scale * float(rows[f'{table}_paper', row, metric][key]):.{digits}f}"  # noqa: B023

        if (f"{table}_paper", row, "test_accuracy") in rows:
            whole, sd = (shown("test_accuracy", 1, 100, key) for key in ("mean", "sd"))
            leaked, fresh = (shown(f"test_accuracy_{part}", 0, 100) for part in ("in_train", "not_in_train"))
            text = f"{whole} ± {sd} %: {leaked} % on sentences that are also in train, {fresh} % on the others."
        else:
            texts = " / ".join(shown(f"test_perplexity_{part}", 0) for part in ("obama", "wbush", "hbush"))
            mean, sd = (shown("test_perplexity_mean", 0, 1, key) for key in ("mean", "sd"))
            text = f"{texts}, mean {mean} ± {sd}."
        header = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
        assert f"Expect {text}" in " ".join(re.sub("^# ", "", header, flags=re.M).split()), (experiment, text)


# Of sweeps and ladders: what the header says; then archive, table, metric, factor, digits; then how the rows begin
EXPECTED_OF_OTHERS = {
    "positions_lm": (
        "rope {}, relative {}, alibi {}, nope {}, sinusoidal {}, learned {}.",
        *("", "positions_lm_paper", "test_perplexity_mean", 1, 0),
        ["RoPE", "relative", "ALiBi", "no positions", "sinusoidal", "learned"],
    ),
    "patterns_lm": (
        "global {}, window {}, bigbird {}, full, block and strided {}, dilated {}.",
        *("", "patterns_lm_paper", "test_perplexity_mean", 1, 0),
        ["global", "window", "BigBird", "full", "dilated"],
    ),
    "slopes_lm": (
        "{} with slopes times 0.25, {} unchanged, {} times 4.",
        *("", "slopes_lm_paper", "test_perplexity_mean", 1, 0),
        [f"geometric slopes, slopes × {scale}" for scale in ("0.25", "1", "4")],
    ),
    "kulkarni_part3_scales": (
        "{} ± 1.7, {} ± 1.8, {} ± 1.7.",
        *("", "kulkarni_part3_paper", "test_accuracy", 100, 1),
        ["ALiBi × 0.5", "ALiBi × 1", "ALiBi × 2"],
    ),
    "ladder_lm": (
        "{}, mean test perplexity (10 seeds).",
        *("ladder", "ladder_lm_clean", "test_perplexity_mean", 1, 0),
        ["sinusoidal positions, full attention, width 64, ff 100, relu"],
    ),
    "strong_lm": (
        "{}, mean test perplexity, and",
        *("ladder", "strong_lm_clean", "test_perplexity_mean", 1, 0),
        ["the usual settings"],
    ),
    "ladder_classify": (
        "{} % on the test (10 seeds).",
        *("ladder_classify", "ladder_classify_clean", "test_accuracy", 100, 1),
        ["layers 4, max epochs 15, adam"],
    ),
    "strong_classify": (
        "{} % on the test, as",
        *("ladder_classify", "strong_classify_clean", "test_accuracy", 100, 1),
        ["sinusoidal positions, full attention"],
    ),
    "ladder_translate": (
        "{} BLEU on test (4 seeds).",
        *("ladder_translate", "ladder_translate_clean", "test_bleu", 1, 1),
        ["sinusoidal positions, dropout 0.2, adam"],
    ),
    "ted": ("{} BLEU on test with a beam of 5", "translation", "ted_clean", "test_bleu", 1, 1, ["model=sinusoidal"]),
    "ted_faster": ("{} BLEU on test with a beam of 5", "bottleneck", "ted_faster_clean", "test_bleu", 1, 1, ["RoPE"]),
    "sharma_translate": (
        "{} ± 0.4 BLEU on test",
        *("translation", "sharma_paper", "test_bleu", 1, 1),
        ["model=sinusoidal"],
    ),
    "positions_translate": (
        "with one seed: rope {}, sinusoidal {}, alibi {}, learned {}, nope {} BLEU on test.",
        *("translation", "positions_translate_clean", "test_bleu", 1, 1),
        [f"model={name}" for name in ("rope", "sinusoidal", "alibi", "learned", "nope")],
    ),
    "bottleneck": (
        "{}, {} and {} BLEU on test.",
        *("bottleneck", "bottleneck_clean", "test_bleu", 1, 1),
        ["RNN, width", "RNN with attention", "sinusoidal positions"],
    ),
}


@pytest.mark.parametrize("experiment", EXPECTED_OF_OTHERS)
def test_other_experiments_say_what_their_results_are(experiment: str) -> None:
    """Oracle: the table of rows of the report of their archive."""
    template, archive, table, metric, factor, digits, starts = EXPECTED_OF_OTHERS[experiment]
    with (REFERENCE / archive / "tables" / "rows.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["table"].startswith(table) and row["metric"] == metric]
    means = []
    for start in starts:
        exact = [row for row in rows if row["row"] == start] or [row for row in rows if row["row"].startswith(start)]
        (row,) = exact
        means.append(f"{factor * float(row['mean']):.{digits}f}")
    header = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    assert template.format(*means) in " ".join(re.sub("^# ", "", header, flags=re.M).split()), means


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(REFERENCE.rglob("README.md"))], ids=name_of)
def test_no_verdict_is_typed(page: Path) -> None:
    """Oracle: the words of verdicts stand only in what a template gives, and where the page defines them."""
    assert page in PAGES
    typed = [line.strip() for line in BLOCK.sub("", page.read_text()).splitlines() if VERDICT.search(line)]
    assert not [line for line in typed if not line.startswith(DEFINED)]


@pytest.mark.parametrize("page", sorted(REFERENCE.rglob("README.md")), ids=name_of)
def test_no_figure_is_typed(page: Path) -> None:
    """Oracle: numbers with ± or the unit of a result stand only in what a template gives; levels are settings."""
    lines = CODE.sub("", BLOCK.sub("", page.read_text())).splitlines()
    typed = [line.strip() for line in lines if FIGURE.search(line)]
    assert not [line for line in typed if not line.startswith(PUBLISHED)]
