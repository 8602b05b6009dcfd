"""A trained run from its folder: which weights, what it can do, and which folders are errors."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speechformer.analysis.command_line import read_sentences, read_texts
from speechformer.analysis.load import TrainedRun, load
from speechformer.errors import UserError

SENTENCE = "We will mend the harbours, my friend."


def copy_of(run: Path, to: Path, *left_out: str) -> Path:
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("tensorboard", *left_out)))


def test_the_weights_are_those_of_the_reported_metrics(a_classifier: Path, a_translator: Path) -> None:
    """protocol=paper: the last, as the best is chosen on test; a translation: the best on dev, or the average."""
    assert load(a_classifier).checkpoint == "last.ckpt"
    assert load(a_classifier, checkpoint="best.ckpt").checkpoint == "best.ckpt"
    assert load(a_translator).checkpoint == "best.ckpt"


def test_an_average_is_preferred_to_the_best(a_translator: Path, tmp_path: Path) -> None:
    run = copy_of(a_translator, tmp_path / "run")
    shutil.copy(run / "best.ckpt", run / "average.ckpt")
    assert load(run).checkpoint == "average.ckpt"


def test_another_checkpoint_is_no_substitute_for_the_best(a_translator: Path, tmp_path: Path) -> None:
    run = copy_of(a_translator, tmp_path / "run")
    (run / "best.ckpt").unlink()
    with pytest.raises(UserError, match="has no best.ckpt, which its metrics are of"):
        load(run)
    assert load(run, "last.ckpt").checkpoint == "last.ckpt"


def test_the_names_of_the_classes_are_in_the_checkpoint(a_classifier: Path) -> None:
    assert load(a_classifier).task.hparams["classes"] == ["ann", "bob", "cy"]


def test_an_unfinished_run_can_be_loaded(a_classifier: Path, tmp_path: Path) -> None:
    run = copy_of(a_classifier, tmp_path / "run", "result.json", "config.yaml", "run.json")
    assert not load(run).finished and load(a_classifier).finished
    assert load(run).checkpoint == "last.ckpt"  # without a result it is unknown what chose the best


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


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("change", [str.lower, str.upper])
def test_a_checkpoint_with_a_part_twice_is_an_error(change: Callable, a_classifier: Path, tmp_path: Path) -> None:
    """torch would read one of them, and finds a part also by its name in upper case."""
    run = copy_of(a_classifier, tmp_path / "run")
    with zipfile.ZipFile(run / "last.ckpt", "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data/0"))
        archive.writestr(change(name), bytes(len(archive.read(name))))
    with pytest.raises(UserError, match="last.ckpt is damaged.*two of its parts have the same name"):
        load(run)


def test_no_damaged_checkpoint_is_believed(a_classifier: Path, tmp_path: Path) -> None:
    """Flipped bits, missing and foreign bytes; oracle: the weights of the undamaged file, or one sentence."""
    run, chance = copy_of(a_classifier, tmp_path / "run"), random.Random(0)
    content, weights = (run / "last.ckpt").read_bytes(), load(run).task.state_dict()
    for trial in range(60):
        damaged, place = bytearray(content), chance.randrange(len(content))
        if trial % 3 == 0:
            damaged[place] ^= 1 << chance.randrange(8)
        elif trial % 3 == 1:
            del damaged[place : place + chance.randrange(1, 4000)]
        else:
            damaged[place : place + 64] = chance.randbytes(64)
        (run / "last.ckpt").write_bytes(damaged)
        try:
            loaded = load(run, checkpoint="last.ckpt").task.state_dict()
        except UserError as error:
            assert str(error).startswith(f"{run / 'last.ckpt'} ") and "\n" not in str(error)
        else:
            assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "none"},
        {"hyper_parameters": {}},
        {"hyper_parameters": None},
        {"state_dict": {}},
        {"state_dict": {"a": 1}},
        {"state_dict": [1]},
        {"hyper_parameters": {"architecture": {"width": "x"}, "recipe": {}, "classes": []}},
    ],
    ids=str,
)
def test_a_strange_checkpoint_is_one_sentence(change: dict, a_classifier: Path, tmp_path: Path) -> None:
    run = copy_of(a_classifier, tmp_path / "run")
    torch.save({**torch.load(run / "last.ckpt", weights_only=True), **change}, run / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt does not fit this version of speechformer: "):
        load(run, checkpoint="last.ckpt")
    torch.save(torch.zeros(2), run / "last.ckpt")
    with pytest.raises(UserError, match="is not a checkpoint of speechformer: "):
        load(run, checkpoint="last.ckpt")


def test_errors_name_the_folder_and_the_remedy(a_classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load(Path("nowhere"))
    with pytest.raises(UserError, match="has no average.ckpt, best.ckpt, last.ckpt: it is not a run"):
        load(tmp_path)
    with pytest.raises(UserError, match="holds several runs; name one of them"):
        load(a_classifier.parent)
    with pytest.raises(
        UserError,
        match="task=classify, which classifies the speaker of a sentence; generate needs a run of task=lm",
    ):
        load(a_classifier).require("generate")
    with pytest.raises(UserError, match="has no average.ckpt. Leave out the checkpoint"):
        load(a_classifier, checkpoint="average.ckpt")
    with pytest.raises(UserError, match="choose one of average.ckpt, best.ckpt, last.ckpt"):
        load(a_classifier, checkpoint="bset.ckpt")
    run = copy_of(a_classifier, tmp_path / "run")
    (run / "last.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="is not a checkpoint of speechformer"):
        load(run)
    content = torch.load(a_classifier / "last.ckpt", weights_only=True)
    content["state_dict"]["model.head.2.bias"][0] = float("nan")
    torch.save(content, run / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt: weights are NaN or infinite"):
        load(run)
    shutil.copy(a_classifier / "last.ckpt", run / "last.ckpt")
    vocabulary = (run / "tokenizer.json").read_text()
    swapped = vocabulary.replace('"the"', '"x"').replace('"a"', '"the"').replace('"x"', '"a"')
    assert swapped != vocabulary
    (run / "tokenizer.json").write_text(swapped)
    with pytest.raises(UserError, match=r"tokenizer.json is damaged, or of another run"):
        load(run)
    vocabulary = json.loads((run / "tokenizer.json").read_text())["vocabulary"]
    for content in ({}, {"vocabulary": "ab"}, {"vocabulary": [*vocabulary[:-1], 3]}):
        (run / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="is not a tokenizer of speechformer"):
            load(run)
    (run / "tokenizer.json").write_text(json.dumps({"vocabulary": [*vocabulary, "another"]}))
    with pytest.raises(UserError, match="tokenizer.json has .* words, and last.ckpt has .* embeddings"):
        load(run)
    result = json.loads((a_classifier / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "status": "diverged"}))
    with pytest.raises(UserError, match="the run diverged. Train again"):
        load(run)


def test_invalid_texts_are_errors() -> None:
    with pytest.raises(UserError, match="is not UTF-8"):
        read_texts(["caf\udce9"])
    with pytest.raises(UserError, match="Sentence 2 is empty"):
        read_sentences(["one", "  \u2028 "])


def test_an_empty_line_of_standard_input_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n\n")))
    assert read_sentences([]) == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(UserError, match="There is no sentence"):
        read_sentences([])


def test_logits_are_those_of_the_model(a_classifier: Path, a_language_model: Path, a_translator: Path) -> None:
    """For a text, for its ids, and for a padded batch of ids."""
    for folder, axes in ((a_classifier, 1), (a_language_model, 2), (a_translator, 2)):
        run = load(str(folder))
        ids = run.read(SENTENCE).ids
        expected = run.model(*(part[None].to(run.task.device) for part in ids)).detach()
        assert run.logits(SENTENCE).ndim == axes and not run.logits(SENTENCE).requires_grad
        assert torch.equal(run.logits(SENTENCE), expected[0]) and torch.equal(run.logits(*ids), expected[0])
        assert torch.equal(run.logits(*(part[None] for part in ids)), expected)
    run = load(a_classifier)
    for inputs in ([], ["a", "b"], ["a", torch.ones(2)], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(UserError, match=r"one text, or one tensor of ids for each input of the model \(ids\)"):
            run.logits(*inputs)
    padded = torch.nn.functional.pad(run.read(SENTENCE).ids[0], (0, 2))
    torch.testing.assert_close(run.logits(padded), run.logits(SENTENCE))


def test_attention_has_weights_tokens_and_mask(
    a_classifier: Path, a_language_model: Path, a_translator: Path
) -> None:
    for folder, names in (
        (a_classifier, ["encoder"]),
        (a_language_model, ["decoder"]),
        (a_translator, ["encoder", "decoder", "cross"]),
    ):
        maps = load(folder).attention(SENTENCE)
        assert [part.name for part in maps] == names
        for part in maps:
            assert part.weights.shape[2:] == part.mask.shape == (len(part.queries), len(part.keys))
            assert part.entropy().shape == part.weights.shape[:2]


def test_each_task_has_its_methods(a_classifier: Path, a_language_model: Path, a_translator: Path) -> None:
    classifier, language_model, translator = map(load, (a_classifier, a_language_model, a_translator))
    assert classifier.predict(SENTENCE).speaker in ("ann", "bob", "cy")
    assert language_model.generate("We will", tokens=5, seed=1) == language_model.generate(
        "We will", tokens=5, seed=1
    )
    assert language_model.generate("the people", tokens=5).startswith("the people")
    assert translator.translate([SENTENCE, " "], beam=1) == [*translator.translate(SENTENCE, beam=1), ""]
    for run, method, arguments in (
        (classifier, TrainedRun.translate, ["x"]),
        (language_model, TrainedRun.predict, ["x"]),
        (translator, TrainedRun.generate, ["x"]),
    ):
        with pytest.raises(UserError, match=f"which .*; {method.__name__} needs a run of task="):
            method(run, *arguments)


@pytest.mark.parametrize("method", ["logits", "attention", "generate"])
def test_an_empty_text_is_an_error(method: str, a_language_model: Path) -> None:
    with pytest.raises(UserError, match="is empty"):
        getattr(load(a_language_model), method)(" ")


def test_a_run_has_its_result_and_model(a_classifier: Path) -> None:
    run = load(a_classifier)
    assert run.result == json.loads((a_classifier / "result.json").read_text()) and len(repr(run)) < 500
    assert run.model is run.task.model and not run.model.training
