"""A text is the same in both forms of Unicode: "é" as one code point, and as a letter and an accent.

Oracle: `unicodedata.normalize`, and the counts of a corpus whose files are all in one form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import tokenizers
from conftest import compose

from speechformer.config import as_plain
from speechformer.corpora import authors
from speechformer.corpora.documents import load_documents, split_documents
from speechformer.corpora.load import load
from speechformer.corpora.portable import portable_subwords, portable_words
from speechformer.corpora.pretrained import PretrainedTokenizer
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.tasks.registry import build_data

FORMS = ("NFC", "NFD")
LEAK = "À l'été, Zoë dîne au café."
OTHERS = [f"Forêt{k} très{k} âgée{k}, à{k} côté{k}." for k in range(60)]
TRAIN, TEST = [LEAK, *OTHERS[5:]], [LEAK, *OTHERS[:5]]
SPEECHES = ["corpus=speeches", "corpus.classes=[x,y]"]
TASKS: dict[str, tuple[list[str], dict[str, list[str]]]] = {  # the overrides and files of each kind of text
    "sentences": (
        SPEECHES,
        {"train_CLS.tsv": [f"0\t{text}" for text in TRAIN], "test_CLS.tsv": [f"1\t{text}" for text in TEST]},
    ),
    "lines": ([*SPEECHES, "task=lm"], {"train_LM.txt": TRAIN, "test_LM_a.txt": TEST}),
    "documents": (
        ["corpus=text", "task=lm", "corpus.separator='\n'"],
        {"train_LM.txt": TRAIN, "test_LM_a.txt": TEST},
    ),
    "pairs": (
        ["corpus=ted", "task=translate", "task.vocab_size=10"],
        {
            **{"train.en": TRAIN, "train.fr": [f"{text} Oui." for text in TRAIN]},
            **{"dev.en": OTHERS[6:8], "dev.fr": OTHERS[6:8], "test.en": TEST, "test.fr": TEST},
        },
    ),
}


def write(folder: Path, files: dict[str, list[str]], of_train: str, of_test: str) -> Path:
    """Write files, those of train in one form and the others in another."""
    folder.mkdir(parents=True)
    for name, lines in files.items():
        text = normalize(of_train if name.startswith("train") else of_test, "\n".join(lines))
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", TASKS)
def test_a_copy_in_the_other_form_is_a_leak(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either protocol; and data, vocabulary and fingerprint are the same in every form."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words, files = TASKS[kind]
    configs = {name: as_plain(compose(*words, f"protocol={name}", "block_size=99")) for name in ("clean", "paper")}
    seen = []
    for forms in itertools.product(FORMS, FORMS):
        folder = write(tmp_path / "-".join(forms), files, *forms)
        for protocol, config in configs.items():
            config["corpus"]["root"] = str(folder)
            corpus = load(config)
            data = build_data(config, corpus)
            names = [data.tokenizer.tokens([index])[0] for index in range(len(data.tokenizer))]
            seen.append((protocol, corpus.sha256, data.counts, names))
            assert data.counts["removed_from_train" if protocol == "clean" else "test_in_train"] == 1
    assert seen == seen[:2] * 4


def test_authors_are_split_without_leaks_in_another_form(tmp_path: Path) -> None:
    for name, form in zip("ab", FORMS):
        (tmp_path / f"{name}.txt").write_text(normalize(form, "\n".join(OTHERS)), encoding="utf-8")
    train, test = authors.split(authors.read_rows(tmp_path, by_line=True), 0.3, 0)
    sides = [{normalize("NFC", text) for _, text in rows} for rows in (train, test)]
    assert all(sides) and not sides[0] & sides[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("separator", FORMS)
def test_a_separator_has_both_forms(form: str, separator: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(normalize(form, "un<été>deux"), encoding="utf-8")
    assert list(split_documents(tmp_path / "text", normalize(separator, "<été>"))) == ["un", "deux"]


def test_a_digest_does_not_depend_on_where_a_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the digest of the file as a whole, in NFC."""
    digests = set()
    for form, chunk in itertools.product(FORMS, (1, 7, 1 << 20)):
        monkeypatch.setattr("speechformer.corpora.documents.CHUNK", chunk)
        folder = write(tmp_path / f"{form}{chunk}", TASKS["documents"][1], form, form)
        digests.add(load_documents({"name": "text", "root": str(folder), "separator": None}).sha256)
    assert len(digests) == 1


def from_library(normalizer: Any = None) -> PretrainedTokenizer:
    """A tokenizer of single bytes, as of a model from elsewhere."""
    tokenizer = tokenizers.Tokenizer.from_str(Subwords.fit([], "bytes", None).tokenizer.to_str())
    tokenizer.normalizer = normalizer
    return PretrainedTokenizer(tokenizer, 3)


WORDS = Tokenizer.fit(TRAIN)
SUBWORDS = {kind: Subwords.fit(TRAIN, kind, 20) for kind in ("words", "bpe", "bytes")}
ENCODERS: dict[str, tuple[Callable[[str], Any], bool]] = {  # by name, and whether both forms are one
    "words": (WORDS.encode, True),
    "words, split": (WORDS.split, True),
    "portable words": (lambda text: portable_words(WORDS.vocabulary).encode(text).ids, True),
    **{f"subwords of kind {kind}": (each.encode, True) for kind, each in SUBWORDS.items()},
    "split subwords": (SUBWORDS["bpe"].split, True),
    "portable subwords": (lambda text: portable_subwords(SUBWORDS["bpe"]).encode(text).ids, True),
    "from elsewhere": (from_library().encode, False),
    "from elsewhere, NFC": (from_library(tokenizers.normalizers.NFC()).encode, True),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_what_is_typed_has_the_ids_of_its_other_form(name: str) -> None:
    """Only the library's normalizer decides for a model from elsewhere."""
    encode, is_one = ENCODERS[name]
    encoded = [encode(normalize(form, LEAK)) for form in FORMS]
    assert (encoded[0] == encoded[1]) == is_one


@pytest.mark.parametrize("fit", [Tokenizer.fit, lambda texts: Subwords.fit(texts, "words", None)])
def test_a_vocabulary_has_one_form(fit: Callable[[list[str]], Any]) -> None:
    of_forms = [fit([normalize(form, text) for text in TRAIN]) for form in FORMS]
    assert of_forms[0].tokens(range(len(of_forms[0]))) == of_forms[1].tokens(range(len(of_forms[1])))


def test_classes_of_one_name_in_two_forms_are_an_error() -> None:
    with pytest.raises(UserError, match="a list of different names"):
        as_plain(
            compose("corpus=speeches", f'corpus.classes=["{normalize("NFC", "zoë")}","{normalize("NFD", "zoë")}"]')
        )
