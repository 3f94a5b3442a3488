"""Runs the interpreted cases in a process that interprets, and shows that one that compiles says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow


# Each group is one process, which imports torch and triton once.
INTERPRETED = (
    ("table",),
    ("kernels", "operands", "skinny", "head", "waits", "islands"),
)


@pytest.mark.parametrize("part", ["1/9", *(pytest.param(f"{k}/9", marks=pytest.mark.nightly) for k in range(2, 10))])
@pytest.mark.parametrize("names", INTERPRETED, ids=" ".join)
def test_the_repairs_and_the_real_kernels(names: tuple[str, ...], part: str):
    """Short: every ninth case."""
    files = [f"tests/runtime/interpreted_{name}.py" for name in names]
    cases = forked.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--part={part}", *files, timeout=280)
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]


def test_arithmetic_is_a_gpus():
    """All of it: a table of bits is compared in two seconds."""
    cases = forked.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/runtime/interpreted_bits.py", timeout=280)
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]


def test_every_interpreted_file_is_run():
    written = {path.stem.removeprefix("interpreted_") for path in Path(__file__).parent.glob("interpreted_*.py")}
    assert sorted(written) == sorted(["bits", *(name for names in INTERPRETED for name in names)])


def test_a_process_that_compiles_is_told_so():
    code = "import triton; from overweave.runtime.interpreted.interpreter import repair; repair()"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert "triton was imported for compiling" in result.stderr
    assert "MachineError" in result.stderr
