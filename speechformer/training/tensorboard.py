"""What a training shows of itself in TensorBoard, besides its figures.

    SCALARS   gradient_norm                         every `trainer.log_every_n_steps` steps, before it is clipped
              weight_norm                           at every evaluation, and
              attention_entropy/layer1_head1, ...   of a few fixed texts (see `maps`)
    IMAGES    the attention maps of the first of these texts
    TEXT      what the model says of them (who said it, what comes next; translations, `tasks` writes)

Pictures and texts come with the 1st, 2nd, 4th, 8th, ... evaluation and with the last: often where much changes, and
never so often that the training waits for it. It draws no number from the random state of the training.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from speechformer.analysis.attention_maps import draw, maps_of
from speechformer.data.batches import Example
from speechformer.errors import UserError
from speechformer.generation.sampling import sample
from speechformer.tasks.base import Task
from speechformer.tasks.classify import Classify
from speechformer.tasks.language_model import LanguageModel
from speechformer.training.callbacks import ReplayLogger

GOES_ON = 20  # words of a sample
# TensorBoard's page of custom scalars: what belongs together in one chart, by regular expressions of whole names
QUALITY = {
    "classify": {
        "accuracy": r"(train|validation|test)_accuracy",
        "accuracy, seen and unseen": r"test_accuracy_(in_train|not_in_train)",
        "accuracy by speaker": r"(validation|test)_accuracy_of_.+",
    },
    "lm": {"perplexity": r"(train|validation)_perplexity|test_perplexity_.+"},
    "translate": {"BLEU": r"validation_bleu", "perplexity": r"validation_perplexity"},
}
TRAINING = {
    "loss": "train_loss",
    "learning rate": "lr",
    "gradient norm": "gradient_norm",
    "weight norm": "weight_norm",
}


def layout(task: str) -> dict[str, dict[str, list[Any]]]:
    """The page for a task, as `SummaryWriter.add_custom_scalars` takes it."""
    pages = {"How good": QUALITY[task], "Training": TRAINING}
    pages["Attention"] = {"entropy of each head, in nats": r"attention_entropy.*/.+"}
    return {
        page: {chart: ["Multiline", [f"^({pattern})$"]] for chart, pattern in charts.items()}
        for page, charts in pages.items()
    }


@contextlib.contextmanager
def evaluating(trainer: pl.Trainer, module: torch.nn.Module) -> Iterator[None]:
    """Without dropout, in the precision of the run, and then as before."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            yield
    finally:
        module.train(training)


class Dashboard(pl.Callback):
    """Writes what this file says to a `ReplayLogger`.

    Args:
        examples: the texts; of none, and of a model that does not attend, there is no map.
        tokenizer: that of the run.
    """

    def __init__(self, record: ReplayLogger, examples: Sequence[Example], tokenizer: Any) -> None:
        self.record, self.examples, self.tokenizer = record, list(examples), tokenizer
        self.evaluations = self.shown_at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "shown_at": self.shown_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations, self.shown_at = state_dict["evaluations"], state_dict["shown_at"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and isinstance(pl_module, Task):
            for logger in self.record.tensorboards():
                logger.experiment.add_custom_scalars(layout(pl_module.name))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        step = trainer.global_step + 1
        if step % trainer.log_every_n_steps or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self.record.log_metrics({"gradient_norm": float(torch.nn.utils.get_total_norm(gradients))}, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, Task):
            return
        self.evaluations += 1
        if pl_module.diverged():
            return
        with evaluating(trainer, pl_module):
            self.log_numbers(pl_module, trainer.global_step)
            if self.evaluations & (self.evaluations - 1) == 0:
                self.show(pl_module, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, Task) or pl_module.diverged():
            return
        if self.shown_at != trainer.global_step:
            with evaluating(trainer, pl_module):
                self.show(pl_module, trainer.global_step)

    def log_numbers(self, task: Task, step: int) -> None:
        """The norm of the weights, and the entropy of each head in the mean over the examples."""
        weights = [parameter.detach() for parameter in task.parameters()]
        figures = {"weight_norm": float(torch.nn.utils.get_total_norm(weights))}
        maps = [maps_of(task.model, example.ids, example.words) for example in self.examples]
        for parts in zip(*maps):
            entropy = torch.stack([part.entropy() for part in parts]).mean(dim=0)
            name = "attention_entropy" + (f"_{parts[0].name}" if len(maps[0]) > 1 else "")
            for layer, n in itertools.product(*map(range, entropy.shape)):
                figures[f"{name}/layer{layer + 1}_head{n + 1}"] = float(entropy[layer, n])
        self.record.log_metrics(figures, step)

    def show(self, task: Task, step: int) -> None:
        """Maps and texts."""
        self.shown_at = step
        for example in self.examples[:1]:
            for part in maps_of(task.model, example.ids, example.words):
                self.record.log_picture(f"attention/{part.name}", draw(part, f"step {step}"), step)
        for name, text in self.texts(task):
            self.record.log_text(name, text, step)

    def texts(self, task: Task) -> Iterator[tuple[str, str]]:
        """What the model says of the examples, in Markdown."""
        if isinstance(task, Classify):
            rows = ["| sentence | said by | " + " | ".join(task.classes) + " |"]
            rows.append("|" + "---|" * (2 + len(task.classes)))
            for example in self.examples:
                shares = task.model(example.ids[0].to(task.device)[None]).softmax(dim=-1)[0].tolist()
                said = plain(" ".join(example.words[0]))
                label = "" if example.label is None else task.classes[example.label]
                rows.append(f"| {said} | {label} | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |")
            yield "who said it", "\n".join(rows)
        elif isinstance(task, LanguageModel) and self.examples:
            (ids,), (words,) = self.examples[0].ids, self.examples[0].words
            begun = ids[:6].tolist()
            room = GOES_ON if task.model.max_length is None else min(GOES_ON, task.model.max_length - len(begun) + 1)
            generator = torch.Generator().manual_seed(0)
            drawn = sample(task.model, begun, generator=generator, words=len(self.tokenizer))
            try:
                following = self.tokenizer.decode(itertools.islice(drawn, room))
            except UserError as error:
                following = [str(error)]
            yield "what comes next", f"{plain(' '.join(words[: len(begun)]))} **{plain(' '.join(following))}**"


def plain(text: str) -> str:
    """A text without what Markdown reads as its own."""
    return "".join(f"&#{ord(letter)};" if letter in "\\`*_{}[]<>|#&" else letter for letter in text)
