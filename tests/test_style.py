"""Text and names use the terms of the field, not the project's former private vocabulary."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import IS_CHECKOUT, PAGES, ROOT, name_of

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a checkout")

FORMER = {  # regular expression: the term to use instead
    r"refus(e[sd]?|als?|ing)": "reject, error",
    r"screens?": "console",
    r"core\.\w+|cores/|(the|a|each|this) core": "model; architecture.* for the config keys",
    r"quality": "metrics",
    r"packed|packs?|runs_in_one": "ensemble",
    r"nought": "zero",
    r"stands? (word for word )?in train|stood in train": "appears in the training set",
    r"told apart|cannot be told": "significant, inconclusive",
    r"(un)?seen": "in train, not in train, mask",
    r"luck": "seed",
    r"whoever": "name the person or the program",
    r"task\.size|task\.average(?!_)|corpus\.longest": "vocab_size, average_checkpoints, max_length",
}
ALLOWED = {  # where a former name is the subject, or has another meaning
    "CHANGELOG.md": {"core.", "packed", "task.size", "task.average", "corpus.longest", "runs_in_one"},
    "conf/README.md": {"core.", "task.size", "task.average", "corpus.longest"},
    "speechformer/bench/__main__.py": {"packed"},
    "speechformer/layers/recurrent.py": {"packed"},  # torch's packed sequences
    "tests/golden_runs.py": {"packed", "task.size", "task.average", "corpus.longest"},
    "tests/test_bench.py": {"packed"},
    "tests/test_config.py": {"core.", "packed", "task.size", "task.average", "corpus.longest"},
    "tests/test_runs_legacy.py": {"core.", "packed", "task.size", "task.average", "corpus.longest", "runs_in_one"},
}
VAGUE = {"found", "given", "made", "kept", "refused"}  # as names of variables
HISTORY = {
    "tests/test_style.py",
    "outputs/reference/LOG.md",
    "outputs/reference/report.md",
    "outputs/reference/translation/report.md",
}
LEGACY = {"speechformer/runs/legacy.py", "speechformer/report/legacy.py"}
FILES = [
    path
    for path in [
        *PAGES,
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "speechformer").rglob("*.py"),
        *(ROOT / "tests").glob("*.py"),
        *(ROOT / "notebooks").glob("*.ipynb"),
        ROOT / "Makefile",
    ]
    if name_of(path) not in HISTORY | LEGACY
]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_text_uses_the_terms_of_the_field(path: Path) -> None:
    allowed = ALLOWED.get(name_of(path), set())
    hits = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for former, term in FORMER.items():
            for match in re.finditer(rf"(?<![\w.])({former})(?!\w)", line, re.IGNORECASE):
                if not any(match.group().lower().startswith(word) for word in allowed):
                    hits.append(f"{name_of(path)}:{number}: {match.group()!r}: use {term}.")
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".py"], ids=name_of)
def test_names_say_what_the_value_is(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assert node.id not in VAGUE, f"{name_of(path)}:{node.lineno}: rename {node.id}, say what the value is."
        if isinstance(node, ast.FunctionDef):
            words = node.name.replace("_", " ")
            assert not re.search(r"\b(packed|refused?|nought|stands)\b", words), f"{name_of(path)}: {node.name}"
