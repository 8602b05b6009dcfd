"""A text that goes on: words drawn one after another from a language model.

    p_v  ~  exp(logit_v / temperature)      over the words that are kept

kept are the `top_k` most probable (Fan et al. 2018, "Hierarchical Neural Story Generation"), and of these the
fewest whose probabilities sum to `top_p` (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration",
section 3.1). A temperature of 0 takes the most probable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speechformer.errors import UserError
from speechformer.models.decoder import Decoder


def kept(logits_V: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """The probabilities to draw from, [V]: 0 for words that are not kept."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).to(logits_V.dtype)
    wide_V = (logits_V - logits_V.max()).double()  # for any temperature that is a number
    probabilities, order = (wide_V / temperature).softmax(dim=-1).sort(descending=True, stable=True)
    chosen = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k is not None:
        chosen[top_k:] = False
        probabilities = probabilities * chosen / probabilities[chosen].sum()
    if top_p < 1:
        chosen &= probabilities.cumsum(dim=0) - probabilities < top_p  # those before it do not suffice
    probabilities = probabilities * chosen
    found_V = torch.zeros_like(wide_V).scatter(0, order, probabilities / probabilities.sum())
    return found_V.to(logits_V.dtype)


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
    cache: bool = True,
) -> Iterator[int]:
    """The ids that follow a prompt, without end; the caller takes as many as it wants and the positions give.

    Args:
        prompt: at least one id.
        generator: on the CPU; None for torch's own random numbers.
        words: the rows of the embedding table that are words; the rest, and the padding, is never drawn.
        cache: whether keys and values of what was read are kept; without, all is read again for each next word,
            which gives the same and is for comparison.

    Raises:
        UserError: the model has diverged.
    """
    device = model.output.weight.device
    past = model.decoder.new_cache() if cache else None
    ids = torch.tensor([list(prompt)], device=device)
    while True:
        logits_V = model.output(model.hidden(ids, past)[0, -1]).float().cpu()
        if not logits_V.isfinite().all():
            raise UserError("The model's figures are NaN or infinite: it has diverged, and knows no next word.")
        logits_V[0] = float("-inf")
        logits_V[len(logits_V) if words is None else words :] = float("-inf")
        index = int(torch.multinomial(kept(logits_V, temperature, top_k, top_p), 1, generator=generator))
        yield index
        following = torch.tensor([[index]], device=device)
        ids = following if cache else torch.cat((ids, following), dim=1)
