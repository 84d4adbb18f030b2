"""What users install: wheels and sdists of both packages, and the library's wheel in an environment of its own."""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sparsync

ROOT = Path(__file__).parent.parent
FOLDERS = {"sparsync": ROOT, "sparsync_lab": ROOT / "lab"}
LARGEST = {"sparsync": 520_000, "sparsync_lab": 600_000}  # bytes of a wheel or sdist
BESIDE = {"sparsync": {"CHANGELOG.md"}, "sparsync_lab": set()}  # what an sdist holds but source, metadata and licence
LIMIT = 120  # seconds, for a command that hangs; a machine may be busy
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

packages = pytest.mark.parametrize("package", FOLDERS)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that sees neither this checkout nor packages named by the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT)


def succeed(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdists and of the wheels, built from the checkout without the network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    for place in FOLDERS.values():
        succeed(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=place)
    build_wheels(folder, *FOLDERS.values())
    return folder


def build_wheels(folder: Path, *sources: Path) -> None:
    succeed(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, *sources, cwd=folder)


def wheel_of(dist: Path, package: str) -> Path:
    return dist / f"{package}-{sparsync.__version__}-py3-none-any.whl"


def sdist_of(dist: Path, package: str) -> Path:
    return dist / f"{package}-{sparsync.__version__}.tar.gz"


def source_of(package: str) -> set[str]:
    """Return the files of a package, relative to the folder they are imported from."""
    source = FOLDERS[package] / "src"
    files = {path.relative_to(source) for path in (source / package).rglob("*") if path.is_file()}
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path, package: str) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{package}-{sparsync.__version__}.dist-info/METADATA").decode()
    return email.parser.Parser().parsestr(text)


@packages
def test_the_wheel_holds_the_package_and_nothing_else(dist: Path, package: str) -> None:
    names = names_in(wheel_of(dist, package))
    own = {name for name in names if not name.startswith(f"{package}-{sparsync.__version__}.dist-info/")}
    assert own == source_of(package)
    assert f"{package}-{sparsync.__version__}.dist-info/licenses/LICENSE" in names
    assert wheel_of(dist, package).stat().st_size < LARGEST[package]


def test_what_is_not_python_is_in_the_wheels(dist: Path) -> None:
    assert "sparsync/py.typed" in names_in(wheel_of(dist, "sparsync"))
    assert "sparsync_lab/report/page.html.jinja" in names_in(wheel_of(dist, "sparsync_lab"))


@packages
def test_the_sdist_holds_the_source_and_nothing_else(dist: Path, package: str) -> None:
    top = f"{package}-{sparsync.__version__}"
    with tarfile.open(sdist_of(dist, package)) as archive:
        assert all(member.isfile() for member in archive)  # a link would lead nowhere
        names = {member.name.removeprefix(f"{top}/") for member in archive}
    assert {name.removeprefix("src/") for name in names if name.startswith("src/")} == source_of(package)
    beside = {"PKG-INFO", "README.md", "LICENSE", "pyproject.toml", ".gitignore"} | BESIDE[package]
    assert {name for name in names if not name.startswith("src/")} == beside
    assert sdist_of(dist, package).stat().st_size < LARGEST[package]


def test_sdists_build_the_same_wheels(dist: Path, tmp_path: Path) -> None:
    build_wheels(tmp_path, *(sdist_of(dist, package) for package in FOLDERS))
    for package in FOLDERS:
        assert wheel_of(tmp_path, package).read_bytes() == wheel_of(dist, package).read_bytes()


@packages
def test_the_metadata_say_whose_it_is_and_where(dist: Path, package: str) -> None:
    about = metadata_of(wheel_of(dist, package), package)
    assert about["Author"] == "The Sparsync developers"
    assert about["License-Expression"] == "Apache-2.0"
    assert "gradient compression" in about["Keywords"]
    links = dict(link.split(", ") for link in about.get_all("Project-URL", []))
    assert list(links) == ["Homepage", "Documentation", "Issues", "Changelog"]
    assert all(link.startswith("https://github.com/sparsync/sparsync") for link in links.values())
    assert "# Sparsync" in str(about.get_payload())


def test_the_library_needs_torch_and_numpy_and_the_lab_its_own_version_of_the_library(dist: Path) -> None:
    needs = metadata_of(wheel_of(dist, "sparsync"), "sparsync").get_all("Requires-Dist", [])
    assert {Requirement(need).name for need in needs if "extra ==" not in need} == {"torch", "numpy"}
    needs = metadata_of(wheel_of(dist, "sparsync_lab"), "sparsync_lab").get_all("Requires-Dist", [])
    assert f"sparsync=={sparsync.__version__}" in needs


def test_both_packages_have_the_same_licence() -> None:
    assert (ROOT / "lab" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def needed(*names: str) -> set[str]:
    """Return these packages and all that they need."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            needs = map(Requirement, distribution(name).requires or [])
            left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def empty(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds torch and numpy (links to those here), and the library's wheel."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed("torch", "numpy"):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():  # packages may share a folder
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    python = folder / "bin" / "python"
    # pip looks whether all that the wheel needs is there.
    succeed(*PIP, "--python", python, "install", "-q", "--no-index", wheel_of(dist, "sparsync"), cwd=folder)
    return folder / "bin"


@pytest.mark.slow
def test_the_environment_is_empty_otherwise(empty: Path, tmp_path: Path) -> None:
    ask = "import sparsync; from importlib.util import find_spec as f; print(sparsync.__file__, *map(f, {}))"
    others = ("sparsync_lab", "numba", "typer", "pytest", "matplotlib")
    file, *found = succeed(empty / "python", "-c", ask.format(others), cwd=tmp_path).split()
    assert Path(file).is_relative_to(empty.parent)
    assert found == ["None"] * len(others)


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readme_example(empty: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text(next(block for block in blocks if "init_process_group" in block))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "example.py")
    shown = succeed(empty / "python", *launch, cwd=tmp_path)
    assert f"sparsync {sparsync.__version__} on 3 workers" in shown
    assert "loss" in shown


@pytest.mark.slow
def test_the_wheel_alone_has_its_command_line(empty: Path, tmp_path: Path) -> None:
    assert succeed(empty / "sparsync", "--version", cwd=tmp_path) == f"sparsync {sparsync.__version__}\n"
    assert "plain PyTorch (pip install 'sparsync[fast]')" in succeed(empty / "sparsync", "info", cwd=tmp_path)
    done = run(empty / "sparsync", "demo", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install sparsync-lab" in done.stderr
