"""Generate a toy corpus that shows the bottleneck of a fixed-size state: strings of digits and their reversals.

    source   4 0 7 7 1
    target   1 7 7 0 4

Train and dev hold strings of 1 to `max_length` digits. Test holds 15 strings of each length up to twice `max_length`,
so it measures extrapolation to longer strings. No string of dev or test occurs in train.
"""

from __future__ import annotations

import functools
import random

TRAIN, DEV, TEST_OF_EACH_LENGTH = 20_000, 300, 15


@functools.cache
def files(seed: int, max_length: int) -> dict[str, bytes]:
    """Generate train, dev and test as {name: content}; the same seed gives the same bytes."""
    rng, drawn = random.Random(seed), set[str]()

    def draw(length: int) -> str:
        """Draw a new string; a longer one if that length is used up (there are enough of five digits)."""
        while True:
            for _ in range(20):
                if (text := " ".join(rng.choices("0123456789", k=length))) not in drawn:
                    drawn.add(text)
                    return text
            length += 1

    sources = {
        "test": [draw(length) for length in range(2, 2 * max_length + 1) for _ in range(TEST_OF_EACH_LENGTH)],
        "dev": [draw(rng.randint(2, max_length)) for _ in range(DEV)],
        "train": [draw(rng.randint(1, max_length)) for _ in range(TRAIN)],
    }
    return {
        f"{part}.{name}": "".join(f"{line[::step]}\n" for line in lines).encode()
        for part, lines in sources.items()
        for name, step in (("digits", 1), ("reversed", -1))
    }
