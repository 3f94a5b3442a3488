"""Portable kernels compile for GPUs that nobody here has: Ampere, Blackwell, and the cards of desks."""

from __future__ import annotations

import pytest

from campaigns.lint.lint_cases import cases
from tools.aot import compile_kernel

NEEDS_HOPPER = ("matmul_hopper_kernel",)
# The first configuration of each kernel: what differs between GPUs is in a kernel's instructions, not in its sizes.
PORTABLE = {each.source.name: each for each in reversed(list(cases())) if each.source.name not in NEEDS_HOPPER}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
@pytest.mark.parametrize("name", PORTABLE)
def test_a_portable_kernel_compiles(name: str, capability: int) -> None:
    assert compile_kernel(PORTABLE[name].source, capability).resources.registers > 0
