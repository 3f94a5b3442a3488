"""A program that uses overweave finds its process as it left it: environment, torch's settings, signals, warnings."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overweave.hardware.multicast import FILE, WITHOUT
from tests.effects.no_side_effects import THINGS
from tests.source_tree import ROOT, modules, nodes, python_path

WRITES = re.compile(r"\bos\.environ(\.(update|setdefault|pop|popitem|clear)\b|\[[^]]+\]$)|\bos\.(putenv|unsetenv)\b")
# Who writes the environment, and puts it back: around one call of torch, and around one import.
PUT_BACK = {"overweave.memory.cuda.heap", "overweave.runtime.interpreted.interpreter"}


def writes(source: list[ast.AST]) -> list[str]:
    """What writes the environment of the process."""
    found = []
    for node in source:
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
        elif isinstance(node, (ast.Assign, ast.Delete)):
            found += [ast.unparse(each) for each in node.targets]
        elif isinstance(node, ast.AugAssign):
            found += [f"{ast.unparse(node.target)}[...]"] * (ast.unparse(node.target) == "os.environ")
    return [text for text in found if WRITES.search(text)]


def test_no_module_writes_the_environment():
    writing = {name for name, path in modules().items() if writes([*nodes(path)])}
    assert writing == PUT_BACK


def test_a_write_would_be_seen():
    for text in ("os.environ['A'] = 'b'", "os.environ.setdefault('A', 'b')", "os.environ |= {}", "del os.environ['A']",
                 "os.putenv('A', 'b')", "os.environ.update(A='b')"):  # fmt: skip
        assert writes([*ast.walk(ast.parse(text))]), text
    assert not writes([*ast.walk(ast.parse("x = os.environ['A']; os.environ.get('A')"))])


def changes(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in WITHOUT}
    environment["PYTHONPATH"] = python_path()
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("thing", [name for name in THINGS if not name.endswith("calls")])
def test_nothing_of_the_process_is_changed(thing: str):
    assert changes("-m", "tests.effects.no_side_effects", thing) == ""


@pytest.mark.slow
def test_nor_by_first_calls():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert changes(*torchrun, "-m", "tests.effects.no_side_effects", "calls") == ""


@pytest.mark.slow
def test_where_multicast_is_asked_for_no_test_starts_on_gpus(tmp_path: Path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: any'\n")
    driver.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NCCL_NVLS_ENABLE": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_small_plans.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "NVLink multicast is not switched off: NCCL_NVLS_ENABLE=2" in done.stderr


def test_what_switches_multicast_off_is_said_once():
    said = [path for folder in ("overweave", "campaigns", "examples", "benchmarks", ".ci")
            for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".env", "")]  # fmt: skip
    pairs = [f"{name}.{{0,4}}[=:].{{0,2}}{value}" for name, value in WITHOUT.items()]
    copies = [
        path for path in (ROOT / "Makefile", *said) if path.is_file() and re.search("|".join(pairs), path.read_text())
    ]
    assert [path.name for path in copies] == [FILE]
