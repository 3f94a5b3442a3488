"""What a release consists of: a version, a changelog, a citation, issue forms, and a wheel that holds all that runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import overweave
from overweave.cli.main import COMMANDS
from overweave.ir.operators.registry import OPERATORS
from tests.docs.blocks import blocks
from tests.source_tree import ROOT, modules

VERSION = overweave.__version__
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
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert [name for name in (*OPERATORS, *COMMANDS) if f"`{name}`" not in newest] == []


def test_the_citation_names_the_five_papers():
    references = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert all(any(paper in each["title"] for each in references) for paper in PAPERS)
    for each in references:
        assert each["authors"]
        assert each["url"].startswith("https://arxiv.org/abs/")


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
    wanted = {path.relative_to(ROOT).as_posix() for path in modules().values()} | read | {"overweave/py.typed"}
    assert wanted - held == set()
    assert not [name for name in held if not name.startswith(("overweave/", f"overweave-{VERSION}.dist-info/"))]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel of the source distribution, what it requires, and no extra."""
    folder = tmp_path_factory.mktemp("release")
    source = built(folder, "sdist")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], timeout=120, check=True)
    python = folder / "env" / "bin" / "python"
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", str(source)], capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    if done.returncode and ("No matching distribution" in done.stderr or "Connection" in done.stderr):
        pytest.skip(f"no registry answers: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return python


def run(python: Path, folder: Path, *words: str) -> str:
    """Outside the repository, so that nothing but what is installed can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [str(python), *words], capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_an_empty_environment_runs_the_quick_start(installed: Path, tmp_path: Path):
    first = next(block for block in blocks() if block.page.name == "README.md")
    (tmp_path / "first.py").write_text(first.code)
    assert run(installed, tmp_path, "-c", "import overweave; print(overweave.__version__)").strip() == VERSION
    torchrun = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 4 first.py")
    assert str(first.prints).strip() in run(installed, tmp_path, *torchrun)
    assert VERSION in run(installed, tmp_path, "-m", "overweave.cli.main", "--version")
    shown = run(
        installed, tmp_path, "-m", "overweave.cli.main", "simulate", "all_gather_matmul.push", "--shape=64,64,64"
    )
    assert "us in which a rank did each" in shown


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
