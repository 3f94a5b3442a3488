"""Portable kernels compile for GPUs that nobody here has: Ampere, Blackwell, and the cards of desks."""

from __future__ import annotations

import pytest

from campaigns.lint.lint_cases import cases
from tools.aot import compile_kernel

NEEDS_HOPPER = ("matmul_hopper_kernel",)
NEEDS_FP8 = ("quantise_rows_kernel",)  # torch does its work on older GPUs (moe/fp8.py)
# The first configuration of each kernel: what differs between GPUs is in a kernel's instructions, not in its sizes.
PORTABLE = {each.source.name: each for each in reversed(list(cases())) if each.source.name not in NEEDS_HOPPER}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, one) for name in PORTABLE for one in (80, 89, 100, 120) if one > 80 or name not in NEEDS_FP8],
)
def test_a_portable_kernel_compiles(name: str, capability: int) -> None:
    assert compile_kernel(PORTABLE[name].source, capability).resources.registers > 0
