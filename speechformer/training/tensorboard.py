"""What a training logs: the replay logger, and what it shows in TensorBoard besides its metrics.

    SCALARS   gradient_norm                         every `trainer.log_every_n_steps` steps, before clipping
              weight_norm                           at every evaluation
              attention_entropy/layer1_head1, ...   at every evaluation, the mean over a few fixed texts
    IMAGES    the attention maps of the first of these texts
    TEXT      what the model makes of them, see `Task.describe_examples`

TensorBoard sorts groups of charts by name, and opens on the first: `metrics` has the task's main ones, `metrics_more`
the others, `training` loss and norms, `training_attention_...` the heads.

Images and texts are written at the 1st, 2nd, 4th, 8th, ... evaluation and at the last, so that they cost little time.
Nothing here draws from the random numbers of the training.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary

from speechformer.analysis.attention_maps import draw, maps_of
from speechformer.data.batches import Example
from speechformer.tasks.base import Task

# Charts of TensorBoard's page of custom scalars: title -> regular expression of whole names
TRAINING = {"loss": "training/train_loss", "learning rate": "training/lr"}
TRAINING |= {"gradient norm": "training/gradient_norm", "weight norm": "training/weight_norm"}
ATTENTION = {"entropy of each head, in nats": r"training_attention_entropy.*/.+"}


class ReplayLogger(pl.Callback, Logger):
    """Passes metrics, texts and images to other loggers, and keeps them for the checkpoint.

    A resumed run rewrites the loggers' files from the checkpoint: without what was logged after it, which will be
    logged again, and with what had not been flushed.
    """

    name, version = "replay", ""

    def __init__(self, loggers: list[Logger], charts: Mapping[str, str]) -> None:
        super().__init__()
        self.loggers, self.charts = loggers, re.compile("|".join(charts.values()))
        self.tensorboards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self.logged: dict[str, list[Any]] = {"rows": [], "texts": [], "images": []}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.record("rows", {**metrics, "step": int(step or 0)})

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a Markdown text to TensorBoard."""
        self.record("texts", (name, text, step))

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """Log an image to TensorBoard."""
        png = io.BytesIO()  # 64 colours at a low compression level take a fifth of the time
        picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(png, "PNG", compress_level=3)
        self.record("images", (name, png.getvalue(), step))

    def record(self, kind: str, entry: Any) -> None:
        """Keep and write a row of metrics, a text or an image."""
        self.logged[kind].append(entry)
        if kind == "rows":
            metrics = {name: value for name, value in entry.items() if name != "step"}
            for logger in self.loggers:
                is_tensorboard = logger in self.tensorboards
                shown = {self.tag(name): metrics[name] for name in metrics} if is_tensorboard else metrics
                logger.log_metrics(shown, entry["step"])
            return
        name, content, step = entry
        for tensorboard in self.tensorboards:
            if kind == "texts":
                tensorboard.experiment.add_text(name, content, step)
            else:  # not by `add_image`, which would decode and compress it again
                width, height = Image.open(io.BytesIO(content)).size
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
                summary = Summary(value=[Summary.Value(tag=name, image=image)])
                tensorboard.experiment.file_writer.add_summary(summary, step)

    def tag(self, name: str) -> str:
        """Return the name of a metric in TensorBoard, with its group."""
        if name.startswith("attention_entropy"):
            return f"training_{name}"
        if f"training/{name}" in TRAINING.values():
            return f"training/{name}"
        return f"metrics/{name}" if self.charts.fullmatch(name) else f"metrics_more/{name}"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters are logged once, with the final metrics."""

    def save(self) -> None:
        for logger in self.loggers:
            logger.save()

    def finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)

    def state_dict(self) -> dict[str, Any]:
        return self.logged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.logged = {kind: [] for kind in self.logged}
        for kind in self.logged:
            for entry in state_dict[kind]:
                self.record(kind, entry)


MOST_PANELS = 256  # layers times heads of a picture


def layout(charts: dict[str, str]) -> dict[str, dict[str, list[Any]]]:
    """Return the custom scalars with these charts of metrics, as `SummaryWriter.add_custom_scalars` takes them."""
    metrics = {title: rf"metrics/({pattern})" for title, pattern in charts.items()}
    pages = {"Metrics": metrics, "Training": TRAINING, "Attention": ATTENTION}
    return {
        page: {title: ["Multiline", [f"^({pattern})$"]] for title, pattern in shown.items()}
        for page, shown in pages.items()
    }


@contextlib.contextmanager
def evaluation_mode(trainer: pl.Trainer, module: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off, in the precision of the run, and restore the mode afterwards."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            yield
    finally:
        module.train(training)


class TensorBoardCallback(pl.Callback):
    """Writes norms, attention and texts to a `ReplayLogger`. Without examples or attention there are no maps."""

    def __init__(self, logger: ReplayLogger, examples: Sequence[Example], tokenizer: Any) -> None:
        self.logger, self.examples, self.tokenizer = logger, list(examples), tokenizer
        self.evaluations = self.shown_at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "shown_at": self.shown_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations, self.shown_at = state_dict["evaluations"], state_dict["shown_at"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            for tensorboard in self.logger.tensorboards:
                tensorboard.experiment.add_custom_scalars(layout(pl_module.charts))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        if step % trainer.log_every_n_steps or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self.logger.log_metrics({"gradient_norm": float(torch.nn.utils.get_total_norm(gradients))}, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self.evaluations += 1
        if pl_module.diverged():
            return
        with evaluation_mode(trainer, pl_module):
            self.log_numbers(pl_module, trainer.global_step)
            if self.evaluations & (self.evaluations - 1) == 0:
                self.show(pl_module, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and self.shown_at != trainer.global_step and not pl_module.diverged():
            with evaluation_mode(trainer, pl_module):
                self.show(pl_module, trainer.global_step)

    def log_numbers(self, task: Task, step: int) -> None:
        """Log the norm of the weights, and the entropy of each head, averaged over the examples."""
        weights = [parameter.detach() for parameter in task.parameters()]
        metrics = {"weight_norm": float(torch.nn.utils.get_total_norm(weights))}
        maps = [maps_of(task.model, example.ids, example.tokens) for example in self.examples]
        for parts in zip(*maps):
            entropy = torch.stack([part.entropy() for part in parts]).mean(dim=0)
            name = "attention_entropy" + (f"_{parts[0].name}" if len(maps[0]) > 1 else "")
            for layer, n in itertools.product(*map(range, entropy.shape)):
                metrics[f"{name}/layer{layer + 1}_head{n + 1}"] = float(entropy[layer, n])
        self.logger.log_metrics(metrics, step)

    def show(self, task: Task, step: int) -> None:
        """Log attention maps and texts."""
        self.shown_at = step
        for example in self.examples[:1]:
            for part in maps_of(task.model, example.ids, example.tokens):
                if part.weights.shape[0] * part.weights.shape[1] > MOST_PANELS:
                    continue
                self.logger.log_picture(f"training_attention_maps/{part.name}", draw(part, f"step {step}"), step)
        for name, text in task.describe_examples(self.examples, self.tokenizer):
            self.logger.log_text(name, text, step)
