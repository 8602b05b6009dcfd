"""How far to believe a test on a corpus: `python -m speechformer.audit [corpus=...] [--json FILE]`.

Duplicates within the files, between train and test and across the two tasks (exact, the same but for case and
punctuation, or near: `corpora/duplicates.py` says how near); texts with two labels; the balance of the classes;
words that training never saw. Of pairs of sentences (corpus=ted, or task=translate corpus=sample), what is left out
of train and what of dev and test stands in it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from speechformer import console
from speechformer.config import compose
from speechformer.corpora.duplicates import NEAR, kinds_before, kinds_in
from speechformer.corpora.load import load
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.corpora.tokenizer import split_words
from speechformer.errors import run_command

KINDS = ("exact", "same", "near")


def audit(corpus: Corpus) -> dict[str, Any]:
    """Everything that the audit finds, as plain data.

    Returns:
        `files`: lines, words, max_length line, and repeated lines of each kind, of each file;
        `between`: for each test file and each training file, the test lines of each kind that stand there;
        `label_conflicts`: texts with more than one label, and their labels;
        `classes`: lines of each class in each labelled file;
        `unknown_words`: of each test file, the share of its words that no training file of its task has, and that no
        training file has.
    """
    texts = {
        "train_CLS.tsv": [text for _, text in corpus.classify_train],
        "test_CLS.tsv": [text for _, text in corpus.classify_test],
        "train_LM.txt": corpus.lm_train,
        **{f"test_LM_{name}.txt": lines for name, lines in corpus.lm_test.items()},
    }
    texts = {file: lines for file, lines in texts.items() if lines}
    train = [file for file in texts if file.startswith("train")]
    test = [file for file in texts if file.startswith("test")]
    words = {file: [split_words(text) for text in lines] for file, lines in texts.items()}
    known = {file: {word for line in words[file] for word in line} for file in train}

    labels: dict[str, set[int]] = defaultdict(set)
    for label, text in (*corpus.classify_train, *corpus.classify_test):
        labels[text].add(label)
    conflicts = {
        text: [corpus.classes[label] for label in sorted(found)] for text, found in labels.items() if len(found) > 1
    }

    def unknown(file: str, among: list[str]) -> float:
        stream = [word for line in words[file] for word in line]
        vocabulary = set().union(*(known[name] for name in among))
        return sum(word not in vocabulary for word in stream) / len(stream)

    return {
        "corpus": {"name": corpus.name, "where": corpus.where, "sha256": corpus.sha256},
        "near_is": f"Jaccard index of the sets of lower-case words at least {NEAR}",
        "files": {
            file: {
                "lines": len(lines),
                "words": sum(map(len, words[file])),
                "longest_line": max(map(len, words[file])),
                "repeated": counted(kinds_before(lines)),
            }
            for file, lines in texts.items()
        },
        "between": {file: {other: counted(kinds_in(texts[file], texts[other])) for other in train} for file in test},
        "label_conflicts": conflicts,
        "classes": {
            file: {name: sum(label == k for label, _ in rows) for k, name in enumerate(corpus.classes)}
            for file, rows in (("train_CLS.tsv", corpus.classify_train), ("test_CLS.tsv", corpus.classify_test))
            if rows
        },
        "unknown_words": {
            file: {
                "of_its_task": unknown(file, own),
                "of_both_tasks": unknown(file, train),
            }
            for file in test
            if (own := [name for name in train if task_of(name) == task_of(file)])
        },
    }


def audit_pairs(corpus: Pairs) -> dict[str, Any]:
    """The same of pairs of sentences, as plain data.

    Returns:
        `read` and `cleaned`: the pairs in the file of train, and how many each rule of `corpus.clean` leaves out;
        `files`: lines, words (between spaces) and max_length line of each side of each part, train as cleaned;
        `between`: for dev and test, the lines of each kind of each side that stand in train, and the pairs that do.
    """
    parts = {"train": corpus.train, "dev": corpus.dev, "test": corpus.test}
    sides: dict[str, list[str]] = {}
    for part, pairs in parts.items():
        for side, language in enumerate((corpus.source, corpus.target)):
            sides[f"{part}.{language}"] = [pair[side] for pair in pairs]
    trained = set(corpus.train)
    return {
        "corpus": {"name": corpus.name, "where": corpus.where, "sha256": corpus.sha256},
        "near_is": f"Jaccard index of the sets of lower-case words at least {NEAR}",
        "read": corpus.read,
        "cleaned": corpus.cleaned,
        "files": {
            file: {
                "lines": len(lines),
                "words": sum(len(line.split()) for line in lines),
                "longest_line": max(len(line.split()) for line in lines),
            }
            for file, lines in sides.items()
        },
        "between": {
            part: {
                **{
                    language: counted(kinds_in(sides[f"{part}.{language}"], sides[f"train.{language}"]))
                    for language in (corpus.source, corpus.target)
                },
                "pairs": sum(pair in trained for pair in parts[part]),
            }
            for part in ("dev", "test")
        },
    }


def report_pairs(found: dict[str, Any]) -> str:
    """What `audit_pairs` found, as tables for the terminal."""
    corpus = found["corpus"]
    cleaned = ", ".join(f"{rule} {count}" for rule, count in found["cleaned"].items())
    blocks = [f"Corpus {corpus['name']} ({corpus['where']}), sha256 {corpus['sha256'][:16]}..."]
    blocks.append(f"Of {found['read']} pairs of train, corpus.clean leaves out: {cleaned}.")
    rows: list[tuple[str, ...]] = [("file, train as cleaned", "lines", "words", "max_length")]
    for file, about in found["files"].items():
        rows.append((file, *(str(about[name]) for name in ("lines", "words", "longest_line"))))
    blocks.append(console.table(rows))
    rows = [("lines that stand in train", "exact", "same words", "near", "none of these")]
    for part, sides in found["between"].items():
        for language, kinds in sides.items():
            if language == "pairs":
                rows.append((f"{part}, both sides of a pair", str(kinds), "", "", ""))
                continue
            n = found["files"][f"{part}.{language}"]["lines"]
            rows.append((f"{part}.{language}", *(str(kinds[kind]) for kind in KINDS), str(n - sum(kinds.values()))))
    blocks.append(console.table(rows))
    blocks.append(
        "same words: but for case, punctuation and spaces. near: " + found["near_is"] + ".\n"
        "Each line counts once, as the nearest kind. `protocol=clean` takes pairs out of train whose source stands "
        "in test."
    )
    return "\n\n".join(blocks)


def task_of(file: str) -> str:
    """CLS or LM."""
    return file.split("_")[1].partition(".")[0]


def counted(kinds: list[str]) -> dict[str, int]:
    """How many are of each kind."""
    counts = Counter(kinds)
    return {kind: counts[kind] for kind in KINDS}


def report(found: dict[str, Any]) -> str:
    """What `audit` found, as tables for the terminal."""
    corpus = found["corpus"]
    lines = {file: about["lines"] for file, about in found["files"].items()}
    blocks = [f"Corpus {corpus['name']} ({corpus['where']}), sha256 {corpus['sha256'][:16]}..."]
    rows: list[tuple[str, ...]] = [("file", "lines", "words", "max_length", "repeated", "same words", "near")]
    for file, about in found["files"].items():
        repeated = (str(about["repeated"][kind]) for kind in KINDS)
        rows.append((file, str(about["lines"]), str(about["words"]), str(about["longest_line"]), *repeated))
    blocks.append(console.table(rows))
    rows = [("test lines that stand in train", "exact", "", "same words", "near", "none of these")]
    for file, others in found["between"].items():
        for other, kinds in others.items():
            n = lines[file]
            share = f"{100 * kinds['exact'] / n:.1f} %"
            rest = str(n - sum(kinds.values()))
            rows.append(
                (f"{file} in {other}", str(kinds["exact"]), share, str(kinds["same"]), str(kinds["near"]), rest)
            )
    blocks.append(console.table(rows))
    if found["classes"]:
        names = list(next(iter(found["classes"].values())))
        rows = [("lines of each class", *names)]
        for file, counts in found["classes"].items():
            n = sum(counts.values())
            rows.append((file, *(f"{count} ({100 * count / n:.1f} %)" for count in counts.values())))
        blocks.append(console.table(rows))
        conflicts = found["label_conflicts"]
        blocks.append(
            f"Texts with more than one label: {len(conflicts)}"
            + "".join(f"\n  {' and '.join(labels)}: {text[:80]}" for text, labels in list(conflicts.items())[:10])
        )
    rows = [("words of test that are not in train", "of its task", "of both tasks")]
    for file, shares in found["unknown_words"].items():
        rows.append((file, *(f"{100 * share:.1f} %" for share in shares.values())))
    blocks.append(console.table(rows))
    blocks.append(
        "same words: but for case, punctuation and spaces. near: " + found["near_is"] + ".\n"
        "Each line counts once, as the nearest kind. `protocol=clean` takes exact copies out of train."
    )
    return "\n\n".join(blocks)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m speechformer.audit", description=__doc__.split("\n\n")[0])
    parser.add_argument("overrides", nargs="*", help="corpus=speeches, corpus.root=FOLDER, ... as for a run")
    parser.add_argument("--json", type=Path, help="write the findings here as well")
    given = parser.parse_args()

    def command() -> None:
        config: Any = OmegaConf.to_container(compose(given.overrides), resolve=True)
        if config["corpus"]["name"] in ("ted", "digits"):
            config["task"] = {"name": "translate"}
        corpus = load(config)
        found = audit_pairs(corpus) if isinstance(corpus, Pairs) else audit(corpus)
        console.say(report_pairs(found) if isinstance(corpus, Pairs) else report(found))
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    run_command(command)


if __name__ == "__main__":
    main()
