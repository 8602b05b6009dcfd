"""Reading sentence pairs: errors with file and line, cleaning of train, and counts of the TED pairs."""

from __future__ import annotations

import os
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
    "train.nl": b"Goedendag.\nHet huis is rood.\n",
    "dev.de": b"Ja.\n",
    "dev.nl": b"Ja.",
    "test.de": b"\xef\xbb\xbfNein.\r\nHier.\r\n",
    "test.nl": "Nee\u00a0!\nHier.".encode(),
}
OFF = {"markup": False, "words": None, "ratio": None, "duplicates": False}
RULES = {"markup": True, "words": 100, "ratio": 3, "duplicates": True}


def read(**changes: bytes | None) -> Pairs:
    files = {**FILES, **{name.replace("_", "."): content for name, content in changes.items()}}
    files = {name: content for name, content in files.items() if content is not None}
    return parse(files, "own", "here", source="de", target="nl", clean=OFF)


def folder(tmp_path: Path, **changes: bytes) -> Path:
    for name, content in {**FILES, **changes}.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def ted(root: Any, **changes: Any) -> dict[str, Any]:
    return {**group("corpus", "ted"), "root": root and str(root), **changes}


def test_lines_are_paired_whatever_their_line_ends() -> None:
    corpus = read()
    assert corpus.train == [("Guten Tag.", "Goedendag."), ("Das Haus ist rot.", "Het huis is rood.")]
    assert corpus.dev == [("Ja.", "Ja.")]
    assert corpus.test == [("Nein.", "Nee\u00a0!"), ("Hier.", "Hier.")]
    assert corpus.read == 2 and set(corpus.cleaned.values()) == {0}


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("train_nl", b"Goedendag.\n", r"here/train.de:2: train.nl ends before this line \(1 lines against 2\)"),
        ("test_de", b"Nein.\nHier.\nDa.\n", r"here/test.de:3: test.nl ends before this line \(2 lines against 3\)"),
        (
            "train_de",
            b"Guten Tag.\n \t\n",
            r"here/train.de:2: the line has no text; remove it from train.de and train",
        ),
        ("dev_nl", b"Ja\xe9.", r"here/dev.nl:1: byte 0xe9 is not UTF-8"),
        ("dev_nl", b"", r"here/dev.nl:1: the file is empty"),
    ],
)
def test_an_error_names_the_file_and_the_line(file: str, content: bytes, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read(**{file: content})


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
    remaining, counts = cleaned_pairs(pairs, {"markup": True, "words": 5, "ratio": 3, "duplicates": True})
    assert remaining == [pairs[0], pairs[4], pairs[5], pairs[8]]
    assert counts == {"markup": 2, "words": 1, "ratio": 1, "duplicates": 1}
    assert cleaned_pairs(pairs, OFF) == (pairs, dict.fromkeys(counts, 0))


def test_dev_and_test_are_never_cleaned() -> None:
    files = {**FILES, "test.de": b"<url>\nHier.\n"}
    corpus = parse(files, "own", "here", source="de", target="nl", clean=RULES)
    assert corpus.test[0] == ("<url>", "Nee\u00a0!")


def test_any_folder_of_any_two_languages(tmp_path: Path) -> None:
    root = folder(tmp_path)
    corpus = load_pairs(ted(root, source="nl", target="de"))
    assert corpus.train[0] == ("Goedendag.", "Guten Tag.") and corpus.where == str(root.resolve())
    assert corpus.identity != load_pairs(ted(root, source="de", target="nl")).identity
    with pytest.raises(UserError, match=r"train.en: there is no such file; .*corpus.source=en.*this one has dev.de"):
        load_pairs(ted(root))
    with pytest.raises(UserError, match="corpus.root .*nowhere.*there is no such folder"):
        load_pairs(ted(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"corpus.clean leaves no pair of train"):
        load_pairs(ted(root, source="nl", target="de", clean={**RULES, "words": 1, "ratio": 1}))


@pytest.mark.parametrize("kind", ["broken link", "folder", "pipe", "device"])
@pytest.mark.parametrize("name", FILES)
def test_what_has_the_name_of_a_file_is_read_or_is_an_error(kind: str, name: str, tmp_path: Path) -> None:
    path = folder(tmp_path) / name
    path.unlink()
    make = {"broken link": lambda: path.symlink_to("x"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}
    make.get(kind, lambda: path.symlink_to("/dev/zero"))()
    with pytest.raises(UserError, match=f"{name} is a {kind.replace('link', 'symbolic link')}, and"):
        load_pairs(ted(tmp_path, source="de", target="nl"))


def test_files_with_other_line_ends_stay_aligned() -> None:
    assert read(train_de=FILES["train.de"].replace(b"\n", b"\r")).train == read().train
    with pytest.raises(UserError, match=r"train.de:2: train.nl ends before this line"):
        read(train_de=b"Guten Tag.\rDas Haus.", train_nl=b"Goedendag.")


def test_the_search_order_is_root_environment_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speechformer.corpora.files.cache_directory", lambda: tmp_path / "cache")
    monkeypatch.delenv("SPEECHFORMER_DATA", raising=False)
    auto = OmegaConf.to_container(compose("task=translate", "corpus=auto"), resolve=True)
    assert load(auto).name == "sample"  # type: ignore
    with pytest.raises(UserError, match=r"No TED pairs .*python -m speechformer.download ted"):
        load_pairs(ted(None))
    for place in ("cache/ted-en-fr", "data/ted-en-fr"):
        (tmp_path / place).mkdir(parents=True)
        for name, content in FILES.items():
            file = name.replace(".de", ".en").replace(".nl", ".fr")
            (tmp_path / place / file).write_bytes(content)
    assert load(auto).where == str((tmp_path / "cache/ted-en-fr").resolve())  # type: ignore
    monkeypatch.setenv("SPEECHFORMER_DATA", str(tmp_path / "data"))
    assert load_pairs(ted(None)).where == str((tmp_path / "data/ted-en-fr").resolve())


def test_a_corpus_of_another_task_is_an_error() -> None:
    for task, corpus in (("translate", "speeches"), ("lm", "ted"), ("classify", "digits")):
        with pytest.raises(
            UserError, match=rf"task={task} reads .*, and corpus={corpus} has none; set corpus=auto, "
        ):
            load(OmegaConf.to_container(compose(f"task={task}", f"corpus={corpus}"), resolve=True))  # type: ignore


def test_a_language_that_the_sample_lacks_is_an_error() -> None:
    with pytest.raises(UserError, match=r"corpus=sample has no language de; it has .*train.en"):
        load_pairs({**group("corpus", "sample"), "source": "de"})


def test_digits_are_reversed_and_test_extrapolates_to_longer_strings() -> None:
    corpus = load_pairs(group("corpus", "digits"))
    for source, target in corpus.train[:100] + corpus.dev + corpus.test:
        assert target.split() == source.split()[::-1]
    lengths = {
        part: {len(source.split()) for source, _ in getattr(corpus, part)} for part in ("train", "dev", "test")
    }
    assert max(lengths["train"]) == 20 and lengths["dev"] <= lengths["train"]
    assert lengths["test"] == set(range(2, 41))
    assert not {source for source, _ in corpus.dev + corpus.test} & {source for source, _ in corpus.train}


def test_counts_of_the_ted_pairs(ted_pairs: Pairs) -> None:
    """Oracle: counts by other code: 30,000 lines, 1,928 of metadata, 27,865 without exact duplicates of pairs."""
    assert (ted_pairs.read, len(ted_pairs.dev), len(ted_pairs.test)) == (30000, 887, 1305)
    assert ted_pairs.cleaned["markup"] == 1928
    duplicates = parse_again(ted_pairs, {**OFF, "markup": True, "duplicates": True})
    assert len(duplicates) == 27865
    assert sum(len(source.split()) > 30 for source, _ in ted_pairs.test) == 131
    assert any("\u00a0" in target for _, target in ted_pairs.test)


def parse_again(corpus: Pairs, clean: dict[str, Any]) -> list[tuple[str, str]]:
    return load_pairs(ted(corpus.where, clean=clean)).train
