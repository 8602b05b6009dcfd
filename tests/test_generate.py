"""A trained language model continues a text: as text, by seed, within its positions; and invalid options."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_in

from speechformer.analysis.continuation import MAX_PROMPT, continue_text
from speechformer.analysis.load import TrainedRun, load
from speechformer.corpora.tokenizer import detokenize
from speechformer.errors import UserError
from speechformer.generate import main
from speechformer.generation.sampling import sample


@pytest.fixture(scope="module")
def run(a_language_model: Path) -> TrainedRun:
    return load(a_language_model)


@pytest.fixture(scope="module")
def a_run_of_learned_positions(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = [f"corpus.root={little}", "corpus=speeches", "corpus.classes=[a,b,c]", "model=learned", "task=lm"]
    return run_in(tmp_path_factory.mktemp("learned"), *own, "trainer.max_steps=2")


def test_words_become_a_text() -> None:
    words = ["I", "do", "n't", "know", ",", "Mr.", "Bush", "'s", "(", "old", ")", "friend", ";"]
    words += ["``", "yes", "''", "--", "5", "%", "!"]
    assert "".join(detokenize(words)) == "I don't know, Mr. Bush's (old) friend; \"yes\"-- 5%!"


def test_a_continuation_is_what_is_drawn_with_its_seed(run: TrainedRun) -> None:
    ids = run.tokenizer.encode("We will")
    for seed in (0, 1):
        drawn = sample(run.task.model, ids, generator=torch.Generator().manual_seed(seed), words=len(run.tokenizer))
        expected = list(itertools.islice(drawn, 12))
        assert list(continue_text(run, "We will", tokens=12, seed=seed)) == expected
    assert list(continue_text(run, "We will", seed=0)) != list(continue_text(run, "We will", seed=1))
    assert len(list(continue_text(run, "We will"))) == 40  # beyond the 32 that it was trained on


def test_the_command_line(
    a_language_model: Path, run: TrainedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", str(a_language_model), "the zyzzyva", "--n", "2", "--tokens", "5"])
    main()
    said = capsys.readouterr()
    assert said.err == "(not in the vocabulary, read as <unk>: zyzzyva)\n"
    lines = said.out.splitlines()
    assert lines[0::2] == ["--- 1, seed 0", "--- 2, seed 1"]
    for k in (0, 1):
        words = ["the", "<unk>", *run.tokenizer.tokens(continue_text(run, "the zyzzyva", tokens=5, seed=k))]
        assert lines[2 * k + 1] == "".join(detokenize(words))


def test_without_a_prompt_it_asks(
    a_language_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    answers = iter(["the seed", "the people", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "argv", ["generate", str(a_language_model), "--tokens", "3"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("the seed") and lines[1].startswith("the people")


def test_learned_positions_end(a_run_of_learned_positions: Path) -> None:
    """A prompt of 2 words leaves room for 31 of the 32 positions: the last word is not read."""
    run = load(a_run_of_learned_positions)
    assert len(list(continue_text(run, "the people"))) == 31
    assert len(list(continue_text(run, "the people", tokens=31))) == 31
    with pytest.raises(UserError, match="model=learned has 32 positions: .* room for 31 more, not 32"):
        continue_text(run, "the people", tokens=32)
    with pytest.raises(UserError, match="there is no room"):
        continue_text(run, "the " * 33)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--tokens", "0"], "--tokens must be at least 1"),
        (["x", "--top-k", "0"], "--top-k must be at least 1"),
        (["x", "--n", "0"], "--n must be at least 1"),
        (["x", "--seed", "-1"], "--seed must be at least 0"),
        (["x", "--seed", str(2**63 - 1), "--n", "2"], "--seed must be at most 2.63 - 2 for 2 continuations"),
        (["x", "--temperature", "-1"], "--temperature must be 0 or above"),
        (["x", "--top-p", "0"], "--top-p must be above 0 and at most 1"),
        (["--top-p", "2"], "--top-p must be above 0 and at most 1"),  # before it asks for a prompt
        ([" "], "Sentence 1 is empty"),
        (["the people " * 9000], f"The prompt has 18000 words; give at most its last {MAX_PROMPT}"),
    ],
)
def test_errors(arguments: list[str], sentence: str, a_language_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid arguments are errors before the model is loaded."""
    folder = a_language_model if "prompt" in sentence else Path("nowhere")
    monkeypatch.setattr(sys, "argv", ["generate", str(folder), *arguments])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit, match=sentence):
        main()


def test_errors_in_python_name_the_argument(run: TrainedRun) -> None:
    with pytest.raises(UserError, match="^top_k must be at least 1, not 0.$"):
        run.generate("x", top_k=0)


def test_a_closed_pipe_ends_it_without_a_message(a_language_model: Path) -> None:
    command = [sys.executable, "-m", "speechformer.generate", str(a_language_model), "the people", "--n", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0
