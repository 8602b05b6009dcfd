"""The cache of words is used only if it is complete and of this corpus. Oracle: tokenising again."""

from __future__ import annotations

from pathlib import Path

import pytest
from joblib.externals import loky

from speechformer.corpora import cache, sample, tokenizer
from speechformer.corpora.speeches import Corpus, parse


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(tokenizer, "WORDS", {})


def corpus(seed: int) -> Corpus:
    files = {name: b"".join(content.splitlines(keepends=True)[:50]) for name, content in sample.files(seed).items()}
    files["test_LM_other.txt"] = "One\u2028line\u00a0only.\n\u200b\n".encode()  # no line ends, and a text of one sign
    return parse(files, "sample", "here", ["a", "b", "c"])


def test_cached_words_are_those_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cache.remember_words(corpus(0))
    words = dict(tokenizer.WORDS)
    assert set(words) == set(cache.texts_of(corpus(0)))
    tokenizer.WORDS.clear()
    monkeypatch.setattr(tokenizer, "splitter", lambda: pytest.fail("it was tokenised again"))
    assert cache.remember_words(corpus(0))
    assert words == tokenizer.WORDS


def test_many_texts_are_tokenised_by_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = cache.texts_of(corpus(0))
    words = {text: tokenizer.split_words(text) for text in texts}
    tokenizer.WORDS.clear()
    monkeypatch.setattr(cache, "MANY", len(texts))
    monkeypatch.setattr(cache, "CHUNK", 30)
    monkeypatch.setattr(tokenizer, "splitter", lambda: pytest.fail("it was tokenised in this process"))
    assert not cache.remember_words(corpus(0))
    assert words == tokenizer.WORDS


def test_if_another_process_is_killed_this_one_does_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise loky.BrokenProcessPool

    texts = cache.texts_of(corpus(0))
    monkeypatch.setattr(cache, "MANY", len(texts))
    monkeypatch.setattr(loky.ProcessPoolExecutor, "map", killed)
    assert not cache.remember_words(corpus(0))
    assert set(texts) == set(tokenizer.WORDS)


def test_an_invalid_cache_is_rewritten() -> None:
    cache.remember_words(corpus(0))
    words, path = dict(tokenizer.WORDS), cache.cache_file(corpus(0))
    whole = path.read_bytes()
    changed, foreign = whole.replace(b"the", b"teh", 1), whole.replace(corpus(0).sha256.encode(), b"another")
    for content in (whole[:-9], changed, foreign, b"\xff\xfe["):
        path.write_bytes(content)
        tokenizer.WORDS.clear()
        assert not cache.remember_words(corpus(0))
        assert words == tokenizer.WORDS and path.read_bytes() == whole and len([*path.parent.iterdir()]) == 1


def test_another_tokenizer_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.cache_file(corpus(0))
    assert cache.cache_file(corpus(1)) != before
    for name, value in (("ABBREVIATIONS", ["mr"]), ("__file__", __file__)):  # the latter is its code
        tokenizer.settings.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, name, value)
            assert cache.cache_file(corpus(0)) != before
    tokenizer.settings.cache_clear()


def test_a_folder_that_cannot_be_written_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_directory", lambda: Path("/dev/null/nowhere"))
    assert not cache.remember_words(corpus(0))
    assert tokenizer.WORDS
