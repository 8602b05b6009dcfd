"""A toy to see the bottleneck by: strings of digits, to be said backwards.

    source   4 0 7 7 1
    target   1 7 7 0 4

Train and dev hold strings of 1 to `max_length` digits, the test as many of each length up to twice that: what is longer
than `max_length` was never trained. No string of dev and test stands in train.
"""

from __future__ import annotations

import functools
import random

TRAIN, DEV, TEST_OF_EACH_LENGTH = 20_000, 300, 15


@functools.cache
def files(seed: int, max_length: int) -> dict[str, bytes]:
    """train, dev and test .digits and .reversed by name; the same seed gives the same bytes."""
    rng = random.Random(seed)
    said: set[str] = set()

    def draw(length: int) -> str:
        """A new string; where all of that length are used up, a longer one (there are enough of five digits)."""
        while True:
            for _ in range(20):
                if (text := " ".join(rng.choices("0123456789", k=length))) not in said:
                    said.add(text)
                    return text
            length += 1

    tests = [draw(length) for length in range(2, 2 * max_length + 1) for _ in range(TEST_OF_EACH_LENGTH)]
    drawn = {
        "test": tests,
        "dev": [draw(rng.randint(2, max_length)) for _ in range(DEV)],
        "train": [draw(rng.randint(1, max_length)) for _ in range(TRAIN)],
    }
    texts = {f"{part}.digits": sources for part, sources in drawn.items()}
    texts |= {f"{part}.reversed": [source[::-1] for source in sources] for part, sources in drawn.items()}
    return {name: "".join(f"{line}\n" for line in lines).encode() for name, lines in texts.items()}
