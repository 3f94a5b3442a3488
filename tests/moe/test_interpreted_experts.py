"""Runs the kernels of experts in processes that interpret."""

from __future__ import annotations

import os

import pytest

from tests import forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", ["1/2", pytest.param("2/2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("file", ["interpreted_experts.py", "interpreted_sending.py"])
def test_the_real_kernels(file: str, part: str):
    """Short: every second case."""
    env = os.environ | ({"TRITON_INTERPRET": "1"} if file == "interpreted_sending.py" else {})
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--part={part}", f"tests/moe/{file}"]
    cases = forked.run(*command, env=env, timeout=420)
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]
