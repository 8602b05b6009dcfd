"""Optimizers and learning-rate schedules: the `recipe` group.

Muon orthogonalises the momentum of each weight matrix before it is applied: Jordan et al. 2024, "Muon: An optimizer
for hidden layers in neural networks". The other parameters (embeddings, output layer, norms, biases) get AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speechformer.errors import UserError


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the weight matrices of blocks and torch's AdamW for all other parameters, as one optimizer.

    Args:
        parameters: with their names; those of blocks contain "blocks.".
        lr: of AdamW.
        matrix_lr: of Muon; None for `lr`.

    Raises:
        UserError: torch is older than 2.9, or no parameter is a weight matrix of a block.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        lr: float,
        matrix_lr: float | None,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"recipe.optimizer=muon needs torch 2.9 or newer, not {torch.__version__}; use adamw.")
        matrices = [own for name, own in parameters if "blocks." in name and own.ndim == 2]
        others = [own for name, own in parameters if not ("blocks." in name and own.ndim == 2)]
        if not matrices:
            raise UserError("recipe.optimizer=muon needs the weight matrices of transformer blocks; use adamw.")
        adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, fused=True)
        rate = lr if matrix_lr is None else matrix_lr
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay)
        self.parts: list[torch.optim.Optimizer] = [adamw, muon]
        super().__init__([dict(part.param_groups[0]) for part in self.parts], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of both, with the states and settings of this optimizer, which a checkpoint holds."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part, group in zip(self.parts, self.param_groups):
            part.state, part.param_groups = self.state, [group]
            part.step()
        return loss


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "muon": MuonAdamW,
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


def build_optimizer(model: torch.nn.Module, recipe: dict, width: int, trainer: Any) -> Any:
    """Build the optimizer of a recipe, and its schedule: linear warm-up, then `schedule` until the last step.

    Weight decay applies to all parameters of the model, norms and biases included, as in the reports. "vaswani" is
    the schedule of Vaswani et al. 2017, equation 3: "inverse_sqrt" with the peak `lr` / sqrt(width * warmup_steps).

    Returns:
        What `configure_optimizers` of a LightningModule returns.
    """
    peak, warmup = recipe["lr"], recipe["warmup_steps"]
    if recipe["schedule"] == "vaswani":
        if not warmup:
            raise UserError("recipe.schedule=vaswani needs recipe.warmup_steps, which determines its peak.")
        peak /= math.sqrt(width * warmup)
    options: dict[str, Any] = {"lr": peak, "weight_decay": recipe["weight_decay"]}
    if recipe["optimizer"] != "sgd":
        options["betas"] = tuple(recipe["betas"])
    if recipe["optimizer"] == "muon":
        parameters: Any = list(model.named_parameters())
        options["matrix_lr"] = recipe["matrix_lr"]
    else:
        parameters = model.parameters()
        # Lightning cannot clip the gradients of a fused optimizer in mixed precision.
        options["fused"] = not trainer.gradient_clip_val or "mixed" not in str(trainer.precision)
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
