"""Processes that work for a command."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time


@functools.cache
def end_with_parent(parent: int | None = None) -> None:
    """End this process within a second of its parent, however that ends: a worker must not outlive its command.

    Args:
        parent: its process id; None: it lives now.
    """
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_worker(parent: int) -> None:
    """Set up a process that works for a command: Ctrl-C is the command's, and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
