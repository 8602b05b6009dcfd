"""`init_from=RUN`: a run begins with the weights of another. Models from elsewhere: see test_pretrained.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, compose

from speechformer.analysis.load import load
from speechformer.config import as_plain
from speechformer.errors import UserError
from speechformer.models.pretrained import check_overrides
from speechformer.runs.folder import read_result, write_result
from speechformer.training.run import execute

TEXT = "and we will mend the wells"
STAYS = ["trainer.max_steps=1", "trainer.max_epochs=-1", "recipe.lr=0", "trainer.accelerator=cpu"]


def own(run: Path) -> list[str]:
    """Return the overrides of a run that say what it reads."""
    words = read_result(run)["config"]["corpus"]
    values = {"corpus.root": words["root"], "corpus": words["name"]}
    if "classes" in words:
        values["corpus.classes"] = f"[{','.join(words['classes'])}]"
    return ["protocol=paper", *(f"{key}={value}" for key, value in values.items())]


@pytest.mark.parametrize("fixture", ["a_classifier", "a_language_model", "a_translator"])
def test_without_learning_it_stays_the_same_model(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Oracle: a learning rate of 0, and the source's own outputs."""
    source = request.getfixturevalue(fixture)
    task = read_result(source)["config"]["task"]["name"]
    execute(compose(*own(source), f"task={task}", f"init_from={source}", "seed=7", *STAYS), tmp_path / "run")
    before, after = map(load, (source, tmp_path / "run"))
    assert torch.equal(before.logits(TEXT), after.logits(TEXT))


def test_a_classifier_of_other_classes_keeps_all_but_their_layer(a_classifier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(read_result(a_classifier)["config"]["corpus"]["root"], tmp_path / "texts"))
    words = [word for word in own(a_classifier) if not word.startswith("corpus.")]
    words += [f"corpus.root={folder}", "corpus.classes=[x,y,z]", "task=classify", f"init_from={a_classifier}"]
    execute(compose(*words, *STAYS), tmp_path / "run")
    before, after = (load(run).task.model.state_dict() for run in (a_classifier, tmp_path / "run"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.2.weight", "head.2.bias"}


def test_the_content_of_a_run_identifies_it(a_classifier: Path, tmp_path: Path) -> None:
    """A copy is the same; other weights are not."""
    copy = Path(shutil.copytree(a_classifier, tmp_path / "copy"))
    words = [*own(a_classifier), "task=classify"]
    digests = [as_plain(compose(*words, f"init_from={run}"))["init_from"]["sha256"] for run in (a_classifier, copy)]
    shutil.copy(copy / "best.ckpt", copy / "last.ckpt")
    digests.append(as_plain(compose(*words, f"init_from={copy}"))["init_from"]["sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_a_pattern_can_be_given_and_the_rest_is_decided(a_language_model: Path) -> None:
    words = ["task=lm", f"init_from={a_language_model}"]
    config = as_plain(compose(*words, "pattern=window", "block_size=16"))
    assert (config["pattern"]["name"], config["block_size"], config["width"]) == ("window", 16, 16)
    with pytest.raises(UserError, match=r"init_from=.* decides width; remove it\."):
        check_overrides(config, ["width=8"])


@pytest.mark.parametrize(
    ("word", "is_said"),
    [
        ("trainer.max_steps=3", True),
        ("trainer.max_steps=2", False),
        ("trainer.max_steps=1", False),
        ("width=4", False),
    ],
)
def test_a_run_says_which_finished_one_is_shorter(
    word: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*TINY, "trainer.max_steps=2"]
    execute(compose(*words), tmp_path / "a_1")
    execute(compose(*words, word), tmp_path / "a_2")
    said = f"{tmp_path / 'a_1'} is this run with trainer.max_steps=2, and has finished."
    assert ("is this run with" in caplog.text) == (said in caplog.text) == is_said


@pytest.mark.parametrize(
    ("word", "status", "message"),
    [
        ("task=classify", "finished", "is a run of task=lm; set task=lm"),
        ("task=lm", "failed", "the run has not finished; let the same command resume it"),
        ("task=lm", "finished", "tokenizer.json is not the one that the run trained with"),
        ("task=lm", "diverged", "the run diverged"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_sentence(
    word: str, status: str, message: str, a_language_model: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(a_language_model, tmp_path / "run"))
    write_result(run, read_result(run) | {"status": status, "error": "x"})
    if "tokenizer" in message:
        (run / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(UserError, match=message):
        as_plain(compose(word, f"init_from={run}"))


@pytest.mark.parametrize("word", ["probe=recall", "probe.symbols=9"])
def test_a_probe_goes_on_from_the_same_symbols(word: str, tmp_path: Path) -> None:
    words = [*TINY[1:], "task=probe", "probe=copy", "recipe.warmup_steps=0"]
    execute(compose(*words, "trainer.max_steps=1"), tmp_path / "run")
    on = ["task=probe", "probe=copy", f"init_from={tmp_path / 'run'}"]
    assert as_plain(compose(*on, "probe.test_lengths=[30]"))["width"] == 8
    with pytest.raises(UserError, match="a probe with other settings; only lengths may differ"):
        as_plain(compose(*on, word))


def test_words_of_sentences_are_none_of_documents(a_language_model: Path, tmp_path: Path) -> None:
    words = ["task=lm", "corpus=stories", "corpus.documents=5", f"init_from={a_language_model}"]
    with pytest.raises(
        UserError, match="that run has words of sentences; for documents take one with task.tokens=bpe"
    ):
        execute(compose(*words, *STAYS), tmp_path / "run")
