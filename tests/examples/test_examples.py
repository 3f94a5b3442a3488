"""Every example runs, without a GPU, and shows what it says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest

from overweave.schedules.catalog import names
from tests.source_tree import ROOT

EXAMPLES = ROOT / "examples"
RUN_BELOW = (
    "01_first_call.py",
    "02_schedule_by_hand.py",
    "03_simulate.py",
    "04_all_reduce.py",
    "05_compile.py",
)
RUN_BELOW += ("06_chunks_by_hand.py", "07_several_weights.py", "08_tile_kernels.py")


def example(name: str):
    return runpy.run_path(str(EXAMPLES / name))


def test_every_example_is_run_here():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(RUN_BELOW)


def test_schedule_by_hand(capsys: pytest.CaptureFixture[str]):
    example("02_schedule_by_hand.py")["main"]()
    printed = capsys.readouterr().out
    assert "push.0: put x@0[0:64,0:128] -> slot@1[0:64,0:128] signal arrived@1[0]" in printed
    assert printed.count(": refused") == 3
    assert printed.count(": proven") == 0
    assert all(rule in printed for rule in ("[signal]", "[reuse]", "[deadlock]"))


def test_simulate(capsys: pytest.CaptureFixture[str]):
    namespace = example("03_simulate.py")
    namespace["main"]()
    assert "push" in capsys.readouterr().out
    for operator, ours in (("all_gather_matmul", "push"), ("matmul_reduce_scatter", "scatter")):
        timelines = namespace["compare"](operator)
        assert next(iter(timelines)) == f"{operator}.{ours}"
        assert set(timelines) == set(names(operator))


@pytest.mark.slow
def test_first_call():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "01_first_call.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "rank 0 of 4: y [256, 96], z [64, 96], off plain torch by 0\n" in result.stdout
    assert "all_gather_matmul.push" in result.stdout


@pytest.mark.slow
def test_all_reduce():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "04_all_reduce.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "5 plans and our choice: all equal plain torch" in result.stdout
    assert "source: " in result.stdout  # what explains our choice


@pytest.mark.slow
def test_several_weights():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "07_several_weights.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.count("query, key, value [96, 64], [96, 16], [96, 16]; off three calls by 0e+00; SwiGLU [96, 64]")
        == 2
    )
    assert "all_gather_matmul." in result.stdout


@pytest.mark.slow
def test_compile():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "05_compile.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("e-06 on 4 ranks") == 3


@pytest.mark.slow
def test_chunks_by_hand():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "06_chunks_by_hand.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "A.pull.2-1.6: get A.gathered@1[32:64,0:32] -> A.gathered@2[32:64,0:32]" in result.stdout
    assert "e-06 on 3 ranks" in result.stdout


@pytest.mark.slow
def test_tile_kernels():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "08_tile_kernels.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"off plain torch by \d\.\de-0[67] on 4 ranks", result.stdout)) == 3
