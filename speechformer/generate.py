"""What comes next? `python -m speechformer.generate RUN "prompt"`; without a prompt it asks for one after another.

The text appears word by word, each computed from the keys and values of those before it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from speechformer.analysis.load import Trained, given_sentences, load_trained, note_unknown, say_if_unfinished
from speechformer.errors import UserError, run_command
from speechformer.generation.sampling import sample
from speechformer.tasks.language_model import LanguageModel

TOKENS = 40
MOST = 4096  # words of a prompt; the scores of all of them with all others are held at once
GLUED = {".", ",", ";", ":", "!", "?", ")", "]", "}", "%", "''", "...", "n't", "--"}  # to what stands before
OPENING = {"(", "[", "{", "$", "#", "``"}  # what follows is glued to these
QUOTES = {"``": '"', "''": '"'}  # as the Penn Treebank writes them


def pieces(words: Iterable[str]) -> Iterator[str]:
    """The words as pieces of a text, each with the space before it: "I do n't , ( ever ) ." -> I don't, (ever)."""
    before: str | None = None
    for word in words:
        clitic = len(word) > 1 and word[0] == "'" and word[1:].isalpha()  # 's, 're, 've
        glued = before is None or before in OPENING or word in GLUED or clitic
        yield ("" if glued else " ") + QUOTES.get(word, word)
        before = word


def continuation(
    run: Trained,
    prompt: str,
    *,
    tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """The words that follow a prompt, one after another.

    Args:
        tokens: how many; None for 40, or as many as the model has positions for.

    Raises:
        UserError: at once, if prompt and continuation are more than the positions of the model, or the prompt is too
            long for memory.
    """
    assert isinstance(run.task, LanguageModel)
    ids = run.words(prompt)[1]
    max_length = run.task.model.max_length
    if len(ids) > MOST:
        raise UserError(f"The prompt has {len(ids)} words; give at most its last {MOST}.")
    if max_length is not None:
        room = max_length - len(ids) + 1  # the last one drawn is not read
        if room < 1 or (tokens or 0) > room:
            model = run.task.hparams["architecture"]["model"]["name"]
            raise UserError(
                f"model={model} has vectors for {max_length} positions and none beyond: behind these {len(ids)} words "
                f"{f'there is room for {room}, not {tokens}' if room > 0 else 'there is no room'}; give a shorter "
                "prompt or ask for fewer --tokens, or train with model=rope or alibi, which know any position."
            )
        tokens = min(TOKENS, room) if tokens is None else tokens
    drawn = sample(
        run.task.model,
        ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(seed),
        words=len(run.tokenizer),
    )
    limited = itertools.islice(drawn, TOKENS if tokens is None else tokens)
    return (run.tokenizer.decode([index])[0] for index in limited)


def say(run: Trained, prompt: str, n: int, seed: int, **options: Any) -> None:
    """Write a prompt and n continuations of it to the screen as they come."""
    words, ids = run.words(prompt)
    found = [continuation(run, prompt, seed=seed + k, **options) for k in range(n)]
    if note := note_unknown(words, ids):
        print(f"({note})", file=sys.stderr)
    for k, following in enumerate(found):
        if n > 1:
            print(f"--- {k + 1}, seed {seed + k}")
        for piece in pieces(itertools.chain(run.tokenizer.decode(ids), following)):
            print(piece, end="", flush=True)
        print(flush=True)


def talk(run: Trained, n: int, seed: int, **options: Any) -> None:
    """Ask for prompts until the end of input; every answer is another draw."""
    print("Begin a text, and the model goes on with it. An empty line ends.", file=sys.stderr)
    for turn in itertools.count():
        try:
            prompt = input("> ").strip()
        except EOFError:
            print()
            return
        if not prompt:
            return
        try:
            say(run, given_sentences([prompt])[0], n, seed + turn * n, **options)
        except UserError as error:
            print(error, file=sys.stderr)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m speechformer.generate", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run with task=lm")
    parser.add_argument("prompt", nargs="*", help="one or more beginnings; none: lines from the keyboard or a file")
    parser.add_argument("--tokens", type=int, help=f"words to add ({TOKENS}, or as many as the positions give)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable word (%(default)s)")
    parser.add_argument("--top-k", type=int, help="draw from the k most probable words alone")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the fewest that have this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (%(default)s)")
    parser.add_argument("--n", type=int, default=1, help="continuations of each prompt, with seeds one after another")
    parser.add_argument("--checkpoint", help="best.ckpt or last.ckpt; else the one that the run's figures are of")
    given = parser.parse_intermixed_args()

    def command() -> None:
        for name, value, least in (("tokens", given.tokens, 1), ("top-k", given.top_k, 1), ("n", given.n, 1)):
            if value is not None and value < least:
                raise UserError(f"--{name} must be at least {least}, not {value}.")
        if not 0 <= given.temperature < float("inf"):
            raise UserError(f"--temperature must be 0 or above, not {given.temperature}.")
        if not 0 <= given.seed < 2**63 - given.n:
            raise UserError(f"--seed must be at least 0 and below 2^63, not {given.seed}.")
        if not 0 < given.top_p <= 1:
            raise UserError(f"--top-p must be above 0 and at most 1, not {given.top_p}.")
        run = load_trained(given.run, "lm", checkpoint=given.checkpoint)
        say_if_unfinished(run)
        if given.temperature == 0 and given.n > 1:
            print("(at temperature 0 there is one continuation)", file=sys.stderr)
            given.n = 1
        options = {name: getattr(given, name) for name in ("n", "seed", "tokens", "temperature", "top_k", "top_p")}
        if not given.prompt and sys.stdin.isatty():
            talk(run, **options)
            return
        for prompt in given_sentences(given.prompt):
            say(run, prompt, **options)

    run_command(command)


if __name__ == "__main__":
    main()
