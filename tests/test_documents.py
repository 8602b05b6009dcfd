"""Documents of any size. Oracles: `str.split` of the whole text, the tokenizer on whole documents, and slices."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compose, group, run_in
from kills import count_points, killed_at

from speechformer import load
from speechformer.config import as_plain
from speechformer.corpora.documents import Documents, load_documents, split_documents
from speechformer.corpora.files import cache_directory
from speechformer.corpora.load import load as load_corpus
from speechformer.corpora.special_tokens import END, IGNORE, UNKNOWN
from speechformer.corpora.stories import folder_of
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data import documents
from speechformer.data.batches import EvaluationBatches, WindowBatches
from speechformer.data.documents import DocumentData
from speechformer.data.speeches import TextSize
from speechformer.errors import UserError
from speechformer.tasks.language_model import LanguageModel, per_unit
from speechformer.tasks.registry import build_data

TEXT = {
    "train_LM.txt": "One fish.\nTwo fish.\n\nRed  fish ünd blue.\n\n\nLast one",
    "test_LM_a.txt": "A fish.\n\nTwo fish.",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_directory()


def corpus_of(folder: Path, files: dict[str, str], separator: str | None = "blank_line") -> Documents:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return load_documents({"name": "text", "root": str(folder), "separator": separator})


def data_of(corpus: Documents, block_size: int = 4, protocol: str = "paper", **task: Any) -> DocumentData:
    task = group("task", "lm") | {"tokens": "bytes", **task}
    sizes = {"block_size": block_size, "batch_size": 4, "vocab_size": None, "seed": 0}
    return DocumentData(corpus, task=task, protocol=group("protocol", protocol), **sizes)


@pytest.mark.parametrize("separator", ["blank_line", "<|end|>", None])
def test_documents_are_those_of_the_whole_text(separator: str | None, tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["a", "b", " ", "\n", "\r\n", "\n\n", "<|end|>", "<|", "word", "ä"]
    for _ in range(200):
        text = "".join(rng.choice(words) for _ in range(rng.randint(1, 200)))
        (tmp_path / "text").write_bytes(text.encode())
        text = text.replace("\r\n", "\n")
        whole = re.split(r"\n[ \t]*\n", text) if separator == "blank_line" else text.split(separator or "\0")
        expected = [document.strip() for document in whole if document.strip()]
        assert list(split_documents(tmp_path / "text", separator)) == expected


@pytest.mark.parametrize("kind", ["words", "bpe", "bytes"])
def test_a_token_file_holds_the_documents(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the tokens of whole documents, which are encoded line by line."""
    monkeypatch.setattr(documents, "BATCH", 30)
    whole = ["One fish.\nTwo fish.", "Red  fish\u00a0ünd\n\tblue,𝄞 \n\n12!? 13" * 9, "Last one"]
    files = TEXT | {"train_LM.txt": "<end>".join(whole)}
    data = data_of(corpus_of(tmp_path / "text", files, "<end>"), tokens=kind, vocab_size=40)
    expected = [END, *(index for text in whole for index in (*data.tokenizer.encode(text), END))]
    assert data.stream.tolist() == expected
    counts = data.text_counts["train"]
    assert counts["bytes"] == sum(len(text.encode()) + 1 for text in whole)
    assert counts["words"] == sum(len(text.encode().split()) for text in whole)
    assert counts["rows"] == 3
    test = data.streams["test", "a"].tolist()
    assert data.counts["tests"]["a"]["unknown_tokens"] == test.count(UNKNOWN)


def texts_of(data: DocumentData, split: str) -> list[str]:
    """Return the documents between two <eos> of a stream."""
    ids = (data.stream if split == "train" else data.streams[split, ""]).tolist()
    ends = [k for k, index in enumerate(ids) if index == END]
    return [data.tokenizer.decode(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]


def test_only_a_sample_of_a_long_train_is_drawn_for_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = "\n\n".join(f"fish{k} {'word ' * 20}" for k in range(300))
    corpus = corpus_of(tmp_path / "text", TEXT | {"train_LM.txt": train})
    monkeypatch.setattr(documents, "FITTED", len(train) // 3)
    drawn = list(data_of(corpus).vocabulary_texts())
    assert 70 < len(drawn) < 130 and {*drawn} < {*corpus.documents("train")}


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_tokenizing_killed_at_any_point_begins_anew(every: int, tmp_path: Path, cache: Path) -> None:
    """Oracle: the files of the cache of a run that was not killed."""
    train = "\n\n".join(f"Fish number {k} swims in the sea." for k in range(40))  # enough to hold some out
    corpus = corpus_of(tmp_path / "text", TEXT | {"train_LM.txt": train})

    def work() -> None:
        data_of(corpus, protocol="clean", tokens="words")

    def content() -> dict[str, bytes]:
        files = (path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")
        return {path.relative_to(cache).as_posix(): path.read_bytes() for path in files}

    count_points(work, cache)
    expected = content()
    shutil.rmtree(cache)
    points = count_points(work, cache)
    assert points > 20 and any(name.endswith(".bin") for name in expected)
    for point in range(1, points + 1, every):
        shutil.rmtree(cache)
        killed_at(work, cache, point)
        work()
        assert content() == expected, f"killed at point {point} of {points}"


def test_a_complete_cache_is_read_where_nothing_can_be_written(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    corpus = corpus_of(tmp_path / "text", TEXT)
    config = {"seed": 0, "documents": 2, "words": 50}
    expected, stories = texts_of(data_of(corpus), "train"), folder_of(config)
    request.getfixturevalue("no_locks")
    assert texts_of(data_of(corpus), "train") == expected and folder_of(config) == stories
    with pytest.raises(PermissionError):
        data_of(corpus, protocol="clean")


def test_a_changed_text_is_tokenized_again(tmp_path: Path) -> None:
    first = data_of(corpus_of(tmp_path / "text", TEXT))
    changed = TEXT | {"train_LM.txt": TEXT["train_LM.txt"].replace("Red", "Tan")}  # of the same length
    second = data_of(corpus_of(tmp_path / "text", changed))
    assert "Tan  fish ünd blue." in texts_of(second, "train") and "Red  fish ünd blue." in texts_of(first, "train")


def exchange_ids(file: Path) -> None:
    ids = np.fromfile(file, np.int32)
    ids[[1, 2]] = ids[[2, 1]]
    ids.tofile(file)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train.bin", exchange_ids),
        ("counts.json", Path.unlink),
        ("tokenizer.json", lambda file: file.write_bytes(file.read_bytes()[:-1])),
        ("test_LM_stories.txt", lambda file: file.write_text("Another story.")),
        ("sha256.json", lambda file: file.write_text("[]")),
    ],
)
def test_what_is_damaged_in_the_cache_is_made_anew(
    name: str, damage: Callable[[Path], object], cache: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: the cache before."""

    def content() -> dict[Path, bytes]:
        made = data_of(load_documents(group("corpus", "stories") | {"documents": 30, "words": 20}), tokens="bpe")
        assert made.counts["vocabulary"] == len(made.tokenizer)
        return {path: path.read_bytes() for path in cache.rglob("*.*") if path.is_file() and path.name != ".lock"}

    expected = content()
    for file in list(cache.rglob(name)):
        damage(file)
        capsys.readouterr()
        assert content() == expected
        assert f"{file.parent} is damaged: a file is not as it was written" in capsys.readouterr().out


def test_documents_held_out_and_removed(tmp_path: Path) -> None:
    """No document is in two splits; every one of train is somewhere, unless a test has it."""
    texts = [f"{k} fish, " * (1 + k % 12) + "the end" for k in range(300)]
    files = {"train_LM.txt": "\n\n".join(texts), "test_LM_a.txt": "\n\n".join([*texts[:20], texts[19], "new"])}
    corpus = corpus_of(tmp_path / "text", files)
    clean, paper = data_of(corpus, protocol="clean"), data_of(corpus)
    train, validation = set(texts_of(clean, "train")), set(texts_of(clean, "validation"))
    assert not train & validation and train | validation == set(texts[20:])
    assert 10 < len(validation) < 50  # a tenth of 280: three standard deviations are 15
    assert clean.chosen_on == "validation" and paper.chosen_on == "test" and texts_of(paper, "train") == texts
    names = ("train", "validation", "removed_from_train", "test_in_train", "test")
    assert [clean.counts[name] for name in names] == [len(train), len(validation), 20, 0, 22]
    assert [paper.counts[name] for name in names] == [300, 0, 0, 21, 22]
    named = data_of(corpus_of(tmp_path / "text", {"validation_LM.txt": f"{texts[20]}\n\nother"}), protocol="clean")
    assert texts_of(named, "train") == texts[21:] and texts_of(named, "validation") == [texts[20], "other"]


def test_files_of_a_folder_are_documents(tmp_path: Path) -> None:
    files = {"train_LM/one.txt": "First\n\nstill first", "train_LM/two.txt": "Second", "test_LM_b.txt": "Third one"}
    others = ["test_LM_a.txt~", "test_LM_a.json", "notes.txt", "test_LM_.txt"]
    corpus = corpus_of(tmp_path / "text", {**files, **dict.fromkeys(others, "x")}, separator=None)
    assert corpus.tests == ["b"]
    assert texts_of(data_of(corpus, block_size=3), "train") == ["First\n\nstill first", "Second"]


@pytest.mark.parametrize("joining", ["joined", "separate"])
def test_every_token_is_evaluated_once(joining: str, tmp_path: Path) -> None:
    """Each token but the first <eos> is a target once; kept apart, its inputs are of its document alone."""
    data = data_of(corpus_of(tmp_path / "text", TEXT), 8, documents=joining, stride=3)
    stream = data.streams["test", "a"].tolist()
    for part in (("test", "a"), ("test_sliding", "a")):
        pairs, batches = [], list(EvaluationBatches({part: data.tested[part]}))
        for batch in batches:
            is_scored = batch["targets"] != IGNORE
            pairs += zip(batch["ids"][is_scored].tolist(), batch["targets"][is_scored].tolist())
        assert sorted(pairs) == sorted(itertools.pairwise(stream))
        ends = torch.cat([(batch["ids"][:, 1:] == END).flatten() for batch in batches])  # <eos> begins a document
        assert ends.any() == (joining == "joined")


@pytest.mark.parametrize("lengths", [200 * [100], [3, 50_000], [50_000, 3, 3, 3]])
def test_evaluation_during_training_takes_a_fixed_sample(lengths: list[int], tmp_path: Path) -> None:
    files = {"train_LM.txt": "\n\n".join("x" * n for n in lengths), "test_LM_a.txt": "short story"}
    corpus = corpus_of(tmp_path / "text", files)
    for limit in (1000, 10**9):
        data, again = (data_of(corpus, 8, documents="separate", evaluation_tokens=limit) for _ in range(2))
        batches = [batch for batch in data.val_dataloader() if batch["part"] == ("train", "")]
        number = sum(int((batch["targets"] != IGNORE).sum()) for batch in batches)
        whole = len(data.stream) - 1
        assert 900 <= number <= 1000 if limit < whole else number == whole
        assert data.counts["evaluated_tokens"] == number
        pairs = zip(batches, again.val_dataloader())
        assert all(torch.equal(batch["targets"], other["targets"]) for batch, other in pairs)


def test_training_windows_are_slices_of_the_text() -> None:
    def rows(batches: WindowBatches) -> torch.Tensor:
        return torch.cat([batch["ids"] for batch in batches])

    arguments = torch.arange(1000) + 4, 9, 64, 3
    batches = WindowBatches(*arguments)
    first, second = rows(batches), rows(batches)
    assert first.shape == (992, 9) and (first.diff(dim=1) == 1).all() and len(first[:, 0].unique()) > 500
    assert not torch.equal(first, second)
    resumed = WindowBatches(*arguments)
    resumed.load_state_dict({"epoch": 0, "given": 5})
    assert torch.equal(rows(resumed), first[5 * 64 :])
    shards = torch.cat([rows(WindowBatches(*arguments, (k, 2))) for k in (0, 1)])
    assert sorted(shards.tolist()) == sorted(first.tolist())


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"test_LM_a.txt": "x y z"}, "has no train_LM.txt, which task=lm needs"),
        ({"train_LM.txt": "x", "test_LM_a.txt": "x y z"}, "train text has 4 tokens and needs at least 5"),
        ({"train_LM.txt": "", "test_LM_a.txt": "x y z"}, r"train_LM\.txt:1: the file is empty"),
        ({"train_LM.txt": " ", "test_LM_a.txt": "x y z"}, "train text has 1 tokens and needs at least 5"),
        ({"train_LM.txt": "x\nz\0y", "test_LM_a.txt": "x y z"}, r"train_LM\.txt:2: there is a NUL character"),
        (
            {"train_LM.txt": "one\ntwo\nthr\udce9e\n", "test_LM_a.txt": "x"},
            r"train_LM\.txt:3: byte 0xe9 is not UTF-8",
        ),
        ({"train_LM.txt": "x y z", "test_LM_mean.txt": "x"}, "'mean' is the name of the mean"),
    ],
)
def test_errors(files: dict[str, str], sentence: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=sentence):
        data_of(load_documents({"name": "text", "root": str(tmp_path / "text"), "separator": "blank_line"}))


STORIES = ["corpus=stories", "corpus.documents=30", "corpus.words=20", "task=lm", "task.tokens=bytes"]


def test_a_recurrent_network_has_joined_documents() -> None:
    config = as_plain(compose(*STORIES, "model=rnn", "task.documents=separate"))
    with pytest.raises(UserError, match=r"model=rnn reads one document after another; set task\.documents=joined"):
        LanguageModel.from_config(config, build_data(config, load_corpus(config)))


def test_a_seed_always_gives_the_same_stories() -> None:
    """Oracle: a digest that was recorded; it is part of the identity of runs."""
    config = group("corpus", "stories") | {"documents": 30, "words": 200}
    corpus = load_documents(config)
    assert corpus.sha256.startswith("28d42e24bfa022a1")
    texts = list(corpus.documents("train"))
    assert len(texts) == 30 and min(len(text.split()) for text in texts) >= 200
    assert load_documents(config | {"seed": 1}).sha256 != corpus.sha256


def test_perplexity_per_word_and_bits_per_byte(little: Path) -> None:
    """Oracle: 10 tokens of 3 bits each are 1.5 bits for each of 20 bytes, and 6 for each of 5 words."""
    units = per_unit({"test_perplexity_a": 8.0}, {"a": TextSize(tokens=10, bytes=20, words=5)})
    assert units == {"test_bits_per_byte_a": pytest.approx(1.5), "test_word_perplexity_a": pytest.approx(2**6)}
    words = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", "task=lm", "task.tokens=bytes"]
    config = as_plain(compose(*words))
    data: Any = build_data(config, load_corpus(config))
    for name, size in data.text_sizes.items():
        text = (little / f"test_LM_{name}.txt").read_bytes()
        tokens = sum(len(data.tokenizer.encode(line)) for line in text.decode().splitlines())
        assert size == (tokens - 1, len(text), len(text.split()))


def test_few_words_are_the_most_frequent() -> None:
    texts = ["the cat and the dog", "the cat and a bird"]
    assert Tokenizer.fit(texts, 2).vocabulary[2:] == ["the", "and"]
    assert Tokenizer.fit(texts, None, 2).vocabulary[2:] == ["the", "and", "cat"]


def test_a_continuation_ends_with_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load(run_in(tmp_path / "lm", *STORIES, "trainer.max_steps=1", "trainer.max_epochs=-1"))
    drawn = [*run.tokenizer.encode("Ada"), END, *run.tokenizer.encode("Ivo")]
    monkeypatch.setattr("speechformer.generation.sampling.sample", lambda *_, **__: iter(drawn))
    assert run.generate("Once") == "Once Ada"
