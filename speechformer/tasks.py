"""The LightningModules: logits in, loss and metrics out.

    Classify        cross-entropy over speakers; accuracy
    LanguageModel   cross-entropy over the next token; perplexity = exp(mean negative log-likelihood per token)
    Translate       the same over the next token of the translation; BLEU and chrF of what it translates

All are evaluated part by part (train, validation, test, ...) on batches that carry their part's name, and log
one figure for each part. A checkpoint holds their constructor's arguments as plain data, so that it rebuilds
them alone: `load_task(path)`.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from speechformer.cores.classifier import EncoderClassifier
from speechformer.cores.decoder import Decoder
from speechformer.cores.encoder_decoder import Translator, build_translator
from speechformer.cores.stack import initialise
from speechformer.corpora.subwords import Subwords
from speechformer.data import IGNORE, PAD, Batch
from speechformer.decoding import translate_ids
from speechformer.quality import bleu, figures_of_test
from speechformer.refusals import UserError, pick

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def constant(step: int, steps: int, warmup: int) -> float:
    """The same learning rate throughout."""
    return 1.0


def linear(step: int, steps: int, warmup: int) -> float:
    """Down to zero in a straight line."""
    return 1 - step / steps


def cosine(step: int, steps: int, warmup: int) -> float:
    """Down to zero along half a cosine. Loshchilov and Hutter 2017, "SGDR", without restarts."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def inverse_sqrt(step: int, steps: int, warmup: int) -> float:
    """Down with the square root of the steps: 1 at the end of the warm-up, a half after four times as many."""
    return math.sqrt(max(1, warmup) / (warmup + step))


# From the steps after the warm-up, those that are left at its end, and those of it, to a part of the peak rate
SCHEDULES = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "vaswani": inverse_sqrt,
}
ENDLESS = ("inverse_sqrt", "vaswani")  # these do not go by the end of the run


def all_gathered(value: Any) -> list[Any]:
    """The value of each process of a run, by rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def logs_after(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this batch ends an optimiser step that is logged."""
    batches = batch_idx + 1
    ends_step = batches % trainer.accumulate_grad_batches == 0 or batches == trainer.num_training_batches
    return ends_step and (trainer.global_step + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]


class Task(pl.LightningModule):
    """What both tasks share: the core's initialisation, the optimiser and its schedule, and evaluation.

    A subclass sets `core`, and says what a training batch's loss is and what an evaluation batch adds to the
    metrics.

    Attributes: `name` in the config; `metric`, the word for its figure, and `mode`, the direction that is better;
    `tokens`, the real (not padded) tokens trained on so far; `curve`, step and figures of each evaluation;
    `diverged_at`, the step whose loss was NaN or infinite, with which training stops; `generator`, of the random
    numbers that it draws on the CPU.
    """

    name: str
    metric: str
    mode: str
    core: torch.nn.Module
    tokens: Tensor

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.recipe = recipe
        pick(OPTIMIZERS, recipe["optimizer"], "recipe.optimizer")
        pick(SCHEDULES, recipe["schedule"], "recipe.schedule")
        self.measured: dict[str, Metric] = {}
        self.curve: list[dict[str, float]] = []
        self.diverged_at: int | None = None
        self.generator = torch.default_generator
        self.random: list[Tensor] | None = None  # this and the next, of a checkpoint that training goes on from
        self.batches: dict[str, int] = {}
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64), persistent=False)

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self.core.parameters())

    def optimizers_of(self, parameters: Iterable[torch.nn.Parameter]) -> Any:
        """The optimiser over all parameters alike (the reports decay norms and biases too), and its schedule:
        a linear warm-up over `warmup_steps`, then `schedule` down to the last step.

        "vaswani" is the schedule of Vaswani et al. 2017, equation 3: "inverse_sqrt" whose peak follows from the width
        and the warm-up, lr / sqrt(width * warmup_steps); `lr` is then a factor, theirs is 1.
        """
        recipe, peak = self.recipe, self.recipe["lr"]
        if recipe["schedule"] == "vaswani":
            if not recipe["warmup_steps"]:
                raise UserError("recipe.schedule=vaswani needs recipe.warmup_steps, of which its rate follows.")
            width = self.hparams["core"]["width"]
            peak /= math.sqrt(width * recipe["warmup_steps"])
        options = {"lr": peak, "weight_decay": recipe["weight_decay"]}
        # Lightning cannot clip the gradients of a fused optimiser in mixed precision.
        options["fused"] = not self.trainer.gradient_clip_val or "mixed" not in str(self.trainer.precision)
        if recipe["optimizer"] != "sgd":
            options["betas"] = tuple(recipe["betas"])
        optimizer = OPTIMIZERS[recipe["optimizer"]](parameters, **options)
        warmup, shape = recipe["warmup_steps"], SCHEDULES[recipe["schedule"]]
        if warmup == 0 and shape is constant:
            return optimizer
        steps = 0
        if recipe["schedule"] not in ENDLESS:
            if not math.isfinite(self.trainer.estimated_stepping_batches):
                raise UserError("recipe.schedule ends with the run, so set trainer.max_steps or trainer.max_epochs.")
            steps = int(self.trainer.estimated_stepping_batches)
            if warmup >= steps:
                raise UserError(f"recipe.warmup_steps={warmup} is not less than the {steps} steps of the run.")

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            # the endless ones go by the number of the step, from 1, at which the warm-up reaches 1
            return shape(step + (recipe["schedule"] in ENDLESS) - warmup, steps - warmup, warmup)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # at once: what is forgotten before the next forward pass leaves it the memory

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Lightning's place for that, after the forward pass."""

    def figure_of(self, split: str) -> str:
        """The name of the one figure that says how good the model is on "train", "validation" or "test"."""
        return f"{split}_{self.metric}"

    def better(self, figure: float, than: float) -> bool:
        """Whether one figure is better than another."""
        return figure > than if self.mode == "max" else figure < than

    def diverged(self) -> bool:
        """Whether the loss or a weight is NaN or infinite."""
        return self.diverged_at is not None or not all(p.isfinite().all() for p in self.core.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.name
        if "optimizer_states" in checkpoint:  # not of weights alone
            checkpoint["progress"] = {
                "tokens": all_gathered(int(self.tokens)),
                "random": all_gathered(self.random_state()),
                "curve": self.curve,
                "diverged_at": self.diverged_at,
                "batches": getattr(self.trainer.train_dataloader, "state_dict", dict)(),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "progress" in checkpoint:
            progress = checkpoint["progress"]
            self.curve, self.diverged_at = list(progress["curve"]), progress["diverged_at"]
            self.batches = progress["batches"]
            rank = self.global_rank % len(progress["tokens"])
            self.tokens.fill_(progress["tokens"][rank])
            self.random = progress["random"][rank]

    def random_state(self) -> list[Tensor]:
        """Where the random numbers stand, on the CPU and on the device."""
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [self.generator.get_state(), *on_device]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Go back to where `random_state` was; a device that had none goes on with its own."""
        self.generator.set_state(state[0].cpu())
        if self.device.type == "cuda" and len(state) > 1:
            torch.cuda.set_rng_state(state[1].cpu(), self.device)

    def on_train_start(self) -> None:
        if self.random is not None:  # as late as this: building a run draws random numbers
            self.set_random_state(self.random)
            self.random = None
        if self.batches:  # Lightning does so too, but not where it had to count the steps for a schedule before
            self.trainer.train_dataloader.load_state_dict(self.batches)  # type: ignore[union-attr]
            self.batches = {}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        stop = self.diverged_at is not None
        if self.trainer.world_size > 1:
            stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        if not stop:
            return None
        self.trainer.should_stop = True
        return -1

    def watched(self, loss: Tensor, batch: Batch, batch_idx: int) -> Tensor:
        """The loss to differentiate, looked at and, every `log_every_n_steps` optimiser steps, logged.

        A CPU is asked at each step whether it is finite; an accelerator, which would have to wait for the answer, at
        the steps that are logged. Over several devices each share of a batch counts as its rows.
        """
        logged = logs_after(self.trainer, batch_idx)
        looked_at = loss.detach()
        if logged and "weight" in batch:
            looked_at = self.trainer.strategy.reduce(looked_at * batch["weight"], reduce_op="mean")
        if logged or loss.device.type == "cpu":
            self.look_at(float(looked_at), self.global_step + 1, logged)
        return loss * batch["weight"] if "weight" in batch else loss

    def look_at(self, loss: float, step: int, logged: bool, part: float = 1.0) -> None:
        """See whether a loss is finite, and log it if it is to be; the learning rate is `part` of the optimiser's."""
        if self.diverged_at is None and not math.isfinite(loss):
            self.diverged_at = step
        # not by `self.log`, which costs as much as a layer, and is written after the checkpoint of its step
        if logged and self.trainer.logger is not None:
            lr = part * self.trainer.optimizers[0].param_groups[0]["lr"]
            self.trainer.logger.log_metrics({"train_loss": loss, "lr": lr}, step)

    def on_validation_epoch_start(self) -> None:
        self.measured = defaultdict(self.new_metric)

    def on_validation_epoch_end(self) -> None:
        figures = self.figures()
        self.curve.append({"step": self.global_step, **figures})
        self.write(figures)

    def write(self, figures: dict[str, float]) -> None:
        """Hand figures to the loggers, at the step that was done."""
        if self.trainer.logger is not None:
            self.trainer.logger.log_metrics(figures, self.global_step)

    def on_test_epoch_end(self) -> None:
        self.write(self.figures())

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch) -> None:
        self.measure(batch)

    test_step = validation_step

    def new_metric(self) -> Metric:
        raise NotImplementedError

    def measure(self, batch: Batch) -> None:
        """Add what a batch of an evaluation shows to `measured`."""
        self.add(self.seen(self.core, batch), batch)

    def seen(self, core: Any, batch: Batch) -> Tensor:
        """What the core makes of a batch of an evaluation, a row for each of the batch."""
        raise NotImplementedError

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add what `seen` returned to `measured`."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        raise NotImplementedError


class Classify(Task):
    """Who said it? An `EncoderClassifier` under cross-entropy.

    Args:
        core: the arguments of `EncoderClassifier`.
        recipe: the config group.
        classes: the name of each class.
    """

    name, metric, mode = "classify", "accuracy", "max"
    core: EncoderClassifier

    def __init__(self, core: dict[str, Any], recipe: dict[str, Any], classes: list[str]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.classes = classes
        self.core = EncoderClassifier(**core)
        initialise(self.core, recipe["init"], recipe["init_std"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        smoothing = self.recipe["label_smoothing"]
        loss = F.cross_entropy(self.core(batch["ids"]), batch["labels"], label_smoothing=smoothing)
        self.tokens += (batch["ids"] != PAD).sum()
        return self.watched(loss, batch, batch_idx)

    def new_metric(self) -> Metric:
        return MulticlassAccuracy(len(self.classes), average="micro", validate_args=False, sync_on_compute=False).to(
            self.device
        )

    def seen(self, core: EncoderClassifier, batch: Batch) -> Tensor:
        return core(batch["ids"])

    def add(self, logits: Tensor, batch: Batch) -> None:
        (split, _), labels = batch["part"], batch["labels"]
        self.measured[f"{split}_accuracy"].update(logits, labels)
        if "seen" in batch:
            for name, chosen in (("seen", batch["seen"]), ("unseen", ~batch["seen"])):
                if chosen.any():
                    self.measured[f"{split}_accuracy_{name}"].update(logits[chosen], labels[chosen])
        if split != "train":
            for label, name in enumerate(self.classes):
                chosen = labels == label
                if chosen.any():
                    self.measured[f"{split}_accuracy_of_{name}"].update(logits[chosen], labels[chosen])

    def figures(self) -> dict[str, float]:
        return {name: metric.compute().item() for name, metric in self.measured.items()}


def next_token_loss(
    weight_VD: Tensor, bias_V: Tensor | None, hidden_RD: Tensor, targets_R: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy, in nats, of R targets under the logits that a linear layer makes of R hidden states.

    With `smoothing` e the target has probability 1 - e and all tokens share e (Szegedy et al. 2016, section 7).

    The logits are made a few rows at a time: a CPU then keeps them in its cache, which makes evaluation three
    times as fast as all at once; an accelerator gets as many rows as fit. Training on a CPU, torch (from 2.13 on, and
    without smoothing) makes the gradient of each few rows at once, and keeps no logits.
    """
    on_cpu = hidden_RD.device.type == "cpu"
    rows = 128 if on_cpu else 16384
    plain = hidden_RD.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if on_cpu and plain and smoothing == 0 and torch.is_grad_enabled() and hasattr(F, "linear_cross_entropy"):
        chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(hidden_RD, weight_VD, targets_R, linear_bias=bias_V, options=chunks)
    losses = [
        F.cross_entropy(
            F.linear(hidden, weight_VD, bias_V).float(), targets, reduction="sum", label_smoothing=smoothing
        )
        for hidden, targets in zip(hidden_RD.split(rows), targets_R.split(rows))
    ]
    return torch.stack(losses).sum() / len(targets_R)


class MeanPerplexity(Metric):
    """exp of the mean loss per token, from mean losses of batches and their numbers of tokens.

    Not torchmetrics' MeanMetric: it leaves NaN out, so that a diverged model would look well, and where it is told
    not to, it forgets the weights (1.9.0).
    """

    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")

    def update(self, loss: Tensor, tokens: int) -> None:
        self.total += loss * tokens
        self.count += tokens

    def compute(self) -> Tensor:
        return (self.total / self.count).exp()


class LanguageModel(Task):
    """What comes next? A `Decoder` under cross-entropy.

    Args:
        core: the arguments of `Decoder`.
        recipe: the config group.
    """

    name, metric, mode = "lm", "perplexity", "min"
    core: Decoder

    def __init__(self, core: dict[str, Any], recipe: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.core = Decoder(**core)
        initialise(self.core, recipe["init"], recipe["init_std"])

    def figure_of(self, split: str) -> str:
        """As in `Task`; over several test texts, the mean of their perplexities."""
        return f"{split}_perplexity" + ("_mean" if split == "test" else "")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids, targets = batch["ids"][:, :-1], batch["ids"][:, 1:]
        hidden, smoothing = self.core.hidden(ids).flatten(0, 1), self.recipe["label_smoothing"]
        loss = next_token_loss(self.core.output.weight, self.core.output.bias, hidden, targets.flatten(), smoothing)
        self.tokens += ids.numel()
        return self.watched(loss, batch, batch_idx)

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def seen(self, core: Decoder, batch: Batch) -> Tensor:
        return core.hidden(batch["ids"])

    def add(self, hidden_BTD: Tensor, batch: Batch) -> None:
        split, name = batch["part"]
        scored = batch["targets"] != IGNORE
        hidden, targets = hidden_BTD[scored], batch["targets"][scored]
        loss = next_token_loss(self.core.output.weight, self.core.output.bias, hidden, targets)
        self.measured["_".join(filter(None, (split, "perplexity", name)))].update(loss, len(targets))

    def figures(self) -> dict[str, float]:
        figures = {name: metric.compute().item() for name, metric in self.measured.items()}
        tests = defaultdict(list)
        for name, value in figures.items():
            split, _, test = name.partition("_perplexity_")
            if test:
                tests[split].append(value)
        means = {f"{split}_perplexity_mean": sum(values) / len(values) for split, values in tests.items()}
        return figures | means


class Translate(Task):
    """How is it said in another language? An encoder-decoder under cross-entropy over the next token.

    Dev is translated greedily at every evaluation; what is tested at the end, by beam search. Perplexity is per
    subword, so it compares runs of one vocabulary alone.

    Args:
        core: the arguments of `build_translator`.
        recipe: the config group.
        decoding: `beam` and `length_penalty` of the test.

    Attributes: `tokenizer` and `texts` (the pairs of each part as text), which `fit` sets: what is measured is text;
    `translations`, of each part that was measured last.
    """

    name, metric, mode = "translate", "bleu", "max"
    core: Translator
    SHOWN = 5  # sentences of dev in TensorBoard

    def __init__(self, core: dict[str, Any], recipe: dict[str, Any], decoding: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.save_hyperparameters(logger=False)
        self.core = build_translator(**core)
        self.decoding = decoding
        self.tokenizer: Subwords | None = None
        self.texts: dict[str, list[tuple[str, str]]] = {}
        self.translations: dict[str, list[str]] = {}
        self.figured: dict[str, float] | None = None  # once for each evaluation
        initialise(self.core, recipe["init"], recipe["init_std"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        source, inputs, targets = batch["source"], batch["target"][:, :-1], batch["target"][:, 1:]
        scored = (targets != PAD).flatten().nonzero().flatten()
        hidden = self.core.hidden(source, inputs).flatten(0, 1)[scored]
        loss = next_token_loss(
            self.core.output.weight,
            self.core.output.bias,
            hidden,
            targets.flatten()[scored],
            self.recipe["label_smoothing"],
        )
        self.tokens += (source != PAD).sum() + len(scored)
        return self.watched(loss, batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.translations, self.figured = {}, None

    on_test_epoch_start = on_validation_epoch_start

    def new_metric(self) -> Metric:
        return MeanPerplexity(sync_on_compute=False).to(self.device)

    def measure(self, batch: Batch) -> None:
        with torch.autocast(self.device.type, enabled=False):  # as `translate` will compute, whatever the precision
            self.measure_exactly(batch)

    def measure_exactly(self, batch: Batch) -> None:
        """Add the loss of a batch, and translate it."""
        part, targets = batch["part"], batch["target"][:, 1:]
        scored = targets != PAD
        hidden = self.core.hidden(batch["source"], batch["target"][:, :-1])[scored]
        loss = next_token_loss(self.core.output.weight, self.core.output.bias, hidden, targets[scored])
        self.measured[f"{part}_perplexity"].update(loss, len(hidden))
        if self.tokenizer is None:
            return
        beamed = part == "test"
        sources = [ids[ids != PAD].tolist() for ids in batch["source"]]
        found = translate_ids(
            self.core,
            sources,
            beam=self.decoding["beam"] if beamed else 1,
            alpha=self.decoding["length_penalty"],
            longest=self.core.longest,
        )
        texts = self.translations.setdefault(part, [""] * len(self.texts[part]))
        for row, ids in zip(batch["rows"], found):
            texts[row] = self.tokenizer.decode(ids)

    def figures(self) -> dict[str, float]:
        if self.figured is None:
            self.figured = self.score()
        return self.figured

    def score(self) -> dict[str, float]:
        """The figures of what was translated in this evaluation."""
        figures = {name: metric.compute().item() for name, metric in self.measured.items()}
        for part, translations in self.translations.items():
            sources, references = zip(*self.texts[part])
            if part == "test":
                figures |= figures_of_test(sources, translations, references)
            else:
                figures[f"{part}_bleu"] = bleu(translations, references)
        return figures

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        logger, found = self.trainer.logger, self.translations.get("validation", [])
        if found and logger is not None:
            shown = min(self.SHOWN, len(found))
            for k in (place * len(found) // shown for place in range(shown)):
                source, reference = self.texts["validation"][k]
                text = f"source: {source}  \nreference: {reference}  \nmodel: {found[k]}"
                logger.log_text(f"translations/{k + 1}", text, self.global_step)  # type: ignore[attr-defined]


TASKS: dict[str, type[Classify] | type[LanguageModel] | type[Translate]] = {
    "classify": Classify,
    "lm": LanguageModel,
    "translate": Translate,
}


def load_task(path: Path) -> Classify | LanguageModel | Translate:
    """The trained task of a checkpoint, on the CPU and in evaluation mode, from that file alone.

    Raises:
        UserError: the file is missing, or not a checkpoint of speechformer.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        task = TASKS[checkpoint["task"]](**checkpoint["hyper_parameters"])
        task.load_state_dict(checkpoint["state_dict"])
    except (OSError, EOFError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path} is not a checkpoint of speechformer, or one of an older version ({type(error).__name__})."
        ) from None
    return task.eval()
