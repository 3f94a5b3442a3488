"""The rule about packed messages, on the kernel that sends them: right as it is, found wherever it is made wrong."""

from __future__ import annotations

from functools import cache
from typing import Literal

import pytest
from msgspec.structs import replace

from campaigns.lint_cases import packed_case
from overweave.compiler.aot import Compiled, compile_kernel
from overweave.compiler.lint import lint
from overweave.compiler.lint_contract import Contract
from overweave.schedules.tile_shape import PACKED
from tests.compiler.cases import edit, rules

pytestmark = pytest.mark.slow


@cache
def packed(shots: Literal[1, 2]) -> tuple[Compiled, Contract]:
    source, contract = packed_case("bfloat16", 2, replace(PACKED[0], shots=shots))
    return compile_kernel(source), contract


@pytest.mark.parametrize("shots", [1, 2])
def test_the_kernel_passes(shots: Literal[1, 2]) -> None:
    assert lint(*packed(shots)) == ()


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        (r"@here st\.relaxed\.sys\.global\.b128", "@here st.relaxed.gpu.global.b128"),
        (r"@here st\.relaxed\.sys\.global\.b128", "@here st.global.b128"),
        (r"@here st\.relaxed\.sys\.global\.b128[^;]*;", ""),
        (r"st\.relaxed\.sys\.global\.b128", "st.relaxed.sys.global.v2.b64"),
        (r"ld\.relaxed\.sys\.global\.b128", "ld.volatile.global.b128"),
        (r"@other bra spin;", ""),  # one look
        (r"@other bra spin;", "bra spin;"),  # no deadline
        (r"setp\.ne\.b32 other, stop, 0;", "setp.ne.b32 other, scratch, scratch;"),  # no alarm
        (r"setp\.eq\.and\.u32 reached, flag0", "setp.eq.and.u32 reached, scratch"),  # the flag does not matter
    ],
    ids=["scope", "weak", "lost", "vector", "volatile", "one look", "deadline", "alarm", "flag"],
)
def test_seeded_violation_is_found(change: tuple[str, str], shots: Literal[1, 2]) -> None:
    compiled, contract = packed(shots)
    assert "packed-messages" in rules(lint(replace(compiled, ptx=edit(compiled.ptx, change)), contract))


def test_each_shot_is_looked_for() -> None:
    """Of two shots neither may get lost in compiling, whichever the other does."""
    compiled, contract = packed(2)
    for pattern in (r"@here st\.relaxed\.sys\.global\.b128[^;]*;", r"ld\.relaxed\.sys\.global\.b128[^;]*;"):
        lost = edit(compiled.ptx, (pattern, "", 1))
        assert "packed-messages" in rules(lint(replace(compiled, ptx=lost), contract))
