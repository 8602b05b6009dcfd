"""The speech files, read strictly: who said it, and what was said.

    train_CLS.tsv, test_CLS.tsv    one sentence a line: label TAB text, labels 0, 1, 2, ...
    train_LM.txt                   plain text
    test_LM_<name>.txt             plain text, one file for each of any number of names

UTF-8 with or without byte order mark, LF or CRLF, the last line with or without its newline. Anything else is
refused with the file and line: nothing is repaired, and nothing is skipped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechformer.corpora import sample
from speechformer.corpora.files import ENVIRONMENT, checksum, parse_lines, places
from speechformer.errors import UserError, pick

LM_TEST = re.compile(r"test_LM_(.+)\.txt")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus as read: sentences with the index of their class, and lines of text.

    `name` and `where` are for the reader of a result, `sha256` is of the names and bytes of all its files.
    A corpus with files for one task alone has empty lists for the other.
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
        """What a run's fingerprint holds of it besides its files."""
        return self.classes


def find_speeches(root: str | None) -> tuple[Path | None, list[str]]:
    """The folder of the speech files, or None; and the places looked at, in words.

    A `root` that is given is the only place looked at.
    """
    found = places("speeches", root)
    for folder in found.values():
        if folder is not None and folder.is_dir() and any(is_wanted(path) for path in folder.iterdir()):
            return folder, list(found)
    return None, list(found)


def load_corpus(config: Mapping[str, Any]) -> Corpus:
    """The corpus of a `corpus` config.

    `name` is "speeches" (with `root`, `classes`), "sample" (with `seed`, `classes`), or "auto": the speeches where
    they are found, otherwise the sample, with the config of each under its name.

    Raises:
        UserError: there are no speeches (and they were asked for by name or by `root`), or bad files.
    """
    kind = pick({"auto": "auto", "speeches": "speeches", "sample": "sample"}, config["name"], "corpus.name")
    if kind != "sample":
        speeches = config["speeches"] if kind == "auto" else config
        folder, looked_at = find_speeches(speeches["root"])
        if folder is not None:
            files = {path.name: path.read_bytes() for path in folder.iterdir() if is_wanted(path)}
            return remembered(files, "speeches", str(folder.resolve()), speeches["classes"])
        if speeches["root"] is not None:
            raise UserError(
                f"No speech files (train_CLS.tsv, train_LM.txt, ...) in {looked_at[0]}; mend it, or leave "
                "corpus.root away and get the presidents' with: python -m speechformer.download speeches"
            )
        if kind == "speeches":
            raise UserError(
                f"No speech files (train_CLS.tsv, train_LM.txt, ...) in {' or in '.join(looked_at)}; "
                "get them with: python -m speechformer.download speeches"
            )
    own = config["sample"] if kind == "auto" else config
    if type(own["seed"]) is not int:
        raise UserError(f"corpus.seed must be a whole number, not {own['seed']!r}.")
    where = f"made by the package, seed {own['seed']}"
    if kind == "auto" and os.environ.get(ENVIRONMENT):
        where += f"; no speeches in {looked_at[0]}"
    return remembered(sample.files(own["seed"]), "sample", where, own["classes"])


REMEMBERED: dict[str, Corpus] = {}


def remembered(files: Mapping[str, bytes], name: str, where: str, classes: Any) -> Corpus:
    """`parse`, or what it returned for the same files before: the jobs of a sweep share a corpus, and what others
    remember of it."""
    files = {file: content for file, content in files.items() if belongs(file)}
    key = json.dumps([checksum(files), name, where, classes], default=str)
    if key not in REMEMBERED:
        REMEMBERED[key] = parse(files, name, where, classes)
    return REMEMBERED[key]


def parse(files: Mapping[str, bytes], name: str, where: str, classes: Sequence[str]) -> Corpus:
    """A corpus from the contents of its files, by file name; other files are ignored.

    Raises:
        UserError: with `where`/file:line, for what the module's header does not allow.
    """
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"corpus.classes must be a list of names, one for each label from 0 on, not {classes!r}.")
    wanted = {file: content for file, content in sorted(files.items()) if belongs(file)}
    labelled: dict[str, list[tuple[int, str]]] = {"train_CLS.tsv": [], "test_CLS.tsv": []}
    plain: dict[str, list[str]] = {}
    for file, content in wanted.items():
        if file in labelled:
            labelled[file] = parse_labelled(content, f"{where}/{file}", classes)
        else:
            plain[file] = [line.strip() for line in parse_lines(content, f"{where}/{file}")]
    return Corpus(
        name=name,
        where=where,
        sha256=checksum(wanted),
        classes=list(classes),
        classify_train=labelled["train_CLS.tsv"],
        classify_test=labelled["test_CLS.tsv"],
        lm_train=plain.pop("train_LM.txt", []),
        lm_test={LM_TEST.fullmatch(file)[1]: lines for file, lines in plain.items()},  # type: ignore[index]
    )


def is_wanted(path: Path) -> bool:
    """Whether this is a file of a corpus."""
    return belongs(path.name) and path.is_file()


def belongs(file: str) -> bool:
    """Whether a file of this name belongs to a corpus."""
    return file in ("train_CLS.tsv", "test_CLS.tsv", "train_LM.txt") or bool(LM_TEST.fullmatch(file))


def parse_labelled(content: bytes, where: str, classes: Sequence[str]) -> list[tuple[int, str]]:
    """The (index of the class, text) of each line of a label TAB text file; `where` names it in a refusal."""
    labels = {str(k): k for k in range(len(classes))}
    legend = ", ".join(f"{k} ({name})" for k, name in enumerate(classes))
    rows = []
    for number, line in enumerate(parse_lines(content, where), start=1):
        label, tab, text = line.partition("\t")
        if not tab:
            raise UserError(f"{where}:{number}: there is no tab; a line is a label, a tab and a text.")
        if not text.strip():
            raise UserError(f"{where}:{number}: there is no text after the label; remove the line.")
        if label.strip() not in labels:
            raise UserError(
                f"{where}:{number}: label '{label}' is not one of {legend}; mend it, or name the "
                "classes of your own files with corpus=speeches corpus.classes=[...]."
            )
        rows.append((labels[label.strip()], text.strip()))
    return rows
