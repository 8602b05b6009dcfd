"""What stands in TensorBoard after a run. Oracles: norms from the weights themselves, the maps' entropies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose, run_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from speechformer.analysis.attention_maps import AttentionMap, maps_of
from speechformer.analysis.load import load
from speechformer.config import as_plain
from speechformer.corpora.load import load as load_corpus
from speechformer.runs.folder import read_result
from speechformer.tasks.classify import Classify
from speechformer.tasks.registry import build_data
from speechformer.training.loggers import TensorBoard
from speechformer.training.pictures import BLUE, GAP, MASKED, RED, Pictures, thumbnail
from speechformer.training.run import execute

OWN = ["corpus=speeches", "corpus.classes=[ann,bob,cy]", "model=alibi", "layers=2", "trainer.log_every_n_steps=2"]


def events_of(run: Path) -> Any:
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "scalars": 0}).Reload()


def charts_of(run: Path) -> dict[str, dict[str, list[str]]]:
    """Return the curves of each chart on the page of custom scalars, by the match that TensorBoard makes."""
    events = events_of(run)
    content = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    tags = events.Tags()["scalars"]
    return {
        category.title: {
            chart.title: [tag for tag in tags for pattern in chart.multiline.tag if re.match(pattern, tag)]
            for chart in category.chart
        }
        for category in layout_pb2.Layout.FromString(content).category
    }


def weights_of(run: Path) -> torch.Tensor:
    state = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for value in state.values()])


@pytest.fixture(scope="module")
def words(little: Path) -> list[str]:
    """The command of the run, but for its length."""
    return [*TINY, *OWN, f"corpus.root={little}"]


@pytest.fixture(scope="module")
def run(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in(tmp_path_factory.mktemp("shown"), *words, "trainer.max_epochs=5")


def test_norms_and_metrics_are_logged(run: Path) -> None:
    events, steps = events_of(run), read_result(run)["steps"]
    tags = events.Tags()["scalars"]
    assert {"training/train_loss", "training/lr", "metrics/test_accuracy", "metrics/test_accuracy_of_bob"} <= set(
        tags
    )
    assert min(tags).startswith("metrics/")  # what TensorBoard opens on
    assert [event.step for event in events.Scalars("training/gradient_norm")] == list(range(2, steps + 1, 2))
    norm = weights_of(run).norm().item()
    assert events.Scalars("training/weight_norm")[-1].value == pytest.approx(norm, rel=1e-5)


def test_the_entropy_of_each_head_is_that_of_the_maps(run: Path, words: list[str]) -> None:
    config = as_plain(compose(*words))
    examples = build_data(config, load_corpus(config)).examples()
    assert len(examples) == 3 and {example.label for example in examples} == {0, 1, 2}
    model = load(run).task.cpu().model
    maps = [maps_of(model, example.ids, example.tokens)[0] for example in examples]
    entropies = torch.stack([attention_map.entropy() for attention_map in maps]).mean(0)
    events = events_of(run)
    for layer in (1, 2):
        for head in (1, 2):
            logged = events.Scalars(f"training_attention_entropy/layer{layer}_head{head}")
            assert len(logged) == 5  # one for each evaluation
            assert logged[-1].value == pytest.approx(entropies[layer - 1, head - 1].item(), rel=1e-4)


def test_maps_and_texts_come_with_the_first_few_evaluations_and_the_last(
    run: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that was killed after its second evaluation, and goes on."""
    folder = tmp_path / "again"
    evaluated = [int(point["step"]) for point in read_result(run)["curve"]]

    def killed(self: Classify, batch: Any, loss: Any = Classify.training_loss) -> torch.Tensor:
        if self.global_step == evaluated[1] + 1:
            raise KeyError("killed")
        return loss(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Classify, "training_loss", killed)
        execute(compose(*words, "trainer.max_epochs=5", "checkpoint_every=1"), folder)
    execute(compose(*words, "trainer.max_epochs=5"), folder)
    assert read_result(folder)["metrics"] == read_result(run)["metrics"]
    expected = [evaluated[k - 1] for k in (1, 2, 4, 5)]
    for events in (events_of(run), events_of(folder)):
        pictures = events.Images("training_attention_maps/encoder")
        assert [picture.step for picture in pictures] == expected
        assert min(pictures[0].width, pictures[0].height) > 100
        (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("who said it")]
        assert [event.step for event in events.Tensors(tag)] == expected
        text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        assert text.startswith("| sentence | said by | ann | bob | cy |") and text.count("%") == 9


def test_each_task_has_its_maps_texts_and_charts(run: Path, a_language_model: Path, a_translator: Path) -> None:
    """Every chart of a run has a curve."""
    maps = {run: ["encoder"], a_language_model: ["decoder"], a_translator: ["encoder", "decoder", "cross"]}
    for folder, parts in maps.items():
        assert {*events_of(folder).Tags()["images"]} == {f"training_attention_maps/{part}" for part in parts}
        charts = charts_of(folder)
        assert set(charts) == {"Metrics", "Training", "Attention"} and all(charts.values())
        assert all(curves for shown in charts.values() for curves in shown.values()), charts
    events = events_of(a_language_model)
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("what comes next")]
    assert "**" in events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def test_a_chart_has_at_most_eight_curves_of_a_run(tmp_path: Path) -> None:
    """Each curve is in one chart, also of a run that resumes."""
    charts = {"accuracy": r"(train|validation)_accuracy", "by speaker": r"validation_accuracy_of_.+"}
    speakers = [f"validation_accuracy_of_{k}. (née Ö)" for k in range(18)]
    heads = [f"attention_entropy_{part}/layer1_head{n}" for part in ("encoder", "cross") for n in range(1, 11)]
    for step, attempt in enumerate(([*speakers, "validation_accuracy"], [*heads, "lr"])):
        logger = TensorBoard(tmp_path, charts, step or None, ["validation_accuracy", *speakers] if step else [])
        logger.log_metrics(dict.fromkeys(attempt, 0.5), step)
        logger.save()
    shown = charts_of(tmp_path)
    assert {title: len(curves) for category in shown.values() for title, curves in category.items()} == {
        **{"accuracy": 1, "by speaker, 1 to 8": 8, "by speaker, 9 to 16": 8, "by speaker, 17 to 18": 2, "lr": 1},
        **{f"{part} layer 1: entropy of each head in nats, 1 to 8": 8 for part in ("encoder", "cross")},
        **{f"{part} layer 1: entropy of each head in nats, 9 to 10": 2 for part in ("encoder", "cross")},
    }
    curves = [curve for category in shown.values() for curves in category.values() for curve in curves]
    assert sorted(curves) == sorted(events_of(tmp_path).Tags()["scalars"])


def test_training_is_the_same_with_it_and_without(
    run: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hook in ("on_before_optimizer_step", "on_validation_end", "on_train_end"):
        monkeypatch.delattr(Pictures, hook)
    run_in(tmp_path, *words, "trainer.max_epochs=5")
    assert torch.equal(weights_of(run), weights_of(tmp_path))
    assert not any("entropy" in tag for tag in events_of(tmp_path).Tags()["scalars"])


def test_the_norm_of_the_gradient_is_that_before_it_is_clipped(words: list[str], tmp_path: Path) -> None:
    """Oracle: a step of plain gradient descent moves the weights by lr times the gradient."""
    plain = [*words, "recipe.optimizer=sgd", "recipe.lr=0.5", "dropout=0", "trainer.log_every_n_steps=1"]
    for name, more in {"one": [], "two": [], "clipped": ["trainer.gradient_clip_val=1e-3"]}.items():
        run_in(tmp_path / name, *plain, *more, f"trainer.max_steps={1 + (name == 'two')}")
    norms = {
        name: [event.value for event in events_of(tmp_path / name).Scalars("training/gradient_norm")]
        for name in ("two", "clipped")
    }
    moved = (weights_of(tmp_path / "two") - weights_of(tmp_path / "one")).norm().item() / 0.5
    assert norms["two"][1] == pytest.approx(moved, rel=1e-4)
    assert norms["clipped"][0] == pytest.approx(norms["two"][0]) and norms["two"][0] > 1e-2


def test_the_picture_tiles_the_heads() -> None:
    """Oracle: the pixel in the middle of each pair, for weights and a mask written by hand."""
    weights, mask = (
        torch.tensor([[[[1.0, 0], [0, 0.5]], [[0, 1], [1, -1]]]]),
        torch.tensor([[True, True], [False, True]]),
    )
    picture = thumbnail(AttentionMap("decoder", ["a", "b"], ["a", "b"], weights, mask))
    assert picture.size == (2 * (110 + GAP), 110 + GAP)
    white, blue, grey, red = (255, 255, 255), tuple(BLUE), tuple(MASKED), tuple(RED)
    half = tuple(int((255 + channel) / 2) for channel in BLUE)
    for column, expected in enumerate(((blue, white, grey, half), (white, blue, grey, red))):
        left = column * (110 + GAP)
        seen = [picture.getpixel((left + x, y)) for y in (27, 82) for x in (27, 82)]
        assert seen == list(expected)
        assert picture.getpixel((left + 111, 50)) == white
