"""From words to what a transformer reads, step by step and in numbers: `python -m speechformer.toy ["sentence" ...]`.

    paragraph -> vocabulary;   sentence -> words -> ids -> embeddings;   + sinusoidal positions = the model's input

The lecture's toy example: a vocabulary from one paragraph, and new sentences made of its words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speechformer import console
from speechformer.corpora.tokenizer import UNKNOWN_TOKEN, Tokenizer, split_words
from speechformer.errors import UserError, run_command
from speechformer.layers.positions import sinusoid

PARAGRAPH = (
    "Hello! This is an example of a paragraph that has been split into its basic components. "
    "I wonder what will come next! Any guesses?"
)
SENTENCES = [
    "I wonder what will come next!",
    "This is a basic example paragraph.",
    "Hello, what is a basic split?",
]


def steps(
    sentence: str, tokenizer: Tokenizer, embedding: nn.Embedding
) -> tuple[list[str], list[int], Tensor, Tensor, Tensor]:
    """The words of a sentence, their ids, embeddings [T, D] and positions [T, D], and the sum of the two."""
    ids = tokenizer.encode(sentence)
    embedded = embedding.weight.detach()[torch.tensor(ids, dtype=torch.long)]
    positions = sinusoid(len(ids), embedded.shape[1])
    return list(split_words(sentence)), ids, embedded, positions, embedded + positions


def numbers(row: Sequence[float]) -> str:
    return " ".join(f"{value:5.2f}" for value in row)


def show(sentences: Sequence[str], width: int, seed: int) -> str:
    """The whole example as text."""
    tokenizer = Tokenizer.fit([PARAGRAPH])
    torch.manual_seed(seed)
    embedding = nn.Embedding(len(tokenizer), width)
    lines = ["1. A paragraph, and the vocabulary of its words", "", f"   {PARAGRAPH}", ""]
    entries = [f"{index} {word}" for index, word in enumerate(tokenizer.vocabulary)]
    across = max(map(len, entries)) + 2
    lines += ["   " + "".join(entry.ljust(across) for entry in entries[k : k + 6]) for k in range(0, len(entries), 6)]
    lines += ["", f"   {len(entries)} entries; those used more often first, then by the alphabet.", ""]
    lines += [
        f"2. Each sentence as ids, each id as {width} numbers (the embedding: random here, learned in a model), and",
        "   its place added: PE(i, 2d) = sin(i / 10000^(2d/D)), PE(i, 2d+1) = cos(i / 10000^(2d/D))",
    ]
    for sentence in sentences:
        words, ids, embedded, positions, total = steps(sentence, tokenizer, embedding)
        lines += ["", f"   {sentence}", f"   ids: {' '.join(map(str, ids))}", ""]
        rows: list[tuple[str, ...]] = [("   word", "i", "id", "embedding", "+ position", "= input")]
        for i, word in enumerate(words):
            values = (numbers(part[i].tolist()) for part in (embedded, positions, total))
            rows.append((f"   {word}", str(i), str(ids[i]), *values))
        lines.append(console.table(rows))
        if 1 in ids:
            unknown = ", ".join(dict.fromkeys(word for word, index in zip(words, ids) if index == 1))
            lines.append(f"   Not in the paragraph, so read as {UNKNOWN_TOKEN} (1): {unknown}")
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m speechformer.toy", description="From words to what a transformer reads, with the numbers."
    )
    parser.add_argument("sentence", nargs="*", help="new sentences (the lecture's three)")
    parser.add_argument("--width", type=int, default=4, help="numbers for each word (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random embedding (%(default)s)")
    given = parser.parse_args()

    def command() -> None:
        if not 1 <= given.width <= 16:
            raise UserError(f"--width must be between 1 and 16, to be read, not {given.width}.")
        if not 0 <= given.seed < 2**63:
            raise UserError(f"--seed must be at least 0 and below 2^63, not {given.seed}.")
        from speechformer.analysis.command_line import read_sentences

        console.say(show(read_sentences(given.sentence) if given.sentence else SENTENCES, given.width, given.seed))

    run_command(command)


if __name__ == "__main__":
    main()
