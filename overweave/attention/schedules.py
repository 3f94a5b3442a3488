"""Attention over a shared sequence as Schedules, by the name `OPERATOR.PLAN`: what `overweave show`, `verify` and
`simulate` read.

Where shards travel a plan is the program that runs (programs.py, rings.py). What the library moves is written down
here: collectives in front of all of a rank's pieces, and behind them. Rows of a result stand for what is computed.
"""

from __future__ import annotations

import torch

from overweave.attention.cases import AttentionCase
from overweave.attention.programs import TRAVEL, Travel, on_paper
from overweave.attention.rings import RingTravel
from overweave.attention.routes import double_ring_islands
from overweave.errors import InputError
from overweave.ir.dtype import MovedDtype
from overweave.ir.schedule import Goal, InitialContents, Range, Region, Schedule
from overweave.ir.shards import shard_rows
from overweave.schedules.library_calls import LibraryCalls
from overweave.schedules.records.attention import ATTENTION, DOUBLE_RING, HEADS, OPERATORS, PER_SHARD, SEQUENTIAL

DTYPE = torch.bfloat16
SUM_DTYPE: MovedDtype = "float32"


def schedule_for(name: str, case: AttentionCase, ranks: int) -> Schedule:
    """Return the schedule `name` of a case on so many ranks. Raises InputError for an unknown name, and for what ranks
    cannot share."""
    case.check(ranks)
    operator, plan = ATTENTION.operator_and_plan(name)
    is_backward, sequence = operator != OPERATORS[0], case.sequence(ranks)
    if plan in (SEQUENTIAL, HEADS) or not case.tokens:
        written = _ByLibrary(name, case, ranks)
        return written.heads(is_backward) if plan == HEADS else written.sequential(is_backward)
    if plan == PER_SHARD:
        travel: Travel | RingTravel = Travel(sequence, case.columns, DTYPE, is_backward)
    else:
        islands = double_ring_islands(ranks) if plan == DOUBLE_RING else 1
        travel = RingTravel(sequence, case.columns, DTYPE, is_backward, islands)
    return on_paper(travel, plan, case.columns)


class _ByLibrary:
    """Collectives, and one kernel of all that a rank computes between them."""

    def __init__(self, name: str, case: AttentionCase, ranks: int) -> None:
        self.case, self.ranks, self.written = case, ranks, LibraryCalls(name, ranks, "attend")
        self.longest = max(high - low for low, high in map(self._rows, range(ranks)))

    def sequential(self, is_backward: bool) -> Schedule:
        """Keys and values are gathered; gradients of all of them are summed, and scattered."""
        written, columns, rows = self.written, self.case.columns, self.case.tokens
        results = {"dq": columns, "dk": columns, "dv": columns} if is_backward else {"out": columns}
        for name, at in zip("kv", TRAVEL, strict=True):
            written.buffer(name, (self.longest, columns), "input")
            written.buffer(at, (rows, columns), "local")
        for name, cols in results.items():
            written.buffer(name, (self.longest, cols), "output", SUM_DTYPE if name in ("dk", "dv") else None)
        for name in ("dk", "dv") if is_backward else ():
            written.buffer(f"parts_{name}", (rows, columns), "local", SUM_DTYPE)
        for rank in range(self.ranks):
            self._sequential_of(rank, tuple(results), is_backward)
        return written.schedule()

    def _sequential_of(self, rank: int, results: tuple[str, ...], is_backward: bool) -> None:
        written, (low, high) = self.written, self._rows(rank)
        own, summed = (0, high - low), ("dk", "dv") if is_backward else ()
        for name, at in zip("kv", TRAVEL, strict=True):
            written.give(written.region(name, rank, own), at, low)
            written.collective(rank, ("all_gather", at), ((written.region(name, rank, own),), self._shards(at, rank)))
        needs = [InitialContents(written.region(at, rank), at, 0, 0) for at in TRAVEL]
        makes = [Goal(written.region(each, rank, own), each, low, 0) for each in results if each not in summed]
        parts = ((f"parts_{each}", each) for each in summed)
        makes += [Goal(written.region(part, rank), each, 0, 0, ((rank, rank + 1),)) for part, each in parts]
        if self.case.tokens:
            written.apply(rank, needs, makes)
        for each in summed:
            sides = self._shards(f"parts_{each}", rank), (written.region(each, rank, own),)
            written.collective(rank, ("reduce_scatter", each), sides)
        terms = tuple((each, each + 1) for each in range(self.ranks))
        for each in results:
            written.want(written.region(each, rank, own), each, low, terms if each in summed else ())

    def heads(self, is_backward: bool) -> Schedule:
        """Rows become heads, the rank's heads of all rows are computed, and heads become rows. Columns of a matrix are
        those of the ranks' heads, one behind the other."""
        case, written = self.case, self.written
        for heads in (case.heads, case.groups):
            if heads % self.ranks:
                found = f"{self.ranks} ranks do not divide {case.heads} heads of q and {case.groups} of k"
                raise InputError(f"schedule {written.name}", found, "Choose more heads, or another plan")
        wide, narrow = (case.batch * each * case.head_dim for each in (case.heads, case.groups))
        # The backward has what the forward exchanged, and the gradient of the result.
        there = {"dout": wide} if is_backward else {"q": wide, "k": narrow, "v": narrow}
        back = {"dq": wide, "dk": narrow, "dv": narrow} if is_backward else {"out": wide}
        for names, home in ((there, "input"), (back, "output")):
            for name, columns in names.items():
                written.buffer(name, (self.longest, columns), home)  # type: ignore[arg-type]
                written.buffer(f"heads_{name}", (case.tokens, columns // self.ranks), "local")
        for rank in range(self.ranks):
            self._heads_of(rank, there, back)
        return written.schedule()

    def _heads_of(self, rank: int, there: dict[str, int], back: dict[str, int]) -> None:
        written, (low, high) = self.written, self._rows(rank)
        own = (0, high - low)
        for name, columns in there.items():
            written.give(written.region(name, rank, own), name, low)
            sides = self._blocks(name, rank, columns), self._shards(f"heads_{name}", rank)
            written.collective(rank, ("all_to_all", name), sides)
        needs = [InitialContents(*self._of_heads(rank, name, cols)) for name, cols in there.items()]
        makes = [Goal(*self._of_heads(rank, name, cols)) for name, cols in back.items()]
        if self.case.tokens:
            written.apply(rank, needs, makes)
        for name, columns in back.items():
            sides = self._shards(f"heads_{name}", rank), self._blocks(name, rank, columns)
            written.collective(rank, ("all_to_all", name), sides)
            written.want(written.region(name, rank, own), name, low)

    def _of_heads(self, rank: int, name: str, columns: int) -> tuple[Region, str, int, int]:
        """All rows of a rank's heads: where they lie, and what they are of a matrix."""
        return self.written.region(f"heads_{name}", rank), name, 0, rank * (columns // self.ranks)

    def _blocks(self, name: str, rank: int, columns: int) -> tuple[Region, ...]:
        """The own rows, in the columns of each rank's heads."""
        (low, high), each = self._rows(rank), columns // self.ranks
        cuts = ((peer * each, (peer + 1) * each) for peer in range(self.ranks))
        return tuple(self.written.region(name, rank, (0, high - low), cut) for cut in cuts)

    def _rows(self, rank: int) -> Range:
        return shard_rows(self.case.tokens, self.ranks, rank)

    def _shards(self, buffer: str, rank: int) -> tuple[Region, ...]:
        return tuple(self.written.region(buffer, rank, self._rows(each)) for each in range(self.ranks))
