"""An export computes what the run computes. Oracle: the run's own logits."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from commands import call
from conftest import group, run_in
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_models import classifier, decoder
from tokenizers import Tokenizer as RustTokenizer

from speechformer.analysis.exports import (
    as_program,
    compare,
    example_inputs,
    export,
    export_all,
    load_safetensors,
)
from speechformer.analysis.load import load
from speechformer.corpora import sample
from speechformer.corpora.portable import portable_subwords, portable_words
from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.export import main
from speechformer.runs.folder import read_result

slow = pytest.mark.slow
TASKS = pytest.mark.parametrize("task", ["classifier", "language_model", "translator"])


@TASKS
def test_safetensors_gives_equal_logits(task: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = load(request.getfixturevalue(f"a_{task}"))
    export_all(run, "safetensors", tmp_path)
    again = load_safetensors(path := tmp_path / "model.safetensors")
    assert compare(run, again) == 0 and again.hparams == run.task.hparams and not again.training
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert (tmp_path / "tokenizer.json").read_bytes() == (run.directory / "tokenizer.json").read_bytes()
    described = json.loads((tmp_path / "export.json").read_text())
    assert described["task"] == run.task.name and described["weights_of"] == run.checkpoint
    if task == "translator":  # tables are stored once and stay tied
        model = again.model
        assert model.output.weight is model.encoder.embedding.weight is model.decoder.embedding.weight
        table = model.output.weight.numel() * 4
        assert path.stat().st_size < sum(p.numel() for p in model.parameters()) * 4 + table // 2 + 20_000


@TASKS
def test_the_computation_and_the_example_need_only_torch_and_tokenizers(
    task: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Oracles: logits of a text longer than the run was trained on; what the run itself predicts."""
    directory = request.getfixturevalue(f"a_{task}")
    run = load(directory)
    run.task.cpu()
    call(main, directory, "--output", tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        for name in ("speechformer", "lightning", "nltk", "hydra", "safetensors"):
            patch.setitem(sys.modules, name, None)
        exec(example, {})
        inputs = example_inputs(run, 3, 150)
        logits = torch.export.load("model.pt2").module()(*inputs)
    printed = capsys.readouterr().out
    torch.testing.assert_close(logits, run.model(*inputs), atol=1e-5, rtol=1e-5)
    if task == "classifier":
        shares = {name: float(share) for name, share in (line.split(": ") for line in printed.splitlines())}
        assert shares == pytest.approx(run.predict("Together we will mend the harbours.").probabilities, abs=2e-6)
    elif task == "language_model":
        words = run.tokenizer.encode("We will")
        while len(words) < 50:
            words.append(int(run.model(torch.tensor([words]))[0, -1].argmax()))
        assert printed == " ".join(run.tokenizer.tokens(words)) + "\n"
    else:
        expected = run.translate("The old woman does not see the horses.", beam=1)[0]
        assert printed == expected[: len(printed) - 1] + "\n"


@pytest.mark.parametrize(
    "model", [pytest.param("learned", marks=slow), pytest.param("sinusoidal", marks=slow), "relative"]
)
def test_a_model_with_tables_of_positions_can_be_exported(model: str, tmp_path: Path) -> None:
    own = [f"model={model}", "trainer.max_steps=1", "architecture.pool=cls", "pattern=bigbird"]
    run = load(run_in(tmp_path / "run", *own))
    assert export(run, "torch.export", tmp_path / "model.pt2") < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [
        *({"name": name} for name in ("sink", "sigmoid", "entmax", "differential")),
        {"name": "softmax", "kv_heads": 1},
        {"name": "linear"},  # of a classifier
    ],
    ids=str,
)
def test_a_mechanism_can_be_exported(attention: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """At the length with which torch traced the model, and at others."""
    name, build = ("a_classifier", classifier) if attention["name"] == "linear" else ("a_language_model", decoder)
    run = load(request.getfixturevalue(name))
    own = {"vocab_size": len(run.tokenizer), "model": group("model", "rope"), "layers": 1}
    run.task.cpu().model = build(attention=attention, **own)
    program = torch.export.load(io.BytesIO(as_program(run))).module()
    for rows, tokens in ((2, 7), (1, 1), (3, 150)):
        ids = example_inputs(run, rows, tokens)
        torch.testing.assert_close(program(*ids), run.model(*ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "construct"),
    [
        ({"model": group("model", "rnn")}, r"model=.* \(an RNN\)"),
        ({"attention": {"name": "linear"}}, "attention without scores in a decoder, whose chunks .* length"),
        ({"attention": {"name": "delta"}}, "attention without scores in a decoder, whose chunks .* length"),
        ({"pattern": {"name": "top_blocks"}}, "pattern=top_blocks, whose blocks .* length"),
    ],
)
def test_what_torch_cannot_export_is_one_sentence(
    changes: dict[str, Any], construct: str, a_classifier: Path, tmp_path: Path
) -> None:
    run = load(a_classifier)
    run.task.model = decoder(**changes)
    with pytest.raises(UserError, match=rf"^torch.export cannot export {construct}.*\. Use the safetensors .*\.$"):
        export(run, "torch.export", tmp_path / "model.pt2")


def test_where_torch_cannot_export_the_command_says_so_and_writes_the_weights(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: an error that sympy raised within torch 2.8."""
    error = TypeError("BooleanAtom not allowed in this context.\nMore.")
    monkeypatch.setattr(torch.export, "export", MagicMock(side_effect=error))
    said = " ".join(call(main, a_classifier, "--output", tmp_path)[0].split())
    reason = r"\(TypeError: BooleanAtom not allowed in this context\.\)\. Use the safetensors"
    assert re.search(rf"torch \S+ cannot export model=.* {reason} .*, or try a newer torch\.", said)
    assert "model.safetensors (" in said and (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "model.pt2").exists() and "model.pt2" not in (tmp_path / "README.md").read_text()
    with pytest.raises(SystemExit, match=reason):
        call(main, a_classifier, "--output", tmp_path, "--format", "torch.export")


def test_errors(a_classifier: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="other.safetensors is not an export of speechformer"):
        load_safetensors(tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(SystemExit, match="Error: .*model.safetensors is there already"):
        call(main, a_classifier, "--output", tmp_path)


SUBWORDS = Subwords.fit(["A bé, said \"ab\" -- 'ba'!", "été? a.b.", "ab ba"], "bpe", 30)


def test_the_portable_tokenizer_gives_the_same_words() -> None:
    """Oracle: ours, which is NLTK's, on the sample's texts and on cases for each rule."""
    cases = [
        "Dr. Vance, Jr. came to the U.S. in 1990. He said: \"I can't, gonna wait (or not).\" 'Tis so!",
        "We'll pay $3.88; it's 50% -- no: 3,000... John's dogs' toys? J. Smith [sic] wouldn't've *gone*.",
        "“Je t’aime”, said «Ann». ``Yes'' -- cannot, more'n that, at 5. the end: a,b c;d @e #f & g",
        'He said "stop." "Why?" And then? (It was late.) No.',
    ]
    texts = [*cases, *(line for name, text in sample.files(0).items() for line in text.decode().split("\n") if line)]
    tokenizer = Tokenizer.fit(texts)
    portable = portable_words(tokenizer.vocabulary)
    assert {text: portable.encode(text).ids for text in texts} == {text: tokenizer.encode(text) for text in texts}
    assert portable.encode("We unheard-of.").ids[1] == UNKNOWN
    assert portable_words(tokenizer.vocabulary, 3).encode("We will go home.").tokens == ["We", "will", "<unk>"]


@given(st.text(st.sampled_from("abé ,.'\"!?-\u00a0 <eos>"), max_size=30))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_portable_subwords_are_the_same(text: str) -> None:
    portable = RustTokenizer.from_str(portable_subwords(SUBWORDS).to_str())
    portable.encode_special_tokens = True
    assert portable.encode(text).ids == (SUBWORDS.encode(text) if text else [])


def test_the_command_writes_a_card_with_figures_and_their_intervals(a_classifier: Path, tmp_path: Path) -> None:
    printed, _ = call(main, a_classifier, "--format", "safetensors", "--output", tmp_path / "new")
    assert "loaded again, logits differ by at most 0e+00" in printed
    tokenizer = json.loads((tmp_path / "new" / "tokenizers.json").read_text(encoding="utf-8"))
    assert tokenizer["truncation"]["max_length"] == 32  # a classifier reads no more than in training
    text, result = (tmp_path / "new" / "README.md").read_text(encoding="utf-8"), read_result(a_classifier)
    for row in result["summary"]:
        assert f"| {' | '.join(cell.strip() for cell in row)} |" in text
    assert f"sha256 `{result['corpus']['sha256']}`" in text and str(a_classifier) not in text
    assert "- test: 60\n" in text and "`last.ckpt`" in text and "model.pt2" not in text
    unfinished = load(a_classifier)
    unfinished.result = None
    export_all(unfinished, "safetensors", tmp_path / "out")
    assert "None: the run has not come to its end." in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
