"""Documents of any size. Oracles: `str.split` of the whole text, the tokenizer on whole documents, and slices."""

from __future__ import annotations

import errno
import hashlib
import itertools
import math
import multiprocessing
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compose, group, run_in
from kills import count_points, killed_at

from speechformer import load
from speechformer.baselines import measure
from speechformer.config import as_plain
from speechformer.corpora import documents, subwords
from speechformer.corpora.documents import Documents, load_documents, split_documents
from speechformer.corpora.files import cache_directory
from speechformer.corpora.load import load as load_corpus
from speechformer.corpora.load import load_any
from speechformer.corpora.special_tokens import END, IGNORE, UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.data import token_file
from speechformer.data.batches import EvaluationBatches, WindowBatches
from speechformer.data.documents import DocumentData
from speechformer.data.token_cache import TokenCache
from speechformer.data.token_file import open_token_file, write_token_files
from speechformer.errors import UserError
from speechformer.tasks.language_model import LanguageModel
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
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return load_documents({"name": "text", "root": str(folder), "separator": separator})


def data_of(corpus: Documents, block_size: int = 4, protocol: str = "paper", **task: Any) -> DocumentData:
    own = group("task", "lm") | {"tokens": "bytes", **task}
    arguments = {"block_size": block_size, "batch_size": 4, "vocab_size": None, "seed": 0}
    return DocumentData(corpus, task=own, protocol=group("protocol", protocol), **arguments)


@pytest.mark.parametrize("separator", ["blank_line", "<|end|>", "\n", None])
def test_documents_are_those_of_the_whole_text(separator: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(300):
        size = rng.choice([30, 50])
        monkeypatch.setattr(documents, "CHUNK", size)
        words = ["a", "b", " ", "\n", "\n\n", "<|end|>", "<|", "word", "ä"]
        text = "".join(rng.choice(words) for _ in range(rng.randint(1, 200)))
        split = re.split(r"\n[ \t]*\n", text) if separator == "blank_line" else text.split(separator or "\0")
        whole = [part.strip() for part in split]
        pieces = list(split_documents([text[k : k + size] for k in range(0, len(text), size)], separator))
        joined: list[str] = []
        for before, piece in zip([None, *pieces], pieces):
            assert piece.first == (before is None or before.last)
            joined += [""] if piece.first else []
            joined[-1] += piece.text
            begins_a_token = piece.first or piece.text == "" or piece.text[0].isspace()
            assert begins_a_token or max(map(len, text.split())) >= size - 10
        assert joined == [part for part in whole if part]


@pytest.mark.parametrize("kind", ["words", "bpe", "bytes"])
def test_pieces_have_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "REMEMBERED", 200)  # forgotten now and then
    rng = random.Random(1)
    parts = ["fish", "Äg", " ", " ", "\n", "\u00a0", "12", "!?", "é", "𝄞"]
    texts = ["".join(rng.choice(parts) for _ in range(60)) for _ in range(40)]
    tokenizer = Subwords.fit(texts[:20], kind, 50)
    for text in texts:
        cuts = [0, *(k for k in range(1, len(text)) if text[k].isspace() and rng.random() < 0.3), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        ids = tokenizer.encode_pieces(pieces, [k == 0 for k in range(len(pieces))])
        assert np.concatenate(ids).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["words", "bpe", "bytes"])
def test_a_token_file_holds_the_documents(kind: str, tmp_path: Path) -> None:
    data = data_of(corpus_of(tmp_path / "text", TEXT), tokens=kind, vocab_size=40)
    whole = [text.strip() for text in TEXT["train_LM.txt"].split("\n\n")]
    file = data.files["train", ""]
    expected = [END]
    for text in whole:
        expected += [*data.tokenizer.encode(text), END]
    assert file.ids.tolist() == expected
    assert file.ends.tolist() == [k for k, index in enumerate(expected) if index == END]
    assert file.counts["bytes"] == sum(len(text.encode()) + 1 for text in whole)
    assert file.counts["words"] == sum(len(text.split()) for text in whole)
    assert file.counts["documents"] == 3 and file.counts["unknown"] == expected.count(UNKNOWN)
    if kind != "words":
        assert [data.tokenizer.decode(part) for part in parts(expected)] == whole


def parts(ids: list[int]) -> list[list[int]]:
    """The ids between two <eos>."""
    ends = [k for k, index in enumerate(ids) if index == END]
    return [ids[a + 1 : b] for a, b in itertools.pairwise(ends)]


def test_a_large_vocabulary_has_wider_ids(tmp_path: Path) -> None:
    for size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        with write_token_files([tmp_path / "x.bin"], "key", size) as (writer,):
            writer.add([np.array([size - 1, END])], b"word")
        file = open_token_file(tmp_path / "x.bin", "key")
        assert file is not None and file.ids.dtype == dtype and file.ids.tolist() == [END, size - 1, END]


def test_a_damaged_or_foreign_token_file_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with write_token_files([path], "key", 300) as (writer,):
        writer.add([np.array([5, 6, END])], b"two words")
    content = path.read_bytes()
    assert open_token_file(path, "key") is not None
    assert open_token_file(path, "other") is None and open_token_file(tmp_path / "none", "key") is None
    for k in range(len(content)):
        path.write_bytes(content[:k])
        assert open_token_file(path, "key") is None, f"{k} of {len(content)} bytes"
        path.write_bytes(content[:k] + bytes([content[k] ^ 1]) + content[k + 1 :])
        assert open_token_file(path, "key") is None, f"byte {k}"


def test_tokenizing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A run that ends in the middle, or finds the disk full, leaves nothing that a later one takes for whole."""
    corpus = corpus_of(tmp_path / "text", TEXT)
    for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(token_file.TokenWriter, "add", fail)
            is_full = isinstance(error, OSError)
            with pytest.raises(
                UserError if is_full else KeyboardInterrupt,
                match="No space left on device. .*make room" if is_full else None,
            ):
                data_of(corpus)
        assert not list((cache / "tokens").glob("*.bin*.partial")) and not list((cache / "tokens").glob("*.bin"))
    assert len(data_of(corpus).files["train", ""]) > 10


def test_tokenizing_killed_at_any_point_begins_anew(tmp_path: Path, cache: Path) -> None:
    """Oracle: the files of the cache of a run that was not killed."""
    train = "\n\n".join(f"Fish number {k} swims in the sea." for k in range(40))  # enough to hold a part out
    corpus = corpus_of(tmp_path / "text", TEXT | {"train_LM.txt": train})

    def work() -> None:
        data_of(corpus, protocol="clean", tokens="words")

    def content() -> dict[str, bytes]:
        files = (path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")
        files = (path for path in files if path.parent.name != "digests")  # they hold times
        return {path.relative_to(cache).as_posix(): path.read_bytes() for path in files}

    points = count_points(work, cache)
    expected = content()
    assert points > 20 and any(name.endswith(".bin") for name in expected)
    for point in range(1, points + 1):
        shutil.rmtree(cache)
        killed_at(work, cache, point)
        work()
        assert content() == expected, f"killed at point {point} of {points}"


def build(folder: Path, barrier: Any, queue: Any) -> None:
    """Tokenize at the same time as another process, and tell what became of it."""
    count = []
    original = TokenCache.tokenize
    TokenCache.tokenize = lambda *arguments: (count.append(1), original(*arguments))[1]
    barrier.wait()
    data = data_of(load_documents({"name": "text", "root": str(folder), "separator": "blank_line"}))
    queue.put((len(count), hashlib.sha256(data.files["train", ""].ids.tobytes()).hexdigest()))


def test_runs_that_start_at_once_tokenize_once(tmp_path: Path, cache: Path) -> None:
    corpus_of(tmp_path / "text", TEXT)
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=build, args=(tmp_path / "text", barrier, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(count for count, _ in answers) == 2  # train and test, each once
    assert answers[0][1] == answers[1][1]


def test_a_changed_text_is_tokenized_again(tmp_path: Path) -> None:
    first = data_of(corpus_of(tmp_path / "text", TEXT))
    changed = TEXT | {"train_LM.txt": TEXT["train_LM.txt"].replace("Red", "Tan")}  # of the same length
    second = data_of(corpus_of(tmp_path / "text", changed))
    assert first.corpus.sha256 != second.corpus.sha256
    assert first.files["train", ""].ids.tolist() != second.files["train", ""].ids.tolist()
    assert first.files["test", "a"].ids.tolist() == second.files["test", "a"].ids.tolist()


def test_documents_held_out_and_removed(tmp_path: Path) -> None:
    """protocol=clean: no document is in two parts; every one of train is somewhere, unless a test has it."""
    rng = random.Random(2)
    texts = [" ".join(rng.choice(["fish", "bird", "cat"]) for _ in range(12)) + f" {k}" for k in range(300)]
    files = {"train_LM.txt": "\n\n".join(texts), "test_LM_a.txt": "\n\n".join([*texts[:20], "new"])}
    data = data_of(corpus_of(tmp_path / "text", files), protocol="clean")
    held = {
        part: {data.tokenizer.decode(ids) for ids in parts(file.ids.tolist())} for part, file in data.files.items()
    }
    train, validation = held["train", ""], held["validation", ""]
    assert not train & validation and train | validation == set(texts[20:])
    assert 10 < len(validation) < 50  # a tenth of 280: three standard deviations are 15
    assert data.chosen_on == "validation"
    assert data.counts["removed_from_train"] == 20 and data.counts["test_in_train"] == 0
    leaky = data_of(data.corpus).counts
    assert leaky["train"] == 300 and leaky["test_in_train"] == 20 and leaky["removed_from_train"] == 0


def test_files_of_a_folder_are_documents(tmp_path: Path) -> None:
    files = {"train_LM/one.txt": "First\n\nstill first", "train_LM/two.txt": "Second", "test_LM_b.txt": "Third one"}
    data = data_of(corpus_of(tmp_path / "text", files, separator=None), block_size=3)
    assert [data.tokenizer.decode(ids) for ids in parts(data.files["train", ""].ids.tolist())] == [
        "First\n\nstill first",
        "Second",
    ]


@pytest.mark.parametrize("how", ["joined", "separate"])
@pytest.mark.parametrize(("block_size", "stride"), [(3, 3), (8, 3), (4, 1), (50, 50)])
def test_every_token_is_evaluated_once(how: str, block_size: int, stride: int, tmp_path: Path) -> None:
    """Each token but the first <eos> is a target once; kept apart, its inputs are of its document alone."""
    data = data_of(corpus_of(tmp_path / "text", TEXT), block_size, documents=how, stride=stride)
    for part, least in ((("test", "a"), 1), (("test_sliding", "a"), block_size - stride + 1)):
        stream, count = data.files["test", "a"].ids.tolist(), 0
        begins = [k for k, index in enumerate(stream) if index == END][:-1] if how == "separate" else [0]
        windows = data.tested[part].windows
        for start, size, scored in zip(*(x.tolist() for x in (windows.start, windows.size, windows.scored))):
            begin = max(begin for begin in begins if begin <= start)
            end = min((k for k in begins if k > begin), default=len(stream) - 1)
            assert start + size <= end
            for t in range(scored, size):
                assert t + 1 >= min(least, start + t + 1 - begin)
            count += size - scored
        assert count == len(stream) - 1
        rows = [batch for batch in EvaluationBatches({part: data.tested[part]})]
        targets = torch.cat([batch["targets"][batch["targets"] != IGNORE] for batch in rows])
        assert sorted(targets.tolist()) == sorted(stream[1:])
        for batch in rows:
            inputs = torch.where(batch["targets"] != IGNORE, batch["ids"], -1)
            pairs = set(itertools.pairwise(stream)) | {(-1, IGNORE)}
            assert set(zip(inputs.flatten().tolist(), batch["targets"].flatten().tolist())) <= pairs


def test_evaluation_during_training_takes_a_fixed_sample(tmp_path: Path) -> None:
    files = {"train_LM.txt": "\n\n".join(f"story {k} " * 20 for k in range(200)), "test_LM_a.txt": "short story"}
    corpus = corpus_of(tmp_path / "text", files)
    data, whole = (data_of(corpus, evaluation_tokens=n) for n in (2000, 10**9))
    targets = targets_of(data, ("train", ""))
    assert 1900 < len(targets) <= 2000
    assert data.counts["evaluated_tokens"]["train"] == len(targets)
    assert whole.counts["evaluated_tokens"]["train"] == len(whole.files["train", ""]) - 1
    assert torch.equal(targets, targets_of(data_of(corpus, evaluation_tokens=2000), ("train", "")))


def targets_of(data: DocumentData, part: tuple[str, str]) -> torch.Tensor:
    """The targets that are scored in a part."""
    batches = [batch["targets"] for batch in data.val_dataloader() if batch["part"] == part]
    return torch.cat([targets[targets != IGNORE] for targets in batches])


@pytest.mark.parametrize("lengths", [[50_000, 50_000], [3, 50_000], [50_000, 3, 3, 3]])
def test_the_sample_is_bounded_whatever_the_documents(lengths: list[int], tmp_path: Path) -> None:
    files = {"train_LM.txt": "\n\n".join("x" * n for n in lengths), "test_LM_a.txt": "short story"}
    data = data_of(corpus_of(tmp_path / "text", files), 8, documents="separate", evaluation_tokens=1000)
    assert 900 <= len(targets_of(data, ("train", ""))) <= 1000


def test_training_windows_are_slices_of_the_text(tmp_path: Path) -> None:
    stream = torch.arange(1000) + 4
    batches = WindowBatches(stream, 9, 64, seed=3)
    rows = torch.cat([batch["ids"] for batch in batches])
    assert rows.shape == (992, 9) and (rows.diff(dim=1) == 1).all() and len(rows[:, 0].unique()) > 500
    again = WindowBatches(stream, 9, 64, seed=3)
    first = [batch["ids"] for batch in again]
    assert torch.equal(torch.cat(first), rows)
    second = torch.cat([batch["ids"] for batch in again])  # of the next epoch
    assert not torch.equal(second, rows)
    resumed = WindowBatches(stream, 9, 64, seed=3)
    resumed.load_state_dict({"epoch": 0, "given": 5})
    assert torch.equal(torch.cat([batch["ids"] for batch in resumed]), rows[5 * 64 :])
    shards = [torch.cat([batch["ids"] for batch in WindowBatches(stream, 9, 64, 3, (k, 2))]) for k in (0, 1)]
    assert sorted(torch.cat(shards)[:, 0].tolist()) == sorted(rows[:, 0].tolist())


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"test_LM_a.txt": "x y z"}, "has no train_LM.txt, which task=lm needs"),
        ({"train_LM.txt": "x y z"}, "has no test_LM_<name>.txt, which task=lm needs"),
        ({"train_LM.txt": "x", "test_LM_a.txt": "x y z"}, "train text has 4 tokens and needs at least 5"),
        ({"train_LM.txt": "", "test_LM_a.txt": "x y z"}, r"train_LM\.txt:1: the file is empty"),
        ({"train_LM.txt": "x\nz\0y", "test_LM_a.txt": "x y z"}, r"train_LM\.txt:2: there is a NUL character"),
        ({"Train_LM.txt": "x", "test_LM_a.txt": "x"}, r"Train_LM\.txt: rename it to train_LM\.txt"),
        ({"train_LM.txt": "x", "train_LM/a.txt": "x", "test_LM_a.txt": "x"}, "both a file and a folder"),
        ({"train_LM.txt": "x", "test_LM_mean.txt": "x"}, "'mean' is the name of the mean"),
    ],
)
def test_errors(files: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        data_of(corpus_of(tmp_path / "text", files))


def test_invalid_bytes_are_named_with_their_line(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "text", TEXT)
    corpus.parts["train"][0].write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(UserError, match=r"train_LM\.txt:3: byte 0xe9 is not UTF-8"):
        data_of(load_documents({"name": "text", "root": str(tmp_path / "text"), "separator": None}))


def test_other_files_are_no_tests(tmp_path: Path) -> None:
    names = ["test_LM_a.txt~", "test_LM_a.json", "test_LM_b.txt.gz", "notes.txt", "test_LM_.txt"]
    corpus = corpus_of(tmp_path / "text", {**TEXT, **dict.fromkeys(names, "x")})
    assert corpus.tests == ["a"]


def test_lines_of_white_space_are_blank(tmp_path: Path) -> None:
    """As in WikiText."""
    files = {"train_LM.txt": " \n = One = \n \n text . \n \n = Two = \n", "test_LM_a.txt": "x y z"}
    assert [piece.text for piece in corpus_of(tmp_path / "text", files).pieces("train")] == [
        "= One =",
        "text .",
        "= Two =",
    ]


def test_too_few_documents_to_hold_some_out(tmp_path: Path) -> None:
    files = {"train_LM.txt": "only one document", "test_LM_a.txt": "x y z"}
    with pytest.raises(UserError, match=r"1 documents are left to train and 0 are held out.*corpus\.separator"):
        data_of(corpus_of(tmp_path / "text", files), protocol="clean")


def test_long_documents_are_known_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of many chunks is removed from train, and counted where it is not."""
    monkeypatch.setattr(documents, "CHUNK", 40)
    monkeypatch.setattr("speechformer.data.token_cache.CHUNK", 40)
    long = "a long document of many words " * 9
    train = "\n\n".join([*(f"short {k} " * (1 + k % 7) for k in range(40)), long])
    validation = "\n\n".join(f"held {k}" for k in range(5))
    files = {"train_LM.txt": train, "test_LM_a.txt": f"{long}\n\n{long}\n\nother", "validation_LM.txt": validation}
    corpus = corpus_of(tmp_path / "text", files)
    clean, paper = (data_of(corpus, protocol=protocol).counts for protocol in ("clean", "paper"))
    assert (clean["train"], clean["removed_from_train"], clean["test_in_train"]) == (40, 1, 0)
    assert (paper["train"], paper["removed_from_train"], paper["test_in_train"]) == (41, 0, 2)  # both in the test


def test_a_text_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    corpus = corpus_of(tmp_path / "text", TEXT)
    (tmp_path / "text" / "train_LM.txt").write_text("another text", encoding="utf-8")
    with pytest.raises(UserError, match=r"train_LM\.txt: the text changed while it was read"):
        data_of(corpus)
    assert not list(cache.glob("tokens/*.bin")) and not list(cache.glob("tokens/*.json"))


def test_a_large_text_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus_of(tmp_path / "text", TEXT)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    again = corpus_of_folder(tmp_path / "text")
    assert again.sha256


def corpus_of_folder(folder: Path) -> Documents:
    """The corpus in a folder that is there."""
    return load_documents({"name": "text", "root": str(folder), "separator": "blank_line"})


@pytest.mark.parametrize("command", ["baselines", "audit"])
def test_commands_for_sentences_say_so(command: str, capsys: pytest.CaptureFixture) -> None:
    words = ["corpus=stories", "corpus.documents=20", "corpus.words=20", "task=lm"]
    with pytest.raises(UserError, match="corpus=stories"):
        if command == "baselines":
            measure(words, Path("never"))
        else:
            load_any(as_plain(compose(*words)))


def test_a_recurrent_network_has_joined_documents() -> None:
    words = ["task=lm", "corpus=stories", "corpus.documents=20", "corpus.words=20", "task.tokens=bytes", "model=rnn"]
    config = as_plain(compose(*words, "task.documents=separate"))
    with pytest.raises(UserError, match=r"model=rnn reads one document after another; set task\.documents=joined"):
        LanguageModel.from_config(config, build_data(config, load_corpus(config)))


def test_documents_have_no_labelled_sentences() -> None:
    config = as_plain(compose("task=lm", "corpus=stories", "corpus.documents=20", "task.extra_text=true"))
    with pytest.raises(UserError, match=r"task\.extra_text needs labelled sentences, and corpus=stories has none"):
        build_data(config, load_corpus(config))


def test_stories_are_deterministic_and_as_long_as_asked(cache: Path) -> None:
    config = group("corpus", "stories") | {"documents": 30, "words": 200}
    corpus = load_documents(config)
    texts = [piece.text for piece in corpus.pieces("train")]
    assert len(texts) == 30 and min(len(text.split()) for text in texts) >= 200
    for text in texts:  # every fact was told in the introduction
        introduction, *rest = text.split("\n")
        for sentence in " ".join(rest).split(". "):
            if " the " in sentence and " went back to " in sentence:
                name, _, town = sentence.split(", ")[1].partition(" the ")
                assert (
                    f"{name} was a {town.split(' went')[0]} from {town.split('back to ')[1].rstrip('.')}"
                    in introduction
                )
    before = corpus.sha256
    for path in cache.rglob("*_LM*.txt"):
        path.unlink()
    assert load_documents(config).sha256 == before
    assert load_documents(config | {"seed": 1}).sha256 != before


@pytest.mark.parametrize("tokens", ["bpe", "bytes"])
def test_runs_with_subwords(tokens: str, little: Path, tmp_path: Path) -> None:
    """A language model and a classifier train, generate and predict. Oracle of bits per byte: the definition."""
    own = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[a,b,c]", f"task.tokens={tokens}"]
    folder = run_in(
        tmp_path / "lm", *own, "task=lm", "task.vocab_size=60", "trainer.max_steps=3", "trainer.max_epochs=-1"
    )
    run = load(folder)
    assert run.result is not None and isinstance(run.tokenizer, Subwords)
    assert run.generate("We will", tokens=5).startswith("We will")
    metrics = run.result["metrics"]
    for path in little.glob("test_LM_*.txt"):
        text, name = path.read_text(encoding="utf-8").rstrip("\n"), path.stem.removeprefix("test_LM_")
        lines = text.split("\n")
        count = sum(len(run.tokenizer.encode(line)) for line in lines) - 1
        bits = count * math.log2(metrics[f"test_perplexity_{name}"])
        assert metrics[f"test_bits_per_byte_{name}"] == pytest.approx(bits / (len(text.encode()) + 1), rel=1e-5)
        per_word = 2 ** (bits / len(text.split()))
        assert metrics[f"test_word_perplexity_{name}"] == pytest.approx(per_word, rel=1e-4)
    classifier = load(run_in(tmp_path / "classify", *own, "task.vocab_size=60"))
    prediction = classifier.predict("We will mend the wells.")
    assert (
        len(prediction.words)
        == len(prediction.weights or [])
        == len(classifier.tokenizer.encode("We will mend the wells."))
    )
    assert "".join(prediction.words).strip() == "We will mend the wells."


def test_few_words_are_the_most_frequent() -> None:
    texts = ["the cat and the dog", "the cat and a bird"]
    assert Tokenizer.fit(texts, 2).vocabulary[2:] == ["the", "and"]
    assert Tokenizer.fit(texts, None, 2).vocabulary[2:] == ["the", "and", "cat"]


def test_a_continuation_ends_with_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["corpus=stories", "corpus.documents=30", "corpus.words=20", "task=lm", "task.tokens=bytes"]
    run = load(run_in(tmp_path / "lm", *words, "trainer.max_steps=1", "trainer.max_epochs=-1"))
    drawn = [*run.tokenizer.encode("Ada"), END, *run.tokenizer.encode("Ivo")]
    monkeypatch.setattr("speechformer.analysis.continuation.sample", lambda *_, **__: iter(drawn))
    assert run.generate("Once") == "Once Ada"
