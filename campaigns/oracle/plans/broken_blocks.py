"""Plans of blocks, broken: of rows that a call fills in part, of permuted blocks, and of rows that end with a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random

from msgspec.structs import replace

from campaigns.oracle.broken_blocks import BLOCKS
from campaigns.oracle.changes import Mutation as OfSchedule
from overweave.ir.epilogue import Norm
from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Compute, Copy, Operation, Reduce, Region
from overweave.schedules.catalog.catalog import build

COUNTED = ("all_to_all_matmul.sequential", "all_to_all_matmul.per_peer", "all_to_all_matmul.hetero_unfused_1d",
           "matmul_all_to_all.sequential", "matmul_all_to_all.per_peer", "matmul_all_to_all.decomposed")  # fmt: skip
IN_WAVES = ("matmul_all_reduce.waves", "matmul_reduce_scatter.waves", "matmul_all_to_all.waves")
OfPlan = Callable[[Random, Plan], Plan | None]


@cache
def plans_of_blocks() -> tuple[Plan, ...]:
    """Right plans that are small enough to run every interleaving of."""
    return tuple(_plans())


def _plans() -> Iterator[Plan]:
    for name in COUNTED:
        for ranks, block in ((2, 1), (2, 2), (3, 1)):
            shape = {"m": ranks * block, "n": 8, "k": 8, "world_size": ranks, "dtype": "bfloat16"}
            yield build(name, Problem(operator=name.split(".")[0], counted=True, **shape), {})  # type: ignore[arg-type]
    for name in IN_WAVES:
        shape = {"m": 96, "n": 16, "k": 8, "world_size": 2, "dtype": "bfloat16"}
        options: dict[str, str | int] = {"sms": 26, "library_sms": 24, "block_m": 16, "block_n": 16}
        yield build(name, Problem(operator=name.split(".")[0], **shape), options)  # type: ignore[arg-type]


def _of_plans(change: OfSchedule) -> OfPlan:
    def mutation(rng: Random, plan: Plan) -> Plan | None:
        chosen = rng.choice(plans_of_blocks())
        changed = change(rng, chosen.schedule)
        return None if changed is None else replace(chosen, schedule=changed)

    mutation.__name__ = f"{change.__name__}_of_plans"
    return mutation


RUN = tuple(_of_plans(change) for change in BLOCKS)


def library_moves_permuted_blocks(rng: Random, plan: Plan) -> Plan | None:
    """What puts permuted blocks in their rows, or computes them, is the library's."""
    permuted = {buffer.name for buffer in plan.schedule.buffers if buffer.blocks}
    touching = [
        one
        for one in plan.schedule.operations
        if isinstance(one, Reduce | Compute) and any(part.buffer in permuted for part in (*one.reads, *one.writes))
    ]
    if not touching:
        return None
    queue = rng.choice(touching).queue
    as_copy = rng.random() < 0.5

    def by_library(one: Operation) -> Operation:
        if one.queue != queue or not isinstance(one, Reduce | Compute):
            return one
        if isinstance(one, Reduce) and as_copy and len(one.operands) == 1:
            return Copy(
                name=one.name, rank=one.rank, queue=queue, waits=one.waits, notifies=one.notifies,
                sources=one.operands, destinations=(one.out,),
            )  # fmt: skip
        return replace(one, tiles=1)

    queues = tuple(replace(one, order="complete") if one.name == queue else one for one in plan.schedule.queues)
    engines = tuple(replace(one, engine=LIBRARY) if one.queue == queue else one for one in plan.realization.engines)
    schedule = replace(plan.schedule, queues=queues, operations=tuple(map(by_library, plan.schedule.operations)))
    return replace(plan, schedule=schedule, realization=replace(plan.realization, engines=engines))


def normed_rows_travel(rng: Random, plan: Plan) -> Plan | None:
    """Each rank's rows of a sum end with a norm and are sent on to the others, where they end with one again."""
    ranks, rows = rng.randint(2, 3), rng.randint(1, 3)
    shape = {"m": ranks * rows, "n": 16, "k": 16, "world_size": ranks, "dtype": "bfloat16"}
    problem = Problem(operator="matmul_all_reduce", norm=Norm(eps=1e-5), **shape)  # type: ignore[arg-type]
    whole = build("matmul_all_reduce.sequential", problem, {})
    by_copy, cols = rng.random() < 0.5, (0, problem.n)
    shards = [(rank * rows, (rank + 1) * rows) for rank in range(ranks)]
    operations: list[Operation] = []
    for one in whole.schedule.operations:
        if isinstance(one, Compute):
            operations.append(replace(one, out=tuple(replace(part, buffer="made") for part in one.out)))
        elif isinstance(one, Collective):
            own = Region("y", one.rank, shards[one.rank], cols)
            parts = tuple(Region("made", one.rank, shard, cols) for shard in shards)
            scattered = {"function": "reduce_scatter", "sources": parts, "destinations": (own,)}
            operations.append(replace(one, **scattered))
            sent, base = own, {"rank": one.rank, "queue": one.queue}
            if by_copy:
                sent = Region("sent", one.rank, (0, rows), cols)
                operations.append(Copy(name=f"keep.{one.rank}", sources=(own,), destinations=(sent,), **base))  # type: ignore[arg-type]
            landing = tuple(
                Region("scratch", one.rank, (0, rows), cols) if peer == one.rank else Region("y", one.rank, shard, cols)
                for peer, shard in enumerate(shards)
            )
            shared = {"name": f"share.{one.rank}", "label": "share", "function": "all_to_all"}
            operations.append(replace(one, sources=(sent,) * ranks, destinations=landing, **shared))
    local = [("made", problem.m), ("scratch", rows), ("sent", rows)]
    kept = [buffer for buffer in whole.schedule.buffers if buffer.home != "local"]
    buffers = (*kept, *(Buffer(name, high, problem.n, "local") for name, high in local))
    return replace(whole, schedule=replace(whole.schedule, buffers=buffers, operations=tuple(operations)))
