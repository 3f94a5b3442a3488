"""The ways of shards round a ring of ranks, or round rings on two levels, as data: who passes what on to whom.

One level: each rank passes its shard to the next, which passes it on, until nobody behind sees any of it. Two levels, a
double ring: ranks stand in islands of equal size. A shard goes round its island; meanwhile its owner sends it to the
same place of the next island, where it goes round, too. Sums of gradients follow the ranks that see the shard, in the
same order, and end with its owner. Ranks without rows stand beside. What arrives at a rank on a level is numbered, and
has one of two places by turns.
SOURCE: Ring attention (arXiv 2310.01889); double ring: LoongTrain (arXiv 2406.18485), AutoOverlap section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from overweave.attention.sequence import Sequence

AROUND, ACROSS = LEVELS = "around", "across"  # within an island, and between islands
SLOTS = 2
MOST_ROUTES = 256  # that are kept


class Turn(NamedTuple):
    """What arrives at a rank on a level, by its number there. giver, step: who sends it, and at which step of its."""

    level: str
    number: int
    giver: int
    step: int

    @property
    def slot(self) -> int:
        """Which of the level's places it has."""
        return self.number % SLOTS


class Delivery(NamedTuple):
    """Something goes to a rank; turn: None: home, to its owner, where it has a place of its own."""

    rank: int
    turn: Turn | None


class Stop(NamedTuple):
    """A shard with a rank, at a step: where it came (None: the own one), and to whom it is passed on from there.

    is_seen: whether the rank sees any of it. sum_came: the sum of earlier ranks' parts of its gradients. sum_goes: to
    whom the sum goes with this rank's part.
    """

    step: int
    source: int
    came: Turn | None
    passed: tuple[Delivery, ...]
    is_seen: bool
    sum_came: Turn | None = None
    sum_goes: Delivery | None = None


class ShardRoute(NamedTuple):
    """The stops of a rank, in the order of steps. home: the step whose sum comes home to the rank, its shard's owner;
    None: nobody else has a part."""

    stops: tuple[Stop, ...]
    home: int | None

    def arrivals(self, level: str, of_sums: bool = False) -> list[Turn]:
        """The shards, or sums, that arrive on a level."""
        turns = (stop.sum_came if of_sums else stop.came for stop in self.stops)
        return [turn for turn in turns if turn is not None and turn.level == level]

    def next_there(self, turn: Turn, of_sums: bool = False) -> Turn | None:
        """What comes to the place of a turn next."""
        later = turn.number + SLOTS
        return next((each for each in self.arrivals(turn.level, of_sums) if each.number == later), None)


class _Visit(NamedTuple):
    """A shard comes to a rank, on a level (none: the rank is its owner), from a giver: its rank and step."""

    step: int
    rank: int
    level: str | None
    giver: tuple[int, int]
    is_seen: bool


def double_ring_islands(ranks: int) -> int:
    """How many islands a double ring of so many ranks has: a divisor, as near to the root as can be from below."""
    return max(each for each in range(1, isqrt(max(1, ranks)) + 1) if ranks % each == 0)


@lru_cache(maxsize=MOST_ROUTES)
def routes(sequence: Sequence, islands: int = 1) -> tuple[ShardRoute, ...]:
    """The way of each rank. islands: of equal size; where some ranks have no rows, those that have are one."""
    ranks = sum(sequence.own(rank) > 0 for rank in range(sequence.ranks))
    grid = (islands, ranks // islands) if ranks == sequence.ranks and ranks % islands == 0 else (1, ranks)
    visits = {source: tuple(_visits(sequence, grid, source)) for source in range(ranks)}
    shards = _numbered((each, each.level, each.giver) for every in visits.values() for each in every)
    chains = {source: [each for each in every if each.is_seen] for source, every in visits.items()}
    hops = [hop for chain in chains.values() for hop in pairwise(chain)]
    sums = _numbered((after, _level(before, after, grid), (before.rank, before.step)) for before, after in hops)
    stops: dict[int, list[Stop]] = {rank: [] for rank in range(sequence.ranks)}
    for source, every in visits.items():
        for visit in every:
            stops[visit.rank].append(_stop(source, visit, every, (shards, sums)))
    homes = {source: chain[-1].step for source, chain in chains.items() if len(chain) > 1}
    return tuple(ShardRoute(tuple(sorted(stops[rank])), homes.get(rank)) for rank in stops)


def _visits(sequence: Sequence, grid: tuple[int, int], source: int) -> Iterator[_Visit]:
    """The ranks to which a shard comes, up to the last that sees it, on each level."""
    (islands, size), (island, place) = grid, divmod(source, grid[1])

    def holder(out: int, step: int) -> int:
        return (island + out) % islands * size + (place + step) % size

    seen = [[sequence.piece(holder(out, step), source) is not None for step in range(size)] for out in range(islands)]
    reached = [max((step for step in range(size) if row[step]), default=-1) for row in seen]
    last = max(out for out in range(islands) if reached[out] >= 0 or not out)
    for out in range(last + 1):
        for step in range(max(reached[out], 0) + 1):
            level, before = (AROUND, (out, step - 1)) if step else (ACROSS if out else None, (max(out - 1, 0), 0))
            giver = holder(*before), before[0] * size + before[1]
            yield _Visit(out * size + step, holder(out, step), level, giver, seen[out][step])


Turns = dict[tuple[int, int], Turn]  # by rank and step


def _numbered(arrivals: Iterable[tuple[_Visit, str | None, tuple[int, int]]]) -> Turns:
    """Number what arrives at each rank, by step, on each level. arrivals: with level and giver."""
    counts: dict[tuple[int, str], int] = {}
    turns: Turns = {}
    for visit, level, giver in sorted(arrivals, key=lambda arrival: arrival[0].step):
        if level is not None:
            number = counts[visit.rank, level] = counts.get((visit.rank, level), -1) + 1
            turns[visit.rank, visit.step] = Turn(level, number, *giver)
    return turns


def _level(before: _Visit, after: _Visit, grid: tuple[int, int]) -> str:
    """Of a sum that goes from one visit to the next that sees the shard."""
    return AROUND if before.step // grid[1] == after.step // grid[1] else ACROSS


def _stop(source: int, visit: _Visit, every: tuple[_Visit, ...], turns: tuple[Turns, Turns]) -> Stop:
    """turns: of shards, and of sums."""
    shards, sums = turns
    passed = (each for each in every if each.level and each.giver == (visit.rank, visit.step))
    stop = Stop(
        step=visit.step,
        source=source,
        came=shards.get((visit.rank, visit.step)),
        passed=tuple(Delivery(each.rank, shards[each.rank, each.step]) for each in passed),
        is_seen=visit.is_seen,
    )
    chain = [each for each in every if each.is_seen]
    if not visit.is_seen:
        return stop
    at = chain.index(visit)
    before, after = chain[at - 1 : at] if at else [], chain[at + 1 : at + 2]
    home = Delivery(source, None) if before else None
    goes = Delivery(after[0].rank, sums[after[0].rank, after[0].step]) if after else home
    return stop._replace(sum_came=sums.get((visit.rank, visit.step)), sum_goes=goes)
