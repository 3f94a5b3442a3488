"""Puts of finished tiles that a kernel carries: on SMs of its own, beside the tiles that come after them.

The kernel has one source, what tiles write; sums that travel on stay with the copy engine. It is launched behind the
tiles' kernel once the first of them are stored, and its Puts stand in front of whatever waits for peers. Sums, which
do, are launched behind it: beside it their blocks could hold the SMs that it needs, on every rank.
SOURCE: AutoOverlap 5 (communication on dedicated SMs, for producers as well as for consumers).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import Operation, Put, Queue
from overweave.schedules.communication import ISSUE, PUSHES, SUMS, TILES, Chunk, Communication

BEHIND = (TILES, PUSHES)


def carried_behind_tiles(made: Communication, tile_rows: int) -> Communication:
    """The same, what tiles write put by a kernel, `tile_rows` rows at a time. Raises ScheduleError where nothing is."""
    if made.world_size == 1:
        return made
    written = {step.region.buffer for step in made.steps if isinstance(step, Chunk)}
    puts = [step for step in made.steps if isinstance(step, Put) and {one.buffer for one in step.sources} <= written]
    if not puts:
        found = "what goes to peers is not what tiles store, but sums of it, or nothing"
        raise ScheduleError("let a kernel push what tiles store", found, "Use mover=copy_engine")
    rows = max(part.shape[0] for put in puts for part in put.sources)
    tiles = max(1, -(-rows // tile_rows))
    moved = {put.name: replace(put, queue=PUSHES, tiles=tiles) for put in puts}
    steps = [moved.get(step.name, step) for step in made.steps]
    steps.sort(key=lambda step: (step.rank, _turn(step)))
    left = {step.queue for step in steps if not isinstance(step, Chunk)}
    queues = (replace(queue, after=BEHIND) if queue.name == SUMS else queue for queue in made.queues)
    kept = tuple(queue for queue in queues if queue.name in left)
    return replace(made, queues=(*kept, Queue(PUSHES, ISSUE)), steps=tuple(steps))


def in_parts(made: Communication, rows_of: Mapping[str, int]) -> Communication:
    """The same, the Puts of some queues in as many parts each as the longest needs. rows_of: the rows of a part."""
    puts = [step for step in made.steps if isinstance(step, Put) and step.queue in rows_of]
    moved: dict[str, Put] = {}
    for queue, rows in rows_of.items():
        ours = [put for put in puts if put.queue == queue]
        longest = max((part.shape[0] for put in ours for part in put.sources), default=0)
        moved |= {put.name: replace(put, tiles=max(1, -(-longest // rows))) for put in ours}
    return replace(made, steps=tuple(moved.get(step.name, step) for step in made.steps))


def _turn(step: Operation | Chunk) -> int:
    return 0 if isinstance(step, Chunk) else 1 if step.queue == PUSHES else 2
