"""Translate texts with a trained run: `python -m speechformer.translate RUN "text" ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_texts, run_parser
from speechformer.analysis.find import find_checkpoint
from speechformer.analysis.translation import align, check_options, encode_sources, translate_sources
from speechformer.corpora.special_tokens import END
from speechformer.corpora.subwords import on_one_line
from speechformer.errors import UserError


def check_alignment(texts: Sequence[str]) -> None:
    """Require that --attention has one sentence to align."""
    number = sum(bool(text.strip()) for text in texts)
    if len(texts) != 1 or number != 1:
        raise UserError(f"--attention draws the alignment of one sentence, but there are {number}.")


def translate(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    check_options(arguments.beam, arguments.length_penalty, typed=True)
    if arguments.attention and arguments.attention.suffix.lower() != ".png":
        raise UserError(f"--attention must name a .png file, not {arguments.attention}.")
    if arguments.attention and arguments.others:
        raise UserError("--attention draws the attention of one run; leave out --with.")
    texts = arguments.text and read_texts(arguments.text)
    if arguments.attention and texts:
        check_alignment(texts)
    for other in arguments.others:
        find_checkpoint(other)
    (run,) = load_runs([arguments.run], arguments.checkpoint, "translate")
    others = load_runs(arguments.others, ability="translate")
    texts = texts or read_texts([])
    if arguments.attention:
        check_alignment(texts)
    sources = encode_sources(run, texts, others)
    for number, source in enumerate(sources, start=1):
        if source and source[-1] != END:
            console.warn(f"Sentence {number} is cut at {len(source)} tokens, the model's maximum.")
    translations = translate_sources(run, sources, arguments.beam, arguments.length_penalty, others)
    for ids in translations:
        console.say(on_one_line(run.tokenizer.decode(ids)))
    if arguments.attention:
        from speechformer.analysis.attention_maps import draw

        draw(align(run, sources[0], translations[0]), f"model={run.label}").save(arguments.attention)


def main() -> None:
    """Run the command line."""
    parser = run_parser("translate", "Translate texts by beam search.", "folder of a run with task=translate")
    parser.add_argument("text", nargs="*", help="one or more sentences (default: the lines of standard input)")
    parser.add_argument("--beam", type=int, help="number of hypotheses; 1 is greedy (default: as in the run's test)")
    parser.add_argument(
        "--length-penalty", type=float, help="alpha of Wu et al. 2016, equation 14 (default: as in the run's test)"
    )
    parser.add_argument(
        "--with",
        type=Path,
        action="append",
        default=[],
        dest="others",
        metavar="RUN",
        help="add a run to an ensemble; may be repeated",
    )
    parser.add_argument("--attention", type=Path, metavar="FILE", help="draw the alignment of one sentence, as PNG")
    parser.run(translate)


if __name__ == "__main__":
    main()
