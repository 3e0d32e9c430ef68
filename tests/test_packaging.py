"""Wheel and sdist: built from the project's files alone, with all that the program reads; and the wheel works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from swarmtrain import __version__

REPOSITORY = Path(__file__).parents[1]
PROJECT = ("pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = ("__pycache__", ".ruff_cache", ".mypy_cache")


def package_files(root: Path) -> set[str]:
    """Profiles included: in the repository their folder is a link to the one at the top."""
    walk = os.walk(root / "swarmtrain", followlinks=True)
    found = (Path(place, name).relative_to(root) for place, _, names in walk for name in names)
    return {str(path) for path in found if not set(path.parts) & set(LEFT_OUT) and path.suffix != ".pyc"}


def build(kind: str, source: Path, out: Path) -> Path:
    """A wheel or sdist, made by the build backend that pyproject.toml names."""
    out.mkdir()
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, check=True, capture_output=True, timeout=600)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("packaging")
    source = place / "project"
    for name in ("swarmtrain", "peers"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in PROJECT:
        shutil.copy(REPOSITORY / name, source / name)
    return build("sdist", source, place / "sdist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent.parent, filter="data")
    return sdist.parent.parent / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """Built from the sdist, which therefore lacks nothing."""
    return build("wheel", unpacked, unpacked.parent / "wheel")


def test_the_sdist_has_every_file_of_the_package(unpacked: Path) -> None:
    assert package_files(unpacked) == package_files(REPOSITORY)
    assert all((unpacked / name).is_file() for name in PROJECT)


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = Parser().parsestr(archive.read(metadata).decode())
    assert {name for name in names if ".dist-info/" not in name} == package_files(REPOSITORY)
    assert {"swarmtrain/sim/peers/gaming-gpu.toml", "swarmtrain/run/presets/nano.toml"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert described["Version"] == __version__
    assert described["License-Expression"] == "Apache-2.0"


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows the dependencies of this one; far from the project's files."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=600)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SWARMTRAIN_", "PYTHON"))}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            arguments,
            cwd=tmp_path,
            env={**clean, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    program = str(place / "bin" / "swarmtrain")
    where = run(str(python), "-c", "import swarmtrain; print(swarmtrain.__file__)")
    assert Path(where.strip()).is_relative_to(place)
    assert run(program, "--version") == f"swarmtrain {__version__}\n"
    assert json.loads(run(program, "plan", "nano", "--peers", "gaming-gpu=8", "--json").splitlines()[0])
    quick = ("--steps", "1", "--set", "validation.microbatches=1", "--threads", "1", "--json")
    told = [
        json.loads(line) for line in run(program, "train", "nano", "--out", str(tmp_path / "run"), *quick).splitlines()
    ]
    assert told[-1]["done"] is True
