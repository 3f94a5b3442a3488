"""A dozen kernels in their configurations, compiled for Hopper and linted, with whatever Triton is at hand."""

from __future__ import annotations

import pytest

from campaigns.gpu_ranks import spread_over
from campaigns.lint.lint_case import Case
from campaigns.lint.lint_cases import cases
from campaigns.lint.spills import beyond
from tools.aot import compile_kernel
from tools.ptx_lint.lint import lint

# `make newest` runs them by day; of the pinned Triton others compile by day (tests/runtime/gpu, tests/compiler).
pytestmark = [pytest.mark.slow, pytest.mark.nightly]
CONFIGURATIONS = 12


def chosen() -> list[Case]:
    """Of the Hopper kernel half of them: most of what a version of Triton can break is there. The last has rectangles
    of which as many as there are make no whole wider ones (kernels/hopper/tiles.py), in operands and in results.
    """
    every = list(cases())
    hopper = [each for each in every if "hopper" in each.source.name]
    others = [each for each in every if "hopper" not in each.source.name]
    uneven = [each for each in hopper if each.source.config.endswith("s/5 1 addend 3 peers")]
    return [*spread_over(hopper, CONFIGURATIONS // 2), *spread_over(others, CONFIGURATIONS // 2), *uneven]


@pytest.mark.parametrize("case", chosen(), ids=lambda case: f"{case.source.name} {case.source.config}")
def test_a_kernel_compiles_and_keeps_its_contract(case: Case) -> None:
    compiled = compile_kernel(case.source)
    assert not [str(each) for each in beyond(compiled, lint(compiled, case.contract))]
