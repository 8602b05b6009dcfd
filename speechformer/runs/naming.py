"""The name of a run's folder, and of a model from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechformer.runs import identity

GROUPS = ("task", "probe", "model", "pattern", "attention", "study")


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed config as plain data, resolved and without Hydra's own."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(own, resolve=True)  # type: ignore[return-value]


def model_name(folder: str | Path) -> str:
    """Return the name of a model from elsewhere: of its folder, or OWNER/NAME in the cache of Hugging Face's Hub."""
    cached = re.search(r"models--([^/]+)/snapshots/[^/]+$", Path(folder).as_posix())
    return cached[1].replace("--", "/", 1) if cached else Path(folder).resolve().name


def safe(name: str) -> str:
    """Return a name as a part of a path that is valid on any system."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")[:30]


def run_name(config: Mapping[str, Any]) -> str:
    """Return the name of a run's folder: the choices of some groups, the seed, and a hash of the config.

    The corpus is named in it, but not read. The run's fingerprint has its content, and guards the folder.
    """
    settings = {**identity.identity_settings(config), "corpus": config.get("corpus")}
    choices = [settings.get(group) for group in (*GROUPS, "seed")]
    words = [str(choice.get("name") if isinstance(choice, Mapping) else choice) for choice in choices]
    content = json.dumps([settings, identity.NUMERICS_VERSION], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return "_".join([*(safe(word) for word in words[:-1] if word != "None"), f"seed{safe(words[-1])}", digest])
