"""`predictions.tsv`: the class and the predicted class of each test sentence, in the order of the test file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechformer.corpora.files import parse_lines, read_file, write_file
from speechformer.errors import UserError
from speechformer.runs.folder import DamagedError

if TYPE_CHECKING:
    import numpy as np

HEADER = "label\tpredicted\tin_train"


def write_predictions(
    path: Path, classes: Sequence[str], labels: Iterable[int], predicted: Iterable[int], in_train: Iterable[Any]
) -> None:
    """Write a line for each test sentence, atomically; `in_train` says whether train has the sentence, too."""
    rows = zip(labels, predicted, in_train, strict=True)
    lines = [HEADER, *(f"{classes[label]}\t{classes[guess]}\t{int(leaked)}" for label, guess, leaked in rows)]
    write_file(path, ("\n".join(lines) + "\n").encode())


def read_predictions(
    path: Path, classes: Sequence[str], sentences: int, accuracy: float
) -> tuple[np.ndarray, np.ndarray]:
    """Read predictions and check them against the result of the run.

    Args:
        classes: their names.
        sentences: number of test sentences.
        accuracy: on all of them.

    Returns:
        For each test sentence whether its class was predicted, and whether train has it, too: bool [sentences].

    Raises:
        DamagedError: the file is not what the run has written.
    """
    import numpy as np

    try:
        header, *lines = parse_lines(read_file(path), str(path), "restore the file")
    except UserError as error:
        raise DamagedError(str(error)) from None
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, start=2):
        if len(row) != 3 or not {row[0], row[1]} <= {*classes} or row[2] not in ("0", "1"):
            raise DamagedError(f"{path}:{number}: expected two classes of the run and 0 or 1. Restore the file.")
    right = np.array([label == guess for label, guess, _ in rows], dtype=bool)
    if header != HEADER or len(rows) != sentences or abs(right.mean() - accuracy) > 1e-6:
        raise DamagedError(
            f"{path} is not of this run: expected the columns {HEADER.split()}, {sentences} lines and an accuracy of "
            f"{accuracy:.6f}. Restore or remove it."
        )
    return right, np.array([leaked == "1" for *_, leaked in rows], dtype=bool)
