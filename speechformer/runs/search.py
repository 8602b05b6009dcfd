"""Where a search (`hydra/sweeper=optuna`) leaves its study. optuna is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechformer.errors import UserError

JOURNAL, STUDY = "search.journal", "search"  # the file in the sweep's folder, and the name in it


def import_optuna() -> Any:
    """Import optuna, or raise a `UserError`."""
    try:
        import optuna
    except ImportError:
        raise UserError("optuna is not installed: pip install 'speechformer[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def journal(folder: Path) -> Any:
    """Return the storage of the study in a sweep's folder, which several processes may write."""
    optuna = import_optuna()
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL)))
