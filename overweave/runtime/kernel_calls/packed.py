"""The calls of the kernel of packed messages, and of the skinny matmul, of few rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from overweave.ir.plan import PackedConfig, SkinnyConfig
from overweave.ir.problem import Problem
from overweave.kernels.arguments import Assembly, Messages, PackedTraits, ShardSpans, SignalWords, SumEpilogueArgs
from overweave.kernels.epilogue import epilogue_code, rows_code
from overweave.kernels.packed.exchange import packed_kernel
from overweave.kernels.skinny import skinny_matmul_kernel
from overweave.memory.device.ptx import poll_packed, poll_packed_constraints
from overweave.memory.heap import PackedSpace
from overweave.memory.layout import PackedLayout
from overweave.memory.split_k import SharedShares
from overweave.runtime.kernel_calls.call import DEPENDENT_LAUNCH, KernelCall, MatrixInput
from overweave.runtime.kernel_calls.sums_and_copies import MOST_REGISTERS, sum_epilogue_args

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


class Caller(NamedTuple):
    """The launching rank. protocol: words and limits (memory/device/signals.py). is_chained: the later of matmul and
    packed kernel starts early, by dependent launch. is_later: the packed kernel is that one."""

    rank: int
    protocol: tuple[Tensor, Tensor]
    is_chained: bool = False
    is_later: bool = False


def packed_call(
    config: PackedConfig,
    problem: Problem,
    layout: PackedLayout,
    tensors: Mapping[str, Any],
    space: PackedSpace,
    caller: Caller,
) -> KernelCall:
    """Return the call of the packed kernel, before or behind the matmul of a problem.

    tensors: buffers by name, and operands of the norm or of the sums' epilogue by theirs.
    """
    ranks, adds, rows = problem.world_size, config.exchange != "gather", problem.of_rows
    span, programs, iterations = layout.stretches(config.block)
    traits = PackedTraits(
        exchange=config.exchange,
        senders=ranks - 1,
        poll=Assembly(poll_packed(ranks - 1), poll_packed_constraints(ranks - 1)),
        block=config.block,
        chained=caller.is_chained,
        epilogue=epilogue_code(problem.sum_epilogue) if adds else 0,
        rows=rows_code(rows),
    )
    arguments = [
        *(tensors[layout.source], tensors[rows.places[0] if rows else layout.out]),
        sum_epilogue_args(problem, tensors) if adds else SumEpilogueArgs(),
        Messages(space.spaces, space.state, layout.part_bytes, space.half_bytes),
        ShardSpans(layout.words, layout.shard_words, span, iterations),
        SignalWords(None, *caller.protocol, ranks),
        *(caller.rank, problem.n, traits),
    ]
    # As in `reduction_call`: rather than take more than 64 registers, ptxas spills.
    options: dict[str, int] = {"num_warps": config.warps} | ({"maxnreg": MOST_REGISTERS} if problem.rows else {})
    options |= DEPENDENT_LAUNCH if caller.is_chained and caller.is_later else {}
    return KernelCall(packed_kernel, arguments, options, programs)
