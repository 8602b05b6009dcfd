"""The wheel holds everything a run needs, and the project's version is the same everywhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from speechformer.config import CONF

PROJECT = CONF.parent


@pytest.mark.skipif(not (PROJECT / "pyproject.toml").exists(), reason="not a checkout")
def test_a_wheel_has_every_config_file_and_runs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=PROJECT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = set(archive.namelist())
    for path in CONF.rglob("*.yaml"):
        assert f"speechformer/conf/{path.relative_to(CONF).as_posix()}" in names
    others = {"report/labels.yaml", "report/page.md", "runs/schema.json", "analysis/card.md", "py.typed"}
    others |= {f"analysis/play/{path.name}" for path in (PROJECT / "speechformer" / "analysis" / "play").glob("*.*")}
    assert {f"speechformer/{name}" for name in others} <= names
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"speechformer", f"speechformer-{version}.dist-info"}
    code = "import speechformer.train as t, sys; print(t.CONF); sys.argv = ['x', '--help']; t.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[0] == str(tmp_path / "site" / "speechformer" / "conf"), done.stderr
    assert "model: alibi" in done.stdout


@pytest.mark.skipif(not (PROJECT / "pyproject.toml").exists(), reason="not a checkout")
def test_version_and_oldest_torch_are_the_same_everywhere() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == project["version"]
    heading = f"\n## [{project['version']}] - {citation['date-released']}\n"
    assert heading in (PROJECT / "CHANGELOG.md").read_text("utf-8")
    (oldest,) = (name.removeprefix("torch>=") for name in project["dependencies"] if name.startswith("torch>="))
    assert f"a torch that you have ({oldest} or newer)" in (PROJECT / "README.md").read_text("utf-8")
    assert f'"torch=={oldest}.0"' in (PROJECT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
