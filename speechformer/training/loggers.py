"""What a run logs, and where: `metrics.csv` always, and what `logger=` names.

TensorBoard and the tracking services are Lightning's loggers. A resumed run logs the steps after its checkpoint
again. TensorBoard drops what it had of them (`purge_step`), `metrics.csv` is written from rows that the checkpoint
holds, and the services get the same values once more.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import http.client
import importlib.util
import io
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary

from speechformer import console
from speechformer.corpora.files import write_file
from speechformer.errors import UserError, one_sentence, pick
from speechformer.paths import expand_uri, path_of
from speechformer.runs.folder import RunFolder

# TensorBoard opens on the first group of charts: the task's main metrics
TRAINING = ("train_loss", "lr", "gradient_norm", "weight_norm")
PATIENCE = 5.0  # seconds that a service may take to answer at all
MOST_CURVES = 8  # of a run in a chart, where all have one colour and only their markers differ


class MetricsFile(Logger):
    """`metrics.csv`: a row for each call, kept in `rows` and written atomically."""

    name, version = "csv", ""

    def __init__(self, path: Path, rows: Sequence[dict[str, float]]) -> None:
        super().__init__()
        self.path, self.rows = path, [*rows]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append({"step": int(step or 0), **metrics})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` has them."""

    @rank_zero_only
    def save(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, sorted({name for row in self.rows for name in row}))
        writer.writeheader()
        writer.writerows(self.rows)
        write_file(self.path, text.getvalue().encode())


class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoard logger in the run's folder, with metrics in groups of charts.

    Args:
        charts: the task's, title -> regular expression of metrics. These stand in the group `metrics`, which comes
            first, others in `metrics_more`.
        first_step: the first step that this attempt logs; None for all.
        logged: the names of metrics that an earlier attempt has logged.
    """

    def __init__(
        self, folder: Path, charts: Mapping[str, str], first_step: int | None, logged: Iterable[str] = ()
    ) -> None:
        super().__init__(folder, name="", version="tensorboard", default_hp_metric=False, purge_step=first_step)
        self.charts, self.main = dict(charts), re.compile("|".join(charts.values()))
        self.tags = dict.fromkeys(map(self.tag, logged))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        tags = {self.tag(name): value for name, value in metrics.items()}
        super().log_metrics(tags, step)
        if not tags.keys() <= self.tags.keys():
            self.tags |= dict.fromkeys(tags)
            self.lay_out()

    def tag(self, name: str) -> str:
        """Return the name of a metric with its group."""
        if name.startswith("metrics_final/"):  # of the table of hyperparameters
            return name
        if name.startswith("attention_entropy"):
            return f"training_{name}"
        group = "training" if name in TRAINING else "metrics" if self.main.fullmatch(name) else "metrics_more"
        return f"{group}/{name}"

    def finalize(self, status: str) -> None:
        """Keep the file open: Lightning calls this after training and after each evaluation."""
        self.experiment.flush()

    def lay_out(self) -> None:
        """Define the page of custom scalars: the task's charts, those of the training, and each layer's heads.

        TensorBoard shows the last definition of a run, and of several runs all charts that differ. Hence a chart is a
        regular expression that all runs share, unless more than `MOST_CURVES` metrics of this run match it.
        """
        heads = r"(training_attention_entropy_?(\w*)/layer(\d+)_head)\d+"
        layers = [match for tag in self.tags if (match := re.fullmatch(heads, tag))]
        pages = {
            "Metrics": {title: rf"metrics/({pattern})" for title, pattern in self.charts.items()},
            "Training": {name.replace("_", " "): f"training/{name}" for name in TRAINING},
            "Attention": {
                f"{part} layer {layer}: entropy of each head in nats".lstrip(): rf"{start}\d+"
                for start, part, layer in (match.groups() for match in layers)
            },
        }
        shown = {page: dict(self.curves(charts)) for page, charts in pages.items()}
        self.experiment.add_custom_scalars({page: charts for page, charts in shown.items() if charts})

    def curves(self, charts: Mapping[str, str]) -> Iterator[tuple[str, list[Any]]]:
        """Yield the charts that have curves, in pieces of at most `MOST_CURVES`."""
        for title, pattern in charts.items():
            tags = [tag for tag in self.tags if re.fullmatch(pattern, tag)]
            if 0 < len(tags) <= MOST_CURVES:
                yield title, ["Multiline", [f"^({pattern})$"]]
            else:
                for first in range(0, len(tags), MOST_CURVES):
                    piece = tags[first : first + MOST_CURVES]
                    shown = [f"^{re.escape(tag)}$" for tag in piece]
                    yield f"{title}, {first + 1} to {first + len(piece)}", ["Multiline", shown]

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """Log an image, compressed at a fifth of the time that `add_image` takes."""
        png = io.BytesIO()
        picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(png, "PNG", compress_level=3)
        width, height = picture.size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png.getvalue())
        self.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


class Tracker(Logger):
    """A tracking service's logger, without which a run goes on if the service fails after the start.

    Args:
        settings: the config group `logger`.
        folder: the run's, whose `run.json` knows the service's run of an earlier attempt.
        config: of the run, for the service to show.

    Attributes: `logger`, None before `open` and after `close` or a failure; `about`, a line for the console.
    """

    version = about = ""
    logger: Logger | None = None

    def __init__(self, settings: dict[str, Any], folder: RunFolder, config: dict[str, Any]) -> None:
        super().__init__()
        self.settings, self.folder, self.config = settings, folder, config

    @property
    def name(self) -> str:
        return self.settings["name"]

    def open(self, rows: list[dict[str, float]]) -> None:
        """Continue the service's run of an earlier attempt, or start one with the rows logged so far.

        Raises:
            UserError: the library is missing, or the service rejects the run.
        """
        if importlib.util.find_spec(self.name) is None:
            raise UserError(f"logger={self.name} needs the library {self.name}: pip install {self.name}")
        if reason := unreachable(SERVICES[self.name](self.settings)):
            self.leave_out(reason)
            return
        before = self.folder.previous.get("tracker") or {}
        previous = before.get("id") if before.get("name") == self.name else None
        try:
            self.logger, continues, self.about = TRACKERS[self.name](self.settings, self.folder.path.name, previous)
            if not continues:
                self.logger.log_hyperparams(self.config)
                for row in rows:
                    self.log_metrics({name: row[name] for name in row if name != "step"}, int(row["step"]))
            identifier = self.logger.version
        except (ConnectionError, TimeoutError) as error:
            self.leave_out(one_sentence(error).rstrip("."))
            return
        except Exception as error:
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            raise UserError(f"logger={self.name} cannot start a run: {reason}.") from error
        self.folder.owner["tracker"] = {"name": self.name, "id": identifier}

    def leave_out(self, reason: str) -> None:
        """Let the run go on without the service."""
        console.warn(f"Warning: logger={self.name}: {reason}; the run goes on without it.")
        self.logger, self.about = None, f"Metrics: {self.folder.path / 'metrics.csv'}"

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Turn the first exception into a warning, and log nothing more."""
        try:
            yield
        except Exception as error:
            self.logger = None
            reason = one_sentence(error).rstrip(".") or type(error).__name__
            console.warn(f"Warning: logger={self.name} failed, and the run goes on without it: {reason}.")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.logger is not None:  # of a run on several devices, in the first process
            with self.tolerated():
                self.logger.log_metrics({**metrics}, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `open` has logged the config."""

    def close(self, succeeded: bool, final: dict[str, float]) -> None:
        """Log the final metrics, and end the service's run."""
        if self.logger is not None:
            with self.tolerated():
                self.logger.log_metrics(final)
                self.logger.finalize("success" if succeeded else "failed")
                if isinstance(self.logger, WandbLogger):  # which leaves it to the end of the process
                    self.logger.experiment.finish(exit_code=int(not succeeded))
            self.logger = None


@functools.cache
def unreachable(url: str) -> str | None:
    """Say why a web server does not answer within seconds, with the proxies of the environment; None if it does.

    The libraries of the services try again for minutes. A process asks once for all its runs.
    """
    if not url.startswith(("http://", "https://")):
        return None
    try:
        urllib.request.build_opener().open(url, timeout=PATIENCE).close()  # with the proxies of now
    except urllib.error.HTTPError:  # an answer
        return None
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer ({one_sentence(getattr(error, 'reason', error)) or type(error).__name__})"
    return None


Opened = tuple[Logger, bool, str]  # the logger, whether it continues the previous run, a line for the console


def wandb_server(settings: dict[str, Any]) -> str:
    """Return the address of W&B's server, or "" if it is not needed."""
    import wandb

    return "" if is_offline(settings) else str(wandb.setup().settings.base_url)


def is_offline(settings: dict[str, Any]) -> bool:
    """Return whether W&B only writes files."""
    return settings["offline"] or os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")


def open_wandb(settings: dict[str, Any], name: str, previous: str | None) -> Opened:
    """Return the logger of a W&B run. Offline W&B cannot continue a run."""
    offline = is_offline(settings)
    continues = previous is not None and not offline
    logger = WandbLogger(
        name=name,
        project=settings["project"],
        entity=settings["entity"],
        mode="offline" if offline else None,
        id=previous if continues else None,
        resume="allow" if continues else None,
        save_dir=path_of(os.environ.get("WANDB_DIR") or os.getcwd()),  # W&B keeps that of its first run
        reinit="create_new",  # an ensemble logs several runs at once
        settings={"console": "off", "init_timeout": 30},
    )
    about = f"W&B: {logger.experiment.url or logger.experiment.settings.sync_dir}"
    if previous is not None and offline:
        about += f", a new run instead of {previous}, because W&B cannot continue a run offline"
    return logger, continues, about


def mlflow_uri(settings: dict[str, Any]) -> str:
    """Return where MLflow's runs are: a database, or the address of a server."""
    default = f"sqlite:///{Path('mlflow.db').resolve()}"  # MLflow would remember a relative one
    return expand_uri(settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI") or default)


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: each letter outside ASCII and each sign becomes its code point."""
    return re.sub(r"[^\w/. -]", lambda match: f"-{ord(match[0]):x}-", name, flags=re.ASCII)


class Mlflow(MLFlowLogger):
    """Lightning's MLflow logger, with names that MLflow accepts."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({mlflow_name(name): value for name, value in metrics.items()}, step)


def open_mlflow(settings: dict[str, Any], name: str, previous: str | None) -> Opened:
    """Return the logger of an MLflow run; a previous one that was deleted is not continued."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for module in ("alembic", "mlflow.store.db.utils"):  # they report each step of making a database
        logging.getLogger(module).setLevel(logging.WARNING)
    uri = mlflow_uri(settings)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # not 7, which take minutes
    database = uri.removeprefix("sqlite:///")  # MLflow makes its tables, and fails if another process does so, too
    with FileLock(f"{database}.lock") if database != uri else contextlib.nullcontext():
        client, continues = MlflowClient(uri), False
        with contextlib.suppress(MlflowException):  # it exists, perhaps since a moment ago
            client.create_experiment(settings["experiment"])
    if previous is not None:
        with contextlib.suppress(MlflowException):
            client.update_run(previous, status="RUNNING")
            continues = True
    logger = Mlflow(settings["experiment"], name, uri, run_id=previous if continues else None)
    return logger, continues, f"MLflow: run {logger.run_id} in {uri}"


TRACKERS = {"wandb": open_wandb, "mlflow": open_mlflow}
SERVICES = {"wandb": wandb_server, "mlflow": mlflow_uri}


class RunLoggers:
    """The loggers of a run: `csv`, and `tensorboard` or a `tracker` if `logger=` names one.

    Args:
        charts: those of the task's view.
        rows: of `metrics.csv`, that an earlier attempt has logged.
        step: of the checkpoint that a run resumes from; None for a run that begins.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: dict[str, Any],
        charts: Mapping[str, str],
        rows: Sequence[dict[str, float]],
        step: int | None,
    ) -> None:
        name = folder.logger["name"]
        pick({"csv": None, "tensorboard": None, **TRACKERS}, name, "logger")
        self.csv = MetricsFile(folder.path / "metrics.csv", rows)
        first_step = None if step is None else step + 1
        logged = [key for row in rows for key in row if key != "step"]
        self.tensorboard = TensorBoard(folder.path, charts, first_step, logged) if name == "tensorboard" else None
        self.tracker = Tracker(folder.logger, folder, config) if name in TRACKERS else None
        self.all: list[Logger] = [
            logger for logger in (self.tensorboard, self.csv, self.tracker) if logger is not None
        ]

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a step everywhere."""
        for logger in self.all:
            logger.log_metrics({**metrics}, step)

    def flush(self) -> None:
        """Write what has been logged, so that a killed run that resumes has it."""
        self.csv.save()
        if self.tensorboard is not None:
            self.tensorboard.experiment.flush()
