"""Trackers that show a run's curves besides its folder: `logger=wandb` and `logger=mlflow`.

A run that resumes continues its MLflow run, and its W&B run too, without logging a value twice. Offline W&B cannot
continue a run: the resumed run begins a new one, which the checkpoint fills from the first step on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch.loggers import Logger

from speechformer import console
from speechformer.errors import UserError, one_sentence
from speechformer.runs.folder import RunFolder


class Tracker(Logger):
    """A run in a tracking service. If the service fails after the start, the run goes on without it.

    Args:
        settings: the config group `logger`.
        folder: the run's, which knows the service's run of an earlier attempt.
        config: of the run, for the service to show.

    Attributes: `id` of the service's run; `about`, a line on it for the console; `is_open` between start and end.
    """

    module: ClassVar[str]
    version = ""
    id = about = ""

    def __init__(self, settings: dict[str, Any], folder: RunFolder, config: dict[str, Any]) -> None:
        super().__init__()
        self.settings, self.folder, self.config, self.is_open = settings, folder, config, False
        before = folder.previous.get("tracker") or {}
        self.previous = before.get("id") if before.get("name") == self.name else None

    def open(self) -> None:
        """Start or continue the service's run.

        Raises:
            UserError: the library is missing, or the service rejects the run.
        """
        if importlib.util.find_spec(self.module) is None:
            raise UserError(f"logger={self.name} needs the library {self.module}: pip install {self.module}")
        try:
            self.start()
        except Exception as error:
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            raise UserError(f"logger={self.name} cannot start a run: {reason}.") from error
        self.is_open = True
        self.folder.owner["tracker"] = {"name": self.name, "id": self.id}

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Turn the first exception into a warning, and log nothing more."""
        try:
            yield
        except Exception as error:
            self.is_open = False
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            console.warn(f"Warning: logger={self.name} failed, and the run goes on without it: {reason}.")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.is_open:  # of a run on several devices, in the first process
            with self.tolerated():
                self.send(metrics, int(step or 0))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the config is logged at the start."""

    def close(self, succeeded: bool, final: dict[str, float]) -> None:
        """Log the final metrics, and end the service's run."""
        if self.is_open:
            with self.tolerated():
                self.end(succeeded, final)
            self.is_open = False

    def start(self) -> None:
        raise NotImplementedError

    def send(self, metrics: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def end(self, succeeded: bool, final: dict[str, float]) -> None:
        raise NotImplementedError


class Wandb(Tracker):
    """Weights & Biases. Options: `project`, `entity`, `offline`."""

    name = module = "wandb"

    def start(self) -> None:
        import wandb

        offline = self.settings["offline"] or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        previous = None if offline else self.previous
        self.run = wandb.init(
            project=self.settings["project"],
            entity=self.settings["entity"],
            name=self.folder.path.name,
            id=previous,
            resume="allow" if previous else None,
            mode="offline" if offline else None,
            config=None if previous else self.config,
            dir=os.environ.get("WANDB_DIR") or os.getcwd(),  # W&B keeps that of its first run
            reinit="create_new",  # an ensemble logs several runs at once
            settings=wandb.Settings(console="off"),
        )
        self.id, self.first_step = self.run.id, self.run.starting_step if previous else 0
        self.about = f"W&B: {self.run.url or self.run.settings.sync_dir}"
        if self.previous and not previous:
            self.about += f", a new run instead of {self.previous}, because W&B cannot continue a run offline"

    def send(self, metrics: dict[str, float], step: int) -> None:
        if step >= self.first_step:
            self.run.log(metrics, step=step)

    def end(self, succeeded: bool, final: dict[str, float]) -> None:
        self.run.summary.update(final)
        self.run.finish(exit_code=0 if succeeded else 1)


class Mlflow(Tracker):
    """MLflow. Options: `experiment`, `tracking_uri`."""

    name = module = "mlflow"

    def start(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for logger in ("alembic", "mlflow.store.db.utils"):  # they report each step of making a database
            logging.getLogger(logger).setLevel(logging.WARNING)
        default = f"sqlite:///{Path('mlflow.db').resolve()}"  # MLflow would remember a relative one
        uri = self.settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI") or default
        self.client, self.known = MlflowClient(uri), set[tuple[str, int]]()
        if not self.continues():
            run = self.client.create_run(self.experiment(), run_name=self.folder.path.name)
            self.id = run.info.run_id
            params = [Param(key, str(value)[:250]) for key, value in _flatten_dict(self.config).items()]
            for first in range(0, len(params), 100):  # the most at once
                self.client.log_batch(self.id, params=params[first : first + 100])
        self.about = f"MLflow: run {self.id} in {uri}"

    def experiment(self) -> str:
        """Return the id of the experiment, which is made if it does not exist."""
        from mlflow.exceptions import MlflowException

        name = self.settings["experiment"]
        with contextlib.suppress(MlflowException):  # it exists, perhaps since a moment ago
            return self.client.create_experiment(name)
        return self.client.get_experiment_by_name(name).experiment_id

    def continues(self) -> bool:
        """Continue the MLflow run of an earlier attempt, and return True; False if there is none any more."""
        from mlflow.exceptions import MlflowException

        if self.previous is None:
            return False
        try:
            run = self.client.get_run(self.previous)
            self.client.update_run(self.previous, status="RUNNING")  # fails for a deleted run
        except MlflowException:
            return False
        self.id = self.previous
        for name in run.data.metrics:
            self.known |= {(name, point.step) for point in self.client.get_metric_history(self.id, name)}
        return True

    def send(self, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {metric_name(name): value for name, value in metrics.items()}
        points = [Metric(name, value, now, step) for name, value in named.items() if (name, step) not in self.known]
        if points:
            self.client.log_batch(self.id, metrics=points)

    def end(self, succeeded: bool, final: dict[str, float]) -> None:
        self.send(final, 0)
        self.client.set_terminated(self.id, "FINISHED" if succeeded else "FAILED")


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts: each letter outside ASCII and each sign becomes its code point."""
    return re.sub(r"[^\w/. -]", lambda match: f"-{ord(match[0]):x}-", name, flags=re.ASCII)


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


@contextlib.contextmanager
def closed_at_failure(*trackers: Tracker | None) -> Iterator[None]:
    """End the services' runs as failed if the block raises."""
    try:
        yield
    except BaseException:
        for tracker in filter(None, trackers):
            tracker.close(False, {})
        raise
