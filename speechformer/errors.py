"""Report invalid input in one sentence: what is wrong, where, and how to fix it.

`UserError` is the only exception that the commands print without a traceback. Any other exception that escapes is a
bug of this project and keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from speechformer.escape import plain

T = TypeVar("T")


class ArgumentParser(argparse.ArgumentParser):
    """A parser of a command line whose errors are free of control characters, and whose paths are not empty."""

    def run(self, command: Callable[[argparse.Namespace], object]) -> None:
        """Run a command for the arguments of the command line, see `run_command`; options may stand anywhere."""
        arguments = self.parse_intermixed_args()
        run_command(lambda: command(arguments))

    def error(self, message: str) -> NoReturn:
        super().error(plain(message))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is Path and not arg_string.strip():  # it would be the current folder
            raise argparse.ArgumentError(action, "is empty; name a file or folder.")
        return super()._get_value(action, arg_string)


class UserError(ValueError):
    """An error that the user can fix; the message is one sentence for the console, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("\n", r"\n").replace("\r", r"\r"))  # of names of files, for example


def run_command(command: Callable[[], object]) -> None:
    """Run a command, and print a `UserError` or an unusable file as one sentence.

    If the reader of the output is gone (`| head`), the command ends silently. Characters that the terminal cannot
    encode become question marks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        fail(f"{one_sentence(error)}.")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")


def fail(message: str) -> NoReturn:
    """End the program with exit code 1 and a message on stderr."""
    sys.exit(f"Error: {plain(message)}")


def require(valid: bool, name: str, rule: str, value: object, typed: bool = False) -> None:
    """Raise a UserError "NAME must be RULE, not VALUE." unless `valid`; `typed`: name the option of a command."""
    if not valid:
        raise UserError(f"{'--' + name.replace('_', '-') if typed else name} must be {rule}, not {value}.")


def one_sentence(error: BaseException) -> str:
    """Return the first paragraph of an error's message on one line; of an `OSError` the file and the reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).strip().split("\n\n")[0].split())


def unknown(place: str, kind: str, name: object, valid: Iterable[object]) -> UserError:
    """Build the error for a name that `place` does not have; `kind` says what it is: a choice, a key, an option."""
    names = [str(valid_name) for valid_name in valid]
    if not names:
        return UserError(f"{place} has no {kind} '{name}', nor any other; leave it out.")
    closest = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {closest[0]}?" if closest else ""
    return UserError(f"{place} has no {kind} '{name}'; the valid ones are: {', '.join(names)}.{hint}")


def pick(kinds: Mapping[str, T], name: str, key: str) -> T:
    """Return `kinds[name]`, or raise a `UserError` with the config key and the valid names."""
    if name not in kinds:
        raise unknown(key, "choice", name, kinds)
    return kinds[name]


def is_choice(entry: object) -> bool:
    """Return whether an entry of `by_layer` or `randomised` names a choice, with options or without."""
    name = entry.get("name") if isinstance(entry, Mapping) else entry
    return isinstance(name, str) and name != "by_layer"


def build(kinds: Mapping[str, Callable[..., T]], spec: Mapping[str, Any], group: str, **common: Any) -> T:
    """Call `kinds[spec["name"]]` with the other entries of `spec` and with `common`.

    Args:
        spec: a config group as plain data, for example `{"name": "window", "window": 5}`.
        group: name of that group, for error messages.

    Raises:
        UserError: a name or option is unknown.
    """
    options = {key: value for key, value in spec.items() if key != "name"}
    kind = pick(kinds, spec["name"], f"{group}.name")
    valid = [name for name in inspect.signature(kind).parameters if name not in common]
    for option in options:
        if option not in valid:
            raise unknown(f"{group}={spec['name']}", "option", option, valid)
    return kind(**options, **common)
