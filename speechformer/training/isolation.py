"""Train inside another program, such as a notebook, without changing its process-wide settings."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restore process-wide settings when the block ends.

    These are the random states of Python, NumPy and torch, torch's number of threads and deterministic mode, warning
    filters, the levels of Lightning's loggers, and environment variables.
    """
    import torch
    from lightning.pytorch.utilities.seed import isolate_rng

    loggers = {logger: logger.level for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))}
    threads, environment = torch.get_num_threads(), dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with isolate_rng(), warnings.catch_warnings():
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
