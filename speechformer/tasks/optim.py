"""Optimizers and learning-rate schedules: the `recipe` group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from speechformer.errors import UserError

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


# From the step after the warm-up, the steps that follow the warm-up, and its own steps, to a fraction of the peak
SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda step, steps, warmup: 1.0,
    "linear": lambda step, steps, warmup: 1 - step / steps,
    # Loshchilov and Hutter 2017, "SGDR", without restarts
    "cosine": lambda step, steps, warmup: 0.5 * (1 + math.cos(math.pi * step / steps)),
    # 1 at the end of the warm-up, 1/2 at four times as many steps
    "inverse_sqrt": lambda step, steps, warmup: math.sqrt(max(1, warmup) / (warmup + step)),
}
SCHEDULES["vaswani"] = SCHEDULES["inverse_sqrt"]
ENDLESS = ("inverse_sqrt", "vaswani")  # independent of the length of the run


def build_optimizer(parameters: Iterable[torch.nn.Parameter], recipe: dict, width: int, trainer: Any) -> Any:
    """Build the optimizer of a recipe, and its schedule: linear warm-up, then `schedule` until the last step.

    Weight decay applies to all parameters, norms and biases included, as in the reports. "vaswani" is the schedule of
    Vaswani et al. 2017, equation 3: "inverse_sqrt" with the peak `lr` / sqrt(width * warmup_steps).

    Returns:
        What `configure_optimizers` of a LightningModule returns.
    """
    peak, warmup = recipe["lr"], recipe["warmup_steps"]
    if recipe["schedule"] == "vaswani":
        if not warmup:
            raise UserError("recipe.schedule=vaswani needs recipe.warmup_steps, which determines its peak.")
        peak /= math.sqrt(width * warmup)
    options = {"lr": peak, "weight_decay": recipe["weight_decay"]}
    # Lightning cannot clip the gradients of a fused optimizer in mixed precision.
    options["fused"] = not trainer.gradient_clip_val or "mixed" not in str(trainer.precision)
    if recipe["optimizer"] != "sgd":
        options["betas"] = tuple(recipe["betas"])
    optimizer = OPTIMIZERS[recipe["optimizer"]](parameters, **options)
    if warmup == 0 and recipe["schedule"] == "constant":
        return optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(recipe, trainer))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lr_factor(recipe: dict[str, Any], trainer: Any) -> Callable[[int], float]:
    """Return the function from the step, counted from 0, to the fraction of the peak learning rate."""
    warmup, shape, endless = recipe["warmup_steps"], SCHEDULES[recipe["schedule"]], recipe["schedule"] in ENDLESS
    steps = 0 if endless else trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise UserError("recipe.schedule ends with the run, so set trainer.max_steps or trainer.max_epochs.")
    if not endless and warmup >= steps:
        raise UserError(f"recipe.warmup_steps={warmup} is not less than the {int(steps)} steps of the run.")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        # The endless schedules count steps from 1, at which the warm-up reaches 1.
        return shape(step + endless - warmup, int(steps) - warmup, warmup)

    return factor
