"""Runs the interpreted cases in a process that interprets, and shows that one that compiles says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.source_tree import ROOT

pytestmark = pytest.mark.slow


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


INTERPRETED = (
    "interpreted_kernels.py",
    "interpreted_messages.py",
    "interpreted_norm.py",
    "interpreted_sums.py",
    "interpreted_endings.py",
    "interpreted_fp8.py",
    "interpreted_weights.py",
    "interpreted_split_k.py",
    "interpreted_skinny.py",
)


@pytest.mark.parametrize("file", INTERPRETED)
def test_the_repairs_and_the_real_kernels(file: str):
    cases = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/runtime/{file}")
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]


def test_a_process_that_compiles_is_told_so():
    result = run("-c", "import triton; from overweave.runtime.interpreter import repair; repair()")
    assert "triton was imported for compiling" in result.stderr
    assert "MachineError" in result.stderr
