"""Translate texts with a trained run: `python -m speechformer.translate RUN "text" ...`."""

from __future__ import annotations

import argparse
from pathlib import Path

from speechformer import console
from speechformer.analysis.command_line import load_runs, read_texts, run_parser
from speechformer.analysis.translation import align, check_options, encode_sources, translate_sources
from speechformer.corpora.special_tokens import END, UNKNOWN
from speechformer.errors import UserError
from speechformer.escape import on_one_line


def translate(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    check_options(arguments.beam, arguments.length_penalty)
    if arguments.attention and (arguments.attention.suffix.lower() != ".png" or arguments.others):
        raise UserError("--attention names a .png file for the alignment of one run, without --with.")
    texts = arguments.text and read_texts(arguments.text)
    run, *others = load_runs([arguments.run, *arguments.others], arguments.checkpoint, "translate")
    texts = texts or read_texts([])
    if arguments.attention and len(texts) != 1:
        raise UserError(f"--attention draws the alignment of one sentence, but there are {len(texts)}.")
    sources = encode_sources(run, texts, others)

    from speechformer.tasks.text import note_unknown

    for number, (text, source) in enumerate(zip(texts, sources), start=1):
        if source and source[-1] != END:
            console.warn(f"Sentence {number} is cut at {len(source)} tokens, the model's maximum.")
        if note := note_unknown(run.tokenizer.split(text.strip()), run.tokenizer.encode(text.strip()), UNKNOWN):
            console.warn(f"Sentence {number}: {note}.")
    translations = translate_sources(run, sources, arguments.beam, arguments.length_penalty, others)
    for ids in translations:
        console.say(on_one_line(run.tokenizer.decode(ids)))
    if arguments.attention:
        from speechformer.analysis.attention_maps import draw

        draw(align(run, sources[0], translations[0]), f"model={run.label}").save(arguments.attention)


def main() -> None:
    """Run the command line."""
    parser = run_parser("translate", "Translate texts by beam search.", "folder of a run with task=translate")
    add = parser.add_argument
    add("text", nargs="*", help="one or more sentences (default: the lines of standard input)")
    add("--beam", type=int, help="number of hypotheses; 1 is greedy (default: as in the run's test)")
    alpha = "alpha of Wu et al. 2016, equation 14 (default: as in the run's test)"
    add("--length-penalty", type=float, help=alpha)
    ensemble = "add a run to an ensemble; may be repeated"
    add("--with", type=Path, action="append", default=[], dest="others", metavar="RUN", help=ensemble)
    add("--attention", type=Path, metavar="FILE", help="draw the alignment of one sentence, as PNG")
    parser.run(translate)


if __name__ == "__main__":
    main()
