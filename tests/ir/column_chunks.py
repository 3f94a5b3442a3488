"""Two small schedules of matmuls by columns of the weight: one gathers before them, one scatters their sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from overweave.ir.epilogue import NO_EPILOGUE
from overweave.ir.plan import COPY_ENGINE, LIBRARY, EngineAssignment, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Compute,
    Goal,
    InitialContents,
    Operation,
    Put,
    Queue,
    Range,
    Reduce,
    Region,
    Schedule,
)
from overweave.ir.shards import shard_rows
from overweave.ir.tensors import epilogue_applied
from overweave.schedules.assemble_schedule import credits
from overweave.schedules.communication import Communication, MatmulChunk
from overweave.schedules.signals import with_signals


def cut(width: int, chunks: int) -> tuple[Range, ...]:
    """Ranges of columns of nearly equal width."""
    return tuple(pairwise([width * at // chunks for at in range(chunks + 1)]))


def scattered(problem: Problem, chunks: int) -> Plan:
    """A reduce-scatter by column chunks: each rank's product of a chunk is pushed, as strided rows, and added there."""
    size, m, n, k = problem.world_size, problem.m, problem.n, problem.k
    height, ranks, ends = shard_rows(m, size, 0)[1], range(size), problem.sum_epilogue != NO_EPILOGUE
    shards = [shard_rows(m, size, rank) for rank in ranks]

    def steps() -> Iterator[Operation]:
        for rank in ranks:
            (lo, hi), depth = shards[rank], (0, k)
            for at, cols in enumerate(cut(n, chunks)):
                a, b = Region("x", rank, (0, m), depth), Region("w", rank, depth, cols)
                out = Region("partial", rank, (0, m), cols)
                yield Compute(name=f"multiply.{rank}.{at}", rank=rank, queue="tiles", a=(a,), b=b, out=(out,))
            for at, cols in enumerate(cut(n, chunks)):
                for step in range(1, size):
                    peer = (rank + step) % size
                    rows = shards[peer][1] - shards[peer][0]
                    landing = Region("landed", peer, (rank * height, rank * height + rows), cols)
                    yield Put(
                        name=f"push.{rank}-{peer}.{at}",
                        rank=rank,
                        queue=f"copies.{step}",
                        sources=(Region("partial", rank, shards[peer], cols),),
                        destinations=(landing,),
                    )
            for at, cols in enumerate(cut(n, chunks)):
                operands = [Region("landed", rank, (one * height, one * height + hi - lo), cols) for one in ranks]
                operands[rank] = Region("partial", rank, (lo, hi), cols)
                out, name = Region("y", rank, (0, hi - lo), cols), f"sum.{rank}.{at}"
                yield Reduce(name=name, rank=rank, queue="main", operands=tuple(operands), out=out, finishes=ends)

    buffers = (
        Buffer("x", m, k, "input"),
        Buffer("w", k, n, "input"),
        Buffer("y", height, n, "output"),
        Buffer("partial", m, n, "local"),
        Buffer("landed", size * height, n, "symmetric"),
    )
    terms = tuple((rank * k, (rank + 1) * k) for rank in ranks)
    tensor = epilogue_applied("a@b") if ends else "a@b"
    return _plan(
        problem,
        buffers,
        list(steps()),
        tuple(
            given
            for rank in ranks
            for given in (
                InitialContents(Region("x", rank, (0, m), (0, k)), "a", 0, rank * k),
                InitialContents(Region("w", rank, (0, k), (0, n)), "b", rank * k, 0),
            )
        ),
        tuple(
            Goal(Region("y", rank, (0, hi - lo), (0, n)), tensor, lo, 0, terms) for rank, (lo, hi) in enumerate(shards)
        ),
    )


def gathered(problem: Problem, chunks: int) -> Plan:
    """The library gathers, then multiplies by one chunk of the weight's columns after the other."""
    size, m, n, k = problem.world_size, problem.m, problem.n, problem.k
    ranks, rows, depth = range(size), (0, m), (0, k)
    shards = [shard_rows(m, size, rank) for rank in ranks]

    def steps() -> Iterator[Operation]:
        for rank, (lo, hi) in enumerate(shards):
            yield Collective(
                name=f"gather.{rank}",
                rank=rank,
                queue="main",
                function="all_gather",
                label="gather",
                ranks=tuple(ranks),
                sources=(Region("x", rank, (0, hi - lo), depth),),
                destinations=tuple(Region("gathered", rank, shard, depth) for shard in shards),
            )
            for at, cols in enumerate(cut(n, chunks)):
                a, b, out = (
                    Region("gathered", rank, rows, depth),
                    Region("w", rank, depth, cols),
                    Region("y", rank, rows, cols),
                )
                yield Compute(name=f"multiply.{rank}.{at}", rank=rank, queue="main", a=(a,), b=b, out=(out,))

    buffers = (
        Buffer("x", shards[0][1], k, "input"),
        Buffer("w", k, n, "input"),
        Buffer("y", m, n, "output", problem.out_dtype),
        Buffer("gathered", m, k, "local"),
    )
    given = [InitialContents(Region("w", rank, depth, (0, n)), "b", 0, rank * n) for rank in ranks]
    given += [
        InitialContents(Region("x", rank, (0, hi - lo), depth), "a", lo, 0)
        for rank, (lo, hi) in enumerate(shards)
        if lo < hi
    ]
    goal = tuple(Goal(Region("y", rank, rows, (0, n)), "a@b", 0, rank * n, (depth,)) for rank in ranks)
    return _plan(problem, buffers, list(steps()), tuple(given), goal)


def _plan(
    problem: Problem,
    buffers: tuple[Buffer, ...],
    steps: list[Operation],
    given: tuple[InitialContents, ...],
    goal: tuple[Goal, ...],
) -> Plan:
    queues = tuple(Queue(name, "complete") for name in dict.fromkeys(step.queue for step in steps))
    made = with_signals(
        Communication(
            world_size=problem.world_size, buffers=buffers, queues=queues, given=given, goal=goal, steps=tuple(steps)
        )
    )
    schedule = Schedule(
        name="column_chunks",
        world_size=problem.world_size,
        buffers=buffers,
        pads=made.pads,
        queues=queues,
        credits=credits(problem.world_size, buffers, made.pads),
        given=given,
        goal=goal,
        operations=tuple(one for one in made.steps if not isinstance(one, MatmulChunk)),
    )
    engines = tuple(EngineAssignment(one.name, COPY_ENGINE if "copies" in one.name else LIBRARY) for one in queues)
    return Plan(
        name="column_chunks",
        problem=problem,
        schedule=schedule,
        realization=Realization(dtype=problem.dtype, engines=engines),
    )
