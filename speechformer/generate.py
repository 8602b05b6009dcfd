"""Continue a text with a language model, word by word: `python -m speechformer.generate RUN "prompt"`."""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING, Any

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser
from speechformer.analysis.continuation import DEFAULT_TOKENS, check_options, continue_text
from speechformer.errors import UserError, require

if TYPE_CHECKING:
    from speechformer.analysis.load import TrainedRun


def print_continuations(run: TrainedRun, prompt: str, n: int, seed: int, **options: Any) -> None:
    """Print a prompt and n continuations of it, with seeds from `seed` on, as they are sampled."""
    from speechformer.tasks.text import note_unknown

    continuations = [continue_text(run, prompt, seed=seed + k, **options) for k in range(n)]
    ids = run.tokenizer.encode(prompt)
    if note := note_unknown(run.tokenizer.split(prompt), ids):
        console.warn(f"({note})")
    for k, drawn in enumerate(continuations):
        if n > 1:
            console.write(f"--- {k + 1}, seed {seed + k}")
        for piece in run.tokenizer.stream(itertools.chain(ids, drawn)):
            console.write(piece, end="")
        console.write("")


def converse(run: TrainedRun, n: int, seed: int, **options: Any) -> None:
    """Ask for prompts until the end of input; each continuation has its own seed."""
    console.warn("Enter the beginning of a text and the model continues it. An empty line ends.")
    for turn in itertools.count():
        try:
            prompt = input("> ").strip()
        except EOFError:
            console.write("")
            return
        if not prompt:
            return
        try:
            print_continuations(run, read_sentences([prompt])[0], n, seed + turn * n, **options)
        except UserError as error:
            console.warn(str(error))


def generate(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    n, seed = arguments.n, arguments.seed
    options = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "top_p")}
    check_options(**options, seed=seed, typed=True)
    require(n >= 1, "n", "at least 1", n, typed=True)
    require(seed + n <= 2**63, "seed", f"at most 2^63 - {n} for {n} continuations", seed, typed=True)
    prompts = arguments.prompt and read_sentences(arguments.prompt)
    (run,) = load_runs([arguments.run], arguments.checkpoint, "generate")
    if arguments.temperature == 0 and n > 1:
        console.warn("(at temperature 0 there is one continuation)")
        n = 1
    if not prompts and sys.stdin.isatty():
        converse(run, n, seed, **options)
        return
    for prompt in prompts or read_sentences([]):
        print_continuations(run, prompt, n, seed, **options)


def main() -> None:
    """Run the command line."""
    parser = run_parser("generate", "Continue a text with a language model.", "folder of a run with task=lm")
    parser.add_argument("prompt", nargs="*", help="one or more prompts (default: lines of standard input)")
    parser.add_argument("--tokens", type=int, help=f"tokens to add (default: up to {DEFAULT_TOKENS})")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits; 0: greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, help="sample from the k most probable words only")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the fewest words of this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (%(default)s)")
    parser.add_argument("--n", type=int, default=1, help="continuations of each prompt, with consecutive seeds")
    parser.run(generate)


if __name__ == "__main__":
    main()
