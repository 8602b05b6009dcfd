"""An export computes what the run computes. Oracle: the run's own logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, compose
from safetensors import safe_open
from safetensors.torch import save_file

from speechformer.analysis.load import load
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.export import FILES, example_inputs, export, load_safetensors, main
from speechformer.training.run import execute


@pytest.mark.parametrize("task", ["classifier", "language_model", "translator"])
def test_safetensors_gives_equal_logits(task: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = load(request.getfixturevalue(f"a_{task}"))
    path, worst = export(run, "safetensors", tmp_path)
    assert worst == 0
    again = load_safetensors(path)
    assert again.hparams == run.task.hparams and not again.training
    for name, value in run.task.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert (tmp_path / "tokenizer.json").read_bytes() == (run.directory / "tokenizer.json").read_bytes()
    described = json.loads((tmp_path / "export.json").read_text())
    assert described["task"] == run.task.name and described["weights_of"] == run.checkpoint


def test_an_export_of_version_0_1_is_read(a_classifier: Path, tmp_path: Path) -> None:
    """Its header says `core` where today's says `architecture`."""
    path, _ = export(load(a_classifier), "safetensors", tmp_path)
    with safe_open(path, framework="pt") as file:
        header, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header["speechformer"] = header["speechformer"].replace('"architecture"', '"core"')
    save_file(weights, path, metadata=header)
    assert torch.equal(load_safetensors(path).model.head[0].weight, load(a_classifier).model.head[0].weight)


def test_tied_tables_stay_tied(a_translator: Path, tmp_path: Path) -> None:
    path, _ = export(load(a_translator), "safetensors", tmp_path)
    model = load_safetensors(path).model
    assert model.output.weight is model.encoder.embedding.weight is model.decoder.embedding.weight
    table = model.output.weight.numel() * 4
    assert path.stat().st_size < sum(p.numel() for p in model.parameters()) * 4 + table // 2 + 20_000


@pytest.mark.parametrize("task", ["classifier", "language_model", "translator"])
def test_torch_export_gives_equal_logits_for_any_size(
    task: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Longer than the run was trained on, too; in a process that has torch alone."""
    run = load(request.getfixturevalue(f"a_{task}"))
    path, worst = export(run, "torch.export", tmp_path)
    assert worst < 1e-5
    inputs = example_inputs(run, 3, 150)
    torch.save(inputs, tmp_path / "inputs.pt")
    with torch.no_grad():
        torch.save(run.task.model(*inputs), tmp_path / "expected.pt")
    code = (
        f"import sys, torch; inputs = torch.load('{tmp_path}/inputs.pt'); "
        f"output = torch.export.load('{path}').module()(*inputs); "
        f"torch.testing.assert_close(output, torch.load('{tmp_path}/expected.pt'), atol=1e-5, rtol=1e-5); "
        "assert 'speechformer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model", ["sinusoidal", "learned", "relative", "nope"])
def test_every_position_can_be_exported(model: str, little: Path, tmp_path: Path) -> None:
    execute(
        compose(*TINY, f"model={model}", "trainer.max_steps=1", "architecture.pool=cls", "pattern=bigbird"),
        tmp_path / "run",
    )
    run = load(tmp_path / "run")
    for kind in ("torch.export", "safetensors"):
        assert export(run, kind, tmp_path)[1] < 1e-5


def test_errors(a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(compose(*TINY, "model=rnn", "trainer.max_steps=1"), tmp_path / "rnn")
    with pytest.raises(UserError, match="torch.export cannot export an RNN .model=rnn"):
        export(load(tmp_path / "rnn"), "torch.export", tmp_path)
    assert export(load(tmp_path / "rnn"), "safetensors", tmp_path)[1] == 0
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    for name in ("other.safetensors", "tokenizer.json"):
        with pytest.raises(UserError, match=f"{name} is not an export of speechformer"):
            load_safetensors(tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path)])
    with pytest.raises(SystemExit, match="it is not a run"):
        main()


def test_the_command_line(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["export", str(a_classifier), "--output", str(tmp_path / "new" / "folder")])
    main()
    assert "loaded again, logits differ by at most 0e+00" in capsys.readouterr().out
    assert len(Tokenizer.load(tmp_path / "new" / "folder" / "tokenizer.json")) > 100


@pytest.mark.parametrize("kind", ["safetensors", "torch.export"])
def test_a_file_that_cannot_be_written_is_an_error(
    kind: str, a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILES[kind]).mkdir()
    monkeypatch.setattr(sys, "argv", ["export", str(a_classifier), "--format", kind, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"Error: .*{FILES[kind]} is there already"):
        main()
