"""Translate texts with a trained run: `python -m speechformer.translate RUN "text" ...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechformer import console
from speechformer.analysis.attention_maps import draw
from speechformer.analysis.command_line import load_run, read_texts, run_parser
from speechformer.analysis.translation import align, check_options, encode_sources, translate_sources
from speechformer.corpora.special_tokens import END
from speechformer.corpora.subwords import on_one_line
from speechformer.errors import UserError, run_command


def check_alignment(texts: Sequence[str]) -> None:
    """Require that --attention has one sentence to align."""
    number = sum(bool(text.strip()) for text in texts)
    if len(texts) != 1 or number != 1:
        raise UserError(f"--attention draws the alignment of one sentence, but there are {number}.")


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
    arguments = parser.parse_intermixed_args()

    def command() -> None:
        check_options(arguments.beam, arguments.length_penalty, typed=True)
        if arguments.attention and arguments.attention.suffix.lower() != ".png":
            raise UserError(f"--attention must name a .png file, not {arguments.attention}.")
        if arguments.attention and arguments.others:
            raise UserError("--attention draws the attention of one run; leave out --with.")
        if arguments.attention and arguments.text:
            check_alignment(arguments.text)
        run = load_run(arguments.run, arguments.checkpoint, "translate")
        others = [load_run(other, None, "translate") for other in arguments.others]
        texts = read_texts(arguments.text)
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
            draw(align(run, sources[0], translations[0]), f"model={run.label}").save(arguments.attention)

    run_command(command)


if __name__ == "__main__":
    main()
