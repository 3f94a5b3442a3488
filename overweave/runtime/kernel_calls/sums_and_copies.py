"""Calls of the ordered-reduction kernel and of the copy kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from overweave.ir.operators.forms import RESIDUAL
from overweave.ir.plan import CopyConfig, ReduceConfig
from overweave.ir.problem import Problem
from overweave.kernels.arguments import SumEpilogueArgs
from overweave.kernels.copy import copy_kernel
from overweave.kernels.epilogue import operands_of
from overweave.kernels.reduction import reduction_kernel
from overweave.memory.cuda.heap import sms_for_copies
from overweave.runtime.kernel_calls.call import KernelCall, MatrixInput, TileKernelArgs

MOST_REGISTERS = 224  # of a thread
WORDS_PER_KIB = 256  # of int32
SUMS_PER_SM = 4  # of the SMs left to copies; a reduction block takes an eighth of an SM


class ReductionCall(NamedTuple):
    """Operands, output and epilogue of a reduction (kernels/reduction.py).

    operands: int64 addresses (memory/lower.reduction_operands). widths: as of memory/lower.reduction_widths. out: of
    `cols` columns; used by sums without an address in `operands`. rows, epilogue: codes of kernels/epilogue.py for
    whole rows and for sums; 0: none. cells: int32, the block map of permuted operands; cell: rows and columns of a
    block.
    """

    operands: torch.Tensor
    widths: tuple[int, int, int]
    out: MatrixInput
    cols: int
    epilogue_args: SumEpilogueArgs = SumEpilogueArgs()
    rows: int = 0
    sum_first: bool = False  # the first operand of each sum is fp32
    epilogue: int = 0
    cells: torch.Tensor | None = None
    cell: tuple[int, int] = (1, 1)


def sum_epilogue_args(problem: Problem, tensors: Mapping[str, Any]) -> SumEpilogueArgs:
    """Return inputs and outputs of the epilogue, or row-wise form, that ends sums. tensors: of the call, by name."""
    rows = problem.of_rows
    if rows is None:
        return SumEpilogueArgs(inputs=operands_of(problem.sum_epilogue, tensors))
    outputs = (tensors[name] for name in rows.places[1:])
    return SumEpilogueArgs(tensors.get(RESIDUAL), operands_of(rows, tensors), *outputs)


def reduction_call(config: ReduceConfig, tiles: TileKernelArgs, sums: ReductionCall) -> KernelCall:
    """Return the call of the reduction kernel."""
    # With an epilogue ptxas spills registers rather than take more than 64 (Triton 3.6), unless maxnreg allows more.
    blocks = [*sums.widths, config.block_m, config.block_n // config.parts]
    constants = [*blocks, tiles.traced, sums.rows, sums.sum_first, sums.epilogue, *sums.cell]
    arguments = [
        sums.operands,
        sums.out,
        tiles.queue,
        tiles.protocol,
        sums.cols,
        sums.epilogue_args,
        sums.cells,
        *constants,
    ]
    options = {"num_warps": config.warps} | ({"maxnreg": MOST_REGISTERS} if sums.epilogue else {})
    return KernelCall(reduction_kernel, arguments, options, reduction_programs(config, tiles.queue.tiles))


def reduction_programs(config: ReduceConfig, tiles: int) -> int:
    """Return the programs of a reduction: few where copies need room on the SMs that tiles leave free."""
    limit = SUMS_PER_SM * sms_for_copies() or config.programs
    return min(config.programs, tiles, limit)


class Pushes(NamedTuple):
    """The copies of a copy kernel. targets: int64 (memory/lower.copy_targets). source: its rows have `row_words` times
    16 bytes. adds: add to the target instead of storing."""

    targets: torch.Tensor
    source: MatrixInput
    row_words: int
    adds: bool = False


def copy_call(config: CopyConfig, tiles: TileKernelArgs, pushes: Pushes) -> KernelCall:
    """Return the call of the copy kernel.

    Without bulk copies, a program moves a block of int32 or of addends at once.
    """
    is_bulk, (targets, source, row_words, adds) = config.path == "bulk", pushes
    constants = [config.block_kib * WORDS_PER_KIB, is_bulk and not adds, adds, tiles.traced]
    arguments = [targets, source, tiles.queue, tiles.protocol, row_words, *constants]
    programs = min(config.programs, tiles.queue.tiles)
    return KernelCall(copy_kernel, arguments, {"num_warps": config.warps}, programs)
