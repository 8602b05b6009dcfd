"""Where a search (`hydra/sweeper=optuna`) leaves its study. optuna is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechformer.errors import UserError

SEARCH = "search.json"  # in the sweep's folder: the study's place, and the trial of each job by its number
STUDY = "search"


def import_optuna() -> Any:
    """Import optuna, or raise a `UserError`."""
    try:
        import optuna
    except ImportError:
        raise UserError("optuna is not installed: pip install 'speechformer[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def journal(path: Path) -> Any:
    """Return the storage of a study in a journal file, which several processes may write."""
    optuna = import_optuna()
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
