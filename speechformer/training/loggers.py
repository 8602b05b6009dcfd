"""The replay logger: what a run logs goes to TensorBoard and CSV, and into the checkpoint.

A resumed run rewrites the loggers' files from the checkpoint: without what was logged after it, which will be logged
again, and with what had not been flushed.
"""

from __future__ import annotations

import io
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary


class ReplayLogger(pl.Callback, Logger):
    """Pass metrics, texts and images to other loggers, and keep them for the checkpoint."""

    name, version = "replay", ""

    def __init__(self, loggers: list[Logger]) -> None:
        super().__init__()
        self.loggers = loggers
        self.rows: list[dict[str, float]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.images: list[tuple[str, bytes, int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {**metrics, "step": int(step or 0)}
        self.rows.append(row)
        self.write(row)

    def write(self, row: dict[str, float]) -> None:
        metrics = {name: value for name, value in row.items() if name != "step"}
        for logger in self.loggers:
            logger.log_metrics(metrics, int(row["step"]))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a Markdown text to TensorBoard."""
        self.texts.append((name, text, step))
        self.write_text(name, text, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        for logger in self.tensorboards():
            logger.experiment.add_text(name, text, step)

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """Log an image to TensorBoard."""
        png = io.BytesIO()  # 64 colours at a low compression level take a fifth of the time
        picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(png, "PNG", compress_level=3)
        self.images.append((name, png.getvalue(), step))
        self.write_picture(*self.images[-1])

    def write_picture(self, name: str, png: bytes, step: int) -> None:
        # not by `add_image`, which would decode and compress it again
        width, height = Image.open(io.BytesIO(png)).size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        for logger in self.tensorboards():
            logger.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def tensorboards(self) -> list[TensorBoardLogger]:
        return [logger for logger in self.loggers if isinstance(logger, TensorBoardLogger)]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters are logged once, with the final metrics."""

    def save(self) -> None:
        for logger in self.loggers:
            logger.save()

    def finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "texts": self.texts, "images": self.images}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self.texts = list(state_dict["rows"]), list(state_dict["texts"])
        self.images = list(state_dict["images"])
        for row in self.rows:
            self.write(row)
        for text in self.texts:
            self.write_text(*text)
        for image in self.images:
            self.write_picture(*image)
