"""What is loaded from a run's folder, and what is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from speechformer.analysis.load import given_sentences, given_texts, load_trained, note_unknown
from speechformer.errors import UserError


def copy_of(run: Path, to: Path, *left_out: str) -> Path:
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("tensorboard", *left_out)))


def test_the_weights_are_those_that_the_figures_are_of(a_classifier: Path, a_translator: Path) -> None:
    """protocol=paper: the last, for the best is chosen on test; a translation: the best on dev, or the average."""
    assert load_trained(a_classifier).checkpoint == "last.ckpt"
    assert load_trained(a_classifier, checkpoint="best.ckpt").checkpoint == "best.ckpt"
    assert load_trained(a_translator).checkpoint == "best.ckpt"


def test_an_average_goes_before_the_best(a_translator: Path, tmp_path: Path) -> None:
    run = copy_of(a_translator, tmp_path / "run")
    shutil.copy(run / "best.ckpt", run / "average.ckpt")
    assert load_trained(run).checkpoint == "average.ckpt"


def test_the_names_of_the_classes_are_in_the_checkpoint(a_classifier: Path) -> None:
    assert load_trained(a_classifier).task.hparams["classes"] == ["ann", "bob", "cy"]


def test_an_unfinished_run_can_be_used(a_classifier: Path, tmp_path: Path) -> None:
    run = copy_of(a_classifier, tmp_path / "run", "result.json", "config.yaml", "run.json")
    assert not load_trained(run).finished and load_trained(a_classifier).finished
    assert load_trained(run).checkpoint == "last.ckpt"  # what its best was chosen on cannot be known


def test_a_checkpoint_is_not_executed(a_classifier: Path, tmp_path: Path) -> None:
    """A pickle that would run a command when it is loaded."""

    class Harmful:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    run = copy_of(a_classifier, tmp_path / "run")
    content = torch.load(run / "last.ckpt", weights_only=True)
    torch.save({**content, "more": Harmful()}, run / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt is not a checkpoint of speechformer"):
        load_trained(run)
    assert not (tmp_path / "executed").exists()


def test_refusals(a_classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        load_trained(Path("nowhere"))
    with pytest.raises(UserError, match="has no average.ckpt, best.ckpt, last.ckpt: it is no run"):
        load_trained(tmp_path)
    with pytest.raises(
        UserError, match="is a run of task=classify, which tells speakers apart; this needs .*task=lm"
    ):
        load_trained(a_classifier, "lm")
    with pytest.raises(UserError, match="has no average.ckpt; leave --checkpoint away"):
        load_trained(a_classifier, checkpoint="average.ckpt")
    with pytest.raises(UserError, match="it is one of average.ckpt, best.ckpt, last.ckpt"):
        load_trained(a_classifier, checkpoint="bset.ckpt")
    run = copy_of(a_classifier, tmp_path / "run")
    (run / "last.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="is not a checkpoint of speechformer"):
        load_trained(run)
    content = torch.load(a_classifier / "last.ckpt", weights_only=True)
    content["state_dict"]["architecture.head.2.bias"][0] = float("nan")
    torch.save(content, run / "last.ckpt")
    with pytest.raises(UserError, match="weights of last.ckpt are NaN or infinite"):
        load_trained(run)
    shutil.copy(a_classifier / "last.ckpt", run / "last.ckpt")
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer of speechformer"):
        load_trained(run)
    result = json.loads((a_classifier / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "status": "diverged"}))
    with pytest.raises(UserError, match="diverged: its weights mean nothing"):
        load_trained(run)


def test_texts_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(UserError, match="is not UTF-8"):
        given_texts(["caf\udce9"])
    with pytest.raises(UserError, match="Sentence 2 is empty"):
        given_sentences(["one", "  \u2028 "])


def test_an_empty_line_of_standard_input_is_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n\n")))
    assert given_sentences([]) == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(UserError, match="There is no sentence"):
        given_sentences([])


def test_unknown_words_are_named_shortly() -> None:
    words = ["the", "x" * 100_000, *(f"w{k}" for k in range(30))]
    note = note_unknown(words, [7, *[1] * 31])
    assert note is not None and len(note) < 250 and note.endswith("w18 and 11 more") and "the," not in note
    assert note_unknown(["the"], [7]) is None
