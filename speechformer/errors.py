"""How bad input is refused: one sentence that says what is wrong, where, and what to do.

`UserError` is the only exception that the commands print without a traceback. Everything else that
escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """The user can mend this; the message is one sentence for the console."""


def run_command(command: Callable[[], object]) -> None:
    """Run a command; end it with one sentence on a `UserError` or a file that cannot be used, and in silence if
    nobody reads any more (`| head`). What a terminal cannot show becomes a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        sys.exit(f"Error: {error}")
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        sys.exit(f"Error: {error.filename}: {error.strerror}.")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")


def one_sentence(error: BaseException) -> str:
    """The first paragraph of an error's message, on one line."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def unknown(place: str, kind: str, given: object, valid: Iterable[object]) -> UserError:
    """The refusal of a name that `place` does not have, with the valid ones and the nearest of them.

    `kind` says what was named: a choice, a key, an option.
    """
    names = [str(name) for name in valid]
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UserError(f"{place} has no {kind} '{given}'; the valid ones are: {', '.join(names)}.{hint}")


def pick(kinds: Mapping[str, T], name: str, key: str) -> T:
    """`kinds[name]`, or a `UserError` that names the config key and the valid names."""
    if name not in kinds:
        raise unknown(key, "choice", name, kinds)
    return kinds[name]


def build(kinds: Mapping[str, Callable[..., T]], spec: Mapping[str, Any], group: str, **common: Any) -> T:
    """Call `kinds[spec["name"]]` with the other entries of `spec` and with `common`.

    `spec` is a config group as plain data, for example `{"name": "window", "window": 5}`; `group` is its
    name in the config, for the message of the `UserError` that a wrong name or option raises.
    """
    options = {key: value for key, value in spec.items() if key != "name"}
    kind = pick(kinds, spec["name"], f"{group}.name")
    valid = [name for name in inspect.signature(kind).parameters if name not in common]
    for option in options:
        if option not in valid:
            raise unknown(f"{group}={spec['name']}", "option", option, valid)
    return kind(**options, **common)
