"""Random right schedules of groups of tiles: blocks that are scattered in the product and one stretch of memory."""

from __future__ import annotations

from random import Random

from campaigns.oracle.random.drafts import Draft, Place, Sharding, cut, one, tell
from overweave.ir.blocks import Blocks
from overweave.ir.schedule import Collective, Copy, Range, Region, Schedule
from overweave.ir.tensors import all_to_all_result, product

Group = list[tuple[int, int]]  # blocks of a member, by row and column


def waves(rng: Random, ranks: int, pieces: int) -> Schedule:
    """A product block by block, a sum of each group by the library, and a move out of the blocks. A scattered sum
    leaves a rank its shard, or a row of blocks of each band of as many rows of blocks as there are ranks.
    """
    is_scattered = rng.random() < 0.5
    members = ranks if is_scattered else 1
    grid = _Grid(rng, members, pieces + 1)
    deal = Sharding(members * grid.rows, ranks, 1, rng.randint(1, 2), grid.cols)
    draft = Draft("waves", ranks)
    x, w = draft.buffer("x", deal.m, deal.k, "input"), draft.buffer("w", deal.k, deal.n, "input")
    y = draft.buffer("y", grid.rows if is_scattered else deal.m, deal.n, "output")
    landed = staged = draft.buffer("staged", deal.m, deal.n, "local", grid.blocks(members))
    if is_scattered:
        landed = draft.buffer("summed", grid.rows, deal.n, "local", grid.blocks(1))
    draft.pad("computed", len(grid.groups))
    draft.queue("tiles", rng.choice(("issue", "complete")))
    draft.queue("exchanges")
    draft.queue("sums", "complete", ("tiles", "exchanges"))
    for rank in range(ranks):
        draft.give_split(rank, deal, x(rank), w(rank))
        if is_scattered:
            for row in range(grid.high):
                strip, (top, _) = (row * grid.height, min((row + 1) * grid.height, grid.rows)), grid.rows_of(rank, row)
                draft.want(y(rank, strip), product("a", "b"), top, 0, deal.terms(list(range(ranks))))
        else:
            draft.want(y(rank), product("a", "b"), 0, 0, deal.terms(list(range(ranks))))
        for at, group in enumerate(grid.groups):
            tiles, sources = rng.randint(1, 2), grid.parts(staged, rank, members, group)
            for part in rng.sample(sources, len(sources)):
                operands = x(rank, part.rows), w(rank, cols=part.cols), part
                draft.multiply((rank, "tiles"), operands, (), tell("computed", rank, at), tiles)
            draft.add(
                Collective,
                "sum",
                (rank, "exchanges"),
                one("computed", at, tiles * len(sources)),
                function="reduce_scatter" if is_scattered else "all_reduce",
                label=f"group.{at}",
                ranks=tuple(range(ranks)),
                sources=tuple(sources),
                destinations=tuple(grid.parts(landed, rank, 1, group)),
            )
        draft.move(Copy, (rank, "sums"), (landed(rank), y(rank)))
    return draft.schedule(())


def exchanged_waves(rng: Random, ranks: int, pieces: int) -> Schedule:
    """A product block by block of rows for every rank, an all-to-all of each group, and a move out of the blocks."""
    grid = _Grid(rng, ranks, pieces + 1)
    rows, depth = ranks * grid.rows, rng.randint(1, 2)
    draft = Draft("exchanged_waves", ranks)
    x, w = draft.buffer("x", rows, depth, "input"), draft.buffer("w", depth, grid.cols, "input")
    y = draft.buffer("y", rows, grid.cols, "output")
    staged, gathered = (draft.buffer(name, rows, grid.cols, "local", grid.blocks(ranks)) for name in ("staged", "got"))
    draft.pad("computed", len(grid.groups))
    draft.queue("tiles", rng.choice(("issue", "complete")))
    draft.queue("exchanges")
    draft.queue("sums", "complete", ("tiles", "exchanges"))
    for rank in range(ranks):
        draft.give(w(rank), "b", 0, rank * grid.cols)
        for member in range(ranks):
            for row in range(grid.high):
                strip, first = grid.rows_of(member, row), row * grid.height
                draft.give(x(rank, strip), all_to_all_result("a", member), rank * grid.rows + first, 0)
                its, made = (member * grid.rows + first, member * grid.cols), product(all_to_all_result("a", rank), "b")
                draft.want(y(rank, strip), made, *its, ((0, depth),))
        for at, group in enumerate(grid.groups):
            tiles, sources = rng.randint(1, 2), grid.parts(staged, rank, ranks, group)
            for part in rng.sample(sources, len(sources)):
                operands = x(rank, part.rows), w(rank, cols=part.cols), part
                draft.multiply((rank, "tiles"), operands, (), tell("computed", rank, at), tiles)
            draft.add(
                Collective, "exchange", (rank, "exchanges"), one("computed", at, tiles * len(sources)),
                function="all_to_all", label=f"group.{at}", ranks=tuple(range(ranks)),
                sources=tuple(sources), destinations=tuple(grid.parts(gathered, rank, ranks, group)),
            )  # fmt: skip
        draft.move(Copy, (rank, "sums"), (gathered(rank), y(rank)))
    return draft.schedule(())


class _Grid:
    """The blocks of each member's rows, all alike, in random order and cut into groups. Last blocks may be smaller.

    is_cyclic: the members' rows of blocks stand by turns in the whole, not one member's behind another's.
    """

    def __init__(self, rng: Random, members: int, groups: int) -> None:
        self.members, self.is_cyclic = members, rng.random() < 0.5
        self.height, self.width, self.wide = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2)
        self.high = -(-groups * (rng.randint(1, 2) if members == 1 else 1) // self.wide)
        self.rows = self.high * self.height - rng.randint(0, self.height - 1)
        self.cols = self.wide * self.width - rng.randint(0, self.width - 1)
        order = [(row, col) for row in range(self.high) for col in range(self.wide)]
        rng.shuffle(order)
        self.groups: list[Group] = [order[lo:hi] for lo, hi in cut((0, len(order)), groups)]

    def blocks(self, members: int) -> Blocks:
        """Of each group a member's blocks behind another's. members: all of them, or the one whose rows are alone."""
        tops = sorted(self.rows_of(member, row, members)[0] for member in range(members) for row in range(self.high))
        places, first = [0] * (len(tops) * self.wide), 0
        for group in self.groups:
            for member in range(members):
                for row, col in group:
                    places[tops.index(self.rows_of(member, row, members)[0]) * self.wide + col] = first
                    first += 1
        is_even = tops == list(range(0, members * self.rows, self.height))
        return Blocks(self.height, self.width, tuple(places), () if is_even else tuple(tops))

    def rows_of(self, member: int, row: int, members: int | None = None) -> Range:
        """Where a member's row of blocks stands among the rows of so many members."""
        members = self.members if members is None else members
        below, height = row * self.height, min(self.height, self.rows - row * self.height)
        top = members * below + member * height if self.is_cyclic else member * self.rows + below
        return top, top + height

    def parts(self, place: Place, rank: int, members: int, group: Group) -> list[Region]:
        return [self._part(place, rank, (member, members), block) for member in range(members) for block in group]

    def _part(self, place: Place, rank: int, of: tuple[int, int], block: tuple[int, int]) -> Region:
        (member, members), left = of, block[1] * self.width
        rows = self.rows_of(member, block[0], members)
        return place(rank, rows, cols=(left, min(left + self.width, self.cols)))
