"""Measure how far a test on a corpus can be trusted: `python -m speechformer.audit [corpus=...] [--json]`.

It counts repeated lines and test lines that are in train. Of labelled sentences it also counts the lines of each
class, and lists texts with two labels; of pairs it counts what `corpus.clean` removes from train.
`corpora/duplicates.py` defines a duplicate.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speechformer import console
from speechformer.config import as_plain, compose
from speechformer.corpora.duplicates import NEAR, kinds_in
from speechformer.corpora.load import load
from speechformer.corpora.pairs import PARTS, Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.errors import ArgumentParser, UserError

NOTE = f"""exact, same words but for case, punctuation and spaces, or near: a Jaccard index of the sets of words of at
least {NEAR}. Each line counts once, as its closest kind. `protocol=clean` removes exact copies from train."""


def texts_of(corpus: Corpus | Pairs) -> dict[str, list[str]]:
    """Return the lines of each file of a corpus; of train, those of pairs that cleaning leaves."""
    if isinstance(corpus, Pairs):
        sides = {part: zip((corpus.source, corpus.target), zip(*getattr(corpus, part))) for part in PARTS}
        return {f"{part}.{name}": list(lines) for part in PARTS for name, lines in sides[part]}
    labelled = {"train_CLS.tsv": corpus.classify_train, "test_CLS.tsv": corpus.classify_test}
    texts = {file: [text for _, text in rows] for file, rows in labelled.items()} | {"train_LM.txt": corpus.lm_train}
    texts |= {f"test_LM_{name}.txt": lines for name, lines in corpus.lm_test.items()}
    return {file: lines for file, lines in texts.items() if lines}


def audit(corpus: Corpus | Pairs) -> dict[str, Any]:
    """Audit a corpus.

    Returns:
        Plain data. "corpus"; "files": the size of each file, and its lines that repeat an earlier one; "between": for
        each test and training file, the test lines that occur there; "cleaned" of pairs; or "classes", the lines of
        each class, and "label_conflicts", the labels of each text that has several.
    """
    texts = texts_of(corpus)
    findings: dict[str, Any] = {
        "corpus": {"name": corpus.name, "where": corpus.where, "sha256": corpus.sha256},
        "files": {file: count(lines) for file, lines in texts.items()},
        "between": {},
    }
    for file, other in itertools.permutations(texts, 2):
        same_language = isinstance(corpus, Corpus) or Path(file).suffix == Path(other).suffix
        if other.startswith("train") and not file.startswith("train") and same_language:
            findings["between"][f"{file} in {other}"] = count(texts[file], texts[other])
    if isinstance(corpus, Pairs):
        return findings | {"cleaned": {"pairs of train": {"read": corpus.read, **corpus.cleaned}}}
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    labels: dict[str, set[str]] = defaultdict(set)
    for file, rows in {"train_CLS.tsv": corpus.classify_train, "test_CLS.tsv": corpus.classify_test}.items():
        for label, text in rows:
            sizes[file][corpus.classes[label]] += 1
            labels[text].add(corpus.classes[label])
    conflicts = {text: sorted(names) for text, names in labels.items() if len(names) > 1}
    return findings | {"classes": sizes, "label_conflicts": conflicts}


def count(lines: Sequence[str], others: Sequence[str] | None = None) -> dict[str, int]:
    """Count lines, their words and their duplicates of each kind, among themselves or in `others`."""
    words, kinds = [len(line.split()) for line in lines], kinds_in(lines, others)
    size = {"lines": len(lines)} | ({"words": sum(words), "longest": max(words)} if others is None else {})
    return size | {kind: kinds.count(kind) for kind in ("exact", "same", "near")}


def report(findings: dict[str, Any]) -> str:
    """Format the findings of `audit` for the console."""
    import pandas as pd

    corpus, conflicts = findings["corpus"], findings.get("label_conflicts", {})
    titles = {
        "files": "Files, and their lines that repeat an earlier one",
        "between": "Test lines that are in train",
        "classes": "Lines of each class",
        "cleaned": "Pairs that corpus.clean removes",
    }
    blocks = [f"Corpus {corpus['name']} ({corpus['where']}), sha256 {corpus['sha256'][:16]}..."]
    for name, title in titles.items():
        if findings.get(name):
            blocks.append(f"{title}\n{pd.DataFrame(findings[name]).fillna(0).T.astype(int).to_string()}")
    examples = [f"\n  {' and '.join(labels)}: {text[:80]}" for text, labels in list(conflicts.items())[:10]]
    return "\n\n".join([*blocks, f"Texts with more than one label: {len(conflicts)}{''.join(examples)}", NOTE])


def audit_corpus(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    corpus = load(as_plain(compose(arguments.overrides)))
    if not isinstance(corpus, Corpus | Pairs):
        raise UserError(f"corpus={corpus.name} has no lines that could leak; set corpus=speeches, ted or sample.")
    findings = audit(corpus)
    console.write(json.dumps(findings, indent=2, ensure_ascii=False) if arguments.json else report(findings))


def main() -> None:
    """Run the command line."""
    about = "Measure how far a test on a corpus can be trusted."
    parser = ArgumentParser(prog="python -m speechformer.audit", description=about)
    parser.add_argument("overrides", nargs="*", help="corpus=speeches, corpus.root=FOLDER, ... as for a run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.run(audit_corpus)


if __name__ == "__main__":
    main()
