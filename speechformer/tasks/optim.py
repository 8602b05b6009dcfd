"""Optimizers and learning-rate schedules: the `recipe` group.

Muon orthogonalises the momentum of each weight matrix before it is applied: Jordan et al. 2024, "Muon: An optimizer
for hidden layers in neural networks". The other parameters (embeddings, output layer, norms, biases) get AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from speechformer.errors import UserError

ENDLESS = ("inverse_sqrt", "vaswani")  # schedules that do not depend on the length of the run
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of p(s) = a s + b s^3 + c s^5, which takes singular values near 1


def has_amx() -> bool | None:
    """Return whether the CPU has AMX, which multiplies bfloat16 many times as fast as float32; None if unknown.

    AVX-512 has instructions for bfloat16 (`avx512_bf16`), too. On the processor that was measured they take longer.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("amx_bf16")


def matrix_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where it is surely multiplied faster than float32: on accelerators and on CPUs with AMX."""
    return torch.bfloat16 if device.type != "cpu" or has_amx() else torch.float32


def orthogonalize(matrix: Tensor) -> Tensor:
    """Replace the singular values of a matrix by values of about 1, by five Newton-Schulz iterations.

    Args:
        matrix: [M, N]; its norm does not matter.

    Returns:
        [M, N] in `matrix_dtype`: with p of `NEWTON_SCHULZ` and U S V^T = matrix / norm, U p(...p(S)) V^T.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    x = wide.to(matrix_dtype(matrix.device), copy=True)
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.mT


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the weight matrices of blocks and torch's AdamW for all other parameters, as one optimizer.

    Equal to `torch.optim.Muon` (torch 2.9), but for the data type on CPUs without AMX.

    Args:
        parameters: with their names; those of blocks contain "blocks.".
        lr: of AdamW.
        matrix_lr: of Muon; None for `lr`.

    Raises:
        UserError: no parameter is a weight matrix of a block.
    """

    MOMENTUM = 0.95  # of Nesterov's method

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        lr: float,
        matrix_lr: float | None,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:

        def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
            return "blocks." in name and name.endswith("weight") and parameter.ndim == 2

        matrices = [parameter for name, parameter in parameters if is_matrix(name, parameter)]
        others = [parameter for name, parameter in parameters if not is_matrix(name, parameter)]
        if not matrices:
            raise UserError("recipe.optimizer=muon needs the weight matrices of transformer blocks; use adamw.")
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, fused=True)
        rate = lr if matrix_lr is None else matrix_lr
        muon = {"params": matrices, "lr": rate, "weight_decay": weight_decay}
        super().__init__([dict(self.adamw.param_groups[0]), muon], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of both, with the states and settings of this optimizer, which a checkpoint holds."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        group, muon = self.param_groups
        self.adamw.state, self.adamw.param_groups = self.state, [group]
        self.adamw.step()
        for matrix in muon["params"]:
            if matrix.grad is None:
                continue
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            momentum = self.state[matrix]["momentum_buffer"].lerp_(matrix.grad, 1 - self.MOMENTUM)
            update = orthogonalize(matrix.grad.lerp(momentum, self.MOMENTUM))
            matrix.mul_(1 - muon["lr"] * muon["weight_decay"])
            matrix.add_(update, alpha=-muon["lr"] * math.sqrt(max(1, matrix.size(0) / matrix.size(1))))
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
    steps = int(steps)
    if not endless and warmup >= steps and not getattr(trainer, "fast_dev_run", False):
        raise UserError(
            f"recipe.warmup_steps={warmup} is not less than the {steps} steps of the run; set fewer, such as "
            f"recipe.warmup_steps={steps // 10}, or train longer."
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        # The endless schedules count steps from 1, at which the warm-up reaches 1.
        return shape(step + endless - warmup, max(1, steps - warmup), warmup)

    return factor
