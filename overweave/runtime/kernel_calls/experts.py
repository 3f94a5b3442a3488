"""The launches of a matmul by experts: one fills the table of tiles, one multiplies.

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
FILLED_AT_ONCE = 32  # rows of the table, by one program
MOST_AT_ONCE = 128  # experts that a program looks at together
MOST_TILES = (1 << 27) - 1  # of one launch: the Hopper kernel's partitions tell each other their numbers in 27 bits
NANOSECONDS = 10**9


class ExpertTensors(NamedTuple):
    """Of one call, tensors or stand-ins; None where it has none. x `[source rows, k]`, w and gate `[experts, k, n]`,
    offs int32 `[experts]`, out `[rows, n]`; the others as in `Operands` and `ExpertRows`. table, head:
    `fill_tiles_kernel`.
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
    """What tiles read that wait for rows of their source. bounds: `Arrivals`. The others: memory/device/signals.py, of
    which signal s says that the shard of rank s is there."""

    bounds: Any
    signals: Any
    words: Any
    limits: Any


class ArrivingRows(Struct, frozen=True):
    """How the rows of a source arrive (kernels/arguments.Arrivals)."""

    rank: int
    ranks: int
    ahead: int
    number: int


class ExpertsForm(Struct, frozen=True):
    """What of a call decides what is compiled beside shapes and dtypes. rows: of the product. arriving: None if all
    rows of its source are there when it begins."""

    rows: int
    config: MatmulConfig
    epilogue: Epilogue = NO_EPILOGUE
    arriving: ArrivingRows | None = None


def table_rows(rows: int, experts: int, n: int, config: MatmulConfig) -> int:
    """Return how many tiles there are at most. Raises InputError if a kernel cannot number them."""
    most = (rows // config.block_m + min(rows, experts)) * -(-n // config.block_n)
    if most > MOST_TILES:
        raise InputError("multiply by experts", f"{most} tiles at most", "Use fewer rows")
    return most


def fill_call(form: ExpertsForm, tensors: ExpertTensors) -> KernelCall:
    """Return the call that fills the table."""
    config, (experts, _, n) = form.config, tensors.w.shape
    columns, rest = -(-n // config.block_n), n % config.block_n
    at_once = min(MOST_AT_ONCE, 1 << (experts - 1).bit_length())
    arrivals, how = None, form.arriving
    if how is not None and tensors.arriving is not None:
        arrivals = Arrivals(tensors.arriving.bounds, how.rank, how.ranks, min(how.ahead, experts), how.number)
    arguments: list[Any] = [
        *(tensors.table, tensors.head, tensors.offs, arrivals, experts, form.rows, columns),
        narrow_width(rest, config) if rest else 0,
        *(config.block_m, config.block_n, config.group_m, FILLED_AT_ONCE, at_once),
    ]
    programs = -(-table_rows(form.rows, experts, n, config) // FILLED_AT_ONCE)
    return KernelCall(fill_tiles_kernel, arguments, {"num_warps": 4}, max(1, programs))


def experts_call(form: ExpertsForm, tensors: ExpertTensors, device: torch.device) -> KernelCall:
    """Return the call that multiplies, by the tile kernel that the configuration names."""
    is_transposed = tensors.w.stride()[1] == 1 and tensors.w.stride()[2] != 1
    x, out = tensors.x, tensors.out
    own = ExpertRows(
        step=stack_step(tensors.w, is_transposed) if tensors.w.shape[0] > 1 else 0,
        source=x if tensors.rows is not None else None,
        stride=x.stride()[0],
        twice_source_rows=2 * x.shape[0],
        rows=tensors.rows,
        into=tensors.into,
        twice_out_rows=2 * out.shape[0],
        weights=tensors.row_weights,
    )
    operands = Operands(
        x,
        None,
        ((tensors.w, out),),
        is_transposed,
        bias=tensors.bias,
        scale_x=tensors.scale_x,
        scale_w=tensors.scale_w,
        gate=tensors.gate,
        epilogue=form.epilogue,
        experts=own,
    )
    trace = torch.zeros(1, TRACE_COLUMNS.value, dtype=torch.int64, device=device)
    claims, count = head_words(tensors.head)
    queue = LaunchTiles(tensors.table, claims, trace, count)
    call = matmul_call(form.config, operands, TileKernelArgs(queue, _protocol(form, tensors, device)))
    experts, _, n = tensors.w.shape
    return call._replace(programs=table_rows(form.rows, experts, n, form.config))


def _protocol(form: ExpertsForm, tensors: ExpertTensors, device: torch.device) -> SignalWords:
    """Return what tiles wait by; where none does, words that nobody reads."""
    if form.arriving is not None and tensors.arriving is not None:
        return SignalWords(*tensors.arriving[1:], form.arriving.ranks)
    words = torch.zeros(64, dtype=torch.int32, device=device)
    limits = torch.tensor([NANOSECONDS, 0, 0], dtype=torch.int64, device=device)
    return SignalWords(words, words, limits, 1)


def head_words(head: Any) -> tuple[Any, Any]:
    """Return the work counter and the number of tiles of a `head`."""
    if isinstance(head, torch.Tensor):
        return head[:1], head[1:]
    return head, ShiftedStandIn(head, 4)


class ShiftedStandIn:
    """A stand-in for what lies so many bytes behind another."""

    def __init__(self, of: Moving, distance: int) -> None:
        self.of, self.distance, self.dtype = of, distance, of.dtype

    @property
    def address(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.of.address + self.distance

    def data_ptr(self) -> int:
        """Return the address of the next launch's tensor."""
        return self.address
