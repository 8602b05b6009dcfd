"""Test trained runs again, or their ensemble: `python -m speechformer.evaluate RUN [RUN ...]`."""

from __future__ import annotations

from pathlib import Path

from speechformer import console
from speechformer.analysis.command_line import load_run, run_parser
from speechformer.analysis.evaluation import evaluate, write
from speechformer.errors import run_command


def main() -> None:
    """Run the command line."""
    about = (
        "Test a trained run again. Of several, test their ensemble: the mean of their probabilities decides. The "
        "result is one for `report`."
    )
    parser = run_parser("evaluate", about, "folder of a finished run")
    parser.add_argument("more", type=Path, nargs="*", metavar="RUN", help="more runs, for an ensemble")
    default = "outputs/evaluate/FIRST_RUN_and_NUMBER_more"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"folder to write (default: {default})")
    parser.add_argument("--study", help="study in which the report shows it (default: that of the first run)")
    arguments = parser.parse_intermixed_args()

    def command() -> None:
        runs = [load_run(folder, arguments.checkpoint) for folder in (arguments.run, *arguments.more)]
        more = f"_and_{len(runs) - 1}_more" if len(runs) > 1 else ""
        folder = arguments.output or Path("outputs/evaluate") / f"{runs[0].directory.resolve().name}{more}"
        result = evaluate(runs)
        if arguments.study is not None:
            result["config"]["study"] = arguments.study
        console.say(console.table(result["summary"]))
        console.write(str(write(result, runs[0], folder)))

    run_command(command)


if __name__ == "__main__":
    main()
