"""A release, as a stranger gets it: the wheel is built from the sdist, installed into an empty environment, used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import roundelay

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path) -> str:
    ended = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder
    )  # sdist, then wheel from it
    (built,) = folder.glob("*.whl")
    return built


def test_all_files_name_the_same_version(wheel):
    version = roundelay.__version__
    assert wheel.name.startswith(f"roundelay-{version}-")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest in ("Unreleased", version)


def test_the_wheel_has_types_a_licence_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"roundelay/py.typed", "roundelay/__init__.pyi"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test" in Path(name).parts[0] for name in names)


@pytest.mark.timeout(600)
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "v", cwd=tmp_path)
    python, command = tmp_path / "v" / "bin" / "python", tmp_path / "v" / "bin" / "roundelay"
    quiet = ("-qq", "--disable-pip-version-check", "--no-compile")
    run(python, "-m", "pip", "install", *quiet, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path) == f"roundelay {roundelay.__version__}\n"
    figures = json.loads(run(command, "topology", "ring", "--learners", "16", "--json", cwd=tmp_path))
    assert figures["spectral_gap"] == pytest.approx(0.05075, rel=1e-3)
    assert "learners = 4" in run(command, "train", "tiny", "--show-config", cwd=tmp_path)
    everything = "import roundelay; [getattr(roundelay, name) for name in roundelay.__all__]; print(roundelay.__file__)"
    assert str(tmp_path) in run(python, "-c", everything, cwd=tmp_path)
