"""What users read on the console: lines, tables, log files and errors. Oracle: the text, written by hand."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from speechformer import __main__ as overview
from speechformer import console, errors
from speechformer.errors import UserError, one_sentence, pick, run_command, unknown

# Two jobs of one process. `library` stands for Lightning and torch: it keeps the stderr of its import.
JOBS = """
import contextlib, logging, os, subprocess, sys, warnings
from pathlib import Path
from speechformer import console

library = logging.getLogger("library")
console.say("before")
for name in ("first", "second"):
    with contextlib.suppress(ZeroDivisionError), console.log_to_file(Path(name)):
        if not library.handlers:
            library.addHandler(logging.StreamHandler())
        console.say(f"sáid in {name}")
        print(f"printed in {name}")
        library.warning(f"logged in {name}")
        warnings.warn(f"warned in {name}")
        os.write(2, f"native in {name}\\n".encode())
        subprocess.run([sys.executable, "-c", f"print('child of {name}')"])
        1 / 0
    console.say(f"after {name}")
library.warning("logged after both")
"""


def run(
    code: str, folder: Path, stderr: int = subprocess.PIPE, words: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(console.__file__).parents[1])}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_a_line_goes_to_stdout_without_control_characters(capsys: pytest.CaptureFixture) -> None:
    text = "a\x1b[31mb\r\x07\x9b\u202e\u2066\u200f\tc 100 %s\nd"
    for output in (console.say, console.write, console.warn):
        output(text)
    clean = "a[31mb\tc 100 %s\nd\n"
    assert capsys.readouterr() == (2 * clean, clean)
    with pytest.raises(SystemExit, match=r"^Error: a\[31mb\tc 100 %s\nd$"):
        errors.fail(text)


def test_a_table_aligns_rows_of_any_length() -> None:
    rows = [("", "n"), ("one", "10"), ("d",), ("three", "7", "x")]
    assert console.table(rows) == "        n\none    10\nd\nthree   7  x"


@pytest.mark.parametrize(("level", "kept"), [(logging.NOTSET, logging.INFO), (logging.WARNING, logging.WARNING)])
def test_a_level_that_the_program_has_set_stays(level: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.LOGGER, "handlers", [])
    monkeypatch.setattr(console.LOGGER, "level", level)
    runpy.run_path(console.__file__)
    assert console.LOGGER.level == kept


def test_a_process_outlives_its_reader_and_says_a_line_once(tmp_path: Path) -> None:
    """A handler of the root logger would repeat the line on stderr."""
    code = (
        "import logging, os, sys\nlogging.basicConfig(level=0)\nfrom speechformer import console\n"
        "read, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\n"
        "console.say('lost')\nconsole.say('lost')\nprint('alive', file=sys.stderr)"
    )
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "alive\n")


def test_all_output_of_a_job_is_appended_to_its_own_file(tmp_path: Path) -> None:
    """Each job ends with an error, which gives the console back."""
    (tmp_path / "first").write_text("earlier\n")
    done = run(JOBS, tmp_path)
    assert (done.stdout, done.stderr) == ("before\nafter first\nafter second\n", "logged after both\n")
    for name in ("first", "second"):
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        said = sorted(line for line in lines if "warn" not in line.lower())
        expected = [f"{words} {name}" for words in ("child of", "logged in", "native in", "printed in", "sáid in")]
        assert said == (["child of first", "earlier", *expected[1:]] if name == "first" else expected)
        assert sum(f"UserWarning: warned in {name}" in line for line in lines) == 1


def test_a_progress_bar_sees_no_terminal_while_a_job_logs_to_a_file(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    code = (
        "import sys\nfrom pathlib import Path\nfrom speechformer import console\nis_tty = [sys.stderr.isatty()]\n"
        "with console.log_to_file(Path('log.txt')):\n    is_tty.append(sys.stderr.isatty())\n"
        "print(*is_tty, sys.stderr.isatty())"
    )
    done = run(code, tmp_path, stderr=terminal)
    os.close(ours)
    os.close(terminal)
    assert done.stdout == "True False True\n"


def test_a_metric_has_the_decimals_of_its_kind() -> None:
    shown = [
        ("test_accuracy", 0.8767, "87.7 %"),
        ("test_exact", 0.0, "0.0 %"),
        ("test_exact_at_31+ / test_exact_at_1-10", 0.51, "0.5"),
        ("length_ratio", 0.987, "0.99"),
        ("test_perplexity", 9.994, "9.99"),
        ("test_perplexity", 386.66, "386.7"),
        ("bleu", None, "-"),
    ]
    assert [console.format_metric(name, value) for name, value, _ in shown] == [text for *_, text in shown]


# Runs commands in one process until each ends, and prints how, and whether torch was imported
ENDS = """
import importlib, sys
for line in sys.argv[1:]:
    name, *sys.argv[1:] = line.split()
    try:
        importlib.import_module(f"speechformer.{name}").main()
    except SystemExit as end:
        print("torch" in sys.modules, line, end.code, sep="|")
"""


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    """Oracle: the modules of the process."""
    of_runs = ("predict", "generate", "translate", "attention", "play", "export", "evaluate")
    expected: dict[str, str] = {f"{name} a --nope": "2" for name in (*of_runs, "audit", "status", "download")}
    for name in of_runs:
        expected[f"{name} nowhere"] = (
            "Error: nowhere: no such folder. Name that of a run, or of a model as Hugging Face saves it."
        )
        expected[f"{name} . --checkpoint x"] = (
            "Error: There is no checkpoint x; choose one of average.ckpt, best.ckpt, last.ckpt."
        )
    expected |= {
        "generate . --n 0": "Error: --n must be at least 1, not 0.",
        "translate . --beam 0": "Error: beam must be between 1 and 100, not 0.",
        "play . --output x.txt": "Error: --output x.txt: name a file that ends with .html.",
    }
    done = run(ENDS, tmp_path, words=[*expected])
    assert done.stdout.splitlines() == [f"False|{line}|{code}" for line, code in expected.items()], done.stderr


COMMANDS = ["__main__"]
COMMANDS += [name.removeprefix("python -m speechformer.") for name, _ in overview.commands()]


def ends(name: str, *words: str) -> object:
    """Run a command in this process; return the code or message of its exit, None without one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [name, *words])
        try:
            module = f"speechformer.{name}" if name != "report" else "speechformer.report.__main__"
            importlib.import_module(module).main()
        except SystemExit as end:
            return end.code
    return None


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_without_a_stream(name: str, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python starts where the caller has closed one (`2>&-`). `train` explains itself, the others an argument."""
    monkeypatch.setattr(sys, stream, None)
    if name == "train":
        assert ends(name, "--version") is None
    else:
        assert ends(name, "--nope") not in (None, 0)
    assert not getattr(sys, stream).isatty()
    assert os.get_inheritable(getattr(sys, stream).fileno())  # by the workers of a sweep


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_silently_if_its_reader_is_gone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--help | head`; and without docstrings, as in `python -OO`."""
    if name != "report":
        monkeypatch.setattr(importlib.import_module(f"speechformer.{name}"), "__doc__", None)
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert ends(name, "--help") in (None, 0)
        assert sys.stdout is not pipe


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_output_that_has_no_room_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert ends("status", "--help") == "Error: No space left on device."


def test_an_unknown_name_lists_the_valid_ones_and_the_closest() -> None:
    nothing = unknown("pattern=full", "option", "window", [])
    assert str(nothing) == "pattern=full has no option 'window'; the valid ones are: none."
    with pytest.raises(UserError, match=r"pattern\.name has no choice 'x'; the valid ones are: window, full\.$"):
        pick({"window": 1, "full": 2}, "x", "pattern.name")
    with pytest.raises(UserError, match=r"'ful'; the valid ones are: window, full\. Did you mean full\?$"):
        pick({"window": 1, "full": 2}, "ful", "pattern.name")


def test_a_command_ends_with_one_sentence() -> None:
    def command() -> None:
        raise error

    missing = FileNotFoundError(2, "No such file or directory", "/x")
    sentences = {UserError("a is wrong."): "Error: a is wrong.", KeyboardInterrupt(): "Interrupted."}
    for error, message in {**sentences, missing: "Error: /x: No such file or directory."}.items():  # noqa: B007
        with pytest.raises(SystemExit) as end:
            run_command(command)
        assert end.value.code == message
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        run_command(lambda: 1 / 0)
    assert one_sentence(ValueError("one\n  two\n\nthree")) == "one two"
