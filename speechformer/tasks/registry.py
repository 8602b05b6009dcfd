"""The tasks by name, `task=` in the config, the data of one, and the trained task of a checkpoint."""

from __future__ import annotations

import importlib
import pkgutil
import zipfile
from pathlib import Path
from typing import Any

import torch

import speechformer.tasks
from speechformer.corpora.documents import Documents
from speechformer.corpora.load import AnyTokenizer
from speechformer.corpora.pairs import Pairs
from speechformer.corpora.speeches import Corpus
from speechformer.data.base import TaskData
from speechformer.errors import UserError, one_sentence
from speechformer.probes.registry import GeneratedRows
from speechformer.runs.folder import FOLDERS, ForeignError, identity_of
from speechformer.tasks.base import Task

for module in pkgutil.iter_modules(speechformer.tasks.__path__):  # a task is a module of this folder
    importlib.import_module(f"speechformer.tasks.{module.name}")
TASKS: dict[str, type[Task]] = {task.name: task for task in sorted(Task.__subclasses__(), key=lambda task: task.name)}
AnyCorpus = Corpus | Pairs | Documents | GeneratedRows
DATA_KEYS = ("task", "protocol", "block_size", "batch_size", "vocab_size", "seed")


def build_data(config: dict[str, Any], corpus: AnyCorpus, tokenizer: AnyTokenizer | None = None) -> TaskData:
    """Return the LightningDataModule of a config's task; without a tokenizer it fits one."""
    data_class = TASKS[config["task"]["name"]].data_class(corpus)
    return data_class(corpus, tokenizer=tokenizer, **{key: config[key] for key in DATA_KEYS})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. The checksum of each part is compared first: `torch.load` does not.

    It names its run, or the runs of its ensemble, by their fingerprints. In a run's folder it must be of that run.
    Checkpoints of older versions name none, and are read.

    Raises:
        UserError: the file is missing, damaged, of another run than its folder, or not a checkpoint of speechformer.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged, names = archive.testzip(), [name.lower() for name in archive.namelist()]
            folders = [part.filename for part in archive.infolist() if part.external_attr & 0x10]  # as in DOS
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        if len({*names}) < len(names):  # torch would take one of them, and does not tell upper from lower case
            raise zipfile.BadZipFile("two of its parts have the same name")
        if folders:  # torch would not read it, and take what is in memory
            raise zipfile.BadZipFile(f"{folders[0]} is marked as a folder")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if {"task", "hyper_parameters", "state_dict"} <= checkpoint.keys():
            folder = path.parent.parent if path.parent.name in FOLDERS else path.parent
            identity, identities = identity_of(folder), [*checkpoint.get("identities", ())]
            if not identity or not identities or identity in identities:
                return checkpoint
            raise ForeignError(
                f"{path} is a checkpoint of run {' and '.join(map(str, identities))}, and {folder} holds run "
                f"{identity}: put the file of that run there."
            )
        reason = "it has other entries"
    except ForeignError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None
    except Exception as error:  # a damaged file raises almost any
        reason = one_sentence(error) or type(error).__name__
    raise UserError(f"{path} is damaged, or is not a checkpoint of speechformer: {reason}")


def load_task(path: Path) -> Task:
    """Load the trained task of a checkpoint, from that file alone, on the CPU and in evaluation mode.

    Raises:
        UserError: as `read_checkpoint`, or the checkpoint does not fit this version.
    """
    checkpoint = read_checkpoint(path)
    try:
        task = TASKS[checkpoint["task"]](**checkpoint["hyper_parameters"])
        task.load_state_dict(checkpoint["state_dict"])
    except Exception as error:  # its content can be anything
        reason = str(error) if isinstance(error, UserError) else type(error).__name__
        raise UserError(f"{path} does not fit this version of speechformer: {reason}") from None
    return task.eval()
