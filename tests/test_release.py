"""What a release consists of: a version, a changelog, a citation, issue forms, and a wheel that holds all that runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import overweave
from overweave.cli.main import COMMANDS
from overweave.errors import PACKAGES
from overweave.hardware.multicast import FILE
from overweave.ir.operators.registry import OPERATORS
from tests.source_tree import ROOT, modules

VERSION = overweave.__version__
PYTHONS = ("python3.11", "python3.12", "python3.13")
PAPERS = ("FLUX", "TileLink", "FlashOverlap", "FiCCO", "AutoOverlap")
# What a user's type checker must find out from the annotations of the installed package.
USER = """
import torch
import overweave as ow

def layer(x_shard: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = ow.all_gather_matmul(x_shard, w)
    reveal_type(y)
    return ow.matmul_reduce_scatter(y, w.t())

reveal_type(ow.explain("all_gather_matmul", m=64, n=64, k=64, world_size=2).text)
layer("no tensor", torch.empty(1))
"""


def test_the_version_is_a_semantic_one_and_stands_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert re.findall(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def test_the_changelog_names_every_operator_and_command():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in (*OPERATORS, *COMMANDS) if f"`{name}`" not in changelog] == []


def test_the_citation_names_the_five_papers():
    references = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert all(any(paper in each["title"] for each in references) for paper in PAPERS)
    for each in references:
        assert each["authors"]
        assert each["url"].startswith("https://arxiv.org/abs/")


def test_a_package_that_is_missing_is_named_as_the_extras_have_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [package for name in ("html", "cuda", "compile", "viz") for package in extras[name]]
    said = " ".join(PACKAGES.values())
    assert [package for package in wanted if f"pip install '{package}'" not in said] == []


def test_nothing_names_a_package_that_no_index_has():
    """One place changes when a release is on an index: the section on installing of docs/quickstart.md."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *modules().values()]
    named = re.compile(r"overweave\\?\[|install overweave\b|\bREPOSITORY\b(?!_)")
    assert [path.name for path in pages if named.search(path.read_text())] == []


def test_every_python_that_is_named_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    assert [f"python{version}" for version in named] == [*PYTHONS]
    tried = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["try"]
    assert tried["strategy"]["matrix"]["python"] == named
    assert ".ci/release dist/*.whl" in str(tried["steps"])


def test_issue_forms_ask_what_the_doctor_says():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        labels = [field["attributes"]["label"] for field in yaml.safe_load(form.read_text())["body"]]
        assert any("overweave doctor --json" in label for label in labels)


def built(folder: Path, kind: str) -> Path:
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason=f"{package} is not installed, which builds releases: pip install {package}")
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_what_they_read(tmp_path: Path):
    wheel = built(tmp_path, "wheel")
    assert wheel.name == f"overweave-{VERSION}-py3-none-any.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    read = {path.relative_to(ROOT).as_posix() for path in (ROOT / "overweave").rglob("*.json")}
    assert read
    read |= {"overweave/py.typed", f"overweave/hardware/{FILE}"}
    wanted = {path.relative_to(ROOT).as_posix() for path in modules().values()} | read
    assert wanted - held == set()
    assert not [name for name in held if not name.startswith(("overweave/", f"overweave-{VERSION}.dist-info/"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` builds: of the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = ["make", "--assume-old=.venv/stamp", "dist", f"DIST={folder}", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = folder.glob("*.whl")
    return file


def answers(python: str) -> bool:
    """Whether there is such a Python; a name may lead nowhere."""
    return shutil.which(python) is not None and not subprocess.run([python, "-V"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", PYTHONS)
def test_an_empty_environment_runs_the_wheel(wheel: Path, python: str):
    """README's first.py, `overweave doctor` and OVERWEAVE_INSTALL=1, outside the clone, with what the index has."""
    if not answers(python):
        pytest.skip(f"no {python} here")
    environment = {**os.environ, "PYTHON": python}
    command = [str(ROOT / ".ci" / "release"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False, env=environment)
    if done.returncode and ("No matching distribution" in done.stderr or "Connection" in done.stderr):
        pytest.skip(f"no registry answers: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "ok    overweave" in done.stdout
    assert f"overweave {VERSION}" in done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel and this one's packages: what a type checker reads."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "bin" / "python"
    own = [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], timeout=120, check=True)
    beside = subprocess.run(own, capture_output=True, text=True, check=True).stdout
    (site,) = folder.glob("lib/python*/site-packages")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], timeout=120, check=True)
    (site / "beside.pth").write_text(beside)
    return python


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_users_type_checker_reads_the_annotations(installed: Path, tmp_path: Path):
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={installed}", "user.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path, env=environment
    )
    lines = [line.partition("user.py:")[2] for line in done.stdout.splitlines() if "user.py:" in line]
    assert lines[0] == '7: note: Revealed type is "torch._tensor.Tensor"', done.stdout
    assert re.fullmatch(r'10: note: Revealed type is "(builtins\.)?str"', lines[1]), done.stdout
    assert lines[2].startswith('11: error: Argument 1 to "layer" has incompatible type "str"'), done.stdout
    assert len(lines) == 3
