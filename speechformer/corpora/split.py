"""Make train and test files from one text file for each author: `python -m speechformer.corpora.split FOLDER OUT`.

A text is read as paragraphs of sentences: an empty line ends a paragraph, other line breaks are spaces. With --lines
each line is a sentence. A share of the different sentences of each author, drawn with a seed, becomes the test set.
All copies of a sentence are on one side, of all authors, up to case, punctuation and spaces. Sentences of train
that nearly repeat one of test are left out (`corpora/duplicates.py` defines both).
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from argparse import ArgumentTypeError
from pathlib import Path

from speechformer import console
from speechformer.corpora.duplicates import WORD, kinds_in, plain
from speechformer.corpora.files import OutputFolder, read_file, split_lines, write_file
from speechformer.corpora.speeches import SIMILAR, parse
from speechformer.corpora.tokenizer import sentence_splitter
from speechformer.errors import ArgumentParser, UserError
from speechformer.keys import setting

Texts = dict[str, list[str]]  # the sentences of each author


def read_texts(folder: Path, by_line: bool) -> tuple[Texts, int]:
    """Read the `.txt` files of a folder.

    Returns:
        The sentences of each author, who has the name of the file; and how many were left out for having no word.

    Raises:
        UserError: there are fewer than two such files, or one cannot be read or cannot name a class.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one that has a .txt file for each author.")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".txt" and path.name[0] != ".")
    if len(paths) < 2:
        raise UserError(f"{folder} has {len(paths)} .txt files; put one for each author there, of at least two.")
    texts, wordless = Texts(), 0
    for path in paths:
        name = unicodedata.normalize("NFC", path.stem.strip())
        if name.isdecimal() or not name or name in texts or SIMILAR.fullmatch(path.name):
            raise UserError(f"{path}: rename it to the name of its author, which names the class.")
        sentences = [unicodedata.normalize("NFC", line) for line in split_lines(read_file(path), str(path))]
        if not by_line:
            paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in sentences))
            sentences = list(itertools.chain.from_iterable(map(sentence_splitter(), paragraphs)))
        texts[name] = [" ".join(sentence.split()) for sentence in sentences if WORD.search(sentence)]
        wordless += sum(bool(sentence.strip()) for sentence in sentences) - len(texts[name])
    return texts, wordless


def split(texts: Texts, share: float, seed: int) -> tuple[Texts, Texts, int]:
    """Split the sentences of each author, in their order.

    Args:
        share: of the different sentences of each author that go to test; at least one does, and one does not.

    Returns:
        Train, test, and how many sentences of train were left out because they nearly repeat one of test.

    Raises:
        UserError: an author has too few sentences.
    """
    rng, sides = random.Random(seed), dict[str, bool]()  # whether a sentence goes to test
    for sentences in texts.values():
        different = sorted({plain(text) for text in sentences} - sides.keys())
        rng.shuffle(different)
        count = max(0, min(max(1, round(share * len(different))), len(different) - 1))
        sides |= {text: k < count for k, text in enumerate(different)}
    test = {name: [text for text in sentences if sides[plain(text)]] for name, sentences in texts.items()}
    rest = {name: [text for text in sentences if not sides[plain(text)]] for name, sentences in texts.items()}
    tested = [text for sentences in test.values() for text in sentences]
    train = {
        name: [text for text, kind in zip(sentences, kinds_in(sentences, tested)) if not kind]
        for name, sentences in rest.items()
    }
    for name in texts:
        if not (train[name] and test[name]):
            raise UserError(
                f"{name}.txt has {len(texts[name])} sentences, of which {len(train[name])} are left to train and "
                f"{len(test[name])} to test on without leaks; give it more text, or try another --seed or --test."
            )
    return train, test, sum(map(len, rest.values())) - sum(map(len, train.values()))


def files(train: Texts, test: Texts) -> dict[str, str]:
    """Return the content of each file that `corpus=speeches` reads."""
    contents = {
        f"{side}_CLS.tsv": "".join(f"{name}\t{text}\n" for name, sentences in texts.items() for text in sentences)
        for side, texts in (("train", train), ("test", test))
    }
    contents["train_LM.txt"] = "".join(f"{text}\n" for sentences in train.values() for text in sentences)
    return contents | {f"test_LM_{name}.txt": "\n".join(sentences) + "\n" for name, sentences in test.items()}


def write(folder: Path, out: Path, share: float, seed: int, by_line: bool) -> None:
    """Write the files to `out`, and print what they hold and the command that trains on them."""
    if out.resolve() == folder.resolve():
        raise UserError(f"{out} holds the texts; name another folder for the files.")
    texts, wordless = read_texts(folder, by_line)
    train, test, near = split(texts, share, seed)
    contents = {name: text.encode() for name, text in files(train, test).items()}
    parse(contents, "own", str(out), list(texts))  # what we write can be read
    output = OutputFolder(out)
    for name, content in contents.items():
        write_file(output.file(name), content)
    output.remove_stale("test_LM_*.txt")
    rows = [("sentences", "train", "test"), *((name, str(len(train[name])), str(len(test[name]))) for name in texts)]
    console.write(console.table(rows))
    console.write(f"Left out: {near} of train that nearly repeat a sentence of test, {wordless} without a word.")
    settings = f"{setting('corpus.root', str(out))} {setting('corpus.classes', texts)}"
    console.write(f"python -m speechformer.train corpus=speeches {settings}")


def share(text: str) -> float:
    """Return a share as a number."""
    value = float(text)
    if not 0 < value < 1:
        raise ArgumentTypeError("must be between 0 and 1")
    return value


def main() -> None:
    """Run the command line."""
    about = "Make train and test files for corpus=speeches from one text file for each author, without leaks."
    parser = ArgumentParser(prog="python -m speechformer.corpora.split", description=about)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="it has a .txt file for each author")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to; only our own files are replaced")
    parser.add_argument("--test", type=share, default=0.2, help="share of each author's sentences (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sentences (%(default)s)")
    parser.add_argument("--lines", action="store_true", help="each line is a sentence")
    parser.run(lambda args: write(args.folder, args.out, args.test, args.seed, args.lines))


if __name__ == "__main__":
    main()
