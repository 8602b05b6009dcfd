"""The pages with results hold what the committed results give, and nothing else."""

from __future__ import annotations

import csv
import re
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import EXPERIMENTS, compose
from pages import IS_CHECKOUT, ROOT, name_of

from speechformer.report.page import report

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a checkout")
REFERENCE = ROOT / "outputs" / "reference"
WORDS = ("supported", "contradicted", "inconclusive", "holds\\b(?! `)", "significant")
WORDS += ("better", "worse", "faster", "halves", "doubles", "outperforms?", "overfits", "beats?")
VERDICT = re.compile(rf"\b({'|'.join(WORDS)})", re.IGNORECASE)
DEFINED = ("- **Verdict.** A claim is", "its family. Otherwise it is", "smaller than a margin", "*But small* says")
UNITS = "BLEU|GB|MB|MiB|per cent|points|times|ms|seconds|minutes|hours|tokens/s"
FIGURE = re.compile(rf"\d ?±|\d(\.\d+)? ({UNITS})\b|(?<!\b(?:80|90|95))(?<!\b100)(?<! 5) %")
PUBLISHED = ('- Kulkarni lets sinusoidal positions peak at 86.00 % "around epoch 70".',)  # what the reports say
OF_OTHERS = {"100", "64.5", "173"}  # whole shares, and results of baselines
OF_OLDER_RUNS = ("test_bleu", "test_bleu_interval", "validation_bleu", "copy_bleu")
JINJA = re.compile(r"\{\{|\{%")
CODE = re.compile(r"```.*?```", re.DOTALL)


@pytest.mark.slow
def test_experiments_say_what_their_results_are(tmp_path: Path) -> None:
    """Oracle: means and deviations of the runs of the same study, in the archives or in a table of older runs."""
    shown = defaultdict[str, set[str]](set)
    for archive in REFERENCE.rglob("runs.tar.xz"):
        folder = tmp_path / archive.parent.name
        with tarfile.open(archive) as runs:
            runs.extractall(folder / "runs", filter="data")
        report([folder / "runs"], folder / "report", draw=False)
    for path in (*tmp_path.glob("*/report/tables/variants.csv"), *REFERENCE.rglob("tables/runs.csv")):
        with path.open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                columns = ("mean", "sd") if path.name == "variants.csv" else OF_OLDER_RUNS
                for value in (float(line[key]) for key in columns if line[key]):
                    texts = (f"{value:.0f}", f"{value:.1f}", f"{100 * value:.1f}")
                    shown[line["study" if "study" in line else "table"].rsplit("_", 2)[0]].update(texts)
    compared = 0
    for name in EXPERIMENTS:
        header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        text = " ".join(re.sub("^# ", "", header, flags=re.MULTILINE).split())
        sentence = re.search(r"Expect(.*?)(?:python|\. [A-Z])", re.sub(r"\(.*?\)", "", text))
        study = compose(f"experiment={name}").study or name
        if sentence and study in shown and name != "slopes_learned":  # whose runs are not in an archive
            numbers = {*re.findall(r"\b\d{3}\b|\b\d+\.\d\b", sentence[1])} - OF_OTHERS
            assert numbers <= shown[study], (name, numbers - shown[study])
            compared += len(numbers)
    assert compared > 80


@pytest.mark.parametrize("page", sorted((ROOT / "studies" / "pages").glob("*.md")), ids=name_of)
def test_no_verdict_and_no_figure_is_typed(page: Path) -> None:
    """Oracle: words of verdicts, and numbers with ± or the unit of a result, stand only in lines with something
    computed, and where the page defines them; levels are settings. README and bench have figures of their own."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    lines = [line.strip() for line in text.splitlines() if not JINJA.search(line)]
    assert (
        not [line for line in lines if VERDICT.search(line) and not line.startswith(DEFINED)] or page.stem == "bench"
    )
    if page.stem not in ("README", "bench"):
        assert not [line for line in lines if FIGURE.search(line) and not line.startswith(PUBLISHED)]
