"""`predictions.tsv`: the class and the predicted class of each test sentence, in the order of the test file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechformer.corpora.files import write_file
from speechformer.runs.folder import DamagedError

if TYPE_CHECKING:
    import numpy as np

HEADER = "label\tpredicted\tin_train"


def write_predictions(
    path: Path, classes: Sequence[str], labels: Iterable[int], predicted: Iterable[int], in_train: Iterable[bool]
) -> None:
    """Write a line for each test sentence, atomically; `in_train` says whether train has the sentence, too."""
    rows = zip(labels, predicted, in_train, strict=True)
    lines = [HEADER, *(f"{classes[label]}\t{classes[guess]}\t{int(leaked)}" for label, guess, leaked in rows)]
    write_file(path, ("\n".join(lines) + "\n").encode())


def read_predictions(path: Path, sentences: int, accuracy: float) -> tuple[np.ndarray, np.ndarray]:
    """Read predictions and check them against the number of test sentences and the accuracy in the run's result.

    Returns:
        For each test sentence whether its class was predicted, and whether train has it, too: bool [sentences].

    Raises:
        DamagedError: the file is not what the run has written.
    """
    import numpy as np

    rows = [line.split("\t") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    if len(rows) == sentences + 1 and {len(row) for row in rows} == {3}:
        labels, predicted, in_train = np.array(rows[1:]).T
        right = labels == predicted
        if abs(right.mean() - accuracy) < 1e-6:
            return right, in_train == "1"
    raise DamagedError(
        f"{path} is not of this run: expected the columns {HEADER.split()}, {sentences} lines and an accuracy of "
        f"{accuracy:.6f}. Restore or remove it."
    )
