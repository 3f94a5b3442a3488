"""A toy operator, `all_gather(x @ w)`: all that an operator needs, in one file, registered by one call.

Each rank multiplies its shard of the rows of x by the same weight, and every rank gets all of the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from overweave.ir.operators.record import Forms, Operand, Operator, SizeRule
from overweave.ir.schedule import Buffer, Compute, Given, Goal, Operation, Queue, Schedule
from overweave.ir.tensors import product
from overweave.ops.call.groups import GroupLike
from overweave.ops.dispatch.call import call
from overweave.schedules.catalog.catalog import register
from overweave.schedules.communication import COMPLETE, MAIN, PARTIAL, A, B, W, X, Y, gathered_by_library, region
from overweave.schedules.records.record import Method, Work

OPERATOR = Operator(
    name="matmul_all_gather",
    summary="all_gather(x @ w)",
    x=Operand("x", ("m", "k"), "sharded", "m"),
    w=Operand("w", ("k", "n"), "replicated"),
    y=Operand("y", ("m", "n"), "gathered", "m"),
    split=None,
    forms=Forms(epilogue=False, scaling=False),
    reference=lambda tensors, by: by.all_gather(by.matmul(tensors["x"], tensors["w"])),
    size_rule=SizeRule("sequential", "sequential"),
)
METHOD = Method(
    operator=OPERATOR.name,
    name="sequential",
    summary="one library matmul, then library all-gather",
    grids=({},),
)


def matmul_all_gather(
    x_shard: torch.Tensor, w: torch.Tensor, group: GroupLike = None, *, m: int | None = None, plan: str | None = None
) -> torch.Tensor:
    """y `[m, n]` = all_gather(x_shard @ w), of the rank's shard `[m/W, k]` and `[k, n]`, the same on every rank."""
    return call(OPERATOR, group, {"x": x_shard, "w": w, "m": m, "plan": plan})["y"]


def schedule(work: Work) -> Schedule:
    """The one schedule: each rank's product into a buffer of its own, or, of a group of one, into the result."""
    problem, split = work.problem, work.split
    ranks = range(problem.world_size)
    x, w = Buffer(X, split.shard_size, problem.k, "input"), Buffer(W, problem.k, problem.n, "input")
    y, own = Buffer(Y, problem.m, problem.n, "output"), Buffer(PARTIAL, split.shard_size, problem.n, "local")
    shards = {rank: (0, hi - lo) for rank, (lo, hi) in enumerate(map(split.shard, ranks)) if lo < hi}

    def operations(rank: int) -> Iterator[Operation]:
        out = own if problem.world_size > 1 else y
        rows = shards.get(rank, (0, 0))
        if rank in shards:
            yield Compute(
                name=f"multiply.{rank}",
                rank=rank,
                queue=MAIN,
                a=(region(x, rank, rows),),
                b=region(w, rank, (0, problem.k)),
                out=(region(out, rank, rows),),
            )
        if problem.world_size > 1 and problem.m > 0:
            yield gathered_by_library(split, region(own, rank, rows), y)

    given = [Given(region(x, rank, rows), A, *problem.start(OPERATOR.x, rank)) for rank, rows in shards.items()]
    given += [Given(region(w, rank, (0, problem.k)), B, 0, 0) for rank in ranks]
    whole = (0, problem.m)
    return Schedule(
        name=work.method.full_name,
        world_size=problem.world_size,
        buffers=(x, w, *((own,) if problem.world_size > 1 else ()), y),
        queues=(Queue(MAIN, COMPLETE),),
        given=tuple(given),
        goal=tuple(Goal(region(y, r, whole), product(A, B), 0, 0, ((0, problem.k),)) for r in ranks if problem.m > 0),
        operations=tuple(operation for rank in ranks for operation in operations(rank)),
    )


def add() -> None:
    """The one call: from now on every part of overweave knows the operator."""
    register(OPERATOR, [METHOD], schedule)
