"""Make train and test files from one text file for each author: `python -m speechformer.corpora.authors FOLDER OUT`.

A text is read as paragraphs of sentences: an empty line ends a paragraph, other line breaks are spaces. With --lines
each line is a sentence. A share of the different sentences, drawn with a seed, becomes the test set.
All copies of a sentence are on one side, of all authors, up to case, punctuation and spaces. Sentences of train
that nearly repeat one of test are left out (`corpora/duplicates.py` defines both).
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from speechformer import console
from speechformer.corpora.duplicates import WORD, kinds_in, plain
from speechformer.corpora.files import OutputFolder, decode, read_file
from speechformer.corpora.splits import held_out
from speechformer.corpora.tokenizer import sentence_splitter
from speechformer.errors import ArgumentParser, UserError, require
from speechformer.keys import setting

Row = tuple[str, str]  # author and sentence


def read_rows(folder: Path, by_line: bool) -> list[Row]:
    """Read the sentences of the `.txt` files of a folder, whose names are the authors; what has no word is left out.

    Raises:
        UserError: there are fewer than two such files, or one cannot be read.
    """
    paths = sorted(folder.glob("*.txt"))
    if len(paths) < 2:
        raise UserError(f"{folder} has {len(paths)} .txt files; put one for each author there, of at least two.")
    rows = []
    for path in paths:
        text = decode(read_file(path), str(path))
        paragraphs = re.split(r"\n\s*\n", text)
        sentences = text.split("\n") if by_line else itertools.chain(*map(sentence_splitter(), paragraphs))
        rows += [(path.stem, " ".join(sentence.split())) for sentence in sentences if WORD.search(sentence)]
    return rows


def split(rows: list[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split sentences into train and test, and leave out those of train that nearly repeat one of test.

    Args:
        share: of the different sentences that go to test, by a hash of the sentence and the seed.

    Raises:
        UserError: an author has too few sentences.
    """
    test, rest = list[Row](), list[Row]()
    for row in rows:
        (test if held_out(f"{seed} {plain(row[1])}", share) else rest).append(row)
    kinds = kinds_in([text for _, text in rest], [text for _, text in test])
    train = [row for row, kind in zip(rest, kinds) if not kind]
    for author in dict(rows):
        if not (author in dict(train) and author in dict(test)):
            raise UserError(
                f"{author}.txt: no sentence is left to train or to test on without leaks; give it more text, or try "
                "another --seed or --test."
            )
    return train, test


def write(folder: Path, out: Path, share: float, seed: int, by_line: bool) -> None:
    """Write the files that `corpus=speeches` reads, and print what they hold and the command that trains on them."""
    require(0 < share < 1, "test", "between 0 and 1", share, typed=True)
    rows = read_rows(folder, by_line)
    train, test = split(rows, share, seed)
    files = {f"{part}_CLS.tsv": list(map("\t".join, side)) for part, side in (("train", train), ("test", test))}
    files["train_LM.txt"] = [text for _, text in train]
    authors = sorted(dict(rows))
    files |= {f"test_LM_{author}.txt": [text for name, text in test if name == author] for author in authors}
    output = OutputFolder(out)
    for file, lines in files.items():
        output.file(file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    output.remove_stale("test_LM_*.txt")
    left_out = len(rows) - len(train) - len(test)
    console.write(
        f"{len(train)} sentences to train and {len(test)} to test on; {left_out} nearly repeat one of test."
    )
    settings = f"{setting('corpus.root', str(out))} {setting('corpus.classes', authors)}"
    console.write(f"python -m speechformer.train corpus=speeches {settings}")


def main() -> None:
    """Run the command line."""
    about = "Make train and test files for corpus=speeches from one text file for each author, without leaks."
    parser = ArgumentParser(prog="python -m speechformer.corpora.authors", description=about)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="it has a .txt file for each author")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to; only our own files are replaced")
    parser.add_argument("--test", type=float, default=0.2, help="share of each author's sentences (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sentences (%(default)s)")
    parser.add_argument("--lines", action="store_true", help="each line is a sentence")
    parser.run(lambda args: write(args.folder, args.out, args.test, args.seed, args.lines))


if __name__ == "__main__":
    main()
