"""Kill a function at an enumerated point: before it opens, renames, syncs or removes a file, or within a write.

The function runs in a forked process, which kills itself (SIGKILL), so nothing of it can tidy up. Only the main
thread counts, and only what lies below a folder, so that the points are the same each time.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")  # of Python's audit


class Points:
    """Counts the points of a process, and kills it at one of them."""

    def __init__(self, below: Path, fatal: int, without: str = "") -> None:
        self.below, self.fatal, self.count, self.active = str(below), fatal, 0, True
        self.without = without  # a word of the paths that do not count

    def point(self, before: Callable[[], object] = lambda: None) -> None:
        """Count a point; if it is the fatal one, call `before` and die."""
        self.count += 1
        if self.count == self.fatal:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    def concerns(self, path: Any) -> bool:
        """Return whether a path lies below the folder and this is the main thread."""
        if threading.current_thread() is not threading.main_thread() or not isinstance(path, str | bytes | Path):
            return False
        where = os.path.abspath(os.fsdecode(path))
        return where.startswith(self.below) and not (self.without and self.without in where)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what Python's audit tells."""
        if self.active and event in EVENTS and self.concerns(arguments[0]):
            reads = event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            self.point() if not reads else None


def count_points(work: Callable[[], object], below: Path, without: str = "") -> int:
    """Return the number of points of a function that runs to its end."""
    read, write = os.pipe()
    status = in_child(work, Points(below, 0, without), write)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    assert status == 0, f"it ended with {status}"
    return int(told)


def killed_at(work: Callable[[], object], below: Path, point: int, without: str = "") -> None:
    """Run a function in a process that dies at a point."""
    assert in_child(work, Points(below, point, without), None) == -signal.SIGKILL


def in_child(work: Callable[[], object], points: Points, pipe: int | None) -> int:
    """Run a function in a forked process; return its exit code, negative for a signal."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        sys.addaudithook(points.audit)
        with writes_counted(points):
            work()
        points.active = False
        if pipe is not None:
            os.write(pipe, str(points.count).encode())
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if pipe is not None and code == 0:
            os.write(pipe, str(points.count).encode())
    finally:
        os._exit(code)


@contextlib.contextmanager
def writes_counted(points: Points) -> Iterator[None]:
    """Count fsync, and the first write of each file that `atomic_write` opens; the latter dies halfway."""
    from speechformer.corpora import files

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        if points.concerns(os.readlink(f"/proc/self/fd/{descriptor}")):
            points.point()
        fsync(descriptor)

    class Counted(io.FileIO):
        first = True

        def write(self, data: Any) -> int:
            if self.first and points.concerns(self.name):
                self.first = False
                content = bytes(data)
                points.point(lambda: super(Counted, self).write(content[: len(content) // 2]))
            return super().write(data)

    def counted_open(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "xb":
            return io.BufferedWriter(Counted(os.fspath(path), "xb"))
        return open(path, mode, *arguments, **options)

    files.open, os.fsync = counted_open, counted_fsync  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.fsync = fsync
