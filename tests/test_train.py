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
from conftest import COMPOSED, MODELS, RECURRENT, TINY, compose, processor_seconds
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speechformer import train
from speechformer.config import CONF
from speechformer.corpora.speeches import load_corpus
from speechformer.corpora.tokenizer import Tokenizer
from speechformer.errors import UserError
from speechformer.runs.folder import read_result
from speechformer.tasks.language_model import LanguageModel
from speechformer.tasks.registry import TASKS, load_task
from speechformer.training.run import execute

LM = ["task=lm", "trainer.max_steps=6", "eval_interval=3", "trainer.log_every_n_steps=2"]
TRANSLATE = ["task=translate", "trainer.max_steps=6", "eval_interval=3", "task.vocab_size=40", "task.beam=2"]
CLASSIFY = ["task=classify", "trainer.max_epochs=2", "trainer.limit_train_batches=5", "trainer.log_every_n_steps=2"]


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    return execute(compose(*TINY, *overrides), folder)


def command(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "speechformer.train", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("protocol", ["paper", "clean"])
@pytest.mark.parametrize("task", [CLASSIFY, LM], ids=["classify", "lm"])
def test_a_run_leaves_what_is_promised(task: list[str], protocol: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", "model=alibi", f"protocol={protocol}", *task)
    folder = tmp_path / "run"
    assert read_result(folder) == json.loads(json.dumps(result))
    assert not list(folder.glob("*.partial"))

    keys = "status task metrics parameters corpus config seed seconds tokens_per_second commit versions"
    assert set(keys.split()) <= set(result)
    assert result["status"] == "finished"
    assert result["parameters"]["total"] == sum(n for part, n in result["parameters"].items() if part != "total")
    assert {"name", "sha256", "counts"} <= set(result["corpus"])
    assert sum(result["seconds_by_phase"].values()) <= result["seconds"]
    metrics = result["metrics"]
    if "task=lm" in task:
        names = {"marlowe", "okafor", "vance"}
        assert {"train_perplexity", "test_perplexity_mean"} <= set(metrics)
        assert {f"test_perplexity_{name}" for name in names} <= set(metrics)
        assert {f"test_sliding_perplexity_{name}" for name in names} <= set(metrics)
        assert all(1 < value < 1000 for name, value in metrics.items() if "_unknown_rate" not in name)
        assert {name for name in metrics if name.startswith("test_unknown_rate_")} == {
            f"test_unknown_rate_{name}" for name in (*names, "mean")
        }
    else:
        assert {"train_accuracy", "test_accuracy", "test_accuracy_in_train", "test_accuracy_not_in_train"} <= set(
            metrics
        )
        assert metrics["test_accuracy_in_train"] is None  # the sample repeats nothing
        assert metrics["test_accuracy_not_in_train"] == metrics["test_accuracy"]
        assert all(0 <= value <= 1 for value in metrics.values() if value is not None)

    # both checkpoints rebuild the model alone, and give the figures that the result names
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    config = result["config"]
    data = TASKS[result["task"]].datamodule(
        load_corpus(config["corpus"]),
        **{key: config[key] for key in ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")},
        tokenizer=tokenizer,
    )
    for name, expected in (("best", result["best"]["value"]), ("last", None)):
        torch.load(folder / f"{name}.ckpt", weights_only=True)
        loaded: Any = load_task(folder / f"{name}.ckpt")
        loaded.on_validation_epoch_start()
        with torch.no_grad():
            for batch in data.test_dataloader():
                loaded.evaluate_batch(batch)
        figures = loaded.compute_metrics()
        if expected is not None:
            assert figures[result["best"]["metric"]] == pytest.approx(expected, rel=1e-5)
        if (name == "last") == (protocol == "paper"):
            assert {key: metrics[key] for key in figures} == pytest.approx(figures, rel=1e-5)
    assert result["best"]["chosen_on"] == ("test" if protocol == "paper" else "validation")

    # the same in TensorBoard and as CSV; test is touched along the way only under the reports' protocol
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"training/train_loss", f"metrics/{result['best']['metric']}"} <= scalars
    constant = {key for key in metrics if key == "majority_accuracy" or "_unknown_rate" in key}  # of the corpus
    figures = {key for key, value in metrics.items() if value is not None} - constant
    assert {f"metrics_final/{key}" for key in figures} <= scalars and not {
        f"metrics_final/{key}" for key in constant
    } & scalars
    assert "_hparams_/experiment" in events.PluginTagToContent("hparams")
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    test = "test_perplexity_mean" if "task=lm" in task else "test_accuracy"
    assert sum(bool(row[test]) for row in rows) == (2 if protocol == "paper" else 1)
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == config


def test_figures_are_those_of_a_model_that_has_learned(tmp_path: Path) -> None:
    """The floor is chance (1/3 of the sample's balanced test); 5 standard deviations above it."""
    result = execute(
        compose("corpus=sample", "model=sinusoidal", "trainer.max_epochs=4", "trainer.accelerator=cpu"),
        tmp_path / "a",
    )
    assert result["metrics"]["test_accuracy"] > 1 / 3 + 5 * (2 / 9 / 750) ** 0.5
    assert result["metrics"]["majority_accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("task", [CLASSIFY, LM], ids=["classify", "lm"])
def test_the_same_seed_gives_the_same_run_to_the_last_bit(task: list[str], tmp_path: Path) -> None:
    first, second, other = (run(tmp_path / name, f"seed={seed}", *task) for name, seed in ("a0", "b0", "c1"))
    assert first["metrics"] == second["metrics"] != other["metrics"]
    states = [torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"] for name in "ab"]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_result_holds_the_curve_of_its_run(tmp_path: Path) -> None:
    """Oracle: metrics.csv, which Lightning writes."""
    result = run(tmp_path / "a", *LM)
    with open(tmp_path / "a" / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["test_perplexity_mean"]]
    assert [point["step"] for point in result["curve"]] == [int(row["step"]) for row in rows] == [3, 6]
    for point, row in zip(result["curve"], rows):
        assert point["test_perplexity_mean"] == pytest.approx(float(row["test_perplexity_mean"]), rel=1e-5)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
@pytest.mark.parametrize("model", MODELS)
def test_longer_contexts_are_tested_at_the_end(
    model: str, protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Oracle: cross-entropy over the text cut by hand into contexts of 48 tokens, one at a time."""
    result = run(tmp_path / "a", f"model={model}", f"protocol={protocol}", *LM, "task.lengths=[48]")
    names = {f"test_length_48_perplexity_{name}" for name in ("marlowe", "okafor", "vance", "mean")}
    if model == "learned":  # it has no vector beyond 32
        assert not names & set(result["metrics"]) and "out of reach" in capsys.readouterr().out
        return
    assert names <= set(result["metrics"])
    loaded = load_task(tmp_path / "a" / ("last.ckpt" if protocol == "paper" else "best.ckpt"))
    tokenizer = Tokenizer.load(tmp_path / "a" / "tokenizer.json")
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
    done = command(*TINY, *CLASSIFY, "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_result(tmp_path / "here")["status"] == "finished"
    assert done.stdout.startswith(
        "Corpus sample (made by the package, seed 0): trains on 2100 lines, tests on 750, of which 0"
    )
    assert "Parameters: " in done.stdout and "majority class" in done.stdout
    assert done.stderr == ""  # not a terminal: no bar; and no warning
    again = command(*TINY, *CLASSIFY, "hydra.run.dir=here", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.startswith(f"Already finished: {tmp_path / 'here'}. ")
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[-6:]  # the same table
    other = command(*TINY, *CLASSIFY, "hydra.run.dir=here", "dropout=0", cwd=tmp_path)
    assert other.returncode == 1 and "here holds another run" in other.stderr


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m speechformer.train {" ".join([*TINY, *LM])} hydra.run.dir=here | head -1',
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("Corpus sample") and done.stderr == ""
    assert read_result(tmp_path / "here")["status"] == "finished"


def test_help_is_quick_and_names_the_choices() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert f"model: {', '.join(sorted(path.stem for path in (CONF / 'model').glob('*.yaml')))}\n" in done.stdout
    imports = subprocess.run(
        [
            sys.executable,
            "-c",
            "import speechformer.train, sys; print(sorted({m.split('.')[0] for m in sys.modules}))",
        ],
        capture_output=True,
        text=True,
    ).stdout
    assert "'hydra'" in imports
    for heavy in ("torch", "lightning", "nltk", "torchmetrics", "matplotlib"):
        assert f"'{heavy}'" not in imports
    heavy = processor_seconds("-c", "import lightning")
    assert any(
        processor_seconds("-m", "speechformer.train", "--help") < heavy / 2 for _ in range(3)
    )  # a fifth is usual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=alibii"], "model has no choice 'alibii'; the valid ones are: alibi, .*Did you mean alibi?"),
        (["widht=3"], "the config has no key 'widht'; the valid ones are: .*Did you mean width?"),
        (["modle=rope"], "the config has no key 'modle'; .*Did you mean model?"),
        (
            ["model=alibi", "model.scal=2"],
            "model has no key 'scal'; the valid ones are: name, slopes, scale. Did you",
        ),
        (["trainer.max_step=2"], "trainer has no key 'max_step'; .*Did you mean trainer.max_steps?"),
        (["+trainer.max_stepz=2"], "trainer has no argument 'max_stepz'; .*Did you mean max_steps?"),
        (["+trainer.logger=false"], "trainer.logger cannot be set"),
        (["+foo=1"], "+foo=1 adds a key that nothing reads"),
        (["width=abc"], "width must be a whole number, not 'abc'"),
        (["width=0"], "width must be a whole number of at least 1, not 0"),
        (["architecture.bias=off"], "architecture.bias must be true or false, not 'off'"),
        (["model=rope", "model.base=x"], "model.base must be a number, not 'x'"),
        (["model=rope", "model.base=0"], "model.base must be a number between 1e-06 and 1e+12, not 0"),
        (["model=alibi", "model.slopes=[a,b]"], "model.slopes must be a number, not 'a'"),
        (["model=alibi", "model.slopes=[1]"], "model.slopes must be geometric, learned or a list of 2 numbers"),
        (["recipe.betas=5"], "recipe.betas must be two numbers in [0, 1), not 5"),
        (["recipe.betas=[2,3]"], "recipe.betas must be two numbers in [0, 1), not [2, 3]"),
        (["seed=4294967296"], "seed must be a whole number of at most 4294967295, not 4294967296"),
        (["corpus.classes=abc"], "corpus.classes must be a list of different names"),
        (["corpus.classes=[a,b]"], "train_CLS.tsv:3: label '2' is not one of 0 (a), 1 (b)"),
        (["architecture=3"], "architecture is a group of keys (norm, final_norm"),
        (["~architecture.norm"], "architecture.norm is missing"),
        (
            ["task=lm", "architecture.pool=maxx"],
            "architecture.pool has no choice 'maxx'; the valid ones are: mean, cls.",
        ),
        (["recipe=cosine", "trainer.max_epochs=-1"], "recipe.schedule ends with the run, so set trainer.max_steps"),
        (["protocol=clean", "protocol.validation=0"], "protocol=clean chooses on a held-out part"),
        (["trainer.devices=0"], "trainer.devices must be a number of devices, or [K] for device number K, not 0"),
        (
            ["trainer.devices=[a]"],
            "trainer.devices must be a number of devices, or [K] for device number K, not ['a']",
        ),
        (["+trainer.plugins=x"], "trainer.plugins cannot be set"),
        (["corpus.seed=x"], "corpus.seed must be a whole number, not 'x'"),
        (["+trainer.limit_val_batches=2"], "trainer.limit_val_batches cannot be set"),
        (["seed=-1"], "seed must be a whole number of at least 0, not -1"),
        (["dropout=1"], "dropout must be a number between 0 and 0.999, not 1"),
        (["trainer.max_steps=many"], "trainer.max_steps must be a whole number, not 'many'"),
        (["trainer.precision=9"], "trainer: Precision 9 is invalid"),
        (["heads=3"], "width must be a multiple of heads"),
        (
            ["architecture.norm=prey"],
            "architecture.norm has no choice 'prey'; the valid ones are: pre, post. Did you mean pre?",
        ),
        (
            ["corpus=speeches", "corpus.root=nowhere"],
            "No speech files .* in corpus.root (nowhere), which does not exist; correct corpus.root, or omit it",
        ),
        (["model.name=rope"], "model.name=rope: make a choice with model=rope"),
        (
            ["task=lm", "task.lengths=[16]"],
            "task.lengths must be a list of whole numbers above block_size=32, not [16]",
        ),
        (["task=lm", "task.lengths=64"], "task.lengths must be a list, not 64"),
        (["study=3"], "study must be a word or null, not 3"),
        (["task.name=lm"], "task.name=lm: make a choice with task=lm"),
        (["trainer.accelerator=tpu"], "trainer: "),
        (["trainer.num_nodes=2"], "trainer.num_nodes needs machine=ddp in the command."),
        (["--width", "16"], "--width is not an option; a setting is KEY=VALUE"),
        (["width=16", "--info", "defaults", "seed=1"], "Write seed=1 beside the other settings"),
        (["model=nope", "-m", "seed=range(0)"], "seed=range(0) has no values, so the sweep has no runs."),
        (["-m", "pattern=glob(zz*)"], "pattern=glob(zz*) has no values, so the sweep has no runs."),
        (["+trainer.enable_progress_bar=true"], "trainer.enable_progress_bar cannot be set"),
        (["corpus.speeches.classes=[a]"], "corpus has no key 'speeches'; the valid ones are: name, seed, classes"),
        (["hydra.run.dir=/dev/null/x"], "/dev/null/x"),
        (["experiment=null"], "For no experiment, leave experiment= out"),
        (["model=rope,nope"], "model=rope,nope: several values are a sweep, so add -m"),
        (["corpus.classes=a,b"], "so add -m. A list needs brackets: 'corpus.classes=[a,b]'."),
        (["task=translate", "corpus.clean.words=abc"], "corpus.clean.words must be a number or null, not 'abc'"),
        (
            ["task=translate", "corpus.clean=3"],
            "corpus.clean is a group of keys (markup, words,",
        ),
        (["task=translate", "corpus.target=en"], "corpus.source and corpus.target are both en; name two languages"),
        (["task=translate", "corpus.seed=x"], "corpus.seed must be a whole number, not 'x'"),
        (["task=translate", "task.beam=0"], "task.beam must be a whole number of at least 1, not 0"),
        (["task=translate", "task.length_penalty=-1"], "task.length_penalty must be a number between 0 and 10"),
        (["task=translate", "task.beam=null"], "task.beam must be a whole number, not None"),
        (
            ["task=translate", "corpus=digits", "corpus.max_length=4"],
            "corpus.max_length must be a whole number of at least 5",
        ),
        (["task=translate", "task.vocab_size=many"], "task.vocab_size must be a whole number or null, not 'many'"),
        (["task=lm", "corpus=ted"], "task=lm reads texts, and corpus=ted has none"),
        (["~model"], "model is missing or has no name; choose one of alibi, by_layer, .* with model=CHOICE"),
        (["task=[]"], "task is missing or has no name"),
        (["model={name:rope}"], "make a choice with model=NAME"),
        (["--resolve"], "The --resolve flag can only be used"),
        (
            ["trainer.accumulate_grad_batches=null"],
            "trainer.accumulate_grad_batches must be a whole number",
        ),
        (["+trainer.max_time=-1"], "trainer.max_time must be of Lightning's type Union[str, "),
        (["+trainer.max_time={days:9999999999}"], "trainer: Python int too large"),
        (["corpus.classes=[a,a,b]"], "corpus.classes must be a list of different names"),
        (['corpus.classes=["a\tb",c,d]'], "corpus.classes must be a list of different names of printable"),
        (["width=65536", "ff=65536", "layers=100"], "GiB for its weights, gradients and the optimizer's state, and "),
        (["corpus=speeches", "corpus.root='~nobody/x'"], "No speech files .* in corpus.root (~nobody/x)"),
        (["model==alibi"], "'model==alibi' cannot be parsed; write KEY=VALUE"),
        ([""], "'' cannot be parsed; write KEY=VALUE"),
        (["seed=1", "=0"], "=0: a config group needs the name of a choice"),
        (["task=lm", "model=null"], "model=null: a config group needs the name of a choice"),
        (["task=[1,2]"], "task=[1,2]: a config group needs the name of a choice"),
        (["width=${nowhere}"], "width: Interpolation key 'nowhere' not found."),
        (["dropout=${dropout}"], "dropout: Recursive interpolation detected."),
    ],
)
def test_bad_input_is_answered_in_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
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
    assert not list(tmp_path.rglob("result.json"))


def test_an_interpolation_is_recorded_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*TINY, "ff=${width}", "trainer.max_epochs=1", "trainer.limit_train_batches=1"]
    monkeypatch.setattr(sys, "argv", ["train", *words, f"hydra.run.dir={tmp_path / 'a'}"])
    train.main()
    result = read_result(tmp_path / "a")
    assert result["overrides"] == words and result["config"]["ff"] == 8


def test_an_error_is_one_line_of_stderr_and_the_exit_code_is_1(tmp_path: Path) -> None:
    done = command("corpus=sample", "widht=3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: the config has no key 'widht'") and done.stderr.count("\n") == 1


def test_a_clear_refusal_reaches_a_caller_of_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task=lm needs train_LM.txt"):
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "train_CLS.tsv").write_text("0\tOne.\n")
        execute(compose("task=lm", "corpus=speeches", f"corpus.root={tmp_path / 'own'}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_seed_zero_seeds_like_every_other(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = run(tmp_path / "a", "seed=0", *CLASSIFY)
    torch.manual_seed(2)
    assert run(tmp_path / "b", "seed=0", *CLASSIFY)["metrics"] == first["metrics"]


def test_a_run_that_ends_before_its_first_evaluation_is_evaluated_all_the_same(tmp_path: Path) -> None:
    result = run(tmp_path / "a", "trainer.max_steps=3")
    assert result["steps"] == 3 and result["best"]["step"] == 3
    assert (tmp_path / "a" / "best.ckpt").exists()
    assert 0 <= result["metrics"]["test_accuracy"] <= 1


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("model", ["alibi", "rope"])
def test_every_precision_trains_with_clipped_gradients(model: str, precision: str, tmp_path: Path) -> None:
    """Oracle: the same run in float32; 6 steps from the same weights end near each other."""
    options = [f"model={model}", "trainer.gradient_clip_val=1.0", "dropout=0.0", *LM]
    expected = run(tmp_path / "a", *options)["metrics"]["test_perplexity_mean"]
    got = run(tmp_path / "b", f"trainer.precision={precision}", *options)["metrics"]["test_perplexity_mean"]
    assert got == pytest.approx(expected, rel=0.03)


def test_logged_losses_are_those_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    step = LanguageModel.training_step

    def recording(self: LanguageModel, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = step(self, batch, batch_idx)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", recording)
    run(tmp_path / "a", *LM, "recipe=cosine", "recipe.warmup_steps=3")
    with open(tmp_path / "a" / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["train_loss"]]
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([losses[1], losses[3], losses[5]])
    assert [float(row["lr"]) for row in rows] == pytest.approx([2e-3 * 2 / 3, 2e-3, 2e-3 * (1 - 0.75)])


def test_eval_interval_is_in_optimiser_steps(tmp_path: Path) -> None:
    run(tmp_path / "a", *LM, "trainer.accumulate_grad_batches=2")
    with open(tmp_path / "a" / "metrics.csv", encoding="utf-8") as file:
        evaluated = [int(row["step"]) for row in csv.DictReader(file) if row["test_perplexity_mean"]]
    assert evaluated == [3, 6]


@pytest.mark.parametrize("task", [CLASSIFY, LM], ids=["classify", "lm"])
def test_a_run_that_diverges_is_stopped_and_says_so(
    task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wild = ["recipe.optimizer=sgd", "recipe.lr=1000", "architecture.norm=post", "architecture.final_norm=false"]
    result = run(tmp_path / "a", *task, *wild, "trainer.max_steps=500", "trainer.max_epochs=-1", "eval_interval=400")
    assert read_result(tmp_path / "a")["status"] == result["status"] == "diverged"
    assert result["steps"] < 50 and result["error"] == f"The loss was NaN or infinite at step {result['steps']}."
    assert result["metrics"] == {} and result["curve"] == [] and result["best"]["value"] is None
    assert "DIVERGED" in capsys.readouterr().out


def test_a_run_whose_last_step_diverges_says_so(tmp_path: Path) -> None:
    wild = ["recipe.optimizer=sgd", "recipe.lr=1000", "architecture.norm=post", "architecture.final_norm=false"]
    steps = run(tmp_path / "a", *LM, *wild, "trainer.max_steps=500", "eval_interval=400")["steps"]
    result = run(tmp_path / "b", *LM, *wild, f"trainer.max_steps={steps}", "eval_interval=400")
    assert result["status"] == "diverged" and result["steps"] == steps


def test_training_never_touches_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert run(tmp_path / "a", *LM)["status"] == "finished"


def test_the_console_script_completes(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "speechformer-train"
    done = subprocess.run(
        [script, "-sc", "query=bash"],
        env={**os.environ, "COMP_LINE": "speechformer-train model=", "COMP_POINT": "25"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [f"model={name}" for name in sorted([*MODELS, *RECURRENT, *COMPOSED])]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "task",
    [
        CLASSIFY,
        LM,
        TRANSLATE,
        [*TRANSLATE, "model=rnn_attention", "recipe.warmup_steps=0"],
        *([*task, "compile=reduce-overhead"] for task in (CLASSIFY, LM, TRANSLATE)),
    ],
    ids=["classify", "lm", "translate", "rnn", "classify, CUDA graphs", "lm, CUDA graphs", "translate, CUDA graphs"],
)
def test_a_run_on_cuda(task: list[str], tmp_path: Path) -> None:
    result = execute(compose(*TINY[:-1], "machine=gpu", *task), tmp_path / "run")
    assert result["status"] == "finished"
    assert all(value is None or value >= 0 for value in result["metrics"].values())


@pytest.mark.parametrize("arguments", [[], ["corpus=sample"]])
def test_an_experiment_on_the_sample_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("SPEECHFORMER_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    train.warn_of_sample(compose("experiment=marsol_table1_alibi", *arguments), "marsol_table1_alibi")
    said = capsys.readouterr().err
    assert ("names are those of the speeches, and this run uses the generated sample" in said) == (not arguments)


def test_a_warm_up_longer_than_the_run_is_said(
    little_pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    own = [
        "task=translate",
        "corpus=auto",
        f"corpus.root={little_pairs}",
        "task.vocab_size=20",
        "trainer.max_steps=2",
    ]
    result = execute(compose(*TINY[1:], *own), tmp_path / "run")
    said = capsys.readouterr().out
    assert "recipe.warmup_steps=400 is at least the run's 2" in said
    assert result["corpus"]["name"] == "pairs" and said.startswith("Corpus pairs, en to fr (")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vocab_size=20"], r"vocab_size=20 is less than the \d+ tokens of the vocabulary"),
        (["model=rnn", "pattern=window"], "model=rnn has no self-attention, so pattern must be full"),
        (["model=rnn", "model.cell=gruu"], "model.cell has no choice 'gruu'; .*Did you mean gru?"),
        (["model=rnn", "architecture.norm=bogus"], "architecture.norm has no choice 'bogus'"),
        (["recipe.schedule=vaswani", "recipe.warmup_steps=0"], "needs recipe.warmup_steps"),
        (["task.tokens=word"], "task.tokens has no choice 'word'; .*Did you mean words?"),
    ],
)
def test_invalid_options_of_a_model_or_a_corpus_are_errors(
    arguments: list[str], message: str, little_pairs: Path, tmp_path: Path
) -> None:
    own = ["task=translate", f"corpus.root={little_pairs}", "task.vocab_size=20"]
    with pytest.raises(UserError, match=message):
        execute(compose(*TINY[1:], *own, *arguments), tmp_path / "run")
    assert not (tmp_path / "run").exists()
