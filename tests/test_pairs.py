"""Reading sentence pairs: errors with file and line, cleaning of train, and counts of the TED pairs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import compose, group
from omegaconf import OmegaConf

from speechformer.corpora.load import load
from speechformer.corpora.pairs import Pairs, cleaned_pairs, load_pairs, parse
from speechformer.errors import UserError

FILES = {
    "train.de": b"Guten Tag.\nDas Haus ist rot.\n",
    "train.nl": b"Goedendag.\r\nHet huis is rood.\r\n",
    "dev.de": b"Ja.\n",
    "dev.nl": b"Ja.",
    "test.de": b"\xef\xbb\xbf<url>\r\nHier.\r\n",
    "test.nl": "Nee\u00a0!\nHier.".encode(),
}
OFF = {"markup": False, "words": None, "ratio": None, "duplicates": False}
RULES = {"markup": True, "words": 100, "ratio": 3, "duplicates": True}


def read(files: dict[str, bytes], clean: dict[str, Any] = RULES) -> Pairs:
    return parse(FILES | files, "own", "here", {"source": "de", "target": "nl", "clean": clean})


def ted(root: Any, **changes: Any) -> dict[str, Any]:
    return {**group("corpus", "ted"), "root": root and str(root), **changes}


def test_lines_are_paired_whatever_their_line_ends() -> None:
    """Dev and test are never cleaned."""
    corpus = read({})
    assert corpus.train == [("Guten Tag.", "Goedendag."), ("Das Haus ist rot.", "Het huis is rood.")]
    assert corpus.dev == [("Ja.", "Ja.")]
    assert corpus.test == [("<url>", "Nee\u00a0!"), ("Hier.", "Hier.")]
    assert corpus.read == 2 and set(corpus.cleaned.values()) == {0}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.nl", b"Goedendag.\n", "here/train.de:2: train.nl ends before this line (1 lines against 2)"),
        ("train.de", b"Guten Tag.\n \t\n", "here/train.de:2: the line has no text; remove it from train.de and"),
        ("dev.nl", b"Ja\xe9.", "here/dev.nl:1: byte 0xe9 is not UTF-8"),
    ],
)
def test_an_error_names_the_file_and_the_line(file: str, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read({file: content})


def test_each_rule_removes_its_pairs_and_counts_each_once() -> None:
    """Oracle: by hand. The first rule that holds counts; pairs at the limit remain."""
    pairs = [
        ("a b", "c d"),
        ("<url> a", "c"),
        ("a", "<talkid> 5 6 7 8 9"),
        ("a " * 6, "c " * 6),
        ("a " * 5, "c " * 5),
        ("a", "c c c"),
        ("a", "c c c c"),
        ("a b", "c d"),
        ("a b", "c"),
    ]
    remaining, counts = cleaned_pairs(pairs, {**RULES, "words": 5})
    assert remaining == [pairs[0], pairs[4], pairs[5], pairs[8]]
    assert counts == {"markup": 2, "words": 1, "ratio": 1, "duplicates": 1}
    assert cleaned_pairs(pairs, OFF) == (pairs, dict.fromkeys(counts, 0))
    with pytest.raises(UserError, match=r"corpus.clean leaves no pair of train"):
        read({}, clean={**RULES, "words": 0.5})


def write(folder: Path, languages: tuple[str, str] = ("de", "nl")) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        part, language = name.split(".")
        (folder / f"{part}.{languages[language == 'nl']}").write_bytes(content)
    return folder


def test_any_folder_of_any_two_languages(tmp_path: Path) -> None:
    root = write(tmp_path / "mine")
    corpus = load_pairs(ted(root, source="nl", target="de"))
    assert corpus.train[0] == ("Goedendag.", "Guten Tag.") and corpus.where == str(root.resolve())
    assert corpus.identity != load_pairs(ted(root, source="de", target="nl")).identity
    with pytest.raises(UserError, match=r"mine/train.en cannot be read"):
        load_pairs(ted(root))
    with pytest.raises(UserError, match="corpus.source and corpus.target are both de"):
        load_pairs(ted(root, source="de", target="de"))
    (root / "dev.nl").unlink()
    with pytest.raises(UserError, match="dev.nl cannot be read"):
        load_pairs(ted(root, source="de", target="nl"))


def test_the_pairs_are_searched_before_the_sample_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speechformer.corpora.files.cache_directory", lambda: tmp_path)
    monkeypatch.delenv("SPEECHFORMER_DATA", raising=False)
    auto: Any = OmegaConf.to_container(compose("task=translate", "corpus=auto"), resolve=True)
    assert load(auto).name == "sample"
    with pytest.raises(UserError, match=r"No pairs .*python -m speechformer.download ted"):
        load_pairs(ted(None))
    with pytest.raises(UserError, match="corpus.root .*nowhere.*does not exist"):
        load_pairs(ted(tmp_path / "nowhere"))
    cache = write(tmp_path / "ted-en-fr", ("en", "fr"))
    assert load(auto).where == load_pairs(ted(None)).where == str(cache.resolve())


@pytest.mark.parametrize(("task", "corpus"), [("translate", "speeches"), ("lm", "ted"), ("classify", "digits")])
def test_a_corpus_of_another_task_is_an_error(task: str, corpus: str) -> None:
    config: Any = OmegaConf.to_container(compose(f"task={task}", f"corpus={corpus}"), resolve=True)
    with pytest.raises(UserError, match=rf"task={task} reads .*, and corpus={corpus} has none; set corpus=auto, "):
        load(config)


def test_a_language_that_the_sample_lacks_is_an_error() -> None:
    with pytest.raises(UserError, match=r"corpus=sample has no train.de; it has .*train.en"):
        load_pairs({**group("corpus", "sample"), "source": "de"})


def test_digits_are_reversed_and_test_extrapolates_to_longer_strings() -> None:
    corpus = load_pairs(group("corpus", "digits"))
    assert all(target == source[::-1] for source, target in corpus.train + corpus.dev + corpus.test)
    lengths = [{len(source.split()) for source, _ in pairs} for pairs in (corpus.train, corpus.test)]
    assert lengths == [{*range(1, 21)}, {*range(2, 41)}]
    assert not {*corpus.dev, *corpus.test} & {*corpus.train}


def test_counts_of_the_ted_pairs(ted_pairs: Pairs) -> None:
    """Oracle: counts by other code: 30,000 lines, 1,928 of metadata, 27,865 without exact duplicates of pairs."""
    assert (ted_pairs.read, len(ted_pairs.dev), len(ted_pairs.test)) == (30000, 887, 1305)
    assert ted_pairs.cleaned["markup"] == 1928
    rules = {**OFF, "markup": True, "duplicates": True}
    assert len(load_pairs(ted(ted_pairs.where, clean=rules)).train) == 27865
