"""The command line and whole runs: what a run leaves, that it repeats to the last bit, how bad input is answered."""

from __future__ import annotations

import csv
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from conftest import TINY, compose
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speechformer import train
from speechformer.analysis.load import load
from speechformer.config import CONF
from speechformer.corpora.speeches import load_corpus
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.runs.folder import read_result
from speechformer.tasks.classify import REFERENCES
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.registry import load_task
from speechformer.training.evaluation import evaluate
from speechformer.training.run import execute

LM = ["task=lm", "trainer.max_steps=6", "eval_interval=3", "trainer.log_every_n_steps=2"]
TRANSLATE = ["task=translate", "trainer.max_steps=6", "eval_interval=3", "task.vocab_size=40", "task.beam=2"]
CLASSIFY = ["task=classify", "trainer.max_epochs=2", "trainer.limit_train_batches=5", "trainer.log_every_n_steps=2"]


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    return execute(compose(*TINY, *overrides), folder)


def rows_of(folder: Path, column: str) -> list[dict[str, str]]:
    """The rows of `metrics.csv` that have a value in a column."""
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row[column]]


@pytest.mark.parametrize(
    ("task", "protocol"), [(CLASSIFY, "clean"), (CLASSIFY, "paper"), (LM, "paper")], ids=["clean", "paper", "lm"]
)
def test_a_run_leaves_what_is_promised(task: list[str], protocol: str, tmp_path: Path) -> None:
    result = run(tmp_path, "model=alibi", f"protocol={protocol}", *task)
    assert read_result(tmp_path) == json.loads(json.dumps(result))
    assert not list(tmp_path.glob("*.partial"))
    keys = "status task metrics parameters corpus config seed seconds tokens_per_second commit versions"
    assert set(keys.split()) <= set(result)
    assert result["status"] == "finished"
    assert result["parameters"]["total"] == sum(n for part, n in result["parameters"].items() if part != "total")
    assert {"name", "sha256", "counts"} <= set(result["corpus"])
    assert sum(result["seconds_by_phase"].values()) <= result["seconds"]
    metrics, test = result["metrics"], "test_accuracy"
    if "task=lm" in task:
        test, names = "test_perplexity_mean", ("marlowe", "okafor", "vance")
        assert {f"test_perplexity_{name}" for name in (*names, "mean")} <= set(metrics)
        assert {f"test_sliding_perplexity_{name}" for name in names} <= set(metrics)
        assert {name for name in metrics if name.startswith("test_unknown_rate_")} == {
            f"test_unknown_rate_{name}" for name in (*names, "mean")
        }
    else:
        assert metrics["test_accuracy_in_train"] is None  # the sample repeats nothing
        assert metrics["test_accuracy_not_in_train"] == metrics["test_accuracy"]

    # the best checkpoint gives the figure that it was chosen for
    best = result["best"]
    again = evaluate([load(tmp_path, "best.ckpt")])["metrics"]
    assert again[best["metric"]] == pytest.approx(best["value"], rel=1e-5)
    assert best["chosen_on"] == ("test" if protocol == "paper" else "validation")

    # the same in TensorBoard and as CSV; test is touched along the way only under the reports' protocol
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"training/train_loss", f"metrics/{best['metric']}"} <= scalars
    constant = {key for key in metrics if key in REFERENCES or "_unknown_rate" in key}  # of the corpus
    final = {name.removeprefix("metrics_final/") for name in scalars if name.startswith("metrics_final/")}
    assert final == {key for key, value in metrics.items() if value is not None} - constant
    assert "_hparams_/experiment" in events.PluginTagToContent("hparams")
    evaluations = rows_of(tmp_path, test)
    assert len(evaluations) == (2 if protocol == "paper" else 1)
    if protocol == "paper":
        assert [int(row["step"]) for row in evaluations] == [point["step"] for point in result["curve"]]
        curve = [point[test] for point in result["curve"]]
        assert [float(row[test]) for row in evaluations] == pytest.approx(curve, rel=1e-5)
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == result["config"]


@pytest.mark.parametrize(("model", "protocol"), [("alibi", "paper"), ("rope", "clean"), ("learned", "paper")])
def test_longer_contexts_are_tested_at_the_end(
    model: str, protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: cross-entropy over the text cut by hand into contexts of 48 tokens, one at a time."""
    result = run(tmp_path, f"model={model}", f"protocol={protocol}", *LM, "task.lengths=[48]")
    names = {f"test_length_48_perplexity_{name}" for name in ("marlowe", "okafor", "vance", "mean")}
    if model == "learned":  # it has no vector beyond 32
        assert not names & set(result["metrics"]) and "out of reach" in capsys.readouterr().out
        return
    assert names <= set(result["metrics"])
    loaded = load_task(tmp_path / ("last.ckpt" if protocol == "paper" else "best.ckpt"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    lines = load_corpus(result["config"]["corpus"]).lm_test["vance"]
    ids = torch.tensor([index for line in lines for index in tokenizer.encode(line)])
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 48):
            targets = ids[start + 1 : start + 49]
            logits = loaded.model(ids[None, start : start + len(targets)])[0]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    expected = math.exp(total / (len(ids) - 1))
    assert result["metrics"]["test_length_48_perplexity_vance"] == pytest.approx(expected, rel=1e-4)


def test_the_command_line_works_from_any_folder_and_places_the_run(tmp_path: Path) -> None:
    words = ["speechformer.train", *TINY, *CLASSIFY, "hydra.run.dir=here"]
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_result(tmp_path / "here")["status"] == "finished"
    assert done.stdout.startswith("Corpus sample (made by the package, seed 0): train 2,100, test 750, ")
    assert "Parameters: " in done.stdout and "majority class" in done.stdout
    assert done.stderr == ""  # not a terminal: no bar; and no warning
    again = run_command(*words, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.startswith(f"Already finished: {tmp_path / 'here'}. ")
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[-9:]  # the same table
    other = run_command(*words, "dropout=0", cwd=tmp_path)
    assert (other.returncode, other.stdout) == (1, "") and other.stderr.count("\n") == 1
    assert other.stderr.startswith("Error: ") and "here holds another run" in other.stderr


def test_help_names_the_choices_without_heavy_imports() -> None:
    """Then libgomp is not loaded either, when the command says for how long its threads spin."""
    code = (
        "import atexit, os, sys; from speechformer import train; sys.argv[1:] = ['--help']\n"
        "atexit.register(lambda: print(os.environ['GOMP_SPINCOUNT'], *sys.modules)); train.main()"
    )
    variables = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    spins, *imports = done.stdout.splitlines()[-1].split()
    assert spins == "1000" and "hydra" in imports
    assert not {"torch", "lightning", "nltk", "torchmetrics", "matplotlib"} & {*imports}
    assert f"model: {', '.join(sorted(path.stem for path in (CONF / 'model').glob('*.yaml')))}\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=alibii"], "model has no choice 'alibii'; the valid ones are: alibi, .*Did you mean alibi?"),
        (["widht=3"], "the config has no key 'widht'; the valid ones are: .*Did you mean width?"),
        (["model=alibi", "model.scal=2"], "model has no key 'scal'; the valid ones are: name, slopes, scale. Did"),
        (["pattern=full", "pattern.window=3"], "to one choice alone: 'pattern=A,{name:B,window:VALUE}'"),
        (["pattern={name:window,window:0}"], "pattern.window must be "),
        (["seed=0,1", "-m", "pattern={name:window,win:3}"], "pattern has no key 'win'"),
        (["-m", "pattern=full,{window:3}"], "has no name; write pattern={name:CHOICE,OPTION:VALUE}."),
        (["pattern=name:window", "pattern=window:3"], "Quote braces for the shell: 'pattern={name:CHOICE,"),
        (["+trainer.max_stepz=2"], "trainer has no key 'max_stepz'; .*Did you mean max_steps?"),
        (["model=alibi", "model.slopes=[1]"], "model.slopes must be geometric, learned or a list of 2 numbers"),
        (["recipe=cosine", "trainer.max_epochs=-1"], "recipe.schedule ends with the run, so set trainer.max_steps"),
        (["trainer.precision=9"], "trainer: Precision 9 is invalid"),
        (
            ["trainer.num_nodes=2"],
            "trainer.num_nodes is not listed in config.yaml, so it needs a +: ",
        ),
        (["trainer.nodes=2"], "and with a + those of Lightning's Trainer."),
        (["heads=3"], "width must be a multiple of heads"),
        (["hydra.run.dir=/dev/null/x"], "/dev/null/x"),
        (["model=rope,nope"], "'model=rope,nope': several values are a sweep, so add -m"),
        (["corpus.classes=a,b"], "so add -m; a list needs brackets, as in '[a,b]'."),
        (["task=translate", "corpus.target=en"], "corpus.source and corpus.target are both en; name two languages"),
        (["~model"], "the config lacks model; every key of its yaml file is required."),
        (["+trainer.max_time={days:9999999999}"], "trainer: Python int too large"),
        (["width=65536", "ff=65536", "layers=100"], "GiB for its weights, gradients and the optimizer's state, and "),
        (["width=${nowhere}"], "width: Interpolation key 'nowhere' not found."),
        (["vocab_size=20"], "vocab_size=20 is less than the .* tokens of the vocabulary"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In this process; `sys.exit` with a text prints it to stderr and exits with 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "corpus=sample", *arguments])
    with pytest.raises(SystemExit) as end:
        train.main()
    answer = str(end.value.code)
    assert answer.startswith("Error: ") and "\n" not in answer and capsys.readouterr().err == ""
    for part in message.split(".*"):
        assert part in answer
    assert not list(tmp_path.rglob("result.json")) and not list(tmp_path.glob("outputs/runs/*"))


def test_an_interpolation_is_recorded_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*TINY, "ff=${width}", "trainer.max_epochs=1", "trainer.limit_train_batches=1"]
    monkeypatch.setattr(sys, "argv", ["train", *words, f"hydra.run.dir={tmp_path / 'a'}"])
    train.main()
    result = read_result(tmp_path / "a")
    assert result["overrides"] == words and result["config"]["ff"] == 8


def test_a_clear_refusal_reaches_a_caller_of_fit(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train_CLS.tsv").write_text("0\tOne.\n")
    with pytest.raises(UserError, match="task=lm needs train_LM.txt"):
        execute(compose("task=lm", "corpus=speeches", f"corpus.root={tmp_path / 'own'}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_ends_before_its_first_evaluation_is_evaluated_all_the_same(tmp_path: Path) -> None:
    result = run(tmp_path, "trainer.max_steps=3")
    assert result["steps"] == 3 and result["best"]["step"] == 3
    assert (tmp_path / "best.ckpt").exists()
    assert 0 <= result["metrics"]["test_accuracy"] <= 1


def test_half_precision_trains_with_clipped_gradients(tmp_path: Path) -> None:
    """Oracle: the same run in float32; 6 steps from the same weights end near each other."""
    options = ["model=rope", "trainer.gradient_clip_val=1.0", "dropout=0.0", *LM]
    expected = run(tmp_path / "a", *options)["metrics"]["test_perplexity_mean"]
    got = run(tmp_path / "b", "trainer.precision=bf16-true", *options)["metrics"]["test_perplexity_mean"]
    assert got == pytest.approx(expected, rel=0.03)


def test_logged_losses_are_those_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    step = LanguageModel.training_step

    def recording(self: LanguageModel, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = step(self, batch, batch_idx)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", recording)
    run(tmp_path, *LM, "recipe=cosine", "recipe.warmup_steps=3")
    rows = rows_of(tmp_path, "train_loss")
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([losses[1], losses[3], losses[5]])
    assert [float(row["lr"]) for row in rows] == pytest.approx([2e-3 * 2 / 3, 2e-3, 2e-3 * (1 - 0.75)])


def test_eval_interval_is_in_optimiser_steps(tmp_path: Path) -> None:
    run(tmp_path, *LM, "trainer.accumulate_grad_batches=2")
    assert [int(row["step"]) for row in rows_of(tmp_path, "test_perplexity_mean")] == [3, 6]


def test_a_run_that_diverges_is_stopped_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also one whose last step diverges."""
    wild = ["recipe.optimizer=sgd", "recipe.lr=1000", "architecture.norm=post", "architecture.final_norm=false"]
    words = [*LM, *wild, "trainer.max_epochs=-1", "eval_interval=400"]
    result = run(tmp_path / "a", *words, "trainer.max_steps=500")
    assert read_result(tmp_path / "a")["status"] == result["status"] == "diverged"
    assert result["steps"] < 50 and result["error"] == f"The loss was NaN or infinite at step {result['steps']}."
    assert result["metrics"] == {} and result["curve"] == [] and result["best"]["value"] is None
    assert "DIVERGED" in capsys.readouterr().out
    last = run(tmp_path / "b", *words, f"trainer.max_steps={result['steps']}")
    assert last["status"] == "diverged" and last["steps"] == result["steps"]


def test_training_never_touches_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert run(tmp_path, *LM)["status"] == "finished"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("more", [[], ["compile=reduce-overhead"]], ids=["", "CUDA graphs"])
@pytest.mark.parametrize(
    "task", [CLASSIFY, LM, TRANSLATE, [*TRANSLATE, "model=rnn_attention"]], ids=lambda task: task[-1]
)
def test_a_run_on_cuda(task: list[str], more: list[str], tmp_path: Path) -> None:
    if "model=rnn_attention" in task:
        more = ["recipe.warmup_steps=0"]
    result = execute(compose(*TINY[:-1], "machine=gpu", *task, *more), tmp_path)
    assert result["status"] == "finished"
    assert all(value is None or value >= 0 for value in result["metrics"].values())


@pytest.mark.parametrize("corpus", ["auto", "sample"])
def test_an_experiment_on_the_sample_is_said(
    corpus: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("SPEECHFORMER_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    words = ["experiment=marsol_table1_alibi", *TINY[1:], "trainer.max_steps=1", f"corpus={corpus}"]
    monkeypatch.setattr(sys, "argv", ["train", *words, f"hydra.run.dir={tmp_path / 'run'}"])
    train.main()
    said = capsys.readouterr().err
    assert ("names are those of the speeches, and this run used the generated sample" in said) == (corpus == "auto")


def test_a_warm_up_longer_than_the_run_is_said(
    little_pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["task=translate", "corpus=auto", f"corpus.root={little_pairs}", "task.vocab_size=20"]
    result = execute(compose(*TINY[1:], *words, "trainer.max_steps=2"), tmp_path)
    said = capsys.readouterr().out
    assert "recipe.warmup_steps=400 is at least the run's 2" in said
    assert result["corpus"]["name"] == "pairs" and said.startswith("Corpus pairs (")
