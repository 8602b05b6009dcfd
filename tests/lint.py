"""Check what no test run is needed for: links and anchors, the page of the configuration, imports, results in pages.

`make lint` runs it after ruff and mypy. It prints one line for each problem and then exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from pages import PAGES, ROOT, anchors, links, name_of, slug

PACKAGE = ROOT / "speechformer"
FILES = sorted(PACKAGE.rglob("*.py"))
# From the lowest: a part of the package may import only parts of the levels below it.
LEVELS = (
    "escape workers paths",
    "console",
    "errors keys process",
    "options",
    "probes",
    "corpora",
    "runs layers metrics",
    "kernels",
    "models",
    "data generation",
    "tasks",
    "config",
    "analysis report",
    "training",
    "sweeps",
    "train predict generate translate evaluate attention play export status download audit baselines __main__",
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts.split()}
# Parts that answer at once, or that another project could use, and the libraries that they must not import
LIGHT = {
    "torch": "corpora runs console errors download keys options probes config report audit sweeps status",
    "lightning": "report audit layers kernels models",
}


def check_links() -> Iterator[str]:
    """Every link leads to a file and an anchor."""
    for page in PAGES:
        for link in links(page):
            if re.match(r"[a-z]+:", link):  # the web
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                yield f"{name_of(page)}: the link {link} leads to no file."
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                yield f"{name_of(page)}: the link {link} leads to no heading."


def check_contents() -> Iterator[str]:
    """A page with a line of contents lists all its headings."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for contents in re.findall(r"^Contents: (.*?)\n\n", text, re.DOTALL | re.MULTILINE):
            headings = [slug(heading) for heading in re.findall(r"^## (.+)$", text, re.MULTILINE)]
            if re.findall(r"\(#([^)]+)\)", contents) != headings:
                yield f"{name_of(page)}: the contents are not its headings: {', '.join(headings)}."


def check_configuration_page() -> Iterator[str]:
    """The page of the configuration has a row for every choice, in the table of its group."""
    text = (ROOT / "conf" / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "conf").glob("*/*.yaml")):
        group = path.parent.name
        heading = rf"^##+ (?:{group}|{group.capitalize()}s)\n(.*?)(?=^##|\Z)"
        sections = re.findall(heading, text, re.DOTALL | re.MULTILINE)
        cells = [row.split("|")[1] for section in sections for row in section.splitlines() if row.startswith("|")]
        if not any(f"`{path.stem}`" in cell for cell in cells):
            yield f"conf/README.md: no row for {group}={path.stem} under a heading of {group}."


def module_of(path: Path) -> str:
    """Return the name by which a file of the package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the part of the package that a module belongs to: its folder, or the module in the root."""
    return module.split(".")[1] if "." in module else ""


def imported(path: Path) -> set[str]:
    """Return the modules and names that a file imports, wherever in it, except for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unused = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in unused:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in unused:
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def check_levels() -> Iterator[str]:
    """Imports point to lower levels only, and light parts import no heavy library."""
    for path in FILES:
        part = part_of(module_of(path))
        if path.name == "__init__.py":  # the package's own names come lazily
            continue
        names = imported(path)
        for other in sorted({part_of(name) for name in names if name.startswith("speechformer.")} - {part}):
            if LEVEL_OF[other] >= LEVEL_OF[part]:
                yield f"{name_of(path)}: imports {other}, which is on its own level or one above."
        for library, parts in LIGHT.items():
            if part in parts.split() and library in {name.split(".")[0] for name in names}:
                yield f"{name_of(path)}: imports {library}, and {part} is to stay light."


def check_circles() -> Iterator[str]:
    """No two modules import each other, directly or through others."""
    modules = {module_of(path): path for path in FILES if path.parent != PACKAGE or path.name != "__init__.py"}
    graph = {module: imported(path) & modules.keys() - {module} for module, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"modules import each other in a circle: {' <- '.join(error.args[1])}."


def check_own_attention() -> Iterator[str]:
    """The package has its own attention: nothing of torch's transformer modules."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name.startswith(("Transformer", "MultiheadAttention")):
                yield f"{name_of(path)}:{node.lineno}: {name} is torch's."


def check_walls() -> Iterator[str]:
    """The package knows neither the paper nor the benchmarks, and these use public names of it alone."""
    for path in [*FILES, *(ROOT / "studies").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            for name in [module] if module else names:
                if path.is_relative_to(PACKAGE) and name.partition(".")[0] in ("studies", "benchmarks"):
                    yield f"{name_of(path)}:{node.lineno}: the package imports {name}."
            private = [name for name in names if name.startswith("_")]
            if private and module.startswith("speechformer") and not path.is_relative_to(PACKAGE):
                yield f"{name_of(path)}:{node.lineno}: {private[0]} is private to {module}."


def check_results() -> Iterator[str]:
    """The pages with results are what `make pages` gives from the committed archives."""
    sys.path.insert(0, str(ROOT))
    from studies.render import pages, read

    with tempfile.TemporaryDirectory() as folder:
        for page, text in pages(read(Path(folder))):
            if page.read_text(encoding="utf-8") != text:
                yield f"{name_of(page)}: its results are not those of the archive. Run make pages."


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (
    check_links,
    check_contents,
    check_configuration_page,
    check_levels,
    check_circles,
    check_own_attention,
    check_walls,
    check_results,
)


def main() -> None:
    problems = [problem for check in CHECKS for problem in check()]
    print("\n".join(problems) or f"{len(CHECKS)} checks of pages, configuration and imports: no problem.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
