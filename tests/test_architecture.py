"""Imports point downward only: which part of the package may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import speechformer

PACKAGE = Path(speechformer.__file__).parent
# From the lowest: a part of the package may import only parts of the levels below its own.
LEVELS = (
    "escape workers",
    "console",
    "errors keys",
    "probes",
    "corpora",
    "runs layers metrics",
    "config kernels",
    "models",
    "data generation",
    "tasks",
    "analysis report",
    "training",
    "sweeps",
    "train bench predict generate translate evaluate attention play positions export toy status download audit"
    " baselines __main__",
)
LEVEL_OF = {name: k for k, names in enumerate(LEVELS) for name in names.split()}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
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
def test_a_file_imports_only_from_the_levels_below(path: Path) -> None:
    if path.name == "__init__.py":
        assert path.parent == PACKAGE or not imported(path)  # the package's own exports by name, lazily
        return
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("speechformer.")}
    above = {other for other in parts - {part(path)} if LEVEL_OF[other] >= LEVEL_OF[part(path)]}
    assert not above, f"{path} imports {', '.join(sorted(above))} from its own level or one above"


@pytest.mark.parametrize(
    ("parts", "heavy"),
    [
        (
            (
                "corpora",
                "runs",
                "console",
                "errors",
                "download",
                "keys",
                "config",
                "report",
                "audit",
                "sweeps",
                "status",
            ),
            ("torch",),
        ),
        (("report", "audit"), ("lightning",)),
        (("layers", "kernels", "models"), ("lightning",)),
    ],
)
def test_light_parts_import_no_heavy_library(parts: tuple[str, ...], heavy: tuple[str, ...]) -> None:
    for path in FILES:
        if part(path) in parts:
            assert not {name.split(".")[0] for name in imported(path)} & set(heavy), path


def test_attention_is_our_own() -> None:
    for path in FILES:
        if path.parent.name == "bench":  # which measures ours against torch's
            continue
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not {name for name in used if name.startswith(("Transformer", "MultiheadAttention"))}, path


def test_functions_and_classes_are_short() -> None:
    limits = {ast.FunctionDef: 45, ast.ClassDef: 130}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                lines = node.end_lineno - node.lineno + 1  # type: ignore[operator]
                assert lines <= limits[type(node)], f"{path}:{node.lineno}: {node.name} has {lines} lines; split it"
