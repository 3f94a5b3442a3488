"""Runs the kernels of experts in a process that interprets."""

from __future__ import annotations

import pytest

from tests import forked

pytestmark = pytest.mark.slow


def test_the_real_kernels():
    cases = forked.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/moe/interpreted_experts.py", timeout=280)
    assert cases.returncode == 0, cases.stdout[-4000:] + cases.stderr[-2000:]
