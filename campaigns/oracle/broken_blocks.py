"""Ways to break schedules of blocks: of rows that a call fills in part, and permuted ones that a library moves.

What moves stays a chain of right moves of whole blocks, or of regions: only counts, or memory, tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from msgspec.structs import replace

from campaigns.oracle.changes import Mutation
from overweave.ir.schedule import Buffer, Collective, Compute, Credit, Operation, Range, Region, Schedule

SIDES = ("sources", "destinations", "operands", "a", "out")


def with_regions(operation: Operation, change: Callable[[Region], Region]) -> Operation:
    """The operation with other regions."""
    changes: dict[str, object] = {}
    for name in SIDES:
        held = getattr(operation, name, ())
        changes |= {name: change(held) if isinstance(held, Region) else tuple(map(change, held))} if held else {}
    return replace(operation, **changes)


def _with_buffer(schedule: Schedule, chosen: Buffer, **changes: object) -> Schedule:
    buffers = tuple(replace(one, **changes) if one is chosen else one for one in schedule.buffers)
    return replace(schedule, buffers=buffers)


def _inner(rng: Random, schedule: Schedule, fits: Callable[[Buffer], bool]) -> Buffer | None:
    """A buffer of the workspace that operations touch."""
    touched = {part.buffer for one in schedule.operations for part in (*one.reads, *one.writes)}
    found = [
        one for one in schedule.buffers if one.home not in ("input", "output") and one.name in touched and fits(one)
    ]
    return rng.choice(found) if found else None


def rows_lose_their_place(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two pieces of rows change places in a counted buffer, for whoever stores them there and whoever reads them."""
    chosen = _inner(rng, schedule, lambda one: one.counted is not None)
    if chosen is None:
        return None
    parts = [part for one in schedule.operations for part in (*one.reads, *one.writes) if part.buffer == chosen.name]
    one = rng.choice(parts)
    block = chosen.rows // schedule.world_size
    height = rng.choice([one.shape[0], 1, block])
    if not height or chosen.rows < 2 * height:
        return None
    first, second = rng.sample(range(chosen.rows // height), 2)

    def moved(region: Region) -> Region:
        at = region.rows[0] // height
        if (region.buffer, region.rank) != (chosen.name, one.rank) or at not in (first, second):
            return region
        by = (second - first if at == first else first - second) * height
        rows = region.rows[0] + by, region.rows[1] + by
        return replace(region, rows=rows) if region.rows[1] <= (at + 1) * height else region

    return replace(schedule, operations=tuple(with_regions(each, moved) for each in schedule.operations))


def through_uncounted_rows(rng: Random, schedule: Schedule) -> Schedule | None:
    """A counted buffer on the way is not counted, or rows that are not are: as those sent, or as those received."""
    chosen = _inner(rng, schedule, lambda one: any(each.counted for each in schedule.buffers))
    if chosen is None:
        return None
    kinds = [kind for kind in (None, "sent", "received") if kind != chosen.counted]
    return _with_buffer(schedule, chosen, counted=rng.choice(kinds))


def blocks_of_other_heights(rng: Random, schedule: Schedule) -> Schedule | None:
    """A counted buffer has lower blocks than the others, or higher ones; what lies past it, or across, goes."""
    chosen = _inner(rng, schedule, lambda one: one.counted is not None)
    size = schedule.world_size
    block = chosen.rows // size if chosen else 0
    other = max(0, block + rng.choice((-1, 1)))
    if chosen is None or other == block:
        return None

    def placed(rows: Range) -> Range:
        at, lo = divmod(rows[0], block)
        return at * other + min(lo, other), at * other + min(lo + rows[1] - rows[0], other)

    def moved(region: Region) -> Region:
        return replace(region, rows=placed(region.rows)) if region.buffer == chosen.name else region

    operations = tuple(with_regions(each, moved) for each in schedule.operations)
    return replace(_with_buffer(schedule, chosen, rows=size * other), operations=operations)


def next_call_fills_other_rows(rng: Random, schedule: Schedule) -> Schedule | None:
    """A credit is not waited for, or only those are that calls would need whose rows lie where they lay."""
    if not any(each.counted for each in schedule.buffers) or not schedule.credits:
        return None
    if rng.random() < 0.4:
        dropped = rng.choice(schedule.credits)
        return replace(schedule, credits=tuple(one for one in schedule.credits if one is not dropped))
    return replace(schedule, credits=tuple(one for one in schedule.credits if _needs(schedule, one)))


def _needs(schedule: Schedule, credit: Credit) -> bool:
    """Whether the taker stores into rows that the giver touches, or notifies it."""
    touched = [part for one in schedule.of_rank(credit.giver) for part in (*one.reads, *one.writes)]
    return any(
        any(notify.rank == credit.giver for notify in one.notifies)
        or any(_meet(part, other) for part in one.writes for other in touched)
        for one in schedule.of_rank(credit.taker)
    )


def _meet(one: Region, other: Region) -> bool:
    is_same = (one.buffer, one.rank) == (other.buffer, other.rank)
    return is_same and max(one.rows[0], other.rows[0]) < min(one.rows[1], other.rows[1])


def _is_call(part: Any) -> bool:
    return isinstance(part, Collective) and (len(part.sources) > 1 or len(part.destinations) > 1)


def _permuted(schedule: Schedule, fits: Callable[[Collective], bool] = lambda part: True) -> list[str]:
    """Labels of collectives of permuted blocks."""
    names = {one.name for one in schedule.buffers if one.blocks}
    parts = [one for one in schedule.operations if isinstance(one, Collective) and fits(one)]
    return sorted({one.label for one in parts if any(part.buffer in names for part in (*one.reads, *one.writes))})


def uneven_members(rng: Random, schedule: Schedule) -> Schedule | None:
    """Of two ranks, each call takes more blocks for one member than for the other, all together one stretch."""
    labels = _permuted(schedule, lambda part: part.function == "all_to_all")[:2]
    if schedule.world_size != 2 or len(labels) < 2:
        return None
    parts = [one for one in schedule.operations if isinstance(one, Collective)]
    members: list[list[Region]] = [[], []]
    for one in (part for part in parts if part.rank == 0):
        half = len(one.sources) // 2
        members[0] += one.sources[:half]
        members[1] += one.sources[half:]
    for of in members:
        of.sort(key=lambda part: part.rows)
    size = len(members[0])
    first = rng.randint(1, max(1, size - 1))
    are_columns = all(one.rows[1] == other.rows[0] for of in members for one, other in pairwise(of))
    if size < 2 or 2 * first == size or not are_columns:
        return None
    calls = [[members[0][:first], members[1][first:]], [members[0][first:], members[1][:first]]]
    order = [part for call in calls for part in (*call[0], *call[1])]
    lines = sorted(order, key=lambda part: part.rows)
    places = tuple(order.index(part) for part in lines)

    def side(at: int, part: Region) -> tuple[Region, ...]:
        whole = [(of[0].rows[0], of[-1].rows[1]) for of in calls[at]]
        return tuple(replace(part, rows=rows) for rows in whole)

    calls_made: list[Operation] = []
    for one in (part for part in parts if part.label in labels):
        waits = tuple(wait for each in parts if each.rank == one.rank for wait in each.waits)
        at = labels.index(one.label) ^ one.rank
        ends = side(at, one.sources[0]), side(at, one.destinations[0])
        calls_made.append(replace(one, waits=waits, sources=ends[0], destinations=ends[1]))
    rest = [one for one in schedule.operations if not isinstance(one, Collective)]
    made = [one for one in rest if isinstance(one, Compute)] + calls_made
    made += [one for one in rest if not isinstance(one, Compute)]
    buffers = tuple(
        replace(one, blocks=replace(one.blocks, places=places)) if one.blocks else one for one in schedule.buffers
    )
    return replace(schedule, buffers=buffers, operations=tuple(made))


def gap_in_landing(rng: Random, schedule: Schedule) -> Schedule | None:
    """What a call leaves lies in a buffer of rows as they are, at some distance; what reads it reads it there."""
    labels = _permuted(schedule, lambda part: part.function in ("all_to_all", "reduce_scatter"))
    landings = {part.buffer for one in schedule.operations if isinstance(one, Collective) for part in one.writes}
    chosen = next((one for one in schedule.buffers if one.name in landings and one.blocks), None)
    if not labels or chosen is None:
        return None
    if rng.random() < 0.4:
        return _with_buffer(schedule, chosen, blocks=None)
    at = rng.randrange(chosen.rows)

    def moved(region: Region) -> Region:
        rows = region.rows
        if region.buffer != chosen.name or rows[0] < at:
            return region
        return replace(region, rows=(rows[0] + 1, rows[1] + 1))

    operations = tuple(with_regions(each, moved) for each in schedule.operations)
    return replace(_with_buffer(schedule, chosen, blocks=None, rows=chosen.rows + 1), operations=operations)


def all_reduce_apart(rng: Random, schedule: Schedule) -> Schedule | None:
    """The sums of blocks lie in another buffer than the blocks, where they are read; of one call, or of all."""
    labels = _permuted(schedule, lambda part: part.function == "all_reduce")
    summed = next((one for one in schedule.buffers if one.blocks), None)
    if not labels or summed is None:
        return None
    chosen = set(labels) if rng.random() < 0.7 else {rng.choice(labels)}

    def moved(one: Operation) -> Operation:
        if isinstance(one, Collective) and one.label in chosen:
            return replace(one, destinations=tuple(replace(part, buffer="apart") for part in one.destinations))
        is_reader = not isinstance(one, Collective) and any(part.buffer == summed.name for part in one.reads)
        apart = with_regions(one, lambda part: replace(part, buffer="apart") if part.buffer == summed.name else part)
        return apart if is_reader and len(chosen) == len(labels) else one

    buffers = (*schedule.buffers, replace(summed, name="apart"))
    return replace(schedule, buffers=buffers, operations=tuple(map(moved, schedule.operations)))


def two_buffers_at_a_side(rng: Random, schedule: Schedule) -> Schedule | None:
    """Some of what a call takes lies in another buffer, which has its blocks at the same places."""
    labels = _permuted(schedule, _is_call)
    staged = next((one for one in schedule.buffers if one.blocks), None)
    if not labels or staged is None:
        return None
    label, first = rng.choice(labels), rng.randint(1, 3)
    taken = {
        part
        for one in schedule.operations
        if isinstance(one, Collective) and one.label == label
        for part in one.sources[first:]
        if part.buffer == staged.name
    }

    if not taken:
        return None

    def moved(part: Region) -> Region:
        return replace(part, buffer="other") if part in taken else part

    buffers = (*schedule.buffers, replace(staged, name="other"))
    return replace(schedule, buffers=buffers, operations=tuple(with_regions(one, moved) for one in schedule.operations))


def cells_of_other_shapes(rng: Random, schedule: Schedule) -> Schedule | None:
    """Blocks of a buffer lie in cells of another shape, of as many elements or not."""
    found = [one for one in schedule.buffers if one.blocks]
    if not found:
        return None
    chosen = rng.choice(found)
    assert chosen.blocks is not None
    high, wide = chosen.blocks.rows, chosen.blocks.cols
    shapes = [(high * 2, max(1, wide // 2)), (max(1, high // 2), wide * 2), (high + 1, wide), (high, wide + 1)]
    rows, cols = rng.choice(shapes)
    tops = chosen.blocks.tops or tuple(range(0, chosen.rows, high))
    return _with_buffer(schedule, chosen, blocks=replace(chosen.blocks, rows=rows, cols=cols, tops=tops))


BLOCKS: tuple[Mutation, ...] = (
    rows_lose_their_place,
    through_uncounted_rows,
    blocks_of_other_heights,
    next_call_fills_other_rows,
    uneven_members,
    gap_in_landing,
    all_reduce_apart,
    two_buffers_at_a_side,
    cells_of_other_shapes,
)
