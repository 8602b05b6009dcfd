"""A trained run translates: texts, standard input, with a picture; and invalid options."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, compose
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speechformer.analysis.load import load
from speechformer.analysis.translation import align, encode_sources, translate_sources
from speechformer.corpora.special_tokens import BEGIN
from speechformer.corpora.subwords import on_one_line
from speechformer.errors import UserError
from speechformer.generation.beam_search import translate_ids
from speechformer.metrics.bleu import bleu, signatures
from speechformer.training.run import execute
from speechformer.translate import main

LEARNS = ["width=48", "heads=2", "layers=1", "ff=96", "dropout=0", "recipe.lr=1e-2", "recipe.warmup_steps=30"]
LEARNS += ["recipe.label_smoothing=0", "task.vocab_size=300", "task.beam=3", "trainer.max_epochs=60"]


@pytest.fixture(scope="module")
def trained(little_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A small transformer that knows its 200 pairs by heart (the test is made of some of them)."""
    root, folder = tmp_path_factory.mktemp("known"), tmp_path_factory.mktemp("run")
    for file in little_pairs.iterdir():
        train = little_pairs / file.name.replace("dev", "train").replace("test", "train")
        lines = train.read_bytes().splitlines(keepends=True)
        (root / file.name).write_bytes(b"".join(lines if "train" in file.name else lines[:12]))
    own = ["task=translate", "corpus=ted", f"corpus.root={root}", "trainer.accelerator=cpu", "eval_interval=100"]
    return folder, execute(compose(*own, *LEARNS), folder)


def pairs_of(folder: Path) -> list[list[str]]:
    lines = (folder / "translations.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "source\treference\ttranslation"
    return [line.split("\t") for line in lines[1:]]


def test_it_learns_and_the_result_is_that_of_the_translations_it_leaves(trained: tuple[Path, dict]) -> None:
    """Oracle: sacreBLEU on the file."""
    folder, result = trained
    rows = pairs_of(folder)
    assert result["metrics"]["test_bleu"] == pytest.approx(bleu([row[2] for row in rows], [row[1] for row in rows]))
    assert result["metrics"]["test_bleu"] > 90
    assert result["metrics"]["copy_bleu"] < 5
    assert result["scoring"] == signatures()
    assert result["best"]["metric"] == "validation_bleu" and result["best"]["chosen_on"] == "validation"
    assert set(result["corpus"]["counts"]["padding"]) == {"source", "target"}


def test_translations_of_dev_stand_in_tensorboard_at_every_evaluation(trained: tuple[Path, dict]) -> None:
    folder, result = trained
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("translations/")]
    assert len(tags) == 5
    for tag in tags:
        assert [event.step for event in events.Tensors(tag)] == [point["step"] for point in result["curve"]]
    text = events.Tensors(tags[0])[-1].tensor_proto.string_val[0].decode()
    assert text.startswith("source: ") and "reference: " in text and "model: " in text


def test_a_run_translates_as_it_was_tested(trained: tuple[Path, dict]) -> None:
    rows = pairs_of(trained[0])
    run = load(trained[0])
    assert run.translate([row[0] for row in rows]) == [row[2] for row in rows]
    with pytest.raises(UserError, match="^length_penalty must be between 0 and 10, not 11.$"):
        run.translate("x", length_penalty=11)
    assert run.translate([]) == [] and run.translate([" ", rows[0][0]]) == ["", rows[0][2]]


def test_the_command_line_takes_texts_and_lines(
    trained: tuple[Path, dict], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs_of(trained[0])
    monkeypatch.setattr(sys, "argv", ["translate", str(trained[0]), "--beam", "3", rows[0][0], rows[1][0]])
    main()
    assert capsys.readouterr().out.splitlines() == [rows[0][2], rows[1][2]]
    monkeypatch.setattr(sys, "argv", ["translate", str(trained[0]), rows[0][0], "--beam", "3"])
    main()
    assert capsys.readouterr().out.splitlines() == [rows[0][2]]
    lines_in = "".join(f"{row[0]}\n" for row in rows[:3])
    command = [sys.executable, "-m", "speechformer.translate", str(trained[0])]
    done = subprocess.run(command, input=lines_in, capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.splitlines() == [row[2] for row in rows[:3]] and not done.stderr


def test_an_ensemble_translates_with_all_its_runs(
    trained: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: `translate_ids` with both models, which the other tests compare with all translations there are."""
    folder = trained[0]
    run, other = load(folder), load(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    texts = [row[0] for row in pairs_of(folder)]
    options = {"beam": 3, "alpha": 1.0, "max_length": run.max_length}
    written = translate_ids([run.model, other.model], encode_sources(run, texts), **options)
    expected = [run.tokenizer.decode(ids) for ids in written]
    assert run.translate(texts, others=[other]) == expected != run.translate(texts)
    monkeypatch.setattr(sys, "argv", ["translate", str(folder), "--with", str(folder), texts[0]])
    main()
    assert capsys.readouterr().out.splitlines() == run.translate(texts[0])
    (tmp_path / "tokenizer.json").write_text("another")
    with pytest.raises(UserError, match="has another vocabulary than"):
        run.translate(texts, others=[dataclasses.replace(other, directory=tmp_path)])


def test_the_alignment_is_the_mean_of_the_last_layers_heads_and_is_drawn(
    trained: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = pairs_of(trained[0])[0]
    run = load(trained[0])
    (ids,) = encode_sources(run, [row[0]])
    (written,) = translate_sources(run, [ids])
    part = align(run, ids, written)
    source, target, weights = part.keys, part.queries, part.weights[0, 0]
    assert weights.shape == (len(target), len(source)) == (len(written) + 1, len(ids))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(target)))
    assert "".join(target[:-1]) == f" {row[2]}" and source[-1] == target[-1] == "<eos>"
    expected = run.model.attention(torch.tensor([ids]), torch.tensor([[BEGIN, *written]]))["cross"][-1]
    torch.testing.assert_close(weights, expected[0].mean(dim=0))
    monkeypatch.setattr(sys, "argv", ["translate", str(trained[0]), row[0], "--attention", str(tmp_path / "a.png")])
    main()
    assert min(Image.open(tmp_path / "a.png").size) > 300


def test_a_line_is_a_line_whatever_it_holds(
    trained: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """U+2028 and a form feed are no ends of lines; a byte order mark is no word; an empty line stays empty."""
    row = pairs_of(trained[0])[0]
    lines_in = f"\ufeff{row[0]}\r\na\u2028b\x0cc\n\n{row[0]}".encode()
    monkeypatch.setattr(sys, "argv", ["translate", str(trained[0])])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines_in)))
    main()
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 5 and lines[0] == lines[3] == row[2] and lines[2] == lines[4] == ""
    assert on_one_line("a\tb\nc\u2028d") == "a b c d"


def test_a_source_longer_than_the_positions_is_cut_with_a_warning(
    little_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    own = ["task=translate", "corpus=ted", f"corpus.root={little_pairs}", "task.vocab_size=20", "trainer.max_steps=1"]
    execute(compose(*TINY[1:], *own, "model=learned", "block_size=60"), tmp_path)
    monkeypatch.setattr(sys, "argv", ["translate", str(tmp_path), "a short one", "long " * 40])
    capsys.readouterr()
    main()
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert said.err == "Sentence 2 is cut at 60 tokens, the model's maximum.\n"
    run = load(tmp_path)
    (ids,) = encode_sources(run, ["long " * 40])
    align(run, ids, translate_sources(run, [ids])[0])


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_run_of_mixed_precision_translates_as_it_was_tested(
    precision: str, little_pairs: Path, tmp_path: Path
) -> None:
    own = [
        "task=translate",
        "corpus=ted",
        f"corpus.root={little_pairs}",
        "task.vocab_size=40",
        "trainer.max_steps=30",
    ]
    execute(compose(*TINY[1:], *own, "width=32", "recipe.lr=1e-2", f"trainer.precision={precision}"), tmp_path)
    rows = pairs_of(tmp_path)
    assert load(tmp_path).translate([row[0] for row in rows]) == [row[2] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "x"], "nowhere: no such folder"),
        (["EMPTY", "x"], "has no average.ckpt, best.ckpt, last.ckpt"),
        (["nowhere", "--beam", "0"], "--beam must be at least 1, not 0."),  # before it loads the run or reads stdin
        (["nowhere", "--length-penalty", "-1"], "--length-penalty must be between 0 and 10, not -1.0."),
        (
            ["nowhere", "x", "y", "--attention", "a.png"],
            "--attention draws the alignment of one sentence, but there are 2",
        ),
        (
            ["nowhere", " ", "--attention", "a.png"],
            "--attention draws the alignment of one sentence, but there are 0",
        ),
        (["nowhere", "x", "--attention", "a.xyz"], "--attention must name a .png file, not a.xyz."),
        (
            ["CLASSIFIER", "x"],
            "task=classify, which classifies the speaker of a sentence; translate needs a run of task=translate",
        ),
    ],
)
def test_errors(
    arguments: list[str],
    sentence: str,
    trained: tuple[Path, dict],
    little: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    if arguments[0] == "CLASSIFIER":
        own = ["corpus=speeches", f"corpus.root={little}", "corpus.classes=[a,b,c]", "trainer.max_steps=1"]
        execute(compose(*TINY[1:], *own), tmp_path / "CLASSIFIER")
    arguments = [str(trained[0]) if argument == "RUN" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["translate", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert sentence in str(error.value)


def test_a_model_without_attention_has_none_to_draw(little_pairs: Path, tmp_path: Path) -> None:
    own = ["task=translate", "corpus=ted", f"corpus.root={little_pairs}", "task.vocab_size=20", "trainer.max_steps=1"]
    execute(compose(*TINY[1:], *own, "model=rnn", "recipe.warmup_steps=0"), tmp_path)
    with pytest.raises(UserError, match="has no attention weights to draw"):
        align(load(tmp_path), [4, 3], [5])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_it_translates_and_aligns_as_on_the_cpu(trained: tuple[Path, dict]) -> None:
    rows = pairs_of(trained[0])
    run = load(trained[0])
    assert run.task.device.type == "cuda"
    (ids,) = encode_sources(run, [rows[0][0]])
    (written,) = translate_sources(run, [ids])
    assert run.tokenizer.decode(written) == rows[0][2]
    on_cuda = align(run, ids, written).weights
    run.task.cpu()
    torch.testing.assert_close(on_cuda, align(run, ids, written).weights, atol=1e-3, rtol=0)
