"""Execute a run, or several as an ensemble: check the config, read the corpus, own the folder, train, write results.

Heavy imports stand inside functions, so that a run that has ended, or that another process works on, is answered at
once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from speechformer import console
from speechformer.config import as_plain, check_sweep
from speechformer.corpora.load import load
from speechformer.process import standard_state
from speechformer.runs import identity
from speechformer.runs.folder import (
    HISTORY,
    RESULT,
    ForeignError,
    OccupiedError,
    RunFolder,
    check_is_ours,
    own,
    read_or_none,
)
from speechformer.runs.rank import check_machines, is_first, node_rank, processes
from speechformer.training import devices, runtime

if TYPE_CHECKING:
    from speechformer.training.callbacks import OnEvaluation


def execute(
    cfg: DictConfig,
    directory: Path,
    overrides: Sequence[str] | None = None,
    launcher: str | None = None,
    environment: Callable[[], AbstractContextManager[None]] = runtime.quiet,
    on_evaluation: OnEvaluation | None = None,
) -> dict[str, Any]:
    """Execute one run in a folder; a run that has ended is not run again, an interrupted one resumes.

    Args:
        cfg: the composed config; see `conf/config.yaml`.
        directory: the run's folder, which must not hold another run.
        overrides: of the command line, for the result to name; None without one.
        launcher: of the sweep that this run belongs to, which does not wait for another process that works on it.
        environment: what surrounds the training: `runtime.process_set_up` in a command.
        on_evaluation: called with the step, the metrics and the name of the one that chooses the checkpoint.

    Returns:
        The content of `result.json`; `speechformer/README.md` explains its entries.

    Raises:
        UserError: the config or the corpus asks for something impossible, or a file cannot be written.
        OccupiedError: another process works on this run of a sweep.
        ForeignError: the folder holds another run.
    """
    start, config = time.perf_counter(), checked(cfg, overrides)
    if launcher is not None:
        check_sweep(config)
    force, logger = config.pop("force"), config.pop("logger")
    check_machines(config, force)
    corpus = load(config)
    fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
    owned: Any = own(directory, config, fingerprint, overrides, force=force, wait=launcher is None)
    with owned if is_first() else share(RunFolder(directory, fingerprint, overrides)) as folder:
        folder.logger = logger
        if folder.has_ended:
            folder.clean_up()  # the process may have been killed before it did
            result: Any = folder.result
            if launcher is None and folder.writes:
                console.say(f"Already finished: {directory}. Run it again with force=true.")
                console.say(console.summary(result))
        else:
            if launcher is None and folder.writes and not folder.previous:
                say_what_is_shorter(config, directory, corpus.sha256)
            folder.begin(config, devices.share_of_threads())
            with standard_state(processes()), environment():
                from speechformer.training.fit import fit

                (result,) = fit([(config, folder)], corpus, launcher, start, on_evaluation)
        warn_of_absent_checkpoints(config, directory, result)
        return result


def execute_ensemble(jobs: Sequence[tuple[DictConfig, Path, Sequence[str]]]) -> list[Path]:
    """Execute runs that `sweeps.launcher.group_jobs` has grouped as one ensemble, those that have not begun alone.

    Args:
        jobs: config, folder and overrides of each run.

    Returns:
        The folders of the runs that have a result now; none if fewer than two are left.
    """
    start, members = time.perf_counter(), []
    configs = [checked(cfg, overrides) for cfg, _, overrides in jobs]
    corpus = load(configs[0])  # the same of all
    with contextlib.ExitStack() as owned:
        for config, (_, directory, overrides) in zip(configs, jobs):
            _, logger = config.pop("force"), config.pop("logger")
            fingerprint = identity.fingerprint(config, corpus.sha256, corpus.identity)
            with contextlib.suppress(ForeignError, OccupiedError):  # then it runs alone
                folder = owned.enter_context(own(directory, config, fingerprint, overrides, wait=False))
                if folder.result is None and (not folder.previous or folder.previous.get("ensemble")):
                    folder.logger = logger
                    members.append((config, folder))
        if len(members) < 2:
            return []
        for config, folder in members:
            folder.begin(config, devices.share_of_threads())
        from speechformer.training.fit import fit

        fit(members, corpus, None, start)
    return [folder.path for _, folder in members]


def checked(cfg: DictConfig, overrides: Sequence[str] | None) -> dict[str, Any]:
    """Return a composed config as plain data; a `UserError` if it is invalid, or sets what `init_from` decides."""
    config = as_plain(cfg)
    if config["init_from"]:
        from speechformer.models.pretrained import check_overrides

        check_overrides(config, overrides or ())
    return config


@contextlib.contextmanager
def share(folder: RunFolder) -> Iterator[RunFolder]:
    """Yield a folder that another process of the run owns."""
    if node_rank():  # this machine must not wait for the first, which trains nothing in these cases
        check_is_ours(folder.path)
        folder.read()
    yield folder


def say_what_is_shorter(config: dict[str, Any], directory: Path, corpus_sha256: str) -> None:
    """Say which finished run beside a new one differs from it in nothing but that it is shorter."""

    def is_at_most(one: int | None, other: int | None) -> bool:
        return one == other or other in (None, -1) or (one not in (None, -1) and one < other)

    def split(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        settings = identity.identity_settings(config)
        return {key: settings["trainer"].pop(key) for key in ("max_steps", "max_epochs")}, settings

    length, settings = split(config)
    for path in sorted(directory.parent.glob(f"{directory.name.rpartition('_')[0]}_*/{RESULT}")):
        other = read_or_none(path, "result")
        if other is None or other["status"] != "finished" or other["corpus"]["sha256"] != corpus_sha256:
            continue
        other_length, other_settings = split(other["config"])
        is_shorter = other_length != length and all(is_at_most(other_length[key], length[key]) for key in length)
        if is_shorter and other_settings == settings:
            was = ", ".join(f"trainer.{key}={value}" for key, value in other_length.items() if value != length[key])
            console.say(
                f"{path.parent} is this run with {was}, and has finished. This one begins anew; init_from="
                f"{path.parent} would go on from its weights, with a new optimizer and schedule."
            )
            return


def warn_of_absent_checkpoints(config: dict[str, Any], directory: Path, result: dict[str, Any] | None) -> None:
    """Warn if a finished run lacks checkpoints of `keep_every_n_steps`, because it trained with another value."""
    every = config["keep_every_n_steps"]
    if not every or result is None or result["status"] != "finished":
        return
    steps = range(0, result["steps"] + 1, every)
    if absent := [step for step in steps if not (directory / HISTORY / f"{step}.ckpt").exists()]:
        console.warn(
            f"{directory} has no checkpoints of {len(absent)} steps from {absent[0]} to {absent[-1]}: it trained "
            f"there without keep_every_n_steps={every}. Add force=true to train it again."
        )
