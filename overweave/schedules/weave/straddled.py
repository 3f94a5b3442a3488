"""Tiles that write rows of two chunks, where shards are no whole blocks: they announce the chunk that is sent first.

Whoever waits for a chunk waits for the signals of all its tiles then. Sums stand behind the tiles, so that a row of
their table tells what arrives, and one own signal at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from overweave.ir.schedule import Notify, Operation, Queue, Wait
from overweave.schedules.communication import SUMS, TILES, Chunk

Touched = tuple[int, ...]  # the chunks that a tile writes, by their place in the order in which they are sent


class Place(NamedTuple):
    """Where a signal is counted."""

    rank: int
    pad: str
    signal: int


class Told(NamedTuple):
    """Where a rank's tiles announce themselves."""

    by: int
    at: tuple[Place, ...]


Heard = Mapping[Place, Told]  # in place of a chunk's signal, those of all its tiles


def announced_otherwise(rank: int, chunks: list[Chunk], touched: Iterable[Touched]) -> dict[Place, Told]:
    """What to wait for in place of the signals of chunks of which some tiles announce others.

    touched: of each kind of tiles of the rank.
    """
    tellers: dict[int, dict[int, None]] = {}
    for together in ([at for at in each if chunks[at].notifies] for each in touched):
        for at in together:
            tellers.setdefault(at, {})[together[0]] = None
    found: dict[Place, Told] = {}
    for at, by in tellers.items():
        if list(by) != [at]:
            for notify in chunks[at].notifies:
                told = [_place(one) for other in by for one in chunks[other].notifies if one.rank == notify.rank]
                found[_place(notify)] = Told(rank, tuple(told))
    return found


def is_announced(chunks: list[Chunk]) -> bool:
    """Whether tiles of these chunks that announce the first tell all ranks that wait for one of the others."""
    told = {notify.rank for chunk in chunks[:1] for notify in chunk.notifies}
    return all(notify.rank in told for chunk in chunks[1:] for notify in chunk.notifies)


def with_waits(operations: Iterable[Operation], heard: Heard) -> list[Operation]:
    """The same operations, which wait for the signals of all tiles that write what they read."""
    return [replace(one, waits=tuple(dict.fromkeys(_waits(one, heard)))) for one in operations]


def _waits(operation: Operation, heard: Heard) -> Iterator[Wait]:
    """Sums, which stand behind the tiles of their rank, leave out what others of these announce."""
    for wait in operation.waits:
        own = {Place(operation.rank, wait.pad, signal) for signal in range(*wait.signals)}
        if not own & heard.keys():
            yield wait
            continue
        for place in sorted(own):
            told = heard.get(place, Told(operation.rank, (place,)))
            is_behind = operation.queue == SUMS and told.by == operation.rank
            for _, pad, signal in told.at:
                if not is_behind or signal == place.signal:
                    yield Wait(pad, (signal, signal + 1), wait.count)


def behind_tiles(queues: Iterable[Queue]) -> tuple[Queue, ...]:
    """The same queues, sums behind the tiles."""
    return tuple(
        replace(queue, after=tuple(dict.fromkeys((*queue.after, TILES)))) if queue.name == SUMS else queue
        for queue in queues
    )


def _place(notify: Notify) -> Place:
    return Place(notify.rank, notify.pad, notify.signal)
