"""The wheel holds all that a run needs; an installed package is not a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    assert {"speechformer/report/published.yaml", "speechformer/analysis/attention.html"} <= names
    assert {name.split("/")[0] for name in names} == {"speechformer", "speechformer-0.1.0.dist-info"}
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
