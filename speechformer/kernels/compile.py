"""torch.compile for the blocks of a model."""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from speechformer.errors import UserError, pick
from speechformer.kernels.dispatch import FastBlock

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch's


def compile_blocks(model: nn.Module, mode: str, device: torch.device) -> None:
    """Compile the blocks of a model in place, for `device`. The blocks are equal, so they share one compilation.

    Parameter names do not change. "reduce-overhead" replays the blocks as CUDA graphs.

    Raises:
        UserError: torch has no such mode, or the device is a CPU and there is no C++ compiler.
    """
    pick(dict.fromkeys(MODES), mode, "compile")
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise UserError(
            f"compile={mode}: on a CPU, torch.compile needs a C++ compiler such as g++, and none was found. "
            "Install one, or leave compile unset."
        )
    for block in model.modules():
        if isinstance(block, FastBlock):
            block.compile(mode=mode)
            block.compiled = True
