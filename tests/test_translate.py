"""A trained run translates: texts, standard input, with a picture; and invalid options."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from commands import call
from conftest import BAHDANAU, compose, group, run_in
from PIL import Image
from test_encoder_decoder import translator

from speechformer.analysis.load import load
from speechformer.analysis.translation import align, encode_sources, translate_sources
from speechformer.corpora.special_tokens import BEGIN
from speechformer.errors import UserError
from speechformer.escape import on_one_line
from speechformer.generation.beam_search import translate_ids
from speechformer.metrics.bleu import bleu, signatures
from speechformer.training.run import execute
from speechformer.translate import main

LEARNS = ["width=48", "heads=2", "layers=1", "ff=96", "dropout=0", "recipe.lr=1e-2", "recipe.warmup_steps=30"]
LEARNS += ["recipe.label_smoothing=0", "task.vocab_size=300", "task.beam=3", "trainer.max_epochs=100"]


@pytest.fixture(scope="module")
def trained(little_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A small transformer that knows its 60 pairs by heart (the test is made of some of them)."""
    root, folder = tmp_path_factory.mktemp("known"), tmp_path_factory.mktemp("run")
    for file in little_pairs.iterdir():
        known = little_pairs / f"train{file.suffix}"
        lines = known.read_bytes().splitlines(keepends=True)
        (root / file.name).write_bytes(b"".join(lines[:60] if "train" in file.name else lines[:12]))
    options = ["task=translate", "corpus=ted", f"corpus.root={root}", "trainer.accelerator=cpu", "eval_interval=100"]
    options.append("protocol=paper")
    return folder, execute(compose(*options, *LEARNS), folder)


def pairs_of(folder: Path) -> list[list[str]]:
    lines = (folder / "translations.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "source\treference\ttranslation"
    return [line.split("\t") for line in lines[1:]]


def test_it_learns_and_the_result_is_that_of_the_translations_it_leaves(trained: tuple[Path, dict]) -> None:
    """Oracle: sacreBLEU on the file."""
    folder, result = trained
    rows = pairs_of(folder)
    assert result["metrics"]["test_bleu"] == pytest.approx(bleu([row[2] for row in rows], [row[1] for row in rows]))
    assert result["metrics"]["test_bleu"] > 80 and result["metrics"]["copy_bleu"] < 5
    assert result["scoring"] == signatures()
    assert result["best"]["metric"] == "validation_bleu" and result["best"]["chosen_on"] == "validation"


def test_a_run_translates_as_it_was_tested(trained: tuple[Path, dict]) -> None:
    """In Python; on the command line; and from standard input, where U+2028 and a form feed are no ends of lines, a
    byte order mark is no word, and an empty line stays empty."""
    folder, rows = trained[0], pairs_of(trained[0])
    assert load(folder).translate([" ", *(row[0] for row in rows)]) == ["", *(row[2] for row in rows)]
    assert call(main, folder, rows[0][0], "--beam", "3", rows[1][0])[0].splitlines() == [rows[0][2], rows[1][2]]
    written = f"\ufeff{rows[0][0]}\r\na\u2028b\x0cc\n\n{rows[0][0]}"
    lines = call(main, folder, input=written.encode())[0].split("\n")
    assert len(lines) == 5 and lines[0] == lines[3] == rows[0][2] and lines[2] == lines[4] == ""
    assert on_one_line("a\tb\nc\u2028d") == "a b c d"


def test_an_ensemble_translates_with_all_its_runs(trained: tuple[Path, dict], tmp_path: Path) -> None:
    """Oracle: `translate_ids` with both models, which the tests of beam search compare with a naive search."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "other"))
    content = torch.load(folder / "best.ckpt", weights_only=True)
    torch.manual_seed(0)
    for weight in content["state_dict"].values():
        weight += 0.1 * torch.randn_like(weight)
    torch.save(content, folder / "best.ckpt")
    run, other = load(trained[0]), load(folder)
    texts = [row[0] for row in pairs_of(folder)]
    options = {"beam": 3, "alpha": 1.0, "max_length": run.max_length}
    written = translate_ids([run.model, other.model], encode_sources(run, texts), **options)
    expected = [run.tokenizer.decode(ids) for ids in written]
    assert call(main, trained[0], "--with", folder, *texts)[0].splitlines() == expected != run.translate(texts)
    (folder / "tokenizer.json").write_text("another")
    with pytest.raises(UserError, match="has another vocabulary than"):
        run.translate(texts, others=[other])


def test_the_alignment_is_the_mean_of_the_last_layers_heads_and_is_drawn(
    trained: tuple[Path, dict], tmp_path: Path
) -> None:
    row, run = pairs_of(trained[0])[0], load(trained[0])
    (ids,) = encode_sources(run, [row[0]])
    (written,) = translate_sources(run, [ids])
    part = align(run, ids, written)
    assert "".join(part.queries[:-1]) == f" {row[2]}" and part.keys[-1] == part.queries[-1] == "<eos>"
    expected = run.model.attention(torch.tensor([ids]), torch.tensor([[BEGIN, *written]]))["cross"][-1]
    torch.testing.assert_close(part.weights[0, 0], expected[0].mean(dim=0))
    call(main, trained[0], row[0], "--attention", tmp_path / "a.png")
    assert min(Image.open(tmp_path / "a.png").size) > 300


def test_a_run_of_another_precision_translates_as_it_was_tested_and_cuts_long_sources(
    little_pairs: Path, tmp_path: Path
) -> None:
    options = [f"corpus.root={little_pairs}", "corpus=ted", "task=translate", "task.tokens=words"]
    options += ["task.vocab_size=40", "model=learned", "block_size=60", "trainer.max_steps=10"]
    options += ["recipe.warmup_steps=2", "recipe.lr=1e-2"]
    run = load(run_in(tmp_path, *options, "trainer.precision=bf16-mixed"))
    rows = pairs_of(tmp_path)
    assert run.translate([row[0] for row in rows]) == [row[2] for row in rows]
    out, err = call(main, tmp_path, "the the", "long " * 80)
    is_cut, is_unknown = err.splitlines()
    assert len(out.splitlines()) == 2 and is_cut == "Sentence 2 is cut at 60 tokens, the model's maximum."
    assert is_unknown.startswith("Sentence 2: not in the vocabulary, read as <unk>: long. Every word is unknown")
    assert is_unknown.partition(": ")[2] == f"{run.read('long ' * 80).notes[-1]}."
    (ids,) = encode_sources(run, ["long " * 80])
    align(run, ids, translate_sources(run, [ids])[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "--length-penalty", "-1"], "length_penalty must be between 0 and 10, not -1.0."),
        (["nowhere", "x", "--attention", "a.xyz"], "--attention names a .png file"),
    ],
)
def test_errors(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        call(main, *arguments)


def test_a_model_without_attention_has_none_to_draw(a_translator: Path) -> None:
    run = load(a_translator)
    run.task.model = translator("rnn")
    with pytest.raises(UserError, match="has no attention weights to draw"):
        align(run, [4, 3], [5])


def test_a_run_is_named_by_its_attention(a_translator: Path) -> None:
    run = load(a_translator)
    run.task.hparams["architecture"]["model"] = group("model", BAHDANAU)
    assert run.label == "rnn_attention, cell gru, attention bahdanau"
