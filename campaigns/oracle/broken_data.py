"""Ways to break what a schedule moves and computes, one small change each. None where there is nothing to change."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from campaigns.oracle.changes import Changed, of_one, picked_from, put_in_place
from campaigns.oracle.random.endings import adds
from overweave.ir.schedule import (
    Collective,
    Compute,
    Copy,
    Get,
    Operation,
    Put,
    Reduce,
    ReducePut,
    Region,
    Retire,
    Schedule,
)

MOVES = (Put, Get, Copy, ReducePut)


def _moves_something(operation: Operation) -> bool:
    return isinstance(operation, MOVES) and any(not part.is_empty for part in operation.sources)


@of_one(_moves_something)
def drop_chunk(rng: Random, schedule: Schedule, move: Any) -> Changed:
    """The move is gone, or only its data: it still waits and signals."""
    silent = Copy(
        name=move.name,
        rank=move.rank,
        queue=move.queue,
        waits=move.waits,
        notifies=move.notifies,
        sources=(),
        destinations=(),
    )
    return silent if rng.random() < 0.7 else ()


@of_one(_moves_something)
def duplicate_chunk(rng: Random, schedule: Schedule, move: Any) -> Changed:
    """The chunk moves twice, and signals once or twice."""
    again = replace(move, name=f"{move.name}.again", notifies=move.notifies if rng.random() < 0.3 else ())
    return move, again


@of_one(lambda one: isinstance(one, Retire))
def misdirect_retire(rng: Random, schedule: Schedule, retire: Any) -> Changed:
    """It ends other rows, fewer, those of another rank, or nothing: it still waits and signals."""
    (region,) = retire.regions
    lo, hi = region.rows
    others = (
        _shifted(rng, schedule, region),
        replace(region, rows=(lo, max(lo, hi - 1))),
        replace(region, rank=rng.randrange(schedule.world_size)),
    )
    return replace(retire, regions=rng.choice((*((other,) for other in others), ())))


@of_one(lambda one: isinstance(one, Retire))
def duplicate_retire(rng: Random, schedule: Schedule, retire: Any) -> Changed:
    """A life ends twice, or a second time where its end is told."""
    again = replace(retire, name=f"{retire.name}.again", waits=())
    return replace(retire, notifies=() if rng.random() < 0.5 else retire.notifies), again


def _shifted(rng: Random, schedule: Schedule, region: Region) -> Region:
    """Rows moved by one or by their number; within the buffer if that is possible, past it if not."""
    height, rows = max(1, region.shape[0]), schedule.buffer(region.buffer).rows
    shifts = [by for by in (-height, -1, 1, height) if region.rows[0] + by >= 0 and region.rows[1] + by <= rows]
    by = rng.choice(shifts or [1])
    return replace(region, rows=(region.rows[0] + by, region.rows[1] + by))


@of_one(_moves_something)
def misdirect_chunk(rng: Random, schedule: Schedule, move: Any) -> Changed:
    """From or to other rows, or from or to another rank."""
    field = rng.choice(("sources", "destinations"))
    regions = list(getattr(move, field))
    index = rng.randrange(len(regions))
    if rng.random() < 0.3:
        regions[index] = replace(regions[index], rank=rng.randrange(schedule.world_size))
    else:
        regions[index] = _shifted(rng, schedule, regions[index])
    return replace(move, **{field: tuple(regions)})


@of_one(lambda one: isinstance(one, Compute) and one.stored_at != {one.rank})
def misdirect_store(rng: Random, schedule: Schedule, compute: Any) -> Changed:
    """A product or a sum is stored at another rank; or a sum at one rank less, or elsewhere there."""
    assert isinstance(compute, Compute)
    if not compute.copies or rng.random() < 0.2:
        out = (replace(compute.out[0], rank=rng.randrange(schedule.world_size)), *compute.out[1:])
        return replace(compute, out=out)
    copies = list(compute.copies)
    index = rng.randrange(len(copies))
    if rng.random() < 0.4:
        del copies[index]
    elif rng.random() < 0.5:
        copies[index] = replace(copies[index], rank=rng.randrange(schedule.world_size))
    else:
        copies[index] = _shifted(rng, schedule, copies[index])
    return replace(compute, copies=tuple(copies))


def _is_tile_wise(operation: Operation) -> bool:
    return isinstance(operation, Compute | Reduce) or (isinstance(operation, Put) and operation.tiles > 1)


@of_one(_is_tile_wise)
def drop_tile(rng: Random, schedule: Schedule, operation: Any) -> Changed:
    """A Compute or Reduce is gone, does one tile less, or leaves out its last row."""
    if isinstance(operation, Put):
        return replace(operation, tiles=operation.tiles - 1)
    kind = rng.random()
    if kind < 0.35:
        return ()
    if kind < 0.6 and operation.instances > 1:
        return replace(operation, tiles=operation.tiles - 1)
    if isinstance(operation, Compute):
        a, out = operation.a[-1], operation.out[-1]
        shorter = [replace(part, rows=(part.rows[0], max(part.rows[0], part.rows[1] - 1))) for part in (a, out)]
        return replace(operation, a=(*operation.a[:-1], shorter[0]), out=(*operation.out[:-1], shorter[1]))
    parts = [
        replace(part, rows=(part.rows[0], max(part.rows[0], part.rows[1] - 1)))
        for part in (*operation.operands, operation.out)
    ]
    return replace(operation, operands=tuple(parts[:-1]), out=parts[-1])


@of_one(_is_tile_wise)
def duplicate_tile(rng: Random, schedule: Schedule, operation: Any) -> Changed:
    if isinstance(operation, Put):
        return replace(operation, tiles=operation.tiles + 1)
    if isinstance(operation, Compute) and rng.random() < 0.4:
        return replace(operation, tiles=operation.tiles + 1)
    return operation, replace(operation, name=f"{operation.name}.again", notifies=())


@of_one(lambda operation: isinstance(operation, Compute | Reduce))
def misdirect_tile(rng: Random, schedule: Schedule, operation: Any) -> Changed:
    """It reads or writes other rows."""
    if isinstance(operation, Reduce):
        if rng.random() < 0.5:
            return replace(operation, out=_shifted(rng, schedule, operation.out))
        index = rng.randrange(len(operation.operands))
        operands = list(operation.operands)
        operands[index] = _shifted(rng, schedule, operands[index])
        return replace(operation, operands=tuple(operands))
    field = rng.choice(("a", "out"))
    return replace(operation, **{field: tuple(_shifted(rng, schedule, part) for part in getattr(operation, field))})


def _grown(operation: Any, by: int, down: bool) -> Operation:
    """Reaches over `by` more rows, at the bottom or at the top, of what it reads and of what it writes."""
    fields = ("a", "out") if isinstance(operation, Compute) else ("sources", "destinations")
    grown = {}
    for field in fields:
        first, *rest = getattr(operation, field)
        lo, hi = first.rows
        grown[field] = (replace(first, rows=(lo, hi + by) if down else (lo - by, hi)), *rest)
    result: Operation = replace(operation, **grown)
    return result


def _is_within(schedule: Schedule, operation: Operation) -> bool:
    return all(
        region.rows[0] >= 0 and region.rows[1] <= schedule.buffer(region.buffer).rows
        for region in (*operation.reads, *operation.writes)
    )


def overlap(rng: Random, schedule: Schedule) -> Schedule | None:
    """A chunk or a tile reaches one row into its neighbour."""
    grown = [
        (at, bigger)
        for at, operation in enumerate(schedule.operations)
        if _moves_something(operation) or isinstance(operation, Compute)
        for bigger in (_grown(operation, 1, False), _grown(operation, 1, True))
        if _is_within(schedule, bigger)
    ]
    return put_in_place(schedule, *rng.choice(grown)) if grown else None


@of_one(lambda operation: _moves_something(operation) or isinstance(operation, Compute))
def out_of_bounds(rng: Random, schedule: Schedule, operation: Any) -> Changed:
    """A chunk or a tile reaches past its buffer."""
    rows = max(buffer.rows for buffer in schedule.buffers)
    return _grown(operation, rows, rng.random() < 0.5)


def contribution_order(rng: Random, schedule: Schedule) -> Schedule | None:
    """Operands, addends or the terms of a goal are added in another order."""
    summed = picked_from(rng, schedule, lambda operation: isinstance(operation, Compute) and bool(operation.addends))
    if summed is not None and rng.random() < 0.6:
        at, compute = summed
        places = [place for place in range(len(compute.addends) + 2) if place != compute.place]
        changed = replace(compute, place=rng.choice(places))
        if rng.random() < 0.3:
            changed = replace(compute, addends=compute.addends[::-1])
        return put_in_place(schedule, at, changed)
    picked = picked_from(rng, schedule, lambda operation: isinstance(operation, Reduce) and len(operation.operands) > 1)
    if picked is not None and rng.random() < 0.7:
        at, operation = picked
        operands = list(operation.operands)
        first, second = rng.sample(range(len(operands)), 2)
        operands[first], operands[second] = operands[second], operands[first]
        return put_in_place(schedule, at, replace(operation, operands=tuple(operands)))
    goals = [at for at, goal in enumerate(schedule.goal) if len(goal.terms) > 1]
    if not goals:
        return None
    at = rng.choice(goals)
    goal = schedule.goal[at]
    turned = replace(goal, terms=goal.terms[1:] + goal.terms[:1])
    return replace(schedule, goal=(*schedule.goal[:at], turned, *schedule.goal[at + 1 :]))


def wrong_slot(rng: Random, schedule: Schedule) -> Schedule | None:
    """Something is read from the place of another chunk, of the same shape."""
    regions = [region for operation in schedule.operations for region in operation.reads if not region.is_empty]
    picked = picked_from(
        rng, schedule, lambda operation: _moves_something(operation) or isinstance(operation, Compute | Reduce)
    )
    if picked is None:
        return None
    at, operation = picked
    field = "a" if isinstance(operation, Compute) else "operands" if isinstance(operation, Reduce) else "sources"
    if isinstance(operation, Compute) and operation.addends and rng.random() < 0.6:
        field = "addends"
    parts = list(getattr(operation, field))
    index = rng.randrange(len(parts))
    others = [
        region
        for region in regions
        if region != parts[index] and (region.shape, region.rank) == (parts[index].shape, parts[index].rank)
    ]
    if not others:
        return None
    parts[index] = rng.choice(others)
    return put_in_place(schedule, at, replace(operation, **{field: tuple(parts)}))


@of_one(adds)
def finished_otherwise(rng: Random, schedule: Schedule, operation: Any) -> Changed:
    """A sum is finished that was not, or is not that was: a part, the whole one again, or what is only moved."""
    return replace(operation, finishes=not operation.finishes)


def _with_places(rng: Random, schedule: Schedule, change: Callable[[list[int]], list[int]]) -> Schedule | None:
    """One of the buffers with permuted blocks has other places."""
    found = [one for one in schedule.buffers if one.blocks]
    if not found:
        return None
    chosen = rng.choice(found)
    assert chosen.blocks is not None
    blocks = replace(chosen.blocks, places=tuple(change(list(chosen.blocks.places))))
    buffers = tuple(replace(one, blocks=blocks) if one is chosen else one for one in schedule.buffers)
    return replace(schedule, buffers=buffers)


def swapped_blocks(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two blocks of a buffer change places: within a group they may, if they do so wherever it is stored."""

    def swapped(places: list[int]) -> list[int]:
        one, other = rng.sample(range(len(places)), 2)
        places[one], places[other] = places[other], places[one]
        return places

    return _with_places(rng, schedule, swapped)


def no_bijection(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two blocks have one place, one has a place past the end, or one has none."""

    def changed(places: list[int]) -> list[int]:
        one, other = rng.sample(range(len(places)), 2)
        kind = rng.randrange(3)
        if kind == 2:
            return places[:-1]
        places[one] = places[other] if kind else len(places)
        return places

    return _with_places(rng, schedule, changed)


@of_one(lambda one: isinstance(one, Collective) and len(one.sources) > 1)
def hole_in_range(rng: Random, schedule: Schedule, part: Any) -> Changed:
    """A rank's part of a collective leaves out a block, or a row of one, at one end or, if they are alike, at both."""
    at, shared = rng.randrange(len(part.sources)), part.sources == part.destinations
    rest = rng.random()

    def without(regions: tuple[Region, ...]) -> tuple[Region, ...]:
        chosen = regions[at % len(regions)]
        lo, hi = chosen.rows
        left = (replace(chosen, rows=(lo + 1, hi)),) if rest < 0.5 and hi > lo + 1 else ()
        return (*regions[: at % len(regions)], *left, *regions[at % len(regions) + 1 :])

    if shared and rng.random() < 0.7:
        return replace(part, sources=without(part.sources), destinations=without(part.destinations))
    field = rng.choice(("sources", "destinations"))
    return replace(part, **{field: without(getattr(part, field))})
