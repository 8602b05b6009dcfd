"""`predictions.tsv`: the class and the predicted class of each test sentence, in the order of the test file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from speechformer.corpora.files import write_file
from speechformer.escape import on_one_line, spreadsheet_cell

HEADER = "label\tpredicted\tin_train"


def write_predictions(
    path: Path, classes: Sequence[str], labels: Iterable[int], predicted: Iterable[int], in_train: Iterable[bool]
) -> None:
    """Write a line for each test sentence, atomically; `in_train` says whether train has the sentence, too."""
    names = [spreadsheet_cell(on_one_line(name)) for name in classes]
    rows = zip(labels, predicted, in_train, strict=True)
    lines = [HEADER, *(f"{names[label]}\t{names[guess]}\t{int(leaked)}" for label, guess, leaked in rows)]
    write_file(path, ("\n".join(lines) + "\n").encode())
