"""A trained run from its folder: which weights, what it can do, and which folders are errors."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speechformer.analysis.command_line import read_sentences
from speechformer.analysis.load import load
from speechformer.errors import UserError
from speechformer.tasks.registry import load_task

SENTENCE = "We will mend the harbours, my friend."


def copy_of(run: Path, to: Path, *left_out: str) -> Path:
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("tensorboard", *left_out)))


def test_the_weights_are_those_of_the_reported_metrics(
    a_classifier: Path, a_translator: Path, tmp_path: Path
) -> None:
    """protocol=paper: the last, as the best is chosen on test; a translation: the average, else the best on dev."""
    assert load(a_classifier).checkpoint == "last.ckpt"
    assert load(a_classifier, checkpoint="best.ckpt").checkpoint == "best.ckpt"
    assert load(a_translator).checkpoint == "best.ckpt"
    run = copy_of(a_translator, tmp_path / "run")
    shutil.copy(run / "best.ckpt", run / "average.ckpt")
    assert load(run).checkpoint == "average.ckpt"
    for name in ("average.ckpt", "best.ckpt"):
        (run / name).unlink()
    with pytest.raises(UserError, match="has no average.ckpt or best.ckpt: .* Another one is loaded if you name it"):
        load(run)
    assert load(run, "last.ckpt").checkpoint == "last.ckpt"


def test_an_unfinished_run_can_be_loaded(a_classifier: Path, tmp_path: Path) -> None:
    """Without a result it is unknown what chose the best checkpoint, so the last is loaded."""
    run = load(copy_of(a_classifier, tmp_path / "run", "result.json", "config.yaml", "run.json"))
    assert not run.finished and run.checkpoint == "last.ckpt"


def test_a_checkpoint_is_not_executed(a_classifier: Path, tmp_path: Path) -> None:
    """A pickle that would run a command when it is loaded."""

    class Harmful:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    run = copy_of(a_classifier, tmp_path / "run")
    content = torch.load(run / "last.ckpt", weights_only=True)
    torch.save({**content, "more": Harmful()}, run / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt is damaged, or is not a checkpoint of speechformer"):
        load(run)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_with_a_part_marked_as_a_folder_is_an_error(a_classifier: Path, tmp_path: Path) -> None:
    """torch would not read that part, and return what is in memory."""
    run = copy_of(a_classifier, tmp_path / "run")
    content = (run / "last.ckpt").read_bytes()
    start = content.rindex(b"PK\x01\x02")  # the last entry of the directory; its attributes follow 38 bytes on
    (run / "last.ckpt").write_bytes(content[: start + 38] + b"\x10" + content[start + 39 :])
    with pytest.raises(UserError, match="last.ckpt is damaged.* is marked as a folder"):
        load(run)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "none"},
        {"hyper_parameters": {"architecture": {"width": "x"}, "recipe": {}, "classes": []}},
        {"state_dict": {"a": 1}},
    ],
    ids=str,
)
def test_a_strange_checkpoint_is_one_sentence(change: dict, a_classifier: Path, tmp_path: Path) -> None:
    run = copy_of(a_classifier, tmp_path / "run")
    torch.save({**torch.load(run / "last.ckpt", weights_only=True), **change}, run / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt does not fit this version of speechformer: "):
        load(run)


@pytest.mark.parametrize("left_out", [[], ["run.json"], ["result.json"], ["run.json", "result.json"]], ids=str)
@pytest.mark.parametrize("name", ["average.ckpt", "checkpoints/2.ckpt"])
def test_a_checkpoint_of_another_run_is_an_error(
    name: str, left_out: list[str], a_classifier: Path, tmp_path: Path
) -> None:
    """A folder without both JSON files does not say which run it is of."""
    run = copy_of(a_classifier, tmp_path / "run", *left_out)
    (run / "checkpoints").mkdir()
    content = torch.load(run / "last.ckpt", weights_only=True)
    (own,) = content["identities"]
    torch.save({**content, "identities": ["0123456789ab"]}, run / name)
    loads: Callable[[], object] = (lambda: load(run, name)) if "/" not in name else (lambda: load_task(run / name))
    if len(left_out) == 2:
        loads()
        return
    with pytest.raises(UserError, match=f"{name} is a checkpoint of run 0123456789ab, and .* holds run {own}: put"):
        loads()


def test_errors_name_the_folder_and_the_remedy(a_classifier: Path, tmp_path: Path) -> None:
    for folder, checkpoint, message in (
        (Path("nowhere"), None, "nowhere: no such folder"),
        (a_classifier / "run.json", None, "run.json: no such folder"),
        (
            tmp_path,
            None,
            r"neither a run's folder \(it has no last.ckpt .*\(it has no config.json",
        ),
        (a_classifier, "average.ckpt", "has no average.ckpt: "),
        (a_classifier, "bset.ckpt", "choose one of average.ckpt, best.ckpt, last.ckpt"),
    ):
        with pytest.raises(UserError, match=message):
            load(folder, checkpoint)


def test_files_that_are_damaged_or_of_another_run_are_errors(a_classifier: Path, tmp_path: Path) -> None:
    run = copy_of(a_classifier, tmp_path / "run")
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    checkpoint["state_dict"]["model.head.2.bias"][0] = float("nan")
    torch.save(checkpoint, run / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt: weights are NaN or infinite"):
        load(run)
    for content in (b"no archive", b""):
        (run / "last.ckpt").write_bytes(content)
        with pytest.raises(UserError, match="is not a checkpoint of speechformer"):
            load(run)
    shutil.copy(a_classifier / "last.ckpt", run / "last.ckpt")
    vocabulary = json.loads((run / "tokenizer.json").read_text())["vocabulary"]
    for content, message in (
        ({"vocabulary": [*vocabulary[:-2], *vocabulary[:-3:-1]]}, "tokenizer.json is damaged, or of another run"),
        ({"words": vocabulary}, "is not a tokenizer of speechformer"),
        ({"vocabulary": [*vocabulary, "another"]}, "tokenizer.json is damaged, or of another run"),
    ):
        (run / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            load(run)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "status": "diverged"}))
    with pytest.raises(UserError, match="the run diverged. Train again"):
        load(run)


def test_texts_are_read_from_arguments_or_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="A sentence is empty"):
        read_sentences(["one", "  \u2028 "])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n\n")))
    assert read_sentences([]) == ["one", "two"]
    with pytest.raises(UserError, match="A sentence is empty"):
        read_sentences([])


def test_logits_and_attention_are_those_of_the_model(
    a_classifier: Path, a_language_model: Path, a_translator: Path
) -> None:
    """Logits of a text, of its ids, and of a batch of ids."""
    for folder, axes, names in (
        (a_classifier, 1, ["encoder"]),
        (a_language_model, 2, ["decoder"]),
        (a_translator, 2, ["encoder", "decoder", "cross"]),
    ):
        run = load(str(folder))
        ids = run.read(SENTENCE).ids
        expected = run.model(*(part[None].to(run.task.device) for part in ids)).detach()
        assert run.logits(SENTENCE).ndim == axes and not run.logits(SENTENCE).requires_grad
        assert torch.equal(run.logits(SENTENCE), expected[0]) and torch.equal(run.logits(*ids), expected[0])
        assert torch.equal(run.logits(*(part[None] for part in ids)), expected)
        maps = run.attention(SENTENCE)
        assert [part.name for part in maps] == names
        assert all(part.weights.shape[2:] == (len(part.queries), len(part.keys)) for part in maps)
        for method in (run.logits, run.attention):
            with pytest.raises(UserError, match="is empty"):
                method(" ")
    for inputs in ([], ["a", torch.ones(2)], [torch.ones(2)]):  # to the translator
        with pytest.raises(UserError, match="one text, or one tensor of ids for each input of the model"):
            run.logits(*inputs)


def test_each_task_has_its_methods(a_classifier: Path, a_language_model: Path, a_translator: Path) -> None:
    for folder, method in ((a_classifier, "translate"), (a_language_model, "predict"), (a_translator, "generate")):
        run = load(folder)
        assert run.result == json.loads((folder / "result.json").read_text()) and not run.model.training
        with pytest.raises(UserError, match=f"is a run of task=.*, which .*; {method} needs a run of task="):
            getattr(run, method)("x")
