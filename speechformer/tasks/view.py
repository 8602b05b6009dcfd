"""How the results of a task are shown: console, table at the end, report, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from speechformer.console import format_metric
from speechformer.data.batches import Example

if TYPE_CHECKING:
    from speechformer.tasks.base import Task


class View:
    """The views of a task; a task with more than one metric per split extends it.

    Args:
        task: the task whose results are shown.
    """

    charts: ClassVar[dict[str, str]] = {}  # TensorBoard: title -> regular expression of the metrics' names
    compared: ClassVar[tuple[str, ...]] = ()  # metrics by which runs are compared, besides the main one
    x_axis: ClassVar[str] = "step"  # of the report's curves, or "epoch"
    unit: str = "lines"  # what the corpus is counted in
    note: ClassVar[str] = ""  # below the report's table
    baseline_keys: ClassVar[tuple[str, ...]] = ()  # config keys that a baseline shares with the runs of its table

    def __init__(self, task: Task) -> None:
        self.task: Any = task

    def progress_columns(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics that the console shows after an evaluation."""
        return metrics

    def describe_examples(self, examples: Sequence[Example], tokenizer: Any) -> Iterator[tuple[str, str]]:
        """Yield what the network makes of the examples, as title and Markdown, for TensorBoard."""
        yield from ()

    def describe_evaluation(self) -> Iterator[tuple[str, str]]:
        """Yield what the last evaluation wrote, as title and Markdown, for TensorBoard."""
        yield from ()

    def summary(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return the rows of the table that the console shows at the end of a run, the header first."""
        names = {split: self.task.metric_name(split) for split in ("train", "validation", "test")}
        values = {split: result["metrics"].get(name) for split, name in names.items()}
        rows = [
            (split, format_metric(self.task.metric, value)) for split, value in values.items() if value is not None
        ]
        return [(self.task.metric, ""), *rows]

    def columns(self, metrics: dict[str, float | None]) -> list[str]:
        """Return the columns of the report after that of the held-out part; those without a value are left out."""
        return [self.task.metric_name(split) for split in ("test", "train")]

    def report(self, metrics: dict[str, float | None]) -> dict[str, Any]:
        """Return how the report shows a run with these metrics: `result["report"]`."""
        names = [self.task.metric_name("validation"), *self.columns(metrics)]
        columns = [name for name in names if metrics.get(name) is not None]
        return {
            "metric": self.task.metric_name("test"),
            "higher_is_better": self.task.mode == "max",
            "columns": columns,
            "compare": [self.task.metric_name("test"), *(name for name in self.compared if name in columns)],
            "x_axis": self.x_axis,
            "note": self.note,
            "unit": self.unit,
            "baseline_keys": list(self.baseline_keys),
        }
