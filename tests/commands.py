"""Run `python -m MODULE ARGUMENTS` in a fork of a process that has imported torch, Lightning and the package.

Starting Python and importing them takes 3 to 7 seconds; forking takes milliseconds. The fork has its own arguments,
environment, working directory and streams. Variables that are read at an import (`OMP_NUM_THREADS`) come too late
here: a test of those starts a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ("speechformer.sweeps.launcher", "speechformer.training.run", "speechformer.training.fit")
FORKS.set_forkserver_preload([*PRELOADED, "speechformer.report.page", "tensorboard.summary.writer"])


def run_module(
    module: str, arguments: list[str], cwd: str, environment: dict[str, str], streams: tuple[str, str, str]
) -> None:
    """Run a module as `python -m` does, in a process of its own."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate(streams):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8", closefd=False) for number in (1, 2))
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # a fork leaves it out, and with it the end of joblib's workers


class Command:
    """A started command; its output goes to files.

    Args:
        arguments: the module, then what follows it on the command line.
        cwd: the working directory; by default this process's.
        input: what the command reads from its standard input.
        environment: variables beside those of this process.
    """

    def __init__(
        self, *arguments: str | Path, cwd: Path | None = None, input: str = "", environment: Mapping[str, str] = {}
    ) -> None:
        self.arguments = [str(word) for word in arguments]
        folder = Path(tempfile.mkdtemp())
        self.streams = [folder / name for name in ("stdin", "stdout", "stderr")]
        for stream in self.streams:
            stream.write_text(input if stream.name == "stdin" else "", encoding="utf-8")
        module, *words = self.arguments
        variables = {**os.environ, **environment}
        streams = tuple(map(str, self.streams))
        self.process = FORKS.Process(
            target=run_module, args=(module, words, str(cwd or Path.cwd()), variables, streams)
        )
        self.process.start()
        self.pid = self.process.pid or 0

    def output(self) -> tuple[str, str]:
        """Return what the command has written so far to stdout and stderr."""
        _, out, err = (stream.read_text(encoding="utf-8") for stream in self.streams)
        return out, err

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the command runs."""
        return self.process.exitcode

    def send(self, number: int) -> None:
        """Send a signal to the command."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Return what `subprocess.run` would; kill the command and raise a `TimeoutError` if it takes too long."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise TimeoutError(f"{' '.join(self.arguments)} runs after {timeout} s:\n{''.join(self.output())}")
        return subprocess.CompletedProcess(self.arguments, code, *self.output())


def run_command(
    *arguments: str | Path, cwd: Path | None = None, input: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end: `run_command("speechformer.train", "model=rope", cwd=tmp_path, COLUMNS="80")`."""
    return Command(*arguments, cwd=cwd, input=input, environment=environment).wait()


def call(main: Callable[[], None], *words: str | Path, input: bytes | None = None) -> tuple[str, str]:
    """Run the `main` of a command in this process; return what it writes to stdout and stderr.

    Args:
        main: of the command; an error is its `SystemExit`.
        words: of the command line.
        input: what the command reads from its standard input; None: this process's.
    """
    before = sys.argv, sys.stdin
    sys.argv = ["command", *map(str, words)]
    if input is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(input), encoding="utf-8")
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    finally:
        sys.argv, sys.stdin = before
    return out.getvalue(), err.getvalue()
