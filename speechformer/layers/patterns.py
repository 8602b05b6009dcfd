"""What a token may attend to: `pattern=` in the config.

A pattern is a pure function of query index i and key index j (whole-number tensors that broadcast) that
says where i may see j. It knows nothing of causality and padding: `attention.visible` joins them to it, in
one place, so `window` seen from a decoder is the W most recent keys and from an encoder all keys within
distance < W. Every pattern keeps the diagonal, so no query is left with nothing to see.

Because patterns are functions of indices alone, they compose with & and |, work at any length, and are
equal in training and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speechformer.errors import UserError, build

Pattern = Callable[[Tensor, Tensor], Tensor]


def at_least(least: int, **sizes: int) -> None:
    """Refuse a size of a pattern that is not a whole number of at least `least`."""
    for name, value in sizes.items():
        if type(value) is not int or value < least:
            raise UserError(f"pattern.{name} must be a whole number of at least {least}, not {value}.")


def full() -> Pattern:
    """Everything."""
    return lambda i, j: torch.ones_like(i - j, dtype=torch.bool)


def window(window: int = 5) -> Pattern:
    """|i - j| < window: in a decoder the `window` most recent keys, itself included.

    Child et al. 2019, "Generating Long Sequences with Sparse Transformers"; Beltagy et al. 2020,
    "Longformer", figure 2b.
    """
    at_least(1, window=window)
    return lambda i, j: (i - j).abs() < window


def block(block: int = 8) -> Pattern:
    """The sequence is cut into blocks of `block` tokens; i sees its own block and the one before.

    Marsol Torrent 2026, section 4.2; local attention with one block of memory.
    """
    at_least(1, block=block)

    def visible(i: Tensor, j: Tensor) -> Tensor:
        behind = i // block - j // block
        return (behind == 0) | (behind == 1)

    return visible


def strided(stride: int = 6) -> Pattern:
    """The last `stride` keys, and every `stride`-th one beyond, in one merged head.

    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3.
    """
    at_least(1, stride=stride)
    return lambda i, j: ((i - j).abs() < stride) | ((i - j) % stride == 0)


def dilated(window: int = 5, dilation: int = 2) -> Pattern:
    """A window with gaps: `window` keys on a side (itself included), `dilation` apart.

    Beltagy et al. 2020, "Longformer", figure 2c.
    """
    at_least(1, window=window, dilation=dilation)
    return lambda i, j: ((i - j).abs() < window * dilation) & ((i - j) % dilation == 0)


def global_(window: int = 5, tokens: int = 2) -> Pattern:
    """A window, and the first `tokens` positions see all and are seen by all.

    Beltagy et al. 2020, "Longformer", figure 2d.
    """
    at_least(1, window=window)
    at_least(0, tokens=tokens)
    return lambda i, j: ((i - j).abs() < window) | (i < tokens) | (j < tokens)


def bigbird(window: int = 3, tokens: int = 2, links: int = 3, seed: int = 0) -> Pattern:
    """Window, global tokens and random links. Zaheer et al. 2020, "Big Bird", section 2.

    Each position draws `links` times, with replacement, from the earlier positions outside its window; a link
    can be used from both ends, which a decoder's causality cuts to one. The draws are a hash of position and
    `seed`, not of the length: a link stays where it is in training, evaluation and longer sequences.
    """
    at_least(0, links=links, seed=seed)
    near = global_(window, tokens)

    def visible(i: Tensor, j: Tensor) -> Tensor:
        later, earlier = torch.maximum(i, j), torch.minimum(i, j)
        choices = later - window - tokens + 1  # earlier positions that are neither global nor in the window
        linked = torch.zeros_like(later, dtype=torch.bool)
        for link in range(links):
            drawn = tokens + hashed(later, seed, link) % choices.clamp(min=1)
            linked = linked | ((earlier == drawn) & (choices > 0))
        return near(i, j) | linked

    return visible


def with_first_token(pattern: Pattern) -> Pattern:
    """The same pattern, with position 0 seeing all and seen by all: how Longformer treats a CLS token."""
    return lambda i, j: pattern(i, j) | (i == 0) | (j == 0)


def hashed(index: Tensor, seed: int, link: int) -> Tensor:
    """A pseudo-random whole number in [0, 2^31) for each index."""
    x = index.long() * 2654435761 + seed * 40503 + link * 2246822519
    for _ in range(2):  # one round of multiply and shift leaves neighbours correlated
        x = x & 0xFFFFFFFF
        x = ((x >> 16) ^ x) * 0x45D9F3B
    return (x & 0xFFFFFFFF) >> 1


PATTERNS: dict[str, Callable[..., Pattern]] = {
    "full": full,
    "window": window,
    "block": block,
    "strided": strided,
    "dilated": dilated,
    "global": global_,
    "bigbird": bigbird,
}


def build_pattern(spec: dict) -> Pattern:
    """The pattern of a `pattern` config such as `{"name": "window", "window": 5}`."""
    return build(PATTERNS, spec, "pattern")
