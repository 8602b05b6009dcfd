"""A trained language model continues a text: as text, by seed, within its positions; and invalid options."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from commands import call
from conftest import group
from test_models import decoder

from speechformer.analysis.continuation import MAX_PROMPT, continue_text
from speechformer.analysis.load import TrainedRun, load
from speechformer.corpora.tokenizer import detokenize
from speechformer.errors import UserError
from speechformer.generate import main
from speechformer.generation.sampling import sample


@pytest.fixture(scope="module")
def run(a_language_model: Path) -> TrainedRun:
    return load(a_language_model)


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


def test_the_command_line(a_language_model: Path, run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a prompt it writes; without it asks for some."""
    command = [main, a_language_model, "--tokens", "5"]
    out, err = call(*command, "the zyzzyva", "--n", "2")
    assert err == "(not in the vocabulary, read as <unk>: zyzzyva)\n"
    lines = out.splitlines()
    assert lines[0::2] == ["--- 1, seed 0", "--- 2, seed 1"]
    assert lines[1::2] == [run.generate("the zyzzyva", tokens=5, seed=seed) for seed in (0, 1)]
    prompts = ["the seed", "the people"]
    continuations = [run.generate(prompt, tokens=5) for prompt in prompts]
    assert call(*command, input="\n\n".join(prompts).encode())[0].splitlines() == continuations


def test_learned_positions_end(run: TrainedRun) -> None:
    """A prompt of 2 words leaves room for 19 of the 20 positions: the last word is not read."""
    learned = dataclasses.replace(run, task=copy.copy(run.task))
    learned.task.model = decoder(model=group("model", "learned"), vocab_size=len(run.tokenizer))
    assert len(list(continue_text(learned, "the people"))) == 19
    with pytest.raises(UserError, match="has 20 positions: .* room for 19 more, not 20"):
        continue_text(learned, "the people", tokens=20)
    with pytest.raises(UserError, match="The prompt has 21 tokens, and the model reads 1 to 20; shorten it"):
        continue_text(learned, "the " * 21)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--temperature", "-1"], "temperature must be 0 or above"),
        (["--top-p", "2"], "top_p must be above 0 and at most 1"),  # before it asks for a prompt
        ([" "], "A sentence is empty"),
        (["the people " * 9000], f"The prompt has 18000 tokens, and the model reads 1 to {MAX_PROMPT}"),
    ],
)
def test_errors(arguments: list[str], sentence: str, a_language_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid arguments are errors before the model is loaded."""
    folder = a_language_model if "prompt" in sentence else Path("nowhere")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit, match=sentence):
        call(main, folder, *arguments)
