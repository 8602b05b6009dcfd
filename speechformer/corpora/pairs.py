"""Pairs of sentences in two languages, read strictly; and what is cleaned out of train.

    train.en, train.fr    one sentence a line; line n of one is the translation of line n of the other
    dev.en, dev.fr        chooses the checkpoint
    test.en, test.fr      is measured once

The endings are `corpus.source` and `corpus.target`. Files of unequal length, an empty side and wrong bytes are
refused with file and line. Of train, pairs that no model should learn from are left out, by rules that count what
they take (`corpus.clean`); dev and test stay as they are, so that a score is of the whole of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechformer.corpora import digits, sample_pairs
from speechformer.corpora.files import ENVIRONMENT, checksum, parse_lines, places
from speechformer.errors import UserError, pick

Pair = tuple[str, str]
PARTS = ("train", "dev", "test")
RULES = ("markup", "words", "ratio", "duplicates")


@dataclass(frozen=True, eq=False)
class Pairs:
    """A parallel corpus as read, train cleaned.

    `name` and `where` are for the reader of a result, `sha256` is of the names and bytes of its files; `read` is the
    number of pairs in the file of train, `cleaned` how many each rule took out of it.
    """

    name: str
    where: str
    sha256: str
    source: str
    target: str
    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]
    read: int
    cleaned: dict[str, int]

    @property
    def identity(self) -> dict[str, Any]:
        """What a run's fingerprint holds of it: the direction, and how train was cleaned."""
        return {"languages": [self.source, self.target], "cleaned": self.cleaned}


def load_pairs(config: Mapping[str, Any]) -> Pairs:
    """The parallel corpus of a `corpus` config.

    `name` is "ted" (with `root`, `source`, `target`, and the rules of `clean`), "sample" or "digits" (made by the
    package), or "auto": the TED talks where they are found, otherwise the sample, with the config of each under its
    name.

    Raises:
        UserError: the corpus has no pairs; there are no files (and they were asked for by name or by `root`), or bad
            ones.
    """
    kind = config["name"]
    if kind == "speeches":
        raise UserError(
            "task=translate needs pairs of sentences, which speeches have not; take corpus=ted, sample or digits."
        )
    pick(dict.fromkeys(("auto", "ted", "sample", "digits")), kind, "corpus.name")
    where = ""
    if kind in ("auto", "ted"):
        own = config["ted"] if kind == "auto" else config
        check(own)
        for place, folder in (looked_at := places("ted-en-fr", own["root"])).items():
            if folder is not None and folder.is_dir() and (own["root"] is not None or any(folder.glob("train.*"))):
                name = "ted" if own["root"] is None else "pairs"
                return parsed(read(folder, own), name, str(folder.resolve()), own)
            if own["root"] is not None:
                raise UserError(f"{place}: there is no such folder.")
        if kind == "ted":
            raise UserError(
                f"No TED pairs (train.{own['source']}, train.{own['target']}, ...) in {' or in '.join(looked_at)}; "
                "get them with: python -m speechformer.download ted"
            )
        if os.environ.get(ENVIRONMENT):
            where = f"; no TED pairs in {next(iter(looked_at))}"
    own = config["sample"] if kind == "auto" else config
    check(own)
    made = digits.files(own["seed"], own["max_length"]) if kind == "digits" else sample_pairs.files(own["seed"])
    return parsed(
        made, "digits" if kind == "digits" else "sample", f"made by the package, seed {own['seed']}{where}", own
    )


def check(config: Mapping[str, Any]) -> None:
    """Refuse settings of another kind than they should be."""

    def refuse(key: str, what: str, value: Any) -> UserError:
        return UserError(f"corpus.{key} must be {what}, not {value!r}.")

    for key in ("source", "target"):
        if type(config[key]) is not str or not config[key]:
            raise refuse(key, "the ending of files, as en", config[key])
    if config["source"] == config["target"]:
        raise UserError(f"corpus.source and corpus.target are both {config['source']}; name two languages.")
    for key, least in (("seed", 0), ("max_length", 5)):
        if key in config and (type(config[key]) is not int or config[key] < least):
            raise refuse(key, f"a whole number of at least {least}", config[key])
    clean = config["clean"]
    if not isinstance(clean, Mapping) or set(clean) != set(RULES):
        raise refuse("clean", f"the rules {', '.join(RULES)}", clean)
    for rule in ("markup", "duplicates"):
        if type(clean[rule]) is not bool:
            raise refuse(f"clean.{rule}", "true or false", clean[rule])
    for rule in ("words", "ratio"):
        if clean[rule] is not None and (type(clean[rule]) not in (int, float) or clean[rule] < 1):
            raise refuse(f"clean.{rule}", "a number of at least 1, or null", clean[rule])


def read(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The six files of a folder.

    Raises:
        UserError: one is missing.
    """
    contents = {}
    for part in PARTS:
        for language in (config["source"], config["target"]):
            file = folder / f"{part}.{language}"
            if not file.is_file():
                found = ", ".join(sorted(path.name for path in folder.glob("*.*"))[:8]) or "nothing"
                raise UserError(
                    f"{file}: there is no such file; a folder of pairs has train, dev and test with the endings "
                    f"corpus.source={config['source']} and corpus.target={config['target']}; this one has {found}."
                )
            contents[file.name] = file.read_bytes()
    return contents


REMEMBERED: dict[str, Pairs] = {}


def parsed(files: Mapping[str, bytes], name: str, where: str, config: Mapping[str, Any]) -> Pairs:
    """`parse`, or what it returned for the same files before: the jobs of a sweep share a corpus."""
    settings = {key: value for key, value in config.items() if key not in ("name", "root")}
    key = json.dumps([checksum(files), name, where, settings], sort_keys=True, default=str)
    if key not in REMEMBERED:
        REMEMBERED[key] = parse(files, name, where, **{key: settings[key] for key in ("source", "target", "clean")})
    return REMEMBERED[key]


def parse(
    files: Mapping[str, bytes], name: str, where: str, *, source: str, target: str, clean: Mapping[str, Any]
) -> Pairs:
    """A parallel corpus from the contents of its six files, by file name.

    Raises:
        UserError: with `where`/file:line, for what the module's header does not allow.
    """
    parts: dict[str, list[Pair]] = {}
    for part in PARTS:
        mend = f"remove it from {part}.{source} and {part}.{target} both"
        sides = []
        for language in (source, target):
            if f"{part}.{language}" not in files:
                raise UserError(f"corpus={name} has no language {language}; it has {', '.join(sorted(files))}.")
            lines = parse_lines(files[f"{part}.{language}"], f"{where}/{part}.{language}", mend)
            sides.append([line.strip() for line in lines])
        if len(sides[0]) != len(sides[1]):
            shorter, longer = sorted(((len(lines), language) for lines, language in zip(sides, (source, target))))
            raise UserError(
                f"{where}/{part}.{longer[1]}:{shorter[0] + 1}: {part}.{shorter[1]} ends before this line "
                f"({shorter[0]} lines against {longer[0]}); line n of one file must translate line n of the other."
            )
        parts[part] = list(zip(*sides))
    train, cleaned = cleaned_pairs(parts["train"], clean)
    if not train:
        raise UserError(f"{where}: corpus.clean leaves no pair of train ({cleaned}); loosen it.")
    return Pairs(
        name=name,
        where=where,
        sha256=checksum(files),
        source=source,
        target=target,
        train=train,
        dev=parts["dev"],
        test=parts["test"],
        read=len(parts["train"]),
        cleaned=cleaned,
    )


def cleaned_pairs(pairs: list[Pair], rules: Mapping[str, Any]) -> tuple[list[Pair], dict[str, int]]:
    """The pairs that are worth learning from, and how many each rule took (the first that holds counts).

    Args:
        rules: `markup`: a side that begins with "<", which is no sentence but a tag; `words`: a side of more words
            than this; `ratio`: one side with more than so many times the words of the other; `duplicates`: a pair
            that stood before. false or null switches a rule off.
    """
    kept: list[Pair] = []
    cleaned = dict.fromkeys(RULES, 0)
    seen: set[Pair] = set()
    for pair in pairs:
        lengths = [len(side.split()) for side in pair]
        if rules["markup"] and any(side.startswith("<") for side in pair):
            cleaned["markup"] += 1
        elif rules["words"] is not None and max(lengths) > rules["words"]:
            cleaned["words"] += 1
        elif rules["ratio"] is not None and max(lengths) > rules["ratio"] * max(1, min(lengths)):
            cleaned["ratio"] += 1
        elif rules["duplicates"] and pair in seen:
            cleaned["duplicates"] += 1
        else:
            kept.append(pair)
            seen.add(pair)
    return kept, cleaned
