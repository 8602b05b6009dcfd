"""Measure how far a test on a corpus can be trusted: `python -m speechformer.audit [corpus=...] [--json FILE]`.

For speech files it counts duplicates within files, between train and test, and across tasks; texts with two labels;
the lines of each class; and test words that do not occur in train. For sentence pairs it counts what `corpus.clean`
removes from train, and which sentences of dev and test occur in train. `corpora/duplicates.py` defines a duplicate.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechformer import console
from speechformer.config import as_plain, compose
from speechformer.corpora.duplicates import NEAR, kinds_in
from speechformer.corpora.load import load_any
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.corpora.tokenizer import split_words
from speechformer.errors import ArgumentParser, UserError
from speechformer.runs.folder import read_or_none, write_json

KINDS = ("exact", "same", "near")
NEAR_IS = f"Jaccard index of the sets of lower-case words at least {NEAR}"
Rows = list[tuple[str, ...]]


def audit(corpus: Corpus) -> dict[str, Any]:
    """Audit the speech files.

    Returns:
        Plain data. `files`: lines, words, longest line and repeated lines of each kind, of each file;
        `between`: for each test file and each training file, the test lines of each kind that occur there;
        `label_conflicts`: texts with more than one label, and their labels;
        `classes`: lines of each class in each labelled file;
        `unknown_words`: for each test file, the share of its words that no training file of its task has, and that no
        training file has.
    """
    labelled = {"train_CLS.tsv": corpus.classify_train, "test_CLS.tsv": corpus.classify_test}
    texts = {file: [text for _, text in rows] for file, rows in labelled.items()}
    texts |= {"train_LM.txt": corpus.lm_train}
    texts |= {f"test_LM_{name}.txt": lines for name, lines in corpus.lm_test.items()}
    texts = {file: lines for file, lines in texts.items() if lines}
    words = {file: [split_words(text) for text in lines] for file, lines in texts.items()}
    train, test = ([file for file in texts if file.startswith(split)] for split in ("train", "test"))
    of_task = {file: [name for name in train if name.split("_")[1][:2] == file.split("_")[1][:2]] for file in test}
    labels: dict[str, set[int]] = defaultdict(set)
    for label, text in (*corpus.classify_train, *corpus.classify_test):
        labels[text].add(label)
    conflicts = {text: sorted(own) for text, own in labels.items() if len(own) > 1}
    return {
        **about(corpus),
        "files": {file: {**sizes(words[file]), "repeated": count(kinds_in(texts[file]))} for file in texts},
        "between": {file: {other: count(kinds_in(texts[file], texts[other])) for other in train} for file in test},
        "label_conflicts": {text: [corpus.classes[k] for k in own] for text, own in conflicts.items()},
        "classes": {
            file: {name: sum(label == k for label, _ in rows) for k, name in enumerate(corpus.classes)}
            for file, rows in labelled.items()
            if rows
        },
        "unknown_words": {
            file: {
                "of_its_task": unknown_share(words[file], [words[name] for name in own]),
                "of_both_tasks": unknown_share(words[file], [words[name] for name in train]),
            }
            for file, own in of_task.items()
            if own
        },
    }


def audit_pairs(corpus: Pairs) -> dict[str, Any]:
    """Audit sentence pairs.

    Returns:
        Plain data. `read` and `cleaned`: the pairs in the training files, and how many each rule of `corpus.clean`
        removes; `files`: lines, words (between spaces) and longest line of each side of each part, train as cleaned;
        `between`: for dev and test, the lines of each kind of each side that occur in train, and the pairs that do.
    """
    parts, train = {"train": corpus.train, "dev": corpus.dev, "test": corpus.test}, set(corpus.train)
    languages = (corpus.source, corpus.target)
    sides = {
        f"{part}.{language}": [pair[side] for pair in pairs]
        for part, pairs in parts.items()
        for side, language in enumerate(languages)
    }
    return {
        **about(corpus),
        "read": corpus.read,
        "cleaned": corpus.cleaned,
        "files": {file: sizes([line.split() for line in lines]) for file, lines in sides.items()},
        "between": {
            part: {
                **{name: count(kinds_in(sides[f"{part}.{name}"], sides[f"train.{name}"])) for name in languages},
                "pairs": sum(pair in train for pair in parts[part]),
            }
            for part in ("dev", "test")
        },
    }


def about(corpus: Corpus | Pairs) -> dict[str, Any]:
    """Describe the corpus, and what "near" means."""
    return {"corpus": {"name": corpus.name, "where": corpus.where, "sha256": corpus.sha256}, "near_is": NEAR_IS}


def sizes(lines: Sequence[Sequence[str]]) -> dict[str, int]:
    """Count the lines and words of a file, and the words of its longest line."""
    lengths = [len(line) for line in lines]
    return {"lines": len(lengths), "words": sum(lengths), "longest_line": max(lengths)}


def count(kinds: list[str]) -> dict[str, int]:
    """Count the duplicates of each kind."""
    return {kind: kinds.count(kind) for kind in KINDS}


def unknown_share(lines: Sequence[Sequence[str]], files: Sequence[Sequence[Sequence[str]]]) -> float:
    """Compute the share of words, with repetition, that occur in none of `files`."""
    vocabulary = {word for file in files for line in file for word in line}
    words = [word for line in lines for word in line]
    return sum(word not in vocabulary for word in words) / len(words)


def per_cent(part: float, whole: int = 1) -> str:
    return f"{100 * part / whole:.1f} %"


def layout(findings: Mapping[str, Any], blocks: Sequence[str | Rows], removed: str) -> str:
    """Return texts and tables between a line about the corpus and a note on the kinds of duplicates."""
    corpus = findings["corpus"]
    heading = f"Corpus {corpus['name']} ({corpus['where']}), sha256 {corpus['sha256'][:16]}..."
    note = (
        f"same words: except for case, punctuation and spaces. near: {NEAR_IS}.\n"
        f"Each line counts once, as its closest kind. `protocol=clean` removes {removed} from train."
    )
    texts = (block if isinstance(block, str) else console.table(block) for block in blocks)
    return "\n\n".join([heading, *texts, note])


def report(findings: dict[str, Any]) -> str:
    """Format the findings of `audit` as tables for the console."""
    files: Rows = [("file", "lines", "words", "longest", "repeated", "same words", "near")]
    for file, size in findings["files"].items():
        counts = (size["lines"], size["words"], size["longest_line"], *size["repeated"].values())
        files.append((file, *map(str, counts)))
    between: Rows = [("test lines in train", "exact", "", "same words", "near", "none of these")]
    for file, others in findings["between"].items():
        n = findings["files"][file]["lines"]
        for other, kinds in others.items():
            exact, same, near = kinds.values()
            counts = (str(exact), per_cent(exact, n), str(same), str(near), str(n - exact - same - near))
            between.append((f"{file} in {other}", *counts))
    blocks: list[str | Rows] = [files, between]
    if findings["classes"]:
        classes: Rows = [("lines of each class", *next(iter(findings["classes"].values())))]
        for file, lines in findings["classes"].items():
            n = sum(lines.values())
            classes.append((file, *(f"{own} ({per_cent(own, n)})" for own in lines.values())))
        conflicts = findings["label_conflicts"]
        examples = [f"\n  {' and '.join(labels)}: {text[:80]}" for text, labels in list(conflicts.items())[:10]]
        blocks += [classes, f"Texts with more than one label: {len(conflicts)}{''.join(examples)}"]
    unknown: Rows = [("test words that are not in train", "of its task", "of both tasks")]
    unknown += [(file, *map(per_cent, shares.values())) for file, shares in findings["unknown_words"].items()]
    return layout(findings, [*blocks, unknown], "exact copies")


def report_pairs(findings: dict[str, Any]) -> str:
    """Format the findings of `audit_pairs` as tables for the console."""
    cleaned = ", ".join(f"{rule} {removed}" for rule, removed in findings["cleaned"].items())
    files: Rows = [("file, train as cleaned", "lines", "words", "longest")]
    files += [(file, *map(str, size.values())) for file, size in findings["files"].items()]
    between: Rows = [("lines in train", "exact", "same words", "near", "none of these")]
    for part, sides in findings["between"].items():
        for language, kinds in list(sides.items())[:2]:
            rest = findings["files"][f"{part}.{language}"]["lines"] - sum(kinds.values())
            between.append((f"{part}.{language}", *map(str, (*kinds.values(), rest))))
        between.append((f"{part}, both sides of a pair", str(sides["pairs"]), "", "", ""))
    read = f"Of {findings['read']} pairs of train, corpus.clean removes: {cleaned}."
    return layout(findings, [read, files, between], "pairs whose source appears in test")


def write(findings: dict[str, Any], path: Path) -> None:
    """Write the findings as JSON; a file that holds anything but findings of an audit is not overwritten."""
    if os.path.lexists(path) and (read_or_none(path, "object") or {}).keys() != findings.keys():
        raise UserError(f"{path} is there already, and is no audit of this corpus. Choose another file or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, findings)


def audit_corpus(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    corpus = load_any(as_plain(compose(arguments.overrides)))
    findings = audit_pairs(corpus) if isinstance(corpus, Pairs) else audit(corpus)
    console.say(report_pairs(findings) if isinstance(corpus, Pairs) else report(findings))
    if arguments.json:
        write(findings, arguments.json)


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m speechformer.audit", description=__doc__.split("\n\n")[0])
    parser.add_argument("overrides", nargs="*", help="corpus=speeches, corpus.root=FOLDER, ... as for a run")
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    parser.run(audit_corpus)


if __name__ == "__main__":
    main()
