"""Targets of a language model from cross-fitted counts.

    q = (1 - share) onehot(target) + share p_KN(. | the words before it)
    loss = - sum over words w of q_w log p_w

The training text is cut into folds. The Kneser-Ney model of a fold is fitted on the other folds, so it has not
counted the words that it is asked about. Label smoothing is the same with a uniform p_KN.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"; cross-fitting: Chernozhukov et al. 2018.

Shapes: R targets, V words.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from speechformer.models.kneser_ney import KneserNey, contexts_of

FOLDS = 20
MAX_TOKENS = 200_000  # of a training text, since all models of counts are in memory


class CrossFittedTargets:
    """The distributions that a language model learns in place of single words.

    Args:
        stream: the ids of the training text.
        order: n of the longest n-gram.
        vocabulary: the number of words that can occur.
        vocab_size: V, with padding, and rows that no word has.
        share: of each target's probability that the counts distribute.
    """

    def __init__(self, stream: Tensor, order: int, vocabulary: int, vocab_size: int, share: float) -> None:
        self.stream, self.order, self.vocabulary = stream, order, vocabulary
        self.contexts, self.vocab_size, self.share = contexts_of(stream[:-1], order), vocab_size, share
        self.ends = len(stream) * torch.arange(1, FOLDS + 1) // FOLDS

    @functools.cached_property
    def teachers(self) -> list[KneserNey]:
        """The model of each fold; an evaluation needs none."""
        folds = self.stream.tensor_split(self.ends[:-1])
        rest = [torch.cat((*folds[:fold], *folds[fold + 1 :])) for fold in range(FOLDS)]
        return [KneserNey(stream, self.order, self.vocabulary) for stream in rest]

    def distributions(self, places_R: Tensor, targets_R: Tensor) -> Tensor:
        """Return q for the targets at these places of the stream, [R, V]."""
        q_RV = torch.zeros(len(places_R), self.vocab_size)
        folds_R = torch.bucketize(places_R, self.ends, right=True)
        for fold in folds_R.unique().tolist():
            rows = (folds_R == fold).nonzero().flatten()
            counted = self.teachers[fold].distributions(self.contexts[places_R[rows] - 1])
            q_RV[rows, : counted.shape[1]] = counted
        q_RV *= self.share
        q_RV[torch.arange(len(q_RV)), targets_R] += 1 - self.share
        return q_RV

    def loss(
        self, weight_VD: Tensor, bias_V: Tensor | None, hidden_RD: Tensor, start_B: Tensor, targets_R: Tensor
    ) -> Tensor:
        """Return the mean cross-entropy of q and the model's distribution after R hidden states, in nats.

        The hidden states are those of B windows of the stream that begin at `start_B`.
        """
        places_R = (start_B.cpu()[:, None] + torch.arange(1, len(targets_R) // len(start_B) + 1)).flatten()
        q_RV = self.distributions(places_R, targets_R.cpu()).to(hidden_RD.device)
        return F.cross_entropy(F.linear(hidden_RD, weight_VD, bias_V).float(), q_RV)
