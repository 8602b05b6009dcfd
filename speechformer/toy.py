"""Show how words become the input of a transformer: `python -m speechformer.toy ["sentence" ...]`.

    paragraph -> vocabulary;   sentence -> words -> ids -> embeddings;   + sinusoidal positions = the model's input

This is the lecture's toy example: a vocabulary from one paragraph, and new sentences of its words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speechformer import console
from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.corpora.tokenizer import UNKNOWN_TOKEN, Tokenizer, split_words
from speechformer.errors import ArgumentParser, UserError, run_command
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
# Words, ids, and three tables [T, D]: the embeddings, the positions and the sum of both
Steps = tuple[list[str], list[int], Tensor, Tensor, Tensor]


def steps(sentence: str, tokenizer: Tokenizer, embedding: nn.Embedding) -> Steps:
    """Return the steps from a sentence of T words to the input of a model of width D."""
    ids = tokenizer.encode(sentence)
    embedded = embedding.weight.detach()[torch.tensor(ids, dtype=torch.long)]
    positions = sinusoid(len(ids), embedded.shape[1])
    return list(split_words(sentence)), ids, embedded, positions, embedded + positions


def show(sentences: Sequence[str], width: int, seed: int) -> str:
    """Format the whole example."""
    tokenizer = Tokenizer.fit([PARAGRAPH])
    torch.manual_seed(seed)
    embedding = nn.Embedding(len(tokenizer), width)
    entries = [f"{index} {word}" for index, word in enumerate(tokenizer.vocabulary)]
    column = max(map(len, entries)) + 2
    lines = ["1. A paragraph, and the vocabulary of its words", "", f"   {PARAGRAPH}", ""]
    lines += ["   " + "".join(entry.ljust(column) for entry in entries[k : k + 6]) for k in range(0, len(entries), 6)]
    lines += ["", f"   {len(entries)} entries, sorted by frequency, then alphabetically.", ""]
    lines += [
        f"2. Each sentence as ids, each id as {width} numbers: its embedding (random here, learned in a model) plus",
        "   its position: PE(i, 2d) = sin(i / 10000^(2d/D)), PE(i, 2d+1) = cos(i / 10000^(2d/D))",
    ]
    for sentence in sentences:
        words, ids, *tables = steps(sentence, tokenizer, embedding)
        lines += ["", f"   {sentence}", f"   ids: {' '.join(map(str, ids))}", ""]
        rows: list[tuple[str, ...]] = [("   word", "i", "id", "embedding", "+ position", "= input")]
        for i, (word, index) in enumerate(zip(words, ids)):
            vectors = (" ".join(f"{value:5.2f}" for value in table[i].tolist()) for table in tables)
            rows.append((f"   {word}", str(i), str(index), *vectors))
        lines.append(console.table(rows))
        if UNKNOWN in ids:
            unknown = ", ".join(dict.fromkeys(word for word, index in zip(words, ids) if index == UNKNOWN))
            lines.append(f"   Not in the paragraph, so encoded as {UNKNOWN_TOKEN} ({UNKNOWN}): {unknown}")
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(
        prog="python -m speechformer.toy", description="Show how words become the input of a transformer."
    )
    parser.add_argument("sentence", nargs="*", help="new sentences (default: the lecture's three)")
    parser.add_argument("--width", type=int, default=4, help="numbers for each word (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random embedding (%(default)s)")
    arguments = parser.parse_args()

    def command() -> None:
        if not 1 <= arguments.width <= 16:
            raise UserError(f"--width must be between 1 and 16 to be readable, not {arguments.width}.")
        if not 0 <= arguments.seed < 2**63:
            raise UserError(f"--seed must be at least 0 and below 2^63, not {arguments.seed}.")
        from speechformer.analysis.command_line import read_sentences

        sentences = read_sentences(arguments.sentence) if arguments.sentence else SENTENCES
        console.say(show(sentences, arguments.width, arguments.seed))

    run_command(command)


if __name__ == "__main__":
    main()
