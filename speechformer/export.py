"""Take a trained model away: `python -m speechformer.export RUN --format safetensors|torch.export`.

    safetensors     model.safetensors   the weights, and in its header what rebuilds the model: `load_safetensors`
    torch.export    model.pt2           the computation itself, for batches of any size and lengths of up to 4,096 (or
                                        what the positions have); `torch.export.load("model.pt2").module()(ids)`
                                        needs torch alone

Beside either: tokenizer.json, and export.json, which says what goes in and what comes out. Each file is read again
and compared with the run before the command says that it is done.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim

from speechformer.analysis.load import Trained, load_trained, say_if_unfinished
from speechformer.errors import UserError, run_command
from speechformer.layers.positions import Positions
from speechformer.tasks.base import Task
from speechformer.tasks.registry import TASKS

MOST = 4096  # tokens that an exported computation takes, where the model knows no limit
FILES = {"safetensors": "model.safetensors", "torch.export": "model.pt2"}
INPUTS = {
    "classify": {"ids": "[sentences, tokens], whole numbers, 0 is padding at the end"},
    "lm": {"ids": "[texts, tokens], whole numbers"},
    "translate": {
        "source": "[pairs, tokens], whole numbers, with <eos>, 0 is padding at the end",
        "target": "[pairs, tokens], whole numbers, what is written so far, from <bos> on",
    },
}
OUTPUTS = {
    "classify": "logits [sentences, classes]",
    "lm": "logits of the token after each [texts, tokens, vocabulary]",
    "translate": "logits of the target's token after each [pairs, tokens, vocabulary]",
}


def about(run: Trained) -> dict[str, Any]:
    """What goes in, what comes out, and what rebuilds the model, as plain data."""
    return {
        "task": run.task.name,
        "inputs": INPUTS[run.task.name],
        "output": OUTPUTS[run.task.name],
        "max_length": run.task.model.max_length,
        "classes": run.task.hparams.get("classes"),
        "weights_of": run.checkpoint,
        "hyper_parameters": dict(run.task.hparams),
    }


def as_safetensors(run: Trained) -> bytes:
    """The weights as a file; of tables that are shared one, as `state_dict` names it first."""
    kept: dict[str, Tensor] = {}
    pointers: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, value in run.task.model.state_dict().items():
        first = pointers.setdefault(value.data_ptr(), name)
        if first == name:
            kept[name] = value.contiguous().cpu()
        else:
            shared[name] = first
    header = {"speechformer": json.dumps(about(run)), "shared": json.dumps(shared)}
    return save(kept, metadata=header)


def load_safetensors(path: Path) -> Task:
    """The task that `as_safetensors` made, on the CPU and in evaluation mode.

    Raises:
        UserError: the file is not one of ours.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            described, shared = json.loads(header["speechformer"]), json.loads(header["shared"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        task = TASKS[described["task"]](**described["hyper_parameters"])
        task.model.load_state_dict(weights | {name: weights[first] for name, first in shared.items()})
    except Exception as error:  # safetensors raises its own, which is not public
        raise UserError(f"{path} is not an export of speechformer ({type(error).__name__}).") from None
    return task.eval()


class Exported(nn.Module):
    """A model under the names of its inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class OfOne(Exported):
    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


class OfTwo(Exported):
    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(source, target)


def as_program(run: Trained) -> bytes:
    """The computation as a file, by torch.export.

    Raises:
        UserError: torch cannot export this model.
    """
    if any(isinstance(module, nn.RNNBase) for module in run.task.model.modules()):
        raise UserError(
            f"torch.export does not take packed sequences, and so no model={run.label}; take --format safetensors."
        )
    examples = inputs_for(run, 2, 7)
    kind = OfOne if len(examples) == 1 else OfTwo
    most = run.task.model.max_length or MOST
    for module in run.task.model.modules():
        if isinstance(module, Positions):
            module.extend_to(most + 1)  # a CLS token is one more
    batch = Dim("batch", min=1, max=1 << 20)
    sizes = {name: {0: batch, 1: Dim(f"{name}_tokens", min=1, max=most)} for name in INPUTS[run.task.name]}
    try:
        program = torch.export.export(kind(run.task.model), tuple(examples), dynamic_shapes=sizes)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"torch.export cannot export model={run.label} ({type(error).__name__}: {first}); "
            "take --format safetensors."
        ) from error
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def inputs_for(run: Trained, rows: int, tokens: int) -> list[Tensor]:
    """Ids of words, drawn from a seed, for each input of the run's model; of the last row the end is padding where
    the model knows padding."""
    most = run.task.model.max_length or tokens
    generator = torch.Generator().manual_seed(tokens)
    named = INPUTS[run.task.name]
    drawn = [torch.randint(4, len(run.tokenizer), (rows, min(tokens, most)), generator=generator) for _ in named]
    if run.task.name != "lm" and tokens > 1:
        drawn[0][-1, -1] = 0
    return drawn


def export(run: Trained, kind: str, folder: Path) -> tuple[Path, float]:
    """Write a run in a format, read it again, and compare: the file, and by how much a logit differs at most.

    Raises:
        UserError: it cannot be exported, or what was written computes something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILES[kind]
    partial = path.with_name(f"partial_{path.name}")
    run.task.cpu()
    read: Any
    if kind == "safetensors":
        partial.write_bytes(as_safetensors(run))
        read = load_safetensors(partial).model
    else:
        partial.write_bytes(as_program(run))
        read = torch.export.load(partial).module()
    worst = 0.0
    with torch.no_grad():
        for rows, tokens in ((1, 1), (2, 7), (5, 12)):
            ids = inputs_for(run, rows, tokens)
            worst = max(worst, float((read(*ids) - run.task.model(*ids)).abs().max()))
    if not worst <= 1e-4:
        partial.unlink()
        raise UserError(f"The export computes something else: a logit differs by {worst:.1e}. Please report this.")
    os.replace(partial, path)
    shutil.copy(run.directory / "tokenizer.json", folder / "tokenizer.json")
    (folder / "export.json").write_text(json.dumps(about(run), indent=2) + "\n", encoding="utf-8")
    return path, worst


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.export", description="Take a trained model away, with its tokenizer."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--format", choices=list(FILES), default="safetensors", help="%(default)s")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="RUN/export")
    parser.add_argument("--checkpoint", help="best.ckpt or last.ckpt; else the one that the run's figures are of")
    given = parser.parse_args()

    def command() -> None:
        run = load_trained(given.run, checkpoint=given.checkpoint)
        say_if_unfinished(run)
        path, worst = export(run, given.format, given.output or given.run / "export")
        print(
            f"{path} ({path.stat().st_size / 2**20:.1f} MB); read again, no logit differs by more than {worst:.0e}."
        )

    run_command(command)


if __name__ == "__main__":
    main()
