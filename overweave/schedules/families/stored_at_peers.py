"""Tiles that store what they compute where it is needed: at a peer, whom they tell, instead of a Put that follows them.

A template writes a chunk here, announces it, and puts it to its peers. Where nobody else reads the chunk the tiles may
store it there themselves: what the Put would have announced is then announced tile by tile.
SOURCE: Flux (arXiv 2406.06858) 4.1 (stores to the peer in the epilogue); AutoOverlap 5 (co-located SMs).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import Notify, Operation, Put, Region, SignalPad
from overweave.ir.verify.rules.races import overlap
from overweave.schedules.communication import TILES, Chunk, Communication

Signal = tuple[int, str, int]  # rank, pad, number


def stored_at_peers(made: Communication) -> Communication:
    """The same, without the Puts that only follow tiles: of those in the tiles' queue, or, if there are none, of all.

    Raises ScheduleError where no Put does, or one in that queue does not.
    """
    if made.world_size == 1:
        return made
    made = _told_alike(made)
    named = {step.name for step in made.steps if isinstance(step, Put) and step.queue == TILES}
    waiters = _waiters(made.steps)
    following = {
        chunk.name: puts
        for chunk in made.steps
        if isinstance(chunk, Chunk) and (puts := _following(chunk, waiters, named)) is not None
    }
    gone = {put.name for puts in following.values() for put in puts}
    if left_over := sorted(named - gone):
        found = "others read what it carries too, or it is not just what some tiles announce as one"
        raise ScheduleError(f"let tiles carry {left_over[0]}", found, "Use mover=copy_engine, or another chunk")
    if not gone:
        found = "what goes to peers is not what tiles store, but sums of it, or nothing"
        raise ScheduleError("store results at peers", found, "Use mover=copy_engine")
    left = [step for step in made.steps if step.name not in gone]
    read = [part for step in left if not isinstance(step, Chunk) for part in step.reads]
    steps = tuple(_away(step, following[step.name], read) if step.name in following else step for step in left)
    told = {notify.pad for step in steps for notify in step.notifies}
    return replace(made, pads=tuple(pad for pad in made.pads if pad.name in told), steps=steps)


def _told_alike(made: Communication) -> Communication:
    """The same, with one signal where a tile would tell its peers different ones, and they wait for all of these.

    Before: each peer's arrival has a signal of its own, `wait arrived[0:3]`. After: all add to the first.
    """
    apart: dict[tuple[str, object], set[int]] = {}
    for put in (step for step in made.steps if isinstance(step, Put)):
        for notify in put.notifies:
            apart.setdefault((notify.pad, put.sources), set()).add(notify.signal)
    differing = {pad for (pad, _), signals in apart.items() if len(signals) > 1}
    waits = [wait for step in made.steps for wait in (step.waits if isinstance(step, Chunk) else step.all_waits)]
    sizes = {pad.name: pad.size for pad in made.pads}
    asked = {name: {wait.signals for wait in waits if wait.pad == name} for name in sizes}
    together = {name for name in differing if asked[name] == {(0, sizes[name])}}
    if not together:
        return made

    def one(step: Operation | Chunk) -> Operation | Chunk:
        told = tuple(replace(each, signal=0) if each.pad in together else each for each in step.notifies)
        heard = tuple(replace(each, signals=(0, 1)) if each.pad in together else each for each in step.waits)
        return replace(step, notifies=told, waits=heard)

    pads = tuple(SignalPad(pad.name, 1 if pad.name in together else pad.size) for pad in made.pads)
    return replace(made, pads=pads, steps=tuple(map(one, made.steps)))


def _waiters(steps: Iterable[Operation | Chunk]) -> dict[Signal, list[Operation | Chunk]]:
    waiters: dict[Signal, list[Operation | Chunk]] = {}
    for step in steps:
        waits = step.waits if isinstance(step, Chunk) else step.all_waits
        for wait in waits:
            for signal in range(*wait.signals):
                waiters.setdefault((step.rank, wait.pad, signal), []).append(step)
    return waiters


def _following(chunk: Chunk, waiters: dict[Signal, list[Operation | Chunk]], named: set[str]) -> list[Put] | None:
    """The Puts of just this chunk, if nobody else waits for it, and, if any are named, if all of them are."""
    puts: list[Put] = []
    for notify in chunk.notifies:
        for waiter in waiters.get((notify.rank, notify.pad, notify.signal), ()):
            if not isinstance(waiter, Put) or waiter.sources != (chunk.region,) or len(waiter.waits) != 1:
                return None
            if named and waiter.name not in named:
                return None
            puts.append(waiter)
    return puts or None


def _away(step: Operation | Chunk, puts: list[Put], read: Iterable[Region]) -> Chunk:
    """The chunk at its places: at the peers, and here too where something else reads the buffer."""
    assert isinstance(step, Chunk)
    places = [destination for put in puts for destination in put.destinations]
    told: list[Notify] = [notify for put in puts for notify in put.notifies]
    here = [step.region] if any(overlap(step.region, part) for part in read) else []
    return replace(step, notifies=tuple(told), places=(*places, *here))
