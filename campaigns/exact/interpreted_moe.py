"""The kernels of layers of experts, interpreted on CPU ranks in place of plain torch: routing, matmuls, slots' sums.

Started with TRITON_INTERPRET=1, whose interpreter overweave repairs before any kernel is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from overweave.ir.plan import MatmulConfig
from overweave.kernels.arguments import SlotsShape
from overweave.kernels.experts import outer_kernel
from overweave.kernels.slots import add_slots_kernel
from overweave.moe import overlapped
from overweave.runtime.interpreted import interpreter
from overweave.runtime.kernel_calls.experts import (
    COLUMNS,
    ArrivingRows,
    ArrivingTensors,
    ExpertsForm,
    ExpertTensors,
    experts_call,
    fill_call,
    table_rows,
)
from overweave.runtime.kernel_calls.routing import GridBarrier, RoutingSizes, route_call
from overweave.runtime.library import grouped, routing, slots
from overweave.runtime.library.grouped import Grouped, aligned, with_steps
from overweave.runtime.library.slots import SlotSums

CPU = torch.device("cpu")
PROGRAMS = 3
OUTER = (16, 16, 16)  # rows, and both sides of a tile


def is_asked_for() -> bool:
    """Whether this process interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Everything that layers of experts compute on a CPU is computed by their kernels."""
    interpreter.repair()
    with ExitStack() as held:
        for module, name, kernel in (
            (grouped, "multiply", multiply),
            (grouped, "outer", outer),
            (overlapped, "multiply_arriving", multiply_arriving),
            (routing, "route", route),
            (slots, "add", add),
        ):
            held.enter_context(patch.object(module, name, kernel))
        yield


def multiply(call: Grouped) -> torch.Tensor:
    """As `runtime/library/grouped.multiply`; what is not computed is zero."""
    n, call = call.w.shape[2], aligned(with_steps(call))
    out = torch.zeros(call.pairs, call.w.shape[2], dtype=call.out_dtype)
    if out.numel() and len(call.offs):
        run(out, call)
    return out[:, :n].contiguous()


def multiply_arriving(
    out: torch.Tensor, call: Grouped, bounds: torch.Tensor, place: tuple[int, int], channel: Any
) -> None:
    """With tiles that stand as shards come, all of which are there."""
    rank, ahead = place
    run(out, aligned(call), ArrivingRows(rank, bounds.shape[0], ahead, 0), bounds)


def run(
    out: torch.Tensor, call: Grouped, rows: ArrivingRows | None = None, bounds: torch.Tensor | None = None
) -> torch.Tensor:
    """Run both launches of an aligned call, whose rows may be those of shards that are all there; return the table of
    tiles."""
    experts, _, n = call.w.shape
    config = MatmulConfig(block_m=16, block_n=32, block_k=64 // call.x.element_size() // 2, group_m=2, stages=2)
    form = ExpertsForm(call.pairs, config, call.epilogue, arriving=rows)
    table = torch.full((table_rows(call.pairs, experts, n, config), COLUMNS), -9, dtype=torch.int32)
    scale_x = call.scale_x if call.rows is None or call.scale_x is None else call.scale_x[call.rows.long()]
    tensors = ExpertTensors(
        *(call.x, call.w, call.offs, out, table, torch.full((2,), -9, dtype=torch.int32), call.bias, call.gate),
        *(call.rows, call.into, call.row_weights, scale_x, call.scale_w),
        arriving=None if bounds is None else _all_there(bounds),
    )
    fill, product = fill_call(form, tensors), experts_call(form, tensors, CPU)
    fill.kernel[(fill.programs,)](*fill.arguments)
    product.kernel[(PROGRAMS,)](*product.arguments)
    assert tensors.head is not None
    return table[: int(tensors.head[1])]


def _all_there(bounds: torch.Tensor) -> ArrivingTensors:
    signals, words = torch.ones(bounds.shape[0] * 32, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    return ArrivingTensors(bounds, signals, words, torch.zeros(4, dtype=torch.int64))


def outer(x: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """As `runtime/library/grouped.outer`."""
    experts, k, n = offs.shape[0], x.shape[1], g.shape[1]
    out = torch.zeros(experts, k, n, dtype=x.dtype)
    programs = experts * -(-k // OUTER[1]) * -(-n // OUTER[2])
    if programs:
        outer_kernel[(programs,)](x.contiguous(), g.contiguous(), offs, out, experts, k, n, *OUTER, "ieee")
    return out


def route(ids: torch.Tensor, words: torch.Tensor, sizes: RoutingSizes) -> None:
    """As `runtime/library/routing.route`, of ids that are wrong, too."""
    call = route_call(ids, words, sizes, GridBarrier.on(CPU))
    call.kernel[(call.programs,)](*call.arguments)


def add(sums: SlotSums) -> torch.Tensor:
    """As `runtime/library/slots.add`."""
    (rows, count), cols, landed = sums.places.shape, sums.z.shape[1], sums.landed
    out = torch.zeros(rows, cols, dtype=sums.z.dtype)
    if out.numel():
        ranks, rank_step, step = (1, 0, 0) if landed is None else (len(landed), *landed.stride()[:2])
        of_weights = 0 if sums.weights is None else sums.weights.stride(0)
        shape = SlotsShape(rows, cols, sums.z.stride(0), of_weights, step, rank_step, cols, sums.rank)
        add_slots_kernel[(PROGRAMS,)](*sums[:5], out, shape, count, 8, ranks)
    return out
