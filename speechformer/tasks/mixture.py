"""Perplexities of a mixture with counts, from what the model says of each target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.models.mixture import Counted, CountsMixture

Part = tuple[str, str]


class MixturePerplexities:
    """Collects log-probabilities by part, fits the weights on validation, and measures the mixture.

    Args:
        mixture: the weights are fitted here.
        streams: the ids of the validation text, ("validation", ""), and of each test; without the first the weights
            are those of the mixture.
    """

    def __init__(self, mixture: CountsMixture, streams: Mapping[Part, Tensor]) -> None:
        self.mixture = mixture
        self.counted: dict[Part, Counted] = {part: mixture.count(ids) for part, ids in streams.items()}
        self.is_known = {part: ids[1:] != UNKNOWN for part, ids in streams.items()}
        self.reset()

    def reset(self) -> None:
        """Forget all log-probabilities."""
        self.logs = {part: torch.full_like(counted.logs_R, torch.nan) for part, counted in self.counted.items()}

    def update(self, part: Part, logs_R: Tensor, places_R: Tensor) -> None:
        """Add log p of the targets at these places of a part's stream, in nats."""
        self.logs[part][places_R.cpu() - 1] = logs_R.cpu().double()

    def compute(self) -> dict[str, float]:
        """Return the perplexities of the parts that were evaluated, over all words and over known ones."""
        measured = {part: logs for part, logs in self.logs.items() if not logs.isnan().any()}
        held_out = ("validation", "")
        if held_out in measured:
            self.mixture.fit(measured[held_out], self.counted[held_out])
        metrics: dict[str, float] = {}
        for (split, name), logs in measured.items():
            mixed = self.mixture.mix(logs, self.counted[split, name])
            for known, logs_R in (("", mixed), ("known_", mixed[self.is_known[split, name]])):
                if len(logs_R):
                    metric = f"{split}_mixture_{known}perplexity{name and f'_{name}'}"
                    metrics[metric] = (-logs_R.mean()).exp().item()
        return metrics
