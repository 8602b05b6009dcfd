"""The audit finds planted duplicates; on the real speeches, the counts of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import call
from conftest import group

from speechformer.audit import audit, audit_pairs, main, report, report_pairs
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


def test_planted_duplicates_and_conflicts_are_found(planted: Corpus) -> None:
    findings = audit(planted)
    assert findings["files"]["train_CLS.tsv"]["repeated"] == {"exact": 2, "same": 0, "near": 0}
    assert findings["between"]["test_CLS.tsv"]["train_CLS.tsv"] == {"exact": 0, "same": 1, "near": 0}
    assert findings["between"]["test_CLS.tsv"]["train_LM.txt"] == {"exact": 1, "same": 0, "near": 0}
    assert findings["between"]["test_LM_ann.txt"]["train_CLS.tsv"] == {"exact": 1, "same": 0, "near": 0}
    assert findings["between"]["test_LM_ann.txt"]["train_LM.txt"] == {"exact": 0, "same": 0, "near": 0}  # 3 of 4
    assert findings["label_conflicts"] == {"One two three four five.": ["x", "y"]}
    assert findings["classes"]["train_CLS.tsv"] == {"x": 3, "y": 1}
    # test_CLS: one two three four five Never heard . ; "one" in lower case, Never and heard are not in train_CLS
    assert findings["unknown_words"]["test_CLS.tsv"] == {"of_its_task": 3 / 8, "of_both_tasks": 1 / 8}
    # A lone line . Some more words of . ; its task lacks A, lone, line, of
    assert findings["unknown_words"]["test_LM_ann.txt"] == {"of_its_task": 4 / 9, "of_both_tasks": 1 / 9}
    text = report(findings)
    assert "x and y: One two three four five." in text
    assert "0.8" in text  # how near


def test_the_command_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "a" / "found.json"
    for _ in range(2):  # the second time over its own file
        printed, _ = call(main, "corpus=sample", "--json", path)
    assert "test_CLS.tsv in train_CLS.tsv" in printed
    assert json.loads(path.read_text())["corpus"]["name"] == "sample"
    path.write_text("{}")
    with pytest.raises(SystemExit, match="found.json is there already, and is no audit of this corpus"):
        call(main, "corpus=sample", "--json", path)
    assert path.read_text() == "{}"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("corpus=sampel", "corpus has no choice 'sampel'; the valid ones are: .*sample"),
        ("corpus.root=/nowhere", r"No speech files .* in corpus.root \(/nowhere\), which does not exist;"),
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
    findings = audit_pairs(load_pairs({**group("corpus", "ted"), "root": str(tmp_path)}))
    assert findings["read"] == 4 and findings["cleaned"] == {"markup": 1, "words": 0, "ratio": 0, "duplicates": 1}
    assert findings["files"]["test.en"] == {"lines": 4, "words": 11, "longest_line": 5}
    counts = {
        part: [tuple(sides[name].values()) for name in ("en", "fr")] for part, sides in findings["between"].items()
    }
    assert counts == {"test": [(1, 1, 1), (1, 1, 0)], "dev": [(0, 0, 0), (1, 0, 0)]}  # exact, same words, near
    assert [findings["between"][part]["pairs"] for part in ("test", "dev")] == [1, 0]
    assert "Of 4 pairs of train, corpus.clean removes: markup 1" in report_pairs(findings)
