"""Optimizers and learning-rate schedules: the `recipe` group."""

from __future__ import annotations

import math

import torch

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
