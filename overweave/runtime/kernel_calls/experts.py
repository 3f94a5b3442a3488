"""The two launches of a grouped matmul by experts: one fills the tile table, one multiplies.

Both are made for shapes, strides and dtypes; tensors are stand-ins, whose addresses a call sets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from msgspec import Struct

from overweave.errors import InputError
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import MatmulConfig, narrow_width
from overweave.ir.tile_order import TileRow
from overweave.kernels.arguments import Arrivals, ExpertRows, LaunchTiles, SignalWords
from overweave.kernels.experts import fill_tiles_kernel
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.runtime.kernel_calls.call import KernelCall, Moving, TileKernelArgs, stack_step
from overweave.runtime.kernel_calls.matmul import Operands, matmul_call

COLUMNS = len(TileRow._fields)
TABLE_ROWS_PER_PROGRAM = 32  # rows of the table, by one program
MOST_EXPERTS_AT_ONCE = 128  # experts that a program looks at together
MOST_TILES = (1 << 27) - 1  # of one launch: messages between the Hopper kernel's partitions hold 27 bits
NANOSECONDS = 10**9


class ExpertTensors(NamedTuple):
    """Tensors of one call, or their stand-ins; None where it has none.

    x `[source rows, k]`, w and gate `[experts, k, n]`, offs int32 `[experts]` (ends of groups), out `[rows, n]`; table,
    head: of `fill_tiles_kernel`; rows, into, row_weights: index, output index and factor of rows (`ExpertRows`); others
    as in `Operands`.
    """

    x: Any
    w: Any
    offs: Any
    out: Any
    table: Any
    head: Any
    bias: Any = None
    gate: Any = None
    rows: Any = None
    into: Any = None
    row_weights: Any = None
    scale_x: Any = None
    scale_w: Any = None
    arriving: ArrivingTensors | None = None


class ArrivingTensors(NamedTuple):
    """Memory that tiles read to wait for arriving rows. bounds: `Arrivals.row_starts`.

    The others: memory/device/signals.py; signal s says that the shard of rank s is there.
    """

    bounds: Any
    signals: Any
    words: Any
    limits: Any


class ArrivingRows(Struct, frozen=True):
    """How rows of x arrive: as the fields of kernels/arguments.Arrivals. ranks: the number of sources."""

    rank: int
    ranks: int
    early_experts: int
    operation: int


class ExpertsForm(Struct, frozen=True):
    """What a call is compiled for, besides shapes and dtypes. rows: of the output. arriving: None if all rows are
    there."""

    rows: int
    config: MatmulConfig
    epilogue: Epilogue = NO_EPILOGUE
    arriving: ArrivingRows | None = None


def table_rows(rows: int, experts: int, n: int, config: MatmulConfig) -> int:
    """Return an upper bound of the number of tiles. Raises InputError if a kernel cannot number them."""
    most = (rows // config.block_m + min(rows, experts)) * -(-n // config.block_n)
    if most > MOST_TILES:
        raise InputError("multiply by experts", f"{most} tiles at most", "Use fewer rows")
    return most


def fill_call(form: ExpertsForm, tensors: ExpertTensors) -> KernelCall:
    """Return the call that fills the table."""
    config, (experts, _, n) = form.config, tensors.w.shape
    columns, last_cols = -(-n // config.block_n), n % config.block_n
    chunk = min(MOST_EXPERTS_AT_ONCE, 1 << (experts - 1).bit_length())
    arrivals, arriving = None, form.arriving
    if arriving is not None and tensors.arriving is not None:
        early_experts = min(arriving.early_experts, experts)
        arrivals = Arrivals(tensors.arriving.bounds, arriving.rank, arriving.ranks, early_experts, arriving.operation)
    arguments: list[Any] = [
        *(tensors.table, tensors.head, tensors.offs, arrivals, experts, form.rows, columns),
        narrow_width(last_cols, config) if last_cols else 0,
        *(config.block_m, config.block_n, config.group_m, TABLE_ROWS_PER_PROGRAM, chunk),
    ]
    programs = -(-table_rows(form.rows, experts, n, config) // TABLE_ROWS_PER_PROGRAM)
    return KernelCall(fill_tiles_kernel, arguments, {"num_warps": 4}, max(1, programs))


def experts_call(form: ExpertsForm, tensors: ExpertTensors, device: torch.device) -> KernelCall:
    """Return the call that multiplies, by the tile kernel that the configuration names."""
    is_transposed = tensors.w.stride()[1] == 1 and tensors.w.stride()[2] != 1
    x, out = tensors.x, tensors.out
    expert_rows = ExpertRows(
        rows_per_expert=stack_step(tensors.w, is_transposed) if tensors.w.shape[0] > 1 else 0,
        source=x if tensors.rows is not None else None,
        source_stride=x.stride()[0],
        source_rows_x2=2 * x.shape[0],
        row_index=tensors.rows,
        out_index=tensors.into,
        out_rows_x2=2 * out.shape[0],
        row_scales=tensors.row_weights,
    )
    operands = Operands(
        x,
        None,
        ((tensors.w, out),),
        is_transposed,
        epilogue_inputs=tensors._asdict(),
        scale_x=tensors.scale_x,
        epilogue=form.epilogue,
        experts=expert_rows,
    )
    trace = torch.zeros(1, TRACE_COLUMNS.value, dtype=torch.int64, device=device)
    claims, count = counter_and_count(tensors.head)
    queue = LaunchTiles(tensors.table, claims, trace, count)
    call = matmul_call(form.config, operands, TileKernelArgs(queue, _protocol(form, tensors, device)))
    experts, _, n = tensors.w.shape
    return call._replace(programs=table_rows(form.rows, experts, n, form.config))


def _protocol(form: ExpertsForm, tensors: ExpertTensors, device: torch.device) -> SignalWords:
    """Return the signal words that tiles wait for; if none wait, dummies that are not read."""
    if form.arriving is not None and tensors.arriving is not None:
        return SignalWords(*tensors.arriving[1:], form.arriving.ranks)
    words = torch.zeros(64, dtype=torch.int32, device=device)
    limits = torch.tensor([NANOSECONDS, 0, 0], dtype=torch.int64, device=device)
    return SignalWords(words, words, limits, 1)


def counter_and_count(head: Any) -> tuple[Any, Any]:
    """Return the two words of a `head`: work counter, number of tiles."""
    if isinstance(head, torch.Tensor):
        return head[:1], head[1:]
    return head, ShiftedStandIn(head, 4)


class ShiftedStandIn:
    """A stand-in for memory `offset_bytes` behind another stand-in."""

    def __init__(self, base: Moving, offset_bytes: int) -> None:
        self.base, self.offset_bytes, self.dtype = base, offset_bytes, base.dtype

    @property
    def address(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.base.address + self.offset_bytes

    def data_ptr(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.address
