"""Weaves a matmul into a communication: every `MatmulChunk` becomes a Compute, counted in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    CREDITS,
    Buffer,
    Collective,
    Compute,
    Goal,
    InitialContents,
    Operation,
    Queue,
    Reduce,
    Region,
    Schedule,
)
from overweave.ir.tensors import epilogue_applied
from overweave.schedules.assemble_schedule import counted, credits
from overweave.schedules.communication import TOTAL, Communication, MatmulChunk, Y, region
from overweave.schedules.signals import with_signals, without_repeated_waits
from overweave.schedules.tiles.shape import count_tiles, tiles_to_cut


class MatmulFootprint(Struct, frozen=True, kw_only=True):
    """What a matmul `a @ b -> out` on every rank reads, writes and announces.

    a, out: None on the side that the communication's chunks hold; else the buffer with the same rows in global place.
    more: further weights and their outputs. Chunks of `a` are multiplied by them, too, and announce nothing then.
    config: None for a library matmul, which is one instance whatever its size.
    sms: by which the last wave is judged, whose tiles may be cut.
    """

    queue: Queue
    a: Buffer | None
    b: Buffer
    out: Buffer | None
    more: tuple[tuple[Buffer, Buffer], ...] = ()
    config: MatmulConfig | None
    given: tuple[InitialContents, ...]
    goal: tuple[Goal, ...] = ()
    sms: int = 132

    @property
    def widths(self) -> tuple[int, ...]:
        return self.b.cols, *(b.cols for b, _ in self.more)

    def tiles(self, chunks: list[MatmulChunk]) -> list[int]:
        """How many tiles multiply each chunk of one rank by each weight, those of the last wave cut."""
        if self.config is None:
            return [1] * len(chunks) * len(self.widths)
        if any(chunk.weight_cols for chunk in chunks):  # whole tiles, each of which is stored as a block
            shapes = [chunk.region.shape for chunk in chunks]
            return [-(-rows // self.config.block_m) * -(-cols // self.config.block_n) for rows, cols in shapes]
        heights = [chunk.rows[1] - chunk.rows[0] for chunk in chunks]
        counts = [count_tiles((height,), width, self.config) for height in heights for width in self.widths]
        left = tiles_to_cut(count_tiles(heights, self.widths, self.config), self.sms, self.config)
        tiles = []
        for count in reversed(counts):
            cut = min(left, count.whole)
            left -= cut
            tiles.append(count.tiles + cut * (self.config.split_n - 1))
        return tiles[::-1]

    def computes(self, chunk: MatmulChunk, tiles: Iterator[int]) -> Iterator[Compute]:
        """The chunk by each weight in turn. A library queue completes them in order: the last announces them all."""
        weights = [(self.b, self.out), *self.more]
        for index, (b, out) in enumerate(weights):
            is_told = self.config is not None or index == len(weights) - 1
            named = replace(
                chunk,
                name=f"{chunk.name}.w{index}" if index else chunk.name,
                into=chunk.into[index : index + 1],
                notifies=chunk.notifies if is_told else (),
            )
            yield replace(self, b=b, out=out, more=())._compute(named, next(tiles))

    def _compute(self, chunk: MatmulChunk, tiles: int) -> Compute:
        """Return the Compute of a chunk by weight `b`, in so many tiles.

        The chunk's region is what it reads where `a` is not set, and where its product is stored where `out` is not
        set, unless `places` say otherwise. Its `cols` are a range of the reduced axis, so rows of `b`.
        """
        rank, rows = chunk.rank, chunk.rows
        stored = region(self.out, rank, rows) if self.out else (*chunk.places, chunk.region)[0]
        return Compute(
            name=chunk.name,
            rank=rank,
            queue=self.queue.name,
            waits=chunk.waits,
            notifies=chunk.notifies,
            a=(region(self.a, rank, rows) if self.a else chunk.region,),
            b=Region(self.b.name, rank, chunk.cols or (0, self.b.rows), chunk.weight_cols or (0, self.b.cols)),
            out=(*chunk.into, stored)[:1],
            accumulate=chunk.adds,
            copies=chunk.places[1:],
            addends=chunk.addends,
            place=chunk.place,
            late_waits=chunk.late_waits,
            scales=chunk.scales,
            tiles=tiles,
        )


def compose(name: str, communication: Communication, kernel: MatmulFootprint, only: Sequence[int] = ()) -> Schedule:
    """The schedule in which `kernel` computes the communication's chunks in the order they have there.

    The Computes of an issue queue are one launch, so they move up to where the rank's first one stands; but those that
    wait late for what peers send stay behind what their own rank sends, so that ranks never wait in a circle. Waits on
    a signal that tiles announce are raised from one to the number of those tiles. Every pair of ranks exchanges credits
    if peers touch the workspace at all, unless echoes do the same. only: as of a Split.
    """
    communication = with_signals(communication)
    steps: Iterable[Operation | MatmulChunk] = communication.steps
    if kernel.queue.order == "issue":
        steps = _gathered_into_one_launch(communication.steps)
    operations = tuple(_woven(tuple(steps), kernel))
    queues = (kernel.queue, *(queue for queue in communication.queues if queue.name != kernel.queue.name))
    sides = (kernel.a, *(buffer for pair in ((kernel.b, kernel.out), *kernel.more) for buffer in pair))
    matmul_buffers = tuple(buffer for buffer in sides if buffer)
    return Schedule(
        name=name,
        world_size=communication.world_size,
        buffers=(*_named(communication.buffers, operations), *matmul_buffers),
        pads=communication.pads,
        queues=_with_known_predecessors(queues),
        credits=credits(communication.world_size, communication.buffers, communication.pads, only)
        if communication.reuse == CREDITS
        else (),
        reuse=communication.reuse,
        given=communication.given + kernel.given,
        goal=communication.goal + kernel.goal,
        operations=counted(tuple(without_repeated_waits(operations, queues))),
    )


def _named(buffers: Iterable[Buffer], operations: Iterable[Operation]) -> Iterator[Buffer]:
    """Without those of the workspace that no operation touches: where tiles store at peers they need no place here."""
    touched = {part.buffer for operation in operations for part in (*operation.reads, *operation.writes)}
    return (buffer for buffer in buffers if buffer.name in touched or buffer.home in ("input", "output"))


def _woven(steps: tuple[Operation | MatmulChunk, ...], kernel: MatmulFootprint) -> Iterator[Operation]:
    chunks: dict[int, list[MatmulChunk]] = {}
    for step in steps:
        if isinstance(step, MatmulChunk):
            chunks.setdefault(step.rank, []).append(step)
    tiles = {rank: iter(kernel.tiles(of_rank)) for rank, of_rank in chunks.items()}
    for step in steps:
        if isinstance(step, MatmulChunk):
            yield from kernel.computes(step, tiles[step.rank])
        else:
            yield step


def _gathered_into_one_launch(steps: tuple[Operation | MatmulChunk, ...]) -> list[Operation | MatmulChunk]:
    chunks: dict[int, list[Operation | MatmulChunk]] = {}
    for step in steps:
        if isinstance(step, MatmulChunk) and not step.late_waits:
            chunks.setdefault(step.rank, []).append(step)
    ordered: list[Operation | MatmulChunk] = []
    for step in steps:
        moves_up = isinstance(step, MatmulChunk) and not step.late_waits
        ordered += chunks.pop(step.rank, []) if moves_up else [step]
    return ordered


def _with_known_predecessors(queues: tuple[Queue, ...]) -> tuple[Queue, ...]:
    """Templates name every queue that might run before theirs on the caller's stream; not each is in use."""
    names = {queue.name for queue in queues}
    return tuple(
        replace(queue, after=tuple(name for name in queue.after if name in names and name != queue.name))
        for queue in queues
    )


def with_finished_sums(schedule: Schedule, problem: Problem) -> Schedule:
    """The same, each whole sum finished, if the problem's epilogue does anything to sums."""
    if not problem.sum_epilogue.steps:
        return schedule
    permuted = {buffer.name for buffer in schedule.buffers if buffer.blocks}
    operations = (replace(each, finishes=True) if _sums_last(each, permuted) else each for each in schedule.operations)
    goals = (replace(goal, tensor=epilogue_applied(goal.tensor)) for goal in schedule.goal)
    return replace(schedule, operations=tuple(operations), goal=tuple(goals))


def _sums_last(operation: Operation, permuted: set[str]) -> bool:
    """Sums lie in `y` or, to be shared, in `total` once they are whole, and never before. Whole sums in blocks that are
    permuted are finished on their way to `y`, where they lie row by row.
    """
    adds = (
        (isinstance(operation, Reduce) and (len(operation.operands) > 1 or operation.operands[0].buffer in permuted))
        or (isinstance(operation, Compute) and bool(operation.addends))
        or (isinstance(operation, Collective) and operation.function in ("reduce_scatter", "all_reduce"))
    )
    return adds and all(part.buffer in (Y, TOTAL) for part in operation.writes)
