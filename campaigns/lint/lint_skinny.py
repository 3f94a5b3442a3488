"""The matmul of few rows in every configuration, with what it promises to the lint."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from campaigns.lint.lint_case import DTYPES, SHARES, Case, source_of
from overweave.compiler.ptx_lint.contract import Contract
from overweave.ir.dtype import Dtype
from overweave.ir.plan import SkinnyConfig
from overweave.kernels.skinny import skinny_matmul_kernel
from overweave.runtime.gpu.kernels.skinny_call import TURNS, Turn
from overweave.schedules.tiles.skinny import SHAPES


def skinny_cases() -> Iterator[Case]:
    """Every shape in both layouts of the weight, alone and in shares, in turn and early."""
    for shape in SHAPES:
        for is_transposed in (False, True):
            yield skinny_case("bfloat16", shape, is_transposed)
            yield skinny_case("bfloat16", replace(shape, splits=3), is_transposed, "leads")
            yield skinny_case("bfloat16", replace(shape, splits=3), is_transposed, "follows")
    yield skinny_case("float16", SHAPES[0], True)
    yield skinny_case("bfloat16", SHAPES[0], True, is_ragged=True)


def skinny_case(
    dtype: Dtype, config: SkinnyConfig, is_transposed: bool, turn: Turn = "in_turn", is_ragged: bool = False
) -> Case:
    """No signals and no waits for programs: a counter that only this device's programs touch. is_ragged: no number is a
    multiple of 16."""
    stored, apart = ("b_stride_k", "b_stride_n") if is_transposed else ("b_stride_n", "b_stride_k")
    numbers = ("n", "k", "a_stride", apart, "out_stride")
    constexprs: dict[str, int | bool | None] = {
        stored: 1,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWAPPED": config.swapped,
        "B_IS_TRANSPOSED": is_transposed,
        "TURN": TURNS[turn],
    }
    shares = {"partials": "*fp32", "arrivals": "*i32"} if config.splits > 1 else {}
    constexprs |= dict.fromkeys(() if shares else ("partials", "arrivals"))
    words = {"b^T": is_transposed, "shares": bool(shares), turn: turn != "in_turn", "ragged": is_ragged}
    source = source_of(
        skinny_matmul_kernel,
        {**dict.fromkeys(("a", "b", "out"), f"*{DTYPES[dtype]}"), **shares}
        | dict.fromkeys(("m", *numbers, "splits"), "i32"),
        constexprs,
        {"num_warps": config.warps, "num_stages": config.stages},
        " ".join([f"{dtype} {config.block_m} rows", *(word for word, holds in words.items() if holds)]),
        () if is_ragged else numbers,
    )
    known = Contract(private=("arrivals",), counted=(SHARES,), wgmma=True)
    return Case(source, known if shares else Contract(wgmma=True))
