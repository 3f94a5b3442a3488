"""The matmul of few rows in every configuration, with what it promises to the lint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from campaigns.lint.lint_case import Case, case_of
from overweave.ir.dtype import Dtype
from overweave.ir.plan import SkinnyConfig
from overweave.memory.split_k import SharedShares
from overweave.runtime.kernel_calls.packed import ChainPosition, SkinnyOperands, skinny_call
from overweave.schedules.tiles.shape import SHAPES


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
    dtype: Dtype, config: SkinnyConfig, is_transposed: bool, turn: ChainPosition = "in_turn", is_ragged: bool = False
) -> Case:
    """No signals and no waits for programs: a counter that only this device's programs touch. is_ragged: no number is a
    multiple of 16."""
    m, n, k = (5, 1001, 1003) if is_ragged else (5, 1024, 2048)
    a, out = (torch.empty(m, size, dtype=getattr(torch, dtype)) for size in (k, n))
    b = a.new_empty(n, k).t() if is_transposed else a.new_empty(k, n)
    words = {"b^T": is_transposed, "shares": config.splits > 1, turn: turn != "in_turn", "ragged": is_ragged}
    label = " ".join([f"{dtype} {config.block_m} rows", *(word for word, holds in words.items() if holds)])
    return case_of(skinny_call(config, SkinnyOperands(a, b, out), SharedShares(a.device), turn), label, wgmma=True)
