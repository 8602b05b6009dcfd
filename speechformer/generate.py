"""Continue a text with a language model, word by word: `python -m speechformer.generate RUN "prompt"`."""

from __future__ import annotations

import argparse
import itertools

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_sentences, run_parser
from speechformer.analysis.continuation import DEFAULT_TOKENS, check_options, continue_text
from speechformer.errors import require


def generate(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    options = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "top_p")}
    check_options(**options, seed=arguments.seed)
    require(arguments.n >= 1, "--n", "at least 1", arguments.n)
    prompts = arguments.prompt and read_sentences(arguments.prompt)
    (run,) = load_runs([arguments.run], arguments.checkpoint, "generate")
    for prompt, k in itertools.product(prompts or read_sentences([]), range(arguments.n)):
        drawn = continue_text(run, prompt, seed=arguments.seed + k, **options)
        if k == 0 and (notes := run.read(prompt).notes):
            console.warn(f"({'; '.join(notes)})")
        if arguments.n > 1:
            console.write(f"--- {k + 1}, seed {arguments.seed + k}")
        for piece in run.tokenizer.stream(itertools.chain(run.tokenizer.encode(prompt), drawn)):
            console.write(piece, end="")
        console.write("")


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
