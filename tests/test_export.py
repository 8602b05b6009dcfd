"""An export computes what the run computes. Oracle: the run's own logits."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import TINY, compose
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as RustTokenizer

from speechformer.analysis.load import load
from speechformer.corpora import sample
from speechformer.corpora.portable import portable_subwords, portable_words
from speechformer.corpora.special_tokens import UNKNOWN
from speechformer.corpora.subwords import Subwords
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.export import FILES, describe, example_inputs, export, load_safetensors, main
from speechformer.runs.folder import read_result
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


@pytest.fixture(scope="module")
def only_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with torch, what torch requires, and tokenizers: links to what pip has installed."""
    site, wanted, known = tmp_path_factory.mktemp("site"), ["torch", "tokenizers"], set()
    while wanted:
        known.add(name := wanted.pop())
        with contextlib.suppress(metadata.PackageNotFoundError):  # of another system
            distribution = metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
                (site / top).symlink_to(str(distribution.locate_file(top)))
            lines = distribution.requires or [] if name != "tokenizers" else []  # its own is for downloads
            wanted += {re.split(r"[^\w.-]", line)[0].lower() for line in lines if "extra ==" not in line} - known
    return site


def run_example(folder: Path, site: Path) -> str:
    """Run the example of a README.md where there is nothing else than torch and tokenizers, and return its output."""
    (example,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 11
    code = (
        f"import sys, importlib.util; sys.path.append({str(site)!r})\n"
        "for name in ('speechformer', 'lightning', 'nltk', 'hydra', 'safetensors'):\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
    )
    # -I: no PYTHONPATH, no current folder; -S: no site-packages
    command = [sys.executable, "-I", "-S", "-c", code + example]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("task", ["classifier", "language_model", "translator"])
def test_the_example_in_the_readme_needs_only_torch_and_tokenizers(
    task: str, only_torch: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = request.getfixturevalue(f"a_{task}")
    monkeypatch.setattr(sys, "argv", ["export", str(directory), "--output", str(tmp_path)])
    main()
    printed, run = run_example(tmp_path, only_torch), load(directory)
    run.task.cpu()
    if task == "classifier":
        expected = run.predict("Together we will mend the harbours.").probabilities
        got = dict(line.split(": ") for line in printed.splitlines())
        assert {name: float(share) for name, share in got.items()} == pytest.approx(expected, abs=2e-6)
    elif task == "language_model":
        words = run.tokenizer.encode("We will")
        while len(words) < 50:
            words.append(int(run.model(torch.tensor([words]))[0, -1].argmax()))
        assert printed == " ".join(run.tokenizer.tokens(words)) + "\n"
    else:
        assert (
            printed == run.translate("The old woman does not see the horses.", beam=1)[0][: len(printed) - 1] + "\n"
        )


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
    with pytest.raises(SystemExit, match="holds several runs; name one"):
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
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_portable_subwords_are_the_same(subwords: Subwords, text: str) -> None:
    portable = RustTokenizer.from_str(portable_subwords(subwords).to_str())
    portable.encode_special_tokens = True
    assert portable.encode(text).ids == (subwords.encode(text) if text else [])


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.fit(["A bé, said \"ab\" -- 'ba'!", "été? a.b.", "ab ba"], "bpe", 30)


def test_the_card_has_the_figures_and_their_intervals(
    a_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["export", str(a_classifier), "--format", "safetensors", "--output", str(tmp_path)]
    )
    main()
    text, result = (tmp_path / "README.md").read_text(encoding="utf-8"), read_result(a_classifier)
    for row in result["summary"]:
        assert f"| {' | '.join(cell.strip() for cell in row)} |" in text
    assert f"sha256 `{result['corpus']['sha256']}`" in text and str(a_classifier) not in text
    assert "- test: 60\n" in text and "`last.ckpt`" in text and "There are no intervals" not in text
    assert "## Limits" in text and "model.pt2" not in text


def test_the_card_of_an_unfinished_run_says_so(a_classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(a_classifier, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    describe(load(tmp_path / "run"), ["safetensors"], tmp_path / "out")
    assert "None: the run has not come to its end." in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
