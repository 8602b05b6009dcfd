"""Trackers that show a run's curves besides its folder: `logger=wandb` and `logger=mlflow`.

They are Lightning's `WandbLogger` and `MLFlowLogger`. A resumed run continues its MLflow run, and its W&B run too. It
logs everything again from the first step on; what the service has already is skipped. Offline W&B cannot continue a
run: the resumed run begins a new one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from speechformer import console
from speechformer.errors import UserError, one_sentence
from speechformer.runs.folder import RunFolder


class Wandb(WandbLogger):
    """A run of Weights & Biases. Options: `project`, `entity`, `offline`.

    Args:
        settings: the config group `logger`.
        name: of the run.
        previous: the id of W&B's run of an earlier attempt, or None.

    Attributes: `continues` whether it is the previous run; `about`, a line for the console.
    """

    def __init__(self, settings: dict[str, Any], name: str, previous: str | None) -> None:
        offline = settings["offline"] or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        self.continues = previous is not None and not offline
        super().__init__(
            name=name,
            project=settings["project"],
            entity=settings["entity"],
            mode="offline" if offline else None,
            id=previous if self.continues else None,
            resume="allow" if self.continues else None,
            save_dir=os.environ.get("WANDB_DIR") or os.getcwd(),  # W&B keeps that of its first run
            reinit="create_new",  # an ensemble logs several runs at once
            settings={"console": "off"},
        )
        self.known_rows = self.experiment.starting_step
        self.about = f"W&B: {self.experiment.url or self.experiment.settings.sync_dir}"
        if previous is not None and offline:
            self.about += f", a new run instead of {previous}, because W&B cannot continue a run offline"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.known_rows:  # a resumed run logs the same rows in the same order
            self.known_rows -= 1
        else:
            super().log_metrics(metrics, step)

    def finalize(self, status: str) -> None:
        self.experiment.finish(exit_code=int(status != "success"))


class Mlflow(MLFlowLogger):
    """A run of MLflow. Options: `experiment`, `tracking_uri`. Arguments and attributes are those of `Wandb`."""

    def __init__(self, settings: dict[str, Any], name: str, previous: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for logger in ("alembic", "mlflow.store.db.utils"):  # they report each step of making a database
            logging.getLogger(logger).setLevel(logging.WARNING)
        default = f"sqlite:///{Path('mlflow.db').resolve()}"  # MLflow would remember a relative one
        uri = settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI") or default
        client, self.known = MlflowClient(uri), set[tuple[str, int]]()
        with contextlib.suppress(MlflowException):  # it exists, perhaps since a moment ago
            client.create_experiment(settings["experiment"])
        self.continues = False
        with contextlib.suppress(MlflowException):
            if previous is not None:
                client.update_run(previous, status="RUNNING")  # fails for a deleted run
                self.continues = True
        super().__init__(settings["experiment"], name, uri, run_id=previous if self.continues else None)
        for metric in client.get_run(self.run_id).data.metrics:
            self.known |= {(metric, point.step) for point in client.get_metric_history(self.run_id, metric)}
        self.about = f"MLflow: run {self.run_id} in {uri}"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        named = {metric_name(name): value for name, value in metrics.items()}
        super().log_metrics({name: value for name, value in named.items() if (name, step) not in self.known}, step)


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts: each letter outside ASCII and each sign becomes its code point."""
    return re.sub(r"[^\w/. -]", lambda match: f"-{ord(match[0]):x}-", name, flags=re.ASCII)


TRACKERS: dict[str, type[Wandb | Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}


class Tracker(Logger):
    """The logger of a tracking service, without which a run goes on if the service fails after the start.

    Args:
        settings: the config group `logger`.
        folder: the run's, which knows the service's run of an earlier attempt.
        config: of the run, for the service to show.

    Attributes: `logger`, between `open` and `close` and until the service fails, otherwise None; `about`, a line on
    it for the console.
    """

    version = about = ""
    logger: Wandb | Mlflow | None = None

    def __init__(self, settings: dict[str, Any], folder: RunFolder, config: dict[str, Any]) -> None:
        super().__init__()
        self.settings, self.folder, self.config = settings, folder, config

    @property
    def name(self) -> str:
        return self.settings["name"]

    def open(self) -> None:
        """Start or continue the service's run.

        Raises:
            UserError: the library is missing, or the service rejects the run.
        """
        if importlib.util.find_spec(self.name) is None:
            raise UserError(f"logger={self.name} needs the library {self.name}: pip install {self.name}")
        before = self.folder.previous.get("tracker") or {}
        try:
            previous = before.get("id") if before.get("name") == self.name else None
            self.logger = TRACKERS[self.name](self.settings, self.folder.path.name, previous)
            if not self.logger.continues:
                self.logger.log_hyperparams(self.config)
        except Exception as error:
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            raise UserError(f"logger={self.name} cannot start a run: {reason}.") from error
        self.about = self.logger.about
        self.folder.owner["tracker"] = {"name": self.name, "id": self.logger.version}

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Turn the first exception into a warning, and log nothing more."""
        try:
            yield
        except Exception as error:
            self.logger = None
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            console.warn(f"Warning: logger={self.name} failed, and the run goes on without it: {reason}.")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.logger is not None:  # of a run on several devices, in the first process
            with self.tolerated():
                self.logger.log_metrics(metrics, int(step or 0))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the config is logged at the start."""

    def close(self, succeeded: bool, final: dict[str, float]) -> None:
        """Log the final metrics, and end the service's run."""
        if self.logger is not None:
            with self.tolerated():
                self.logger.log_metrics(final)
                self.logger.finalize("success" if succeeded else "failed")
            self.logger = None


@contextlib.contextmanager
def closed_at_failure(*trackers: Tracker | None) -> Iterator[None]:
    """End the services' runs as failed if the block raises."""
    try:
        yield
    except BaseException:
        for tracker in filter(None, trackers):
            tracker.close(False, {})
        raise
