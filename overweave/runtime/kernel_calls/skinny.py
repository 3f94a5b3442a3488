"""The call of the skinny matmul, of few rows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from overweave.ir.plan import SkinnyConfig
from overweave.kernels.skinny import skinny_matmul_kernel
from overweave.memory.split_k import SharedShares
from overweave.runtime.kernel_calls.call import DEPENDENT_LAUNCH, KernelCall, MatrixInput

ChainPosition = Literal[
    "in_turn", "leads", "follows"
]  # of the kernel in its chain: the next one starts early, or it does
CHAIN_POSITIONS: dict[ChainPosition, int] = {"in_turn": 0, "leads": 1, "follows": 2}


class SkinnyOperands(NamedTuple):
    """`a [m, k]`, `b [k, n]` and their product `out [m, n]`: a and out have contiguous rows."""

    a: MatrixInput
    b: MatrixInput
    out: MatrixInput


def skinny_tiles(config: SkinnyConfig, m: int, n: int) -> int:
    """Return the number of tiles of a result `[m, n]`; each has an arrival counter."""
    return -(-m // config.block_m) * -(-n // config.block_n)


def skinny_call(
    config: SkinnyConfig, operands: SkinnyOperands, memory: SharedShares, position: ChainPosition = "in_turn"
) -> KernelCall:
    """Return the call of `out = a @ b`. position: `leads`: the next kernel starts before this one ends; `follows`: this
    one starts before `a` is complete."""
    a, b, out = operands
    (m, k), n, strides = a.shape, b.shape[1], b.stride()
    programs = skinny_tiles(config, m, n) * config.splits
    shares = memory.get(programs, config.block_m * config.block_n) if config.splits > 1 else None
    arguments: list[Any] = [a, b, out, shares, m, n, k, a.stride()[0], *strides, out.stride()[0], config.splits]
    arguments += [config.block_m, config.block_n, config.block_k, config.swapped]
    arguments += [strides[0] == 1 and strides[1] != 1, CHAIN_POSITIONS[position]]
    options = {"num_warps": config.warps, "num_stages": config.stages} | (
        DEPENDENT_LAUNCH if position == "follows" else {}
    )
    return KernelCall(skinny_matmul_kernel, arguments, options, programs)
