"""Tiles that store what they compute where it is needed: at a peer, whom they tell, instead of a Put that follows them.

A template writes a chunk here and puts it to its peers. Where nobody else waits for the chunk the tiles may store it
there themselves.
SOURCE: Flux (arXiv 2406.06858) 4.1 (stores to the peer in the epilogue); AutoOverlap 5 (co-located SMs).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import Operation, Put, Region
from overweave.ir.verify.rules.races import overlap
from overweave.schedules.communication import TILES, Chunk, Communication


class _Read(NamedTuple):
    """A step that is no tiles', and a part of what it reads."""

    step: Operation
    part: Region


def stored_at_peers(made: Communication) -> Communication:
    """The same, without the Puts that only follow tiles: of those in the tiles' queue, or, if there are none, of all.

    Raises ScheduleError where no Put does, or one in that queue does not.
    """
    if made.world_size == 1:
        return made
    named = {step.name for step in made.steps if isinstance(step, Put) and step.queue == TILES}
    behind_tiles = {queue.name for queue in made.queues if TILES in queue.after}
    reads: dict[tuple[str, int], list[_Read]] = {}
    for read in (_Read(step, part) for step in made.steps if not isinstance(step, Chunk) for part in step.reads):
        reads.setdefault((read.part.buffer, read.part.rank), []).append(read)
    gone: set[str] = set()
    steps: list[Operation | Chunk] = []
    for step in made.steps:
        if isinstance(step, Chunk):
            place = step.region.buffer, step.region.rank
            readers = [one for one in reads.get(place, ()) if overlap(one.part, step.region)]
            puts = _following(step, readers, named)
            rest = [one for one in readers if one.step not in puts]
            if puts and all(one.step.queue in behind_tiles for one in rest):
                gone.update(put.name for put in puts)
                to = [destination for put in puts for destination in put.destinations]
                step = replace(step, places=(*to, step.region) if rest else tuple(to))
        steps.append(step)
    if left_over := sorted(named - gone):
        found = "others read what it carries too, or it is not just what some tiles announce as one"
        raise ScheduleError(f"let tiles carry {left_over[0]}", found, "Use mover=copy_engine, or another chunk")
    if not gone:
        found = "what goes to peers is not what tiles store, but sums of it, or nothing"
        raise ScheduleError("store results at peers", found, "Use mover=copy_engine")
    return replace(made, steps=tuple(step for step in steps if step.name not in gone))


def _following(chunk: Chunk, readers: list[_Read], named: set[str]) -> list[Put]:
    """The Puts of just this chunk; none if one of its Puts is of more, or is not named while others are."""
    puts = [one.step for one in readers if isinstance(one.step, Put)]
    is_alone = all(put.sources == (chunk.region,) and (not named or put.name in named) for put in puts)
    return puts if is_alone else []
