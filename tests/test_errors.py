"""Errors name what is wrong and what is valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speechformer.errors import ArgumentParser, UserError, build, one_sentence, pick, run_command, unknown


def test_an_empty_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be the current folder."""
    parser = ArgumentParser("x")
    parser.add_argument("--output", type=Path)
    assert parser.parse_args(["--output", "."]).output == Path()
    for text in ("", " "):
        with pytest.raises(SystemExit):
            parser.parse_args(["--output", text])
        assert "argument --output: is empty; name a file or folder." in capsys.readouterr().err


@pytest.mark.parametrize(("error", "said"), [("KeyboardInterrupt", "Interrupted."), ("OSError(3)", "OSError: 3")])
def test_ctrl_c_while_a_command_is_imported_is_one_word(error: str, said: str) -> None:
    """Oracle: `sys.argv` as Python sets it for `python -m` until the module is found."""
    code = f"import sys; sys.argv = ['-m']; import speechformer; raise {error}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode != 0 and lines[-1] == said and (len(lines) == 1) == (said == "Interrupted.")


def window(width: int, size: int = 3) -> tuple[int, int]:
    return width, size


def test_an_unknown_name_lists_the_valid_ones_and_the_closest() -> None:
    assert str(unknown("model", "key", "scal", ["name", "scale"])) == (
        "model has no key 'scal'; the valid ones are: name, scale. Did you mean scale?"
    )
    nothing = str(unknown("pattern=full", "option", "window", []))
    assert nothing == "pattern=full has no option 'window', nor any other; leave it out."
    with pytest.raises(UserError, match=r"pattern\.name has no choice 'x'; the valid ones are: window\.$"):
        pick({"window": window}, "x", "pattern.name")


def test_build_calls_the_named_function_with_its_options() -> None:
    assert build({"window": window}, {"name": "window", "size": 5}, "pattern", width=8) == (8, 5)
    with pytest.raises(UserError, match=r"pattern=window has no option 'sise'; .* size\. Did you mean size\?"):
        build({"window": window}, {"name": "window", "sise": 5}, "pattern", width=8)


def test_a_message_has_one_line_whatever_it_names() -> None:
    assert str(UserError("a\nb\r is no folder.")) == r"a\nb\r is no folder."


def test_the_first_paragraph_is_the_sentence() -> None:
    assert one_sentence(ValueError("one\n  two\n\nthree")) == "one two"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("width is wrong."), "Error: width is wrong."),
        (FileNotFoundError(2, "No such file or directory", "/x"), "Error: /x: No such file or directory."),
        (KeyboardInterrupt(), "Interrupted."),
    ],
)
def test_a_command_ends_with_one_sentence(error: BaseException, message: str) -> None:
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_command(command)
    assert end.value.code == message
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        run_command(lambda: 1 / 0)
