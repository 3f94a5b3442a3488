"""Predicted overlap losses on a described machine: of cutting a matmul or a transfer, and of running them together.

Decomposition: the time of all the parts, one after the other, over that of the whole. Contention: the time of one thing
beside the other over its time alone, of W matmuls of W-th rows beside an all-gather in W pieces of a shard.
SOURCE: FiCCO, IV-C and IV-D, Figures 7 to 10.
"""

from __future__ import annotations

from math import sqrt
from statistics import geometric_mean

from msgspec import Struct
from msgspec.structs import replace

from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import COPY_ENGINE, LIBRARY, EngineAssignment, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Compute, Operation, Put, Queue, Region, Schedule
from overweave.ir.shards import piece_rows
from overweave.ir.timeline.timeline import COLLECTIVE, COMPUTE, COPY, SpanKind, Timeline
from overweave.schedules.catalog.catalog import LIBRARY_ALIGNMENT
from overweave.sim.cost import library_matmul_us
from overweave.sim.simulate import simulate
from overweave.tuner.model.heuristic import memory_traffic, op_to_byte

ROWS, COLUMNS = "rows", "columns"
MATMULS = ("rows / W", "columns / W", "rows / W W", "columns / W W")  # Figure 7
TRANSFER = "transfer / W"  # Figure 8
BESIDE = (
    *("matmul beside copies", "matmul beside the library"),
    *("copies beside matmul", "the library beside matmul"),
)  # Figure 9
OF_COPIES = (TRANSFER, *BESIDE[::2])  # between GPUs, which need peer access


class Losses(Struct, frozen=True):
    """The losses of one matmul: name -> factor on time. scaled: the divisor of m or k that made it fit into memory."""

    case: str
    m: int
    n: int
    k: int
    op_to_byte: float
    traffic_bytes: float
    factors: dict[str, float]
    scaled: int = 1


def predicted_losses(case: str, problem: Problem, machine: Machine, names: tuple[str, ...]) -> Losses:
    """Return the predicted losses of these names; without peer access there are none of copies."""
    names = tuple(name for name in names if machine.peer_access or name not in OF_COPIES)
    losses: dict[str, float] = {}
    if set(MATMULS) & set(names):
        losses |= _matmul_losses(problem, machine)
    if TRANSFER in names:
        losses[TRANSFER] = _transfer_loss(problem, machine)
    if set(BESIDE) & set(names):
        losses |= _contention_losses(problem, machine)
    return losses_of(case, problem, {name: losses[name] for name in names})


def losses_of(case: str, problem: Problem, factors: dict[str, float], scaled: int = 1) -> Losses:
    """Return the losses of a problem with its static sizes."""
    return Losses(case, problem.m, problem.n, problem.k, op_to_byte(problem), memory_traffic(problem), factors, scaled)


def cut_shape(problem: Problem, by: str, parts: int) -> tuple[int, int, int]:
    """Return (m, n, k) of one of `parts` equal parts."""
    if by == ROWS:
        return -(-problem.m // parts), problem.n, problem.k
    return problem.m, problem.n, -(-problem.k // parts)


def correlation(cases: list[Losses], name: str, of: str) -> float:
    """Return the rank correlation (Spearman) of a factor with `op_to_byte` or `traffic_bytes`; 0 if nothing varies."""
    pairs = [(getattr(each, of), each.factors[name]) for each in cases if name in each.factors]
    one, other = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    middle = (len(pairs) - 1) / 2
    spread = [sum((value - middle) ** 2 for value in side) for side in (one, other)]
    if not all(spread):
        return 0.0
    shared = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
    return shared / sqrt(spread[0] * spread[1])


def geomean(cases: list[Losses], name: str) -> float:
    """Return the geometric mean of a factor over the cases that have it."""
    return geometric_mean(each.factors[name] for each in cases if name in each.factors)


def _ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def _matmul_losses(problem: Problem, machine: Machine) -> dict[str, float]:
    """Return the losses of matmuls cut into kernels in sequence; parts of columns are added to sums in fp32."""
    call_us = machine.latency.call.us

    def alone_us(shape: tuple[int, int, int], is_added: bool = False) -> float:
        return library_matmul_us(machine, shape, problem.dtype, is_added) - call_us

    whole_us, size = alone_us((problem.m, problem.n, problem.k)), problem.world_size
    return {
        name: parts * alone_us(cut_shape(problem, by, parts), by == COLUMNS) / whole_us
        for name, by, parts in zip(MATMULS, (ROWS, COLUMNS) * 2, (size, size, size**2, size**2), strict=True)
    }


def _transfer_loss(problem: Problem, machine: Machine) -> float:
    """Return the time of a shard in W pieces, each with its flag, over that of a shard as one copy."""
    size, shard = problem.world_size, problem.m * problem.k * ITEMSIZE_BYTES[problem.dtype] / problem.world_size

    def copy_us(size_bytes: float) -> float:
        alone_us = max(machine.links.push.time_us(size_bytes), machine.routes.time_us(0, 1, size_bytes))
        return alone_us + machine.latency.flag.us

    return size * copy_us(shard / size) / copy_us(shard)


def _contention_losses(problem: Problem, machine: Machine) -> dict[str, float]:
    """Return the losses of simulated runs of independent matmuls and transfers, together over each alone."""
    losses: dict[str, float] = {}
    movers: tuple[tuple[str, SpanKind], ...] = (("copies", COPY), ("library", COLLECTIVE))
    for (mover, kind), names in zip(movers, (BESIDE[::2], BESIDE[1::2]), strict=True):
        if mover == "copies" and not machine.peer_access:
            continue
        both, matmuls, moves = (
            simulate(_independent(problem, mover, *which), machine)
            for which in ((True, True), (True, False), (False, True))
        )
        losses[names[0]] = _length_us(both, COMPUTE) / _length_us(matmuls, COMPUTE)
        losses[names[1]] = _length_us(both, kind) / _length_us(moves, kind)
    return losses


def _length_us(timeline: Timeline, kind: SpanKind) -> float:
    """Return the time from the first to the last span of a kind on rank 0, waits for SMs included."""
    spans = [span for span in timeline.of_rank(0) if span.kind == kind]
    start_us = min(span.begin_us for span in spans) if kind != COLLECTIVE else 0.0
    return max(span.end_us for span in spans) - start_us


def _independent(problem: Problem, mover: str, has_matmuls: bool, has_moves: bool) -> Plan:
    """Return a plan of W matmuls of a W-th of the rows on each rank, and each shard in W pieces to every peer."""
    ranks, m, n, k = range(problem.world_size), problem.m, problem.n, problem.k
    shard = -(-m // problem.world_size)
    pieces = [rows for rows in piece_rows((0, shard), problem.world_size, LIBRARY_ALIGNMENT) if rows[0] < rows[1]]
    operations: list[Operation] = []
    for rank in ranks:
        if has_matmuls:
            operations += _matmuls(rank, (shard, n, k), problem.world_size)
        if has_moves and mover == "copies":
            operations += _pushes(rank, (shard, k), pieces, problem.world_size)
        elif has_moves:
            operations += _gathers(rank, (shard, k), pieces, problem.world_size)
    names = dict.fromkeys(operation.queue for operation in operations)
    schedule = Schedule(
        name=f"matmuls beside {mover}",
        world_size=problem.world_size,
        buffers=(
            Buffer("a", shard, k, "local"), Buffer("w", k, n, "input"), Buffer("y", shard, n, "output"),
            Buffer("x", shard, k, "input"), Buffer("landed", shard * problem.world_size, k, "symmetric"),
        ),
        pads=(),
        queues=tuple(Queue(name, "complete") for name in names),
        given=(),
        goal=(),
        operations=tuple(operations),
    )  # fmt: skip
    engines = tuple(EngineAssignment(name, COPY_ENGINE if name.startswith("copies") else LIBRARY) for name in names)
    return Plan(
        name=schedule.name,
        problem=replace(problem, operator="all_gather_matmul"),
        schedule=schedule,
        realization=Realization(dtype=problem.dtype, engines=engines),
    )


def _matmuls(rank: int, shape: tuple[int, int, int], count: int) -> list[Operation]:
    rows, n, k = shape
    a, b = Region("a", rank, (0, rows), (0, k)), Region("w", rank, (0, k), (0, n))
    out = Region("y", rank, (0, rows), (0, n))
    return [
        Compute(name=f"multiply.{rank}.{step}", rank=rank, queue="main", a=(a,), b=b, out=(out,))
        for step in range(count)
    ]


def _pushes(rank: int, shape: tuple[int, int], pieces: list[tuple[int, int]], size: int) -> list[Operation]:
    """Return the pushes of a rank's pieces to every peer, a queue for each peer."""
    shard, k = shape
    return [
        Put(
            name=f"push.{rank}-{(rank + away) % size}.{step}",
            rank=rank,
            queue=f"copies.{away}",
            sources=(Region("x", rank, rows, (0, k)),),
            destinations=(
                Region("landed", (rank + away) % size, (rank * shard + rows[0], rank * shard + rows[1]), (0, k)),
            ),
        )
        for away in range(1, size)
        for step, rows in enumerate(pieces)
    ]


def _gathers(rank: int, shape: tuple[int, int], pieces: list[tuple[int, int]], size: int) -> list[Operation]:
    shard, k = shape
    return [
        Collective(
            name=f"gather.{rank}.{step}",
            rank=rank,
            queue="gathers",
            function="all_gather",
            label=f"gather.{step}",
            ranks=tuple(range(size)),
            sources=(Region("x", rank, rows, (0, k)),),
            destinations=tuple(
                Region("landed", rank, (owner * shard + rows[0], owner * shard + rows[1]), (0, k))
                for owner in range(size)
            ),
        )
        for step, rows in enumerate(pieces)
    ]
