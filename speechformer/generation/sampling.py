"""Sampling from a language model.

    p_v  ~  exp(logit_v / temperature)      over the words that are kept

`top_k` keeps the k most probable words (Fan et al. 2018, "Hierarchical Neural Story Generation"). Of these `top_p`
keeps the fewest whose probabilities sum to p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration",
section 3.1). Temperature 0 takes the most probable word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speechformer.corpora.special_tokens import PAD
from speechformer.errors import UserError
from speechformer.models.decoder import Decoder
from speechformer.models.mixture import CountsMixture


def sampling_probabilities(logits_V: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Return the probabilities to draw from, [V]; words that are not kept have 0."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).to(logits_V.dtype)
    wide_V = (logits_V - logits_V.max()).double()  # double, or extreme temperatures overflow
    probabilities, order = (wide_V / temperature).softmax(dim=-1).sort(descending=True, stable=True)
    if top_k is not None:
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:  # keep a word if the sum of those before it is less than p
        probabilities[probabilities.cumsum(dim=0) - probabilities >= top_p] = 0
    return torch.zeros_like(wide_V).scatter(0, order, probabilities / probabilities.sum()).to(logits_V.dtype)


@torch.no_grad()
def sample(
    model: Decoder,
    prompt: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    words: int | None = None,
    padding: int | None = PAD,
    mixture: CountsMixture | None = None,
) -> Iterator[int]:
    """Yield the ids that follow a prompt, without end.

    The caller takes as many as it wants and as the positions of the model allow.

    Args:
        prompt: at least one id.
        generator: of the CPU; None for torch's default.
        words: the size of the vocabulary, if the embedding table has more rows. Those and padding are never drawn.
        padding: id of padding; None if it is in no text.
        mixture: counts to average the probabilities with.

    Raises:
        UserError: the model has diverged.
    """
    past, text, unread = model.decoder.new_cache(), list(prompt), list(prompt)
    while True:
        ids = torch.tensor([unread], device=model.output.weight.device)
        logits_V = model.output(model.hidden(ids, past)[0, -1]).float().cpu()
        if not logits_V.isfinite().all():
            raise UserError("The model has diverged: logits are NaN or infinite; train it with a lower recipe.lr.")
        if mixture is not None:
            logits_V = mixture(logits_V, text)
        if padding is not None:
            logits_V[padding] = float("-inf")
        logits_V[len(logits_V) if words is None else words :] = float("-inf")
        probabilities_V = sampling_probabilities(logits_V, temperature, top_k, top_p)
        unread = [int(torch.multinomial(probabilities_V, 1, generator=generator))]
        yield unread[0]
        text += unread
