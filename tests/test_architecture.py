"""Arrows point down only: which part of the package may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import speechformer

PACKAGE = Path(speechformer.__file__).parent
# A room, and the rooms whose code it may use. `refusals` is the floor that all stand on.
ALLOWED = {
    "refusals": set(),
    "corpora": {"refusals"},
    "layers": {"errors"},
    "kernels": {"errors", "layers"},
    "runs": {"refusals"},
    "devices": set(),
    "sweeps": {"config", "refusals", "report", "runs"},
    "status": {"refusals", "runs", "screen", "sweeps"},
    "report": {"refusals", "runs", "screen"},
    "config": {"refusals"},
    "screen": set(),
    "models": {"corpora", "errors", "kernels", "layers"},
    "data": {"corpora", "refusals"},
    "pair_data": {"corpora", "data", "quality", "refusals"},
    "quality": set(),
    "decoding": {"cores", "corpora"},
    "tasks": {"cores", "corpora", "data", "decoding", "quality", "refusals"},
    "trained": {"corpora", "refusals", "runs", "tasks"},
    "maps": {"layers"},
    "sampling": {"cores", "refusals"},
    "translate": {"corpora", "decoding", "maps", "refusals", "screen", "tasks", "trained"},
    "predict": {"refusals", "screen", "trained"},
    "generate": {"refusals", "sampling", "tasks", "trained"},
    "attention": {"corpora", "decoding", "maps", "refusals", "screen", "tasks", "trained"},
    "export": {"layers", "refusals", "tasks", "trained"},
    "toy": {"corpora", "layers", "refusals", "screen", "trained"},
    "dashboard": {"callbacks", "data", "maps", "refusals", "sampling", "tasks"},
    "callbacks": {"refusals", "runs", "screen"},
    "pack": {"callbacks", "data", "layers", "tasks"},
    "launcher": {"config", "fit", "layers", "refusals", "runs", "sweeps"},
    "download": {"corpora", "refusals"},
    "positions": {"layers", "refusals", "trained"},
    "audit": {"config", "corpora", "refusals", "screen"},
    "baselines": {"config", "corpora", "data", "pair_data", "quality", "refusals", "runs", "screen"},
    "bench": {
        "callbacks",
        "config",
        "cores",
        "corpora",
        "data",
        "decoding",
        "fit",
        "layers",
        "pair_data",
        "refusals",
        "runs",
        "screen",
        "tasks",
        "translate",
    },
    "fit": {
        "callbacks",
        "config",
        "corpora",
        "cores",
        "dashboard",
        "data",
        "devices",
        "layers",
        "pack",
        "pair_data",
        "quality",
        "refusals",
        "runs",
        "screen",
        "tasks",
    },
    "train": {"config", "corpora", "fit", "launcher", "refusals", "runs", "screen", "sweeps"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_the_rooms_below(path: Path) -> None:
    if path.name == "__init__.py":
        assert not imported(path)
        return
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("speechformer.")}
    assert rooms - {room(path)} <= ALLOWED[room(path)], path


@pytest.mark.parametrize(
    ("rooms", "heavy"),
    [
        (
            ("corpora", "runs", "screen", "refusals", "download", "config", "report", "audit", "sweeps", "status"),
            ("torch",),
        ),
        (("report", "audit"), ("lightning",)),
        (("layers", "kernels", "models"), ("lightning",)),
    ],
)
def test_light_rooms_import_nothing_heavy(rooms: tuple[str, ...], heavy: tuple[str, ...]) -> None:
    for path in FILES:
        if room(path) in rooms:
            assert not {name.split(".")[0] for name in imported(path)} & set(heavy), path


def test_attention_is_our_own() -> None:
    for path in FILES:
        if path.parent.name == "bench":  # which measures ours against torch's
            continue
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not {name for name in used if name.startswith(("Transformer", "MultiheadAttention"))}, path
