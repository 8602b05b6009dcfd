"""What TensorBoard shows besides metrics: norms, the entropy and maps of attention, and texts.

    SCALARS   gradient_norm                         every `trainer.log_every_n_steps` steps, before clipping
              weight_norm                           at every evaluation
              attention_entropy/layer1_head1, ...   at every evaluation, the mean over a few fixed texts
    IMAGES    the attention maps of the first of these texts
    TEXT      what the model makes of them, see `View`

Images and these texts are written at the 1st, 2nd, 4th, 8th, ... evaluation and at the last, so that they cost little
time. Nothing here draws from the random numbers of the training. The scalars are in `metrics.csv`, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image

from speechformer.analysis.attention_maps import AttentionMap, maps_of
from speechformer.tasks.base import Task
from speechformer.training.ensemble import Ensemble

if TYPE_CHECKING:
    from speechformer.training.results import Run

MOST_PANELS = 256  # layers times heads of a picture
SMALLEST_PANEL, GAP = 110, 4  # pixels
BLUE, RED = np.array([8, 48, 107]), np.array([103, 0, 31])  # colours of the largest weight, above and below 0
MASKED = np.array([232, 232, 229])  # of masked pairs


def thumbnail(part: AttentionMap) -> Image.Image:
    """Tile the heads of a map in milliseconds: one row for each layer, white for a weight of 0, masked pairs grey."""
    weights = part.weights.detach().numpy()[..., None]  # [L, N, T, S, 1]
    sizes = np.abs(weights)
    colours = 255 + sizes / max(sizes.max(), 1e-9) * (np.where(weights < 0, RED, BLUE) - 255)
    panels = np.where(part.mask.numpy()[..., None], colours, MASKED).astype(np.uint8)
    for axis in (2, 3):
        panels = panels.repeat(-(-SMALLEST_PANEL // panels.shape[axis]), axis)
    panels = np.pad(panels, ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    L, N, height, width, _ = panels.shape
    return Image.fromarray(panels.swapaxes(1, 2).reshape(L * height, N * width, 3))


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


class Pictures(pl.Callback):
    """Logs norms, attention and texts of some runs. Without examples or attention there are no maps."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.examples = runs, runs[0].data.examples()
        self.evaluations = self.shown_at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "shown_at": self.shown_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations, self.shown_at = state_dict["evaluations"], state_dict["shown_at"]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        step = trainer.global_step + 1
        if step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            assert isinstance(pl_module, Task | Ensemble)
            for run, norm in zip(self.runs, pl_module.gradient_norms()):
                if trainer.is_global_zero and run.task.diverged_at is None:
                    run.loggers.log_metrics({"gradient_norm": norm}, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.evaluations += 1
        is_shown = self.evaluations & (self.evaluations - 1) == 0
        for run in self.sound(trainer):
            with evaluation_mode(trainer, run.task):
                self.log_numbers(run, trainer.global_step)
                self.log_texts(run, run.task.view.describe_evaluation(), trainer.global_step)
                if is_shown:
                    self.show(run, trainer.global_step)
        self.shown_at = trainer.global_step if is_shown else self.shown_at

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.shown_at != trainer.global_step:
            self.shown_at = trainer.global_step
            for run in self.sound(trainer):
                with evaluation_mode(trainer, run.task):
                    self.show(run, trainer.global_step)

    def sound(self, trainer: pl.Trainer) -> list[Run]:
        """Return the runs that this process logs, and that have not diverged."""
        return [run for run in self.runs if not run.task.diverged() and trainer.is_global_zero]

    def log_numbers(self, run: Run, step: int) -> None:
        """Log the norm of the weights, and the entropy of each head, averaged over the examples."""
        weights = [parameter.detach() for parameter in run.task.parameters()]
        metrics = {"weight_norm": float(torch.nn.utils.get_total_norm(weights))}
        maps = [maps_of(run.task.model, example.ids, example.tokens) for example in self.examples]
        for parts in zip(*maps):
            entropy = torch.stack([part.entropy() for part in parts]).mean(dim=0)
            name = "attention_entropy" + (f"_{parts[0].name}" if len(maps[0]) > 1 else "")
            for layer, n in itertools.product(*map(range, entropy.shape)):
                metrics[f"{name}/layer{layer + 1}_head{n + 1}"] = float(entropy[layer, n])
        run.loggers.log_metrics(metrics, step)

    def show(self, run: Run, step: int) -> None:
        """Log attention maps and texts."""
        if (tensorboard := run.loggers.tensorboard) is None:
            return
        for example in self.examples[:1]:
            for part in maps_of(run.task.model, example.ids, example.tokens):
                if part.weights.shape[0] * part.weights.shape[1] <= MOST_PANELS:
                    tensorboard.log_picture(f"training_attention_maps/{part.name}", thumbnail(part), step)
        self.log_texts(run, run.task.view.describe_examples(self.examples, run.data.tokenizer), step)

    def log_texts(self, run: Run, texts: Iterator[tuple[str, str]], step: int) -> None:
        """Log Markdown texts with their titles."""
        if run.loggers.tensorboard is not None:
            for title, text in texts:
                run.loggers.tensorboard.experiment.add_text(title, text, step)
