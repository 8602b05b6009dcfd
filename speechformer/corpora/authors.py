"""Make train and test files from one text file for each author: `python -m speechformer.corpora.authors FOLDER OUT`.

A text is read as paragraphs of sentences: an empty line ends a paragraph, other line breaks are spaces. With --lines
each line is a sentence. A share of the different sentences, drawn with a seed, becomes the test set.
All copies of a sentence are on one side, of all authors, up to case, punctuation and spaces. Sentences of train
that nearly repeat one of test are left out (`corpora/duplicates.py` defines both).
"""

from __future__ import annotations

import re
from pathlib import Path

from speechformer import console
from speechformer.corpora.duplicates import WORD, kinds_in, plain
from speechformer.corpora.files import OutputFolder, decode, read_file
from speechformer.corpora.splits import held_out
from speechformer.corpora.tokenizer import sentence_splitter
from speechformer.errors import ArgumentParser, UserError, require
from speechformer.keys import setting

Texts = dict[str, list[str]]  # the sentences of each author


def read_texts(folder: Path, by_line: bool) -> Texts:
    """Read the sentences of the `.txt` files of a folder, by the name of the file; those without a word are left out.

    Raises:
        UserError: there are fewer than two such files, or one cannot be read.
    """
    paths = sorted(folder.glob("*.txt"))
    if len(paths) < 2:
        raise UserError(f"{folder} has {len(paths)} .txt files; put one for each author there, of at least two.")
    texts = Texts()
    for path in paths:
        text = decode(read_file(path), str(path))
        paragraphs = re.split(r"\n" if by_line else r"\n\s*\n", text)
        split = (lambda line: [line]) if by_line else sentence_splitter()
        sentences = (" ".join(sentence.split()) for paragraph in paragraphs for sentence in split(paragraph))
        texts[path.stem] = [sentence for sentence in sentences if WORD.search(sentence)]
    return texts


def split(texts: Texts, share: float, seed: int) -> tuple[Texts, Texts, int]:
    """Split the sentences of each author, in their order.

    Args:
        share: of the different sentences that go to test, by a hash of the sentence and the seed.

    Returns:
        Train, test, and how many sentences of train were left out because they nearly repeat one of test.

    Raises:
        UserError: an author has too few sentences.
    """
    rest, test = (
        {
            name: [text for text in sentences if held_out(f"{seed} {plain(text)}", share) is side]
            for name, sentences in texts.items()
        }
        for side in (False, True)
    )
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


def write(folder: Path, out: Path, share: float, seed: int, by_line: bool) -> None:
    """Write the files that `corpus=speeches` reads, and print what they hold and the command that trains on them."""
    require(0 < share < 1, "test", "between 0 and 1", share, typed=True)
    texts = read_texts(folder, by_line)
    train, test, near = split(texts, share, seed)
    contents = {"train_LM.txt": [text for sentences in train.values() for text in sentences]}
    contents |= {f"test_LM_{name}.txt": sentences for name, sentences in test.items()}
    for side, sides in (("train", train), ("test", test)):
        contents[f"{side}_CLS.tsv"] = [f"{name}\t{text}" for name, sentences in sides.items() for text in sentences]
    output = OutputFolder(out)
    for file, lines in contents.items():
        output.file(file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    output.remove_stale("test_LM_*.txt")
    rows = [("sentences", "train", "test"), *((name, str(len(train[name])), str(len(test[name]))) for name in texts)]
    console.write(console.table(rows))
    console.write(f"Left out: {near} of train that nearly repeat a sentence of test.")
    settings = f"{setting('corpus.root', str(out))} {setting('corpus.classes', list(texts))}"
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
