"""A toy operator, `all_gather(x) @ all_gather(w)`: all that an operator needs, in one file, registered by one call.

Each rank has a shard of the rows of x and of those of w, as FSDP has, and every rank gets all of the product.
"""

from __future__ import annotations

import torch

from overweave.ir.operators.record import CallMatrix, Forms, Operator, SizeRule
from overweave.ir.plan import COPY_ENGINE, TILE_KERNEL
from overweave.ops.call.groups import GroupLike
from overweave.ops.dispatch.call import call
from overweave.schedules.catalog.catalog import register
from overweave.schedules.methods.by_moves import by_moves
from overweave.schedules.moves import gather_templates
from overweave.schedules.records import options
from overweave.schedules.records.record import Method

OPERATOR = Operator(
    name="all_gather_both_matmul",
    summary="all_gather(x) @ all_gather(w)",
    x=CallMatrix("x", ("m", "k"), "gathered", "m"),
    w=CallMatrix("w", ("k", "n"), "gathered", "k"),
    y=CallMatrix("y", ("m", "n"), "replicated"),
    split=None,
    forms=Forms(epilogue=False, scaling=False),
    reference=lambda tensors, by: by.matmul(
        by.all_gather(tensors["x"]), by.all_gather(tensors["w"], tensors["x"].shape[1])
    ),
    size_rule=SizeRule("push", "sequential"),
)
METHODS = (
    Method(
        operator=OPERATOR.name,
        name="sequential",
        summary="library all-gathers of both, then one library matmul",
        write=by_moves(gather_templates.at_once),
        grids=({},),
    ),
    Method(
        operator=OPERATOR.name,
        name="push",
        summary="a library all-gather of w, then pieces of x pushed, tiles of one kernel wait",
        write=by_moves(gather_templates.push),
        multiplies=TILE_KERNEL,
        moves=(COPY_ENGINE,),
        options=(options.PIECES, *options.TILES),
        grids=({"pieces": (1, 2)},),
    ),
)


def all_gather_both_matmul(
    x_shard: torch.Tensor,
    w_shard: torch.Tensor,
    group: GroupLike = None,
    *,
    m: int | None = None,
    plan: str | None = None,
) -> torch.Tensor:
    """y `[m, n]` = all_gather(x_shard) @ all_gather(w_shard), of shards `[m/W, k]` and `[k/W, n]`."""
    return call(OPERATOR, group, {"x": x_shard, "w": w_shard, "m": m, "plan": plan})["y"]


def add() -> None:
    """The one call: from now on every part of overweave knows the operator."""
    register(OPERATOR, METHODS)
