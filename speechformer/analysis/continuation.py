"""Continue a text with a language model, token by token. torch is imported when there is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from speechformer.errors import UserError, require

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun

DEFAULT_TOKENS = 40
MAX_PROMPT = 4096  # tokens; the scores of all pairs of them are in memory at once


def check_options(tokens: int | None, temperature: float, top_k: int | None, top_p: float, seed: int) -> None:
    """Require valid arguments of `continue_text`."""
    require(tokens is None or tokens >= 1, "tokens", "at least 1", tokens)
    require(0 <= temperature < float("inf"), "temperature", "0 or above", temperature)
    require(top_k is None or top_k >= 1, "top_k", "at least 1", top_k)
    require(0 < top_p <= 1, "top_p", "above 0 and at most 1", top_p)
    require(0 <= seed < 2**63, "seed", "at least 0 and below 2^63", seed)


def continue_text(
    run: TrainedRun,
    prompt: str,
    tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Sample the ids of the tokens that follow a prompt, one after another; `tokenizer.stream` makes them a text.

    It ends before a document does.

    Args:
        run: a run of task=lm.
        tokens: how many; None: 40, or as many as the model has positions for.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: sample from the k most probable tokens only.
        top_p: sample from the fewest tokens whose probabilities sum to this.
        seed: of the random numbers.

    Raises:
        UserError: at the call, if an argument is invalid or the model has too few positions.
    """
    import torch

    from speechformer.generation.sampling import sample

    check_options(tokens, temperature, top_k, top_p, seed)
    ids = run.tokenizer.encode(prompt)
    longest = min(MAX_PROMPT, run.max_length or MAX_PROMPT)
    if not 0 < len(ids) <= longest:
        change = "shorten it" if ids else "lengthen it"
        raise UserError(f"The prompt has {len(ids)} tokens, and the model reads 1 to {longest}; {change}.")
    limit = tokens or DEFAULT_TOKENS
    if run.max_length is not None:
        room = run.max_length - len(ids) + 1  # the last token is drawn, but not read
        if room < (tokens or 0):
            raise UserError(
                f"The model has {run.max_length} positions: after a prompt of {len(ids)} tokens there is room for "
                f"{room} more, not {tokens}; ask for fewer, or shorten the prompt."
            )
        limit = min(limit, room)
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
    options |= {"words": len(run.tokenizer), "padding": run.tokenizer.padding, "mixture": run.task.counts}
    drawn = sample(run.model, ids, **options)  # type: ignore[arg-type]
    return itertools.takewhile(lambda index: index not in run.tokenizer.ends, itertools.islice(drawn, limit))
