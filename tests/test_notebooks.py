"""Every notebook runs from top to bottom, and is committed with its outputs, small."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from speechformer.config import CONF

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((CONF.parent / "notebooks").glob("*.ipynb"))


def test_there_are_four() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["1_attention", "2_compare", "3_sweep", "4_python_api"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any corpus. Steps are divided by five; outputs have the media types of the committed ones."""
    monkeypatch.delenv("SPEECHFORMER_DATA", raising=False)
    notebook = nbformat.read(path, as_version=4)
    committed = [kinds(cell) for cell in notebook.cells]
    for cell in notebook.cells:
        cell.source = re.sub(r"(?<=max_steps=|_interval=)\d+", lambda steps: str(int(steps[0]) // 5), cell.source)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(notebook.cells, committed):
        assert kinds(cell) == before, cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_its_outputs_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert "To try" in notebook.cells[-1].source
    text = path.read_text(encoding="utf-8")
    assert len(text) < 250_000 and "site-packages" not in text


def kinds(cell: nbformat.NotebookNode) -> list[set[str]]:
    """Return the media types of each output of a cell."""
    return [set(output.data) - {"image/jpeg"} for output in cell.get("outputs", []) if "data" in output]
