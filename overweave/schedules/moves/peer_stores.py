"""Tiles that store what they compute where it is needed: at a peer, whom they tell, instead of a Put that follows them.

A template writes a chunk here and puts it to its peers. Where nobody else waits for the chunk the tiles may store it
there themselves.
SOURCE: Flux (arXiv 2406.06858) 4.1 (stores to the peer in the epilogue); AutoOverlap 5 (co-located SMs).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import OUTPUT, Operation, Put, Region
from overweave.ir.verify.rules.races import overlap
from overweave.schedules.communication import TILES, Communication, MatmulChunk


class _Read(NamedTuple):
    """A step that is no tiles', and a part of what it reads."""

    step: Operation
    part: Region


def stored_at_peers(made: Communication) -> Communication:
    """The same, without the Puts in the tiles' queue: the tiles that write what these carry store it there.

    A tile stores here, too, what is the caller's or what its own rank reads. Raises ScheduleError for a Put of more, or
    less, than some tiles write, or of what others wait for.
    """
    named = {step.name for step in made.steps if isinstance(step, Put) and step.queue == TILES}
    behind_tiles = {queue.name for queue in made.queues if TILES in queue.after}
    callers = {buffer.name for buffer in made.buffers if buffer.home == OUTPUT}
    reads: dict[tuple[str, int], list[_Read]] = {}
    for read in (_Read(step, part) for step in made.steps if not isinstance(step, MatmulChunk) for part in step.reads):
        reads.setdefault((read.part.buffer, read.part.rank), []).append(read)
    gone: set[str] = set()
    steps: list[Operation | MatmulChunk] = []
    for step in made.steps:
        if isinstance(step, MatmulChunk):
            own = step.region
            readers = [one for one in reads.get((own.buffer, own.rank), ()) if overlap(one.part, own)]
            puts = [one.step for one in readers if isinstance(one.step, Put)]
            rest = [one.step for one in readers if one.step not in puts]
            is_carried = all(put.name in named and put.sources == (own,) for put in puts)
            if puts and is_carried and all(other.queue in behind_tiles for other in rest):
                gone.update(put.name for put in puts)
                here = (own,) if rest or own.buffer in callers else ()
                step = replace(step, places=(*here, *(to for put in puts for to in put.destinations)))
        steps.append(step)
    if left_over := sorted(named - gone):
        found = "others read what it carries too, or it is not just what some tiles announce as one"
        raise ScheduleError(f"let tiles carry {left_over[0]}", found, "Use mover=copy_engine, or another chunk")
    return replace(made, steps=tuple(step for step in steps if step.name not in gone)) if gone else made
