"""Read the speech files strictly: who said it, and what was said.

    train_CLS.tsv, test_CLS.tsv    one sentence a line: label TAB text; a label is a number, 0, 1, 2, ..., or a name
    train_LM.txt                   plain text
    test_LM_<name>.txt             plain text, one file for each of any number of names

`files` describes the encoding. Anything else is an error that names the file and line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechformer.corpora import sample
from speechformer.corpora.files import checksum, find_folder, generated_by, parse_lines, parse_once, read_file
from speechformer.errors import UserError, pick

SPEECH_FILE = re.compile(r"(train|test)_CLS\.tsv|train_LM\.txt|test_LM_.+\.txt", re.DOTALL)
SIMILAR = re.compile(SPEECH_FILE.pattern.replace(".+", ".*"), re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus as read: sentences with the index of their class, and lines of text.

    Attributes:
        where: the folder, or how the corpus was generated.
        sha256: of the names and contents of its files.
        classify_train, classify_test, lm_train, lm_test: empty if the corpus has no files for that task.
    """

    name: str
    where: str
    sha256: str
    classes: list[str]
    classify_train: list[tuple[int, str]]
    classify_test: list[tuple[int, str]]
    lm_train: list[str]
    lm_test: dict[str, list[str]]

    @property
    def identity(self) -> list[str]:
        """What the fingerprint of a run includes besides `sha256`."""
        return self.classes


def speech_files(folder: Path) -> list[Path]:
    """List what has the name of a speech file in a folder; other files are ignored.

    Raises:
        UserError: a name differs from that of a speech file in upper and lower case alone, or names no text.
    """
    for path in folder.iterdir():
        if SIMILAR.fullmatch(path.name) and not SPEECH_FILE.fullmatch(path.name):
            raise UserError(f"{path}: rename it to train_CLS.tsv, test_CLS.tsv, train_LM.txt or test_LM_NAME.txt.")
    return [path for path in folder.iterdir() if SPEECH_FILE.fullmatch(path.name)]


def load_corpus(config: Mapping[str, Any]) -> Corpus:
    """Load the corpus of a `corpus` config.

    Args:
        config: `name` is "speeches" (with `root`, `classes`), "sample" (with `seed`, `classes`) or "auto": the
            speeches if they are installed, otherwise the sample, with the config of each under its name.

    Raises:
        UserError: a file is invalid, or the speeches are missing and `name` or `root` demands them.
    """
    name, searched = config["name"], list[str]()
    pick(dict.fromkeys(("auto", "speeches", "sample")), name, "corpus.name")
    if name != "sample":
        speeches = config["speeches"] if name == "auto" else config
        folder, searched = find_folder("speeches", speeches["root"], speech_files)
        if folder is not None:
            files = {path.name: read_file(path) for path in speech_files(folder)}
            return parse_once(parse, files, "speeches", str(folder.resolve()), classes=speeches["classes"])
        if name == "speeches" or speeches["root"] is not None:
            omit = "correct corpus.root, or omit it and get the presidential speeches"
            raise UserError(
                f"No speech files (train_CLS.tsv, train_LM.txt, ...) in {' or in '.join(searched)}; "
                f"{omit if speeches['root'] is not None else 'get them'} with: "
                "python -m speechformer.download speeches"
            )
    generated = config["sample"] if name == "auto" else config
    where = generated_by(generated["seed"], "speeches", searched)
    return parse_once(parse, sample.files(generated["seed"]), "sample", where, classes=generated["classes"])


def parse(files: Mapping[str, bytes], name: str, where: str, classes: Sequence[str]) -> Corpus:
    """Parse the files of a corpus, {name: content}, and ignore others; a `UserError` has `where`/file:line."""
    files = {file: content for file, content in sorted(files.items()) if SPEECH_FILE.fullmatch(file)}
    train, test = (
        parse_labelled(files[file], f"{where}/{file}", classes) if file in files else []
        for file in ("train_CLS.tsv", "test_CLS.tsv")
    )
    lines = {
        file: [line.strip() for line in parse_lines(content, f"{where}/{file}")]
        for file, content in files.items()
        if file.endswith(".txt")
    }
    lm_train = lines.pop("train_LM.txt", [])
    lm_test = {file.removeprefix("test_LM_").removesuffix(".txt"): texts for file, texts in lines.items()}
    return Corpus(name, where, checksum(files), list(classes), train, test, lm_train, lm_test)


def parse_labelled(content: bytes, where: str, classes: Sequence[str]) -> list[tuple[int, str]]:
    """Parse lines of label TAB text into (index of the class, text); a label is the index or name of a class."""
    labels: dict[str, set[int]] = {}
    for k, name in enumerate(classes):
        for label in (str(k), normal(name)):
            labels.setdefault(label, set()).add(k)
    legend = ", ".join(f"{k} ({name})" for k, name in enumerate(classes))
    rows = []
    for number, line in enumerate(parse_lines(content, where), start=1):
        label, tab, text = line.partition("\t")
        if not tab:
            raise UserError(f"{where}:{number}: expected `label<TAB>text`, found no tab.")
        if not text.strip():
            raise UserError(f"{where}:{number}: there is no text after the label; remove the line.")
        indices = labels.get(normal(label), set())
        if not indices:
            raise UserError(
                f"{where}:{number}: label '{label}' is not one of {legend}; correct it, or name the "
                "classes of your own files with corpus=speeches corpus.classes=[...]."
            )
        if len(indices) > 1:
            raise UserError(
                f"{where}:{number}: label '{label}' is the number of one class and the name of another ({legend}); "
                "give the classes names that are no numbers."
            )
        (k,) = indices
        rows.append((k, text.strip()))
    return rows


def normal(label: str) -> str:
    """Return a label without spaces around it, with each accent in one form: "é" has two in Unicode."""
    return unicodedata.normalize("NFC", label.strip())
