"""The rule about packed messages, on the kernel that sends them: right as it is, found wherever it is made wrong."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from campaigns.lint.lint_packed import packed_case
from overweave.ir.plan import PACKED_SUMS, PackedExchange
from overweave.schedules.tiles.shape import PACKED
from tests.compiler.cases import edit, rules
from tools.aot import Compiled, compile_kernel
from tools.ptx_lint.contract import Contract
from tools.ptx_lint.lint import lint

pytestmark = pytest.mark.slow


EXCHANGES: tuple[PackedExchange, ...] = ("one_shot", "two_shot", "scatter", "gather")


@cache
def packed(exchange: PackedExchange, normed: bool = False) -> tuple[Compiled, Contract]:
    source, contract = packed_case("bfloat16", 2, replace(PACKED[0], exchange=exchange), normed)
    return compile_kernel(source), contract


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_kernel_passes(exchange: PackedExchange) -> None:
    assert lint(*packed(exchange)) == ()


@pytest.mark.parametrize(
    "exchange", [PACKED_SUMS[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in PACKED_SUMS[1:])]
)
def test_the_kernel_passes_with_rows_in_turns_and_a_norm(exchange: PackedExchange) -> None:
    assert lint(*packed(exchange, normed=True)) == ()


@pytest.mark.parametrize("exchange", EXCHANGES)
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
def test_seeded_violation_is_found(change: tuple[str, str], exchange: PackedExchange) -> None:
    compiled, contract = packed(exchange)
    assert "packed-messages" in rules(lint(replace(compiled, ptx=edit(compiled.ptx, change)), contract))


def test_each_shot_is_looked_for() -> None:
    """Of two shots neither may get lost in compiling, whichever the other does."""
    compiled, contract = packed("two_shot")
    for pattern in (r"@here st\.relaxed\.sys\.global\.b128[^;]*;", r"ld\.relaxed\.sys\.global\.b128[^;]*;"):
        lost = edit(compiled.ptx, (pattern, "", 1))
        assert "packed-messages" in rules(lint(replace(compiled, ptx=lost), contract))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_kernel_that_starts_early_awaits_the_matmul_before_it_reads_of_it(exchange: PackedExchange) -> None:
    ranks = 4
    source, contract = packed_case("bfloat16", ranks, replace(PACKED[0], exchange=exchange), chained=True)
    compiled = compile_kernel(source)
    assert lint(compiled, contract) == ()
    if exchange == "gather":  # it is the matmul behind that starts early
        before, _, behind = compiled.ptx.partition("griddepcontrol.launch_dependents")
        assert "ld.global" not in before
        assert "atom." not in before
        assert "griddepcontrol" not in behind
        return
    before, _, behind = compiled.ptx.partition("griddepcontrol.wait")
    assert before.count("ld.global") == ranks + 1  # the limit, and where each rank's space lies
    assert "st.relaxed.sys.global.b128" not in before
    assert "st.relaxed.sys.global.b128" in behind
    assert "griddepcontrol" not in compile_kernel(packed_case("bfloat16", ranks)[0]).ptx
