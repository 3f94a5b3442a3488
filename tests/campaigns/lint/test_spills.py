"""Which spills of registers `campaigns.lint_all` lets through: those of the Triton at hand that its table names."""

from __future__ import annotations

import pytest
import triton
from msgspec.structs import replace

from campaigns.lint import spills
from campaigns.lint.lint_cases import cases
from campaigns.lint.spills import ALLOWED, HOPPER, beyond
from tools.aot import Compiled, Resources
from tools.ptx_lint.contract import Finding

CONFIG = "bfloat16 128x256x64 4w3s/2 3 addends"
FOUND = Finding(HOPPER, CONFIG, "spills", 0, "", "60 bytes spilled", "Use smaller tiles")


def compiled(spilled: int, config: str = CONFIG, stack: int | None = None) -> Compiled:
    used = Resources(168, spilled, spilled if stack is None else stack, 1 << 17, 4)
    return Compiled(HOPPER, config, "", b"", {}, used)


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.9.0")


def test_a_spill_that_the_table_names_is_allowed() -> None:
    most = ALLOWED[3, 9][HOPPER][CONFIG]
    assert beyond(compiled(most), [FOUND]) == ()
    assert beyond(compiled(most - 4, stack=64), [FOUND]) == ()


def test_a_larger_one_another_kernels_and_another_tritons_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    most = ALLOWED[3, 9][HOPPER][CONFIG]
    assert beyond(compiled(most + 4), [FOUND]) == (FOUND,)
    assert beyond(compiled(most, stack=most + 64), [FOUND]) == (FOUND,)  # local memory that is no spill
    assert beyond(compiled(4, "bfloat16 128x128x64 4w5s/2 3 addends"), [FOUND]) == (FOUND,)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert beyond(compiled(most), [FOUND]) == (FOUND,)


def test_nothing_else_is_allowed_beside_it() -> None:
    other = replace(FOUND, rule="deadline")
    assert beyond(compiled(4), [FOUND, other]) == (other,)


@pytest.mark.slow
def test_the_table_names_kernels_that_there_are() -> None:
    known = {(case.source.name, case.source.config) for case in cases()}
    named = {
        (kernel, config) for of_kernels in ALLOWED.values() for kernel, each in of_kernels.items() for config in each
    }
    assert named <= known
    assert all(
        most > 0 for of_kernels in spills.ALLOWED.values() for each in of_kernels.values() for most in each.values()
    )
