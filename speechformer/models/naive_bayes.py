"""Binarized multinomial naive Bayes over words and bigrams, and its sum with a network.

    log p(class | sentence) = sum over its features f of log p(f | class) + constant
    p(f | class) = (sentences of the class with f + SMOOTHING) / (their sum over all features + SMOOTHING * features)

A feature counts once in a sentence, and features that are not in train are ignored (Wang and Manning 2012,
"Baselines and bigrams"). Unlike there, classes have the same prior, and the smoothing is 0.1. The sum of the
log-probabilities of two models is a logarithmic opinion pool.

Shapes: B sentences, T tokens, C classes, F features.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from speechformer.corpora.special_tokens import PAD
from speechformer.models.kneser_ney import find

SMOOTHING = 0.1


class NaiveBayes(nn.Module):
    """Naive Bayes of training sentences, which are its state: `ids` and `labels`.

    Args:
        sentences: number of training sentences.
        block_size: length of the longest sentence, in tokens.
        classes: C.
        vocab_size: number of token ids.
        weight: of its log-probabilities beside those of a network.
    """

    ids: Tensor
    labels: Tensor

    def __init__(self, sentences: int, block_size: int, classes: int, vocab_size: int, weight: float) -> None:
        super().__init__()
        self.classes, self.vocab_size, self.weight = classes, vocab_size, weight
        self.register_buffer("ids", torch.full((sentences, block_size), PAD, dtype=torch.int32))
        self.register_buffer("labels", torch.zeros(sentences, dtype=torch.int32))
        self.register_load_state_dict_post_hook(self.forget_table)

    def fit(self, ids_NT: Tensor, labels_N: Tensor) -> None:
        """Count training sentences padded with `PAD`."""
        self.ids.copy_(ids_NT)
        self.labels.copy_(labels_N)
        self.forget_table()

    def forget_table(self, *of_a_hook: Any) -> None:
        """Count again when the counts are next needed."""
        self.__dict__.pop("table", None)

    def add(self, ids_BT: Tensor, logits_BC: Tensor) -> Tensor:
        """Return the log-probabilities of a network plus `weight` times those of naive Bayes, [B, C], in float32."""
        both_BC = logits_BC.cpu().double().log_softmax(dim=1) + self.weight * self(ids_BT)
        return both_BC.float().to(logits_BC.device)

    def features(self, ids_BT: Tensor) -> Tensor:
        """Return the features of sentences, each once, as positive numbers among zeros, [B, 2T - 1]."""
        words = ids_BT.long()
        first, second = words, nn.functional.pad(words, (0, 1))[:, 1:]  # no size of 0, which export could not trace
        pairs = torch.where((first == PAD) | (second == PAD), 0, first * self.vocab_size + second)
        every = torch.cat((torch.where(words == PAD, 0, words), pairs), dim=1).sort(dim=1).values[:, 1:]
        again = torch.zeros_like(every, dtype=torch.bool)
        again[:, 1:] = every[:, 1:] == every[:, :-1]
        return every.masked_fill(again, 0)

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """The features of train in ascending order, [F], and log p(feature | class), [F, C]."""
        of_sentences = self.features(self.ids.cpu())
        features_F, index = of_sentences[of_sentences > 0].unique(return_inverse=True)
        labels = self.labels.cpu().long()[:, None].expand_as(of_sentences)[of_sentences > 0]
        counts_FC = torch.zeros(len(features_F), self.classes, dtype=torch.float64)
        counts_FC.index_put_((index, labels), counts_FC.new_ones(()), accumulate=True)
        counts_FC += SMOOTHING
        return features_F, (counts_FC / counts_FC.sum(dim=0)).log()

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the log-probabilities of classes, [B, C], in double precision on the CPU."""
        (features_F, logs_FC), features = self.table, self.features(ids_BT.cpu())
        places, is_counted = find(features_F, features)  # the 0 beside features is none
        return (logs_FC[places] * is_counted[:, :, None]).sum(dim=1).log_softmax(dim=1)
