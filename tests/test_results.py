"""The pages with results hold what the committed results give, and nothing else."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path

import pytest
from pages import IS_CHECKOUT, PAGES, ROOT, name_of

from speechformer.bench.pages import fill
from speechformer.report.__main__ import write_report
from speechformer.report.pages import BLOCK

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a checkout")
REFERENCE = ROOT / "outputs" / "reference"
WORDS = ("supported", "contradicted", "inconclusive", "holds\\b(?! `)", "significant")
VERDICT = re.compile(rf"\b({'|'.join(WORDS)})", re.IGNORECASE)
DEFINED = ("- **Verdict.** A claim is", "its family. Otherwise it is")  # lines that say what the words mean


@pytest.mark.parametrize(
    ("folder", "pages"),
    [
        (REFERENCE, (ROOT / "README.md", REFERENCE / "README.md")),
        (REFERENCE / "bottleneck", (REFERENCE / "translation" / "README.md",)),
    ],
)
def test_the_pages_are_what_the_results_of_the_runs_give(
    folder: Path, pages: tuple[Path, ...], tmp_path: Path
) -> None:
    """Oracle: `make pages` from the committed archive."""
    with tarfile.open(folder / "runs.tar.xz") as archive:
        archive.extractall(tmp_path / "runs", filter="data")
    for page in pages:
        copy = tmp_path / "page.md"
        shutil.copy(page, copy)
        write_report([tmp_path / "runs"], tmp_path / "report", plots=False, pages=[copy])
        assert copy.read_text() == page.read_text(), f"{page}: run make pages"


def test_the_page_of_the_benchmark_is_what_its_timings_give(tmp_path: Path) -> None:
    """Oracle: `speechformer.bench.pages` from the committed timings."""
    page, copy = REFERENCE / "bench" / "README.md", tmp_path / "page.md"
    shutil.copy(page, copy)
    fill(REFERENCE / "bench" / "bench.json", [copy])
    assert copy.read_text() == page.read_text(), f"run python -m speechformer.bench.pages for {page}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(REFERENCE.rglob("README.md"))], ids=name_of)
def test_no_verdict_is_typed(page: Path) -> None:
    """Oracle: the words of verdicts stand only in what a template gives, and where the page defines them."""
    assert page in PAGES
    typed = [line.strip() for line in BLOCK.sub("", page.read_text()).splitlines() if VERDICT.search(line)]
    assert not [line for line in typed if not line.startswith(DEFINED)]
