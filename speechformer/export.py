"""Export a trained model: `python -m speechformer.export RUN [--format safetensors|torch.export]`.

`analysis.exports` says what the files are, and checks each against the run before it gets its name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from speechformer.analysis.command_line import load_runs, run_parser


def export(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    (run,) = load_runs([arguments.run], arguments.checkpoint)

    from speechformer.analysis.exports import HUGGINGFACE, export_all

    place = run.directory / "export"
    if run.is_pretrained:  # whose folder is its owner's
        place = Path("outputs/export") / run.directory.resolve().name
    if arguments.format == HUGGINGFACE:  # files of the same names
        place /= HUGGINGFACE
    export_all(run, arguments.format, arguments.output or place)


def main() -> None:
    """Run the command line."""
    parser = run_parser("export", "Export a trained model with its tokenizer.")
    formats = ("safetensors", "torch.export", "huggingface")
    default = "file format (default: the first two, if torch can export the model)"
    parser.add_argument("--format", choices=formats, help=default)
    place = (
        "folder to write to (default: RUN/export, of a model from elsewhere outputs/export/NAME; in it huggingface)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=place)
    parser.run(export)


if __name__ == "__main__":
    main()
