"""Read the speech files strictly: who said it, and what was said.

    train_CLS.tsv, test_CLS.tsv    one sentence a line: label TAB text; a label is a number, 0, 1, 2, ..., or a name
    train_LM.txt                   plain text
    test_LM_<name>.txt             plain text, one file for each of any number of names

`files` describes the encoding. Anything else is an error that names the file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechformer.corpora import sample
from speechformer.corpora.files import checksum, find_folder, nfc, parse_lines, read_file
from speechformer.errors import UserError

SPEECH_FILE = re.compile(r"(train|test)_CLS\.tsv|train_LM\.txt|test_LM_.+\.txt")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus as read: sentences with the index of their class, and lines of text.

    Attributes:
        where: the folder, or how the corpus was generated.
        sha256: of the names and contents of its files, in the normal form NFC.
        classify_train, classify_test, lm_train, lm_test: empty if the corpus has no files for that task.
        ceilings: accuracies of classifiers that know how a generated corpus was made, by name.
    """

    name: str
    where: str
    sha256: str
    classes: list[str]
    classify_train: list[tuple[int, str]]
    classify_test: list[tuple[int, str]]
    lm_train: list[str]
    lm_test: dict[str, list[str]]
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> list[str]:
        """What the fingerprint of a run includes besides `sha256`."""
        return list(map(nfc, self.classes))


def speech_files(folder: Path) -> list[Path]:
    """List the speech files of a folder; other files are ignored."""
    return [path for path in folder.iterdir() if SPEECH_FILE.fullmatch(path.name)]


def load_corpus(config: Mapping[str, Any]) -> Corpus:
    """Load the corpus of a `corpus` config.

    Args:
        config: `name` is "speeches" (with `root`, `classes`), "sample" (with `seed`, `classes`) or "auto": the
            speeches if they are installed, otherwise the sample, with the config of each under its name.

    Raises:
        UserError: a file is invalid, or the speeches are missing and `name` or `root` demands them.
    """
    missing = (
        "No speech files (train_CLS.tsv, train_LM.txt, ...) in {}; correct corpus.root, or omit it and get the "
        "presidential speeches with: python -m speechformer.download speeches"
    )
    folder, settings = find_folder(config, "speeches", "speeches", speech_files, missing)
    if folder is not None:
        files = {path.name: read_file(path) for path in speech_files(folder)}
        return parse(files, "speeches", str(folder.resolve()), settings["classes"])
    seed = settings["seed"]
    corpus = parse(sample.files(seed), "sample", f"made by the package, seed {seed}", settings["classes"])
    order = {"best_without_order_accuracy": False, "best_possible_accuracy": True}
    return replace(corpus, ceilings={name: sample.best_accuracy(word_order) for name, word_order in order.items()})


def parse(files: Mapping[str, bytes], name: str, where: str, classes: Sequence[str]) -> Corpus:
    """Parse the files of a corpus, {name: content}; a `UserError` has `where`/file:line."""
    lines = {file: parse_lines(content, f"{where}/{file}") for file, content in sorted(files.items())}
    train, test = (
        parse_labelled(lines.pop(file, []), f"{where}/{file}", classes) for file in ("train_CLS.tsv", "test_CLS.tsv")
    )
    texts = {file[:-4].removeprefix("test_LM_"): list(map(str.strip, lines[file])) for file in lines}
    return Corpus(name, where, checksum(files), list(classes), train, test, texts.pop("train_LM", []), texts)


def parse_labelled(lines: list[str], where: str, classes: Sequence[str]) -> list[tuple[int, str]]:
    """Parse lines of label TAB text into (index of the class, text); a label is the index or name of a class."""
    indices = {str(k): k for k in range(len(classes))} | {normal(name): k for k, name in enumerate(classes)}
    rows = []
    for number, line in enumerate(lines, start=1):
        label, tab, text = line.partition("\t")
        if not text.strip():
            found = "no text after the label; remove the line" if tab else "no tab"
            raise UserError(f"{where}:{number}: expected `label<TAB>text`, found {found}.")
        if normal(label) not in indices:
            legend = ", ".join(f"{k} ({name})" for k, name in enumerate(classes))
            raise UserError(
                f"{where}:{number}: label '{label}' is not one of {legend}; correct it, or name the "
                "classes of your own files with corpus=speeches corpus.classes=[...]."
            )
        rows.append((indices[normal(label)], text.strip()))
    return rows


def normal(label: str) -> str:
    """Return a label, or a name from a command line, without spaces around it and in the normal form NFC."""
    return nfc(label.strip())
