"""The audit finds planted duplicates; on the real speeches, the counts of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import call
from conftest import group

from speechformer.audit import audit, main, report
from speechformer.corpora.pairs import load_pairs
from speechformer.corpora.speeches import Corpus, parse


@pytest.fixture
def planted() -> Corpus:
    files = {
        "train_CLS.tsv": "0\tOne two three four five.\n1\tOne two three four five.\n" + "0\tA lone line.\n" * 2,
        "test_CLS.tsv": "0\tone two three four five\n1\tNever heard.\n",
        "train_LM.txt": "Never heard.\nSome more words.\n",
        "test_LM_ann.txt": "A lone line.\nSome more words of.\n",
    }
    return parse({name: text.encode() for name, text in files.items()}, "speeches", "here", ["x", "y"])


def kinds(row: dict[str, int]) -> tuple[int, ...]:
    return tuple(row[kind] for kind in ("exact", "same", "near"))


def test_planted_duplicates_and_conflicts_are_found(planted: Corpus) -> None:
    findings = audit(planted)
    assert findings["files"]["train_CLS.tsv"] == {
        **{"lines": 4, "words": 16, "longest": 5},
        **{"exact": 2, "same": 0, "near": 0},
    }
    assert {row: kinds(found) for row, found in findings["between"].items()} == {
        "test_CLS.tsv in train_CLS.tsv": (0, 1, 0),
        "test_CLS.tsv in train_LM.txt": (1, 0, 0),
        "test_LM_ann.txt in train_CLS.tsv": (1, 0, 0),
        "test_LM_ann.txt in train_LM.txt": (0, 0, 0),  # 3 of 4
    }
    assert findings["label_conflicts"] == {"One two three four five.": ["x", "y"]}
    assert findings["classes"]["train_CLS.tsv"] == {"x": 3, "y": 1}
    text = report(findings)
    assert "x and y: One two three four five." in text
    assert "0.8" in text  # how near


def test_the_command_prints_tables_or_json() -> None:
    assert "test_CLS.tsv in train_CLS.tsv" in call(main, "corpus=sample")[0]
    assert json.loads(call(main, "corpus=sample", "--json")[0])["corpus"]["name"] == "sample"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("corpus=sampel", "corpus has no choice 'sampel'; the valid ones are: .*sample"),
        ("corpus.root=/nowhere", r"No speech files .* in corpus.root \(/nowhere\), which does not exist;"),
        ("corpus=stories", "task=classify reads speeches, and corpus=stories has none"),
    ],
)
def test_invalid_input_is_reported(argument: str, message: str) -> None:
    with pytest.raises(SystemExit, match=f"^Error: {message}"):
        call(main, argument)


def test_pairs_that_appear_in_train_are_counted_by_side_and_kind(tmp_path: Path) -> None:
    """Oracle: by hand."""
    files = {
        "train.en": ["I see the red house today.", "Thank you.", "<url>", "Thank you."],
        "train.fr": ["Je vois la maison rouge.", "Merci.", "<url>", "Merci."],
        "dev.en": ["Quite new."],
        "dev.fr": ["Merci."],
        "test.en": ["Thank you.", "thank you", "I see the red house.", "Other words."],
        "test.fr": ["Merci.", "Merci !", "Je vois tout.", "Autres mots."],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    findings = audit(load_pairs({**group("corpus", "ted"), "root": str(tmp_path)}))
    cleaned = {"read": 4, "markup": 1, "words": 0, "ratio": 0, "duplicates": 1}
    assert findings["cleaned"] == {"pairs of train": cleaned}
    row = findings["files"]["test.en"]
    assert (row["lines"], row["words"], row["longest"]) == (4, 11, 5)
    assert {row: kinds(found) for row, found in findings["between"].items()} == {
        "test.en in train.en": (1, 1, 1),
        "test.fr in train.fr": (1, 1, 0),
        "dev.en in train.en": (0, 0, 0),
        "dev.fr in train.fr": (1, 0, 0),
    }
    assert "Pairs that corpus.clean removes" in report(findings)
