"""Predict the class of a text, and measure the importance of each word by leaving it out.

The importance of word t for the predicted class c is the drop in log-probability without it, in nats:

    w_t = ln P(c | all words) - ln P(c | all words but t)

Li, Monroe and Jurafsky 2016, "Understanding Neural Networks through Representation Erasure", equation 1 (there
relative to ln P). A positive value supports the class. The values explain the model's output one word at a time: of
two redundant words each can be left out at no cost.

Shapes: T words, C classes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun

ROWS_AT_ONCE = 256


@dataclass
class Prediction:
    """A classifier's prediction for a text.

    Attributes:
        speaker: the most probable class.
        words: the words that the model read; `known` says which are in the vocabulary.
        weights: the importance of each word in nats; None for a text of one word.
        notes: what was cut or is unknown.
    """

    text: str
    speaker: str
    probabilities: dict[str, float]
    words: list[str]
    known: list[bool]
    weights: list[float] | None
    notes: list[str]

    def as_json(self) -> dict[str, object]:
        """Return the prediction as plain data."""
        columns = zip(self.words, self.known, self.weights or itertools.repeat(None))
        words = [{"word": word, "known": known, "weight": weight} for word, known, weight in columns]
        about = {"text": self.text, "speaker": self.speaker, "probabilities": self.probabilities}
        return {**about, "words": words, "notes": self.notes}


@torch.no_grad()
def leave_out(model: nn.Module, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ln P of each class, [C], and the importance of each word for the best class, [T], None if T is 1."""
    log_C, T = model(ids_T[None]).log_softmax(dim=-1)[0], len(ids_T)
    if T == 1:
        return log_C, None
    index = torch.arange(T, device=ids_T.device)
    shortened = ids_T.expand(T, T)[index[:, None] != index].view(T, T - 1)  # row t: all words but the t-th
    c = log_C.argmax()
    weights = [log_C[c] - model(rows).log_softmax(dim=-1)[:, c] for rows in shortened.split(ROWS_AT_ONCE)]
    return log_C, torch.cat(weights)


def predict(run: TrainedRun, text: str) -> Prediction:
    """Predict the class of a text with a run of task=classify; the text is cut at `block_size`, as in training."""
    inputs = run.read(text, run.block_size)
    (ids,) = inputs.ids
    log_C, weights = leave_out(run.task, ids.to(run.task.device))
    probabilities = dict(zip(run.task.hparams["classes"], log_C.exp().tolist()))
    return Prediction(
        text=text,
        speaker=max(probabilities, key=probabilities.__getitem__),
        probabilities=probabilities,
        words=run.tokenizer.split(text, len(ids)),
        known=[index != run.tokenizer.unknown for index in ids.tolist()],
        weights=None if weights is None else weights.tolist(),
        notes=inputs.notes,
    )
