"""Report invalid input in one sentence: what is wrong, where, and how to fix it.

`UserError` is the only exception that the commands print without a traceback. Any other exception that escapes is a
bug of this project and keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from speechformer import console
from speechformer.escape import plain
from speechformer.paths import path_of

T = TypeVar("T")


class ArgumentParser(argparse.ArgumentParser):
    """A parser of a command line whose options may stand anywhere; one of the type `Path` may begin with ~."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, path_of)

    def run(self, command: Callable[[argparse.Namespace], object]) -> None:
        """Run a command for the arguments of the command line; see `run_command`."""
        run_command(lambda: command(self.parse_intermixed_args()))


class UserError(ValueError):
    """An error that the user can fix; the message is one sentence for the console, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("\n", r"\n").replace("\r", r"\r"))  # of names of files, for example


def run_command(command: Callable[[], object]) -> None:
    """Run a command, and print a `UserError` or an unusable file as one sentence.

    If the reader of the output is gone (`| head`), the command ends silently. Closed streams are those of the null
    device, so that no file gets their numbers.
    """
    console.open_streams()
    try:
        with console.flushed():
            command()
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:
        pass
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
    hint = "".join(f" Did you mean {name}?" for name in difflib.get_close_matches(str(name), names, n=1))
    return UserError(f"{place} has no {kind} '{name}'; the valid ones are: {', '.join(names) or 'none'}.{hint}")


def pick(kinds: Mapping[str, T], name: str, key: str) -> T:
    """Return `kinds[name]`, or raise a `UserError` with the config key and the valid names."""
    if name not in kinds:
        raise unknown(key, "choice", name, kinds)
    return kinds[name]
