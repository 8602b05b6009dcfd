"""Console output and log files. Oracle: the expected text, written by hand."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speechformer import console, errors

# Two jobs of one process. `library` stands for Lightning and torch: it keeps the stderr of its import.
JOBS = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from speechformer import console

library = logging.getLogger("library")
console.say("before")
for name in ("first", "second"):
    with console.log_to_file(Path(name)):
        if not library.handlers:
            library.addHandler(logging.StreamHandler())
        console.say(f"said in {name}")
        print(f"printed in {name}")
        library.warning(f"logged in {name}")
        warnings.warn(f"warned in {name}")
        os.write(2, f"native in {name}\\n".encode())
        subprocess.run([sys.executable, "-c", f"print('child of {name}')"])
    console.say(f"after {name}")
library.warning("logged after both")
"""


def run(code: str, folder: Path, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(console.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_a_line_goes_to_stdout_without_control_characters(capsys: pytest.CaptureFixture) -> None:
    text = "a\x1b[31mb\r\x07\x9b\u202e\u2066\u200f\tc 100 %s\nd"
    for output in (console.say, console.write, console.warn):
        output(text)
    clean = "a[31mb\tc 100 %s\nd\n"
    assert capsys.readouterr() == (2 * clean, clean)
    with pytest.raises(SystemExit, match=r"^Error: a\[31mb\tc 100 %s\nd$"):
        errors.fail(text)
    with pytest.raises(SystemExit):
        errors.ArgumentParser(prog="x").parse_args([text])
    assert capsys.readouterr().err.endswith(f"x: error: unrecognized arguments: {clean}")


def test_nothing_bypasses_the_console() -> None:
    """`print` and `sys.exit` pass control characters on: only `console` and `errors` call them with a text."""
    package = Path(console.__file__).parent
    for path in package.rglob("*.py"):
        if path.name in ("console.py", "errors.py") or path.parent.name == "bench":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                call = ast.unparse(node)
                assert not call.startswith(("print(", "sys.exit(f", "argparse.ArgumentParser(")), f"{path}: {call}"


def test_a_table_takes_rows_of_any_length() -> None:
    assert console.table([("a", "bc"), ("d",), ("e", "f", "g")]).splitlines()[2] == "e   f  g"


def test_the_level_of_the_logger_hides_lines(capsys: pytest.CaptureFixture) -> None:
    logging.getLogger("speechformer").setLevel(logging.WARNING)
    try:
        console.say("hidden")
    finally:
        logging.getLogger("speechformer").setLevel(logging.INFO)
    assert capsys.readouterr() == ("", "")


def test_a_root_handler_does_not_double_a_line(tmp_path: Path) -> None:
    code = "import logging; logging.basicConfig(level=0); from speechformer import console; console.say('once')"
    done = run(code, tmp_path)
    assert (done.stdout, done.stderr) == ("once\n", "")


def test_a_process_outlives_its_reader(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom speechformer import console\n"
        "read, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\n"
        "console.say('lost')\nconsole.say('lost')\nprint('alive', file=sys.stderr)"
    )
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "alive\n")


def test_all_output_of_a_job_reaches_its_own_file(tmp_path: Path) -> None:
    done = run(JOBS, tmp_path)
    assert done.returncode == 0
    assert done.stdout == "before\nafter first\nafter second\n"
    assert done.stderr == "logged after both\n"
    for name in ("first", "second"):
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        expected = ["said in", "printed in", "logged in", "native in", "child of"]
        assert sorted(line for line in lines if "warn" not in line.lower()) == sorted(
            f"{words} {name}" for words in expected
        )
        assert sum(f"UserWarning: warned in {name}" in line for line in lines) == 1


def test_a_log_is_appended_to_and_an_error_gives_the_console_back(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("earlier\n")
    code = (
        "import sys\nfrom pathlib import Path\nfrom speechformer import console\n"
        "try:\n    with console.log_to_file(Path('log.txt')):\n        console.say('né')\n        1 / 0\n"
        "except ZeroDivisionError:\n    console.say('out')\n    print('err', file=sys.stderr)"
    )
    done = run(code, tmp_path)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "earlier\nné\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
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


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("test_accuracy", 0.8767, "87.7 %"),
        ("test_exact", 0.0, "0.0 %"),
        ("test_exact_at_31+ / test_exact_at_1-10", 0.51, "0.5"),
        ("length_ratio", 0.987, "0.99"),
        ("test_perplexity", 9.994, "9.99"),
        ("test_perplexity", 386.66, "386.7"),
        ("bleu", 21.84, "21.8"),
        ("bleu", None, "-"),
    ],
)
def test_a_metric_has_the_decimals_of_its_kind(name: str, value: float | None, text: str) -> None:
    assert console.format_metric(name, value) == text


def test_a_table_aligns_its_columns() -> None:
    assert console.table([("", "n"), ("one", "10"), ("three", "7")]) == "        n\none    10\nthree   7"


def test_above_counts_the_rows_of_wrapped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 10 columns shows 25 characters in 3 rows, and an empty line in 1."""
    monkeypatch.setattr(console.shutil, "get_terminal_size", lambda: os.terminal_size((10, 5)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert console.above("x" * 25 + "\n\nabc") == "\x1b[5A\x1b[J"


def test_above_is_a_line_break_in_a_file(capsys: pytest.CaptureFixture) -> None:
    assert console.above("a\nb") == "\n"
