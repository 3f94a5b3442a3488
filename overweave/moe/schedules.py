"""Layers of experts as Schedules, by the name `OPERATOR.PLAN`: what `overweave show`, `verify` and `simulate` read.

An overlapped plan is the program that runs (moe/programs.py). The sequential one is written down here: library
collectives before and behind all of the matmuls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from msgspec.structs import replace

from overweave.ir.schedule import (
    Apply,
    Buffer,
    Collective,
    Goal,
    InitialContents,
    Operation,
    Queue,
    Range,
    Region,
    Schedule,
)
from overweave.moe.cases import ExpertsCase
from overweave.moe.programs import BUFFERS, Sizes, schedule_of
from overweave.schedules.records.experts import OPERATORS, SEQUENTIAL, operator_and_plan

KINDS = dict(zip(OPERATORS, BUFFERS, strict=True))  # operator -> kind of its programs
EXPERTS_KERNEL = "experts"  # all of a rank's matmuls
MAIN, KERNEL = "main", f"main.{EXPERTS_KERNEL}"


def schedule_for(name: str, case: ExpertsCase, ranks: int) -> Schedule:
    """Return the schedule `name` of a layer on so many ranks. Raises InputError for an unknown name, and for sizes that
    ranks cannot split."""
    case.check(ranks)
    (operator, plan), routing = operator_and_plan(name), case.routing
    sizes = Sizes(routing.tokens, case.hidden, routing.topk, torch.bfloat16, ranks)
    # Columns of h: of the first matmul both products of a gated unit, before the second what the unit makes of them.
    width = case.intermediate // ranks * (2 if operator == "all_gather_experts" else 1)
    kind = KINDS[operator]
    if plan == SEQUENTIAL:
        return _Sequential(name, kind, sizes, width).schedule()
    return replace(schedule_of(kind, sizes, width), name=name)


class _Sequential:
    """All-gathers, all of a rank's matmuls in one kernel, and a reduce-scatter; without what its kind has not."""

    def __init__(self, name: str, kind: str, sizes: Sizes, width: int) -> None:
        self.name, self.kind, self.sizes = name, kind, sizes
        m, columns, top, shard = sizes.m, sizes.columns, sizes.top, sizes.shard
        slots = {"gather": ("ids", "experts", top), "chain": ("own_slots", "slots", 2 * top)}
        # What is gathered: the caller's shard, where it lands, columns.
        self.gathered = ((*slots[kind],), ("x", "tokens", columns)) if kind in slots else ()
        self.tensors = {"tokens": "x", "h": "h", **{at: at for _, at, _ in slots.values()}}
        self.is_summed, self.has_h = kind != "gather", kind in ("scatter", "total")
        self.owned = self.sizes.rows if kind != "total" else lambda rank: (0, m)  # tokens whose sums a rank gets
        pairs, rows = m * top, m if kind == "total" else shard
        self.buffers = (
            *(Buffer(own, shard, cols, "input") for own, _, cols in self.gathered),
            *(Buffer(at, m, cols, "local") for _, at, cols in self.gathered),
            *((Buffer("h", pairs, width, "input"),) if self.has_h else ()),
            *((Buffer("h", pairs, width, "output"),) if kind == "gather" else ()),
            *((Buffer("sums", m, columns, "local"), Buffer("y", rows, columns, "output")) if self.is_summed else ()),
        )
        self.by_name = {buffer.name: buffer for buffer in self.buffers}

    def schedule(self) -> Schedule:
        ranks = range(self.sizes.ranks)
        return Schedule(
            name=self.name,
            world_size=self.sizes.ranks,
            buffers=self.buffers,
            queues=(Queue(MAIN, "complete", (KERNEL,)), Queue(KERNEL, "issue", (MAIN,))),
            given=tuple(each for rank in ranks for each in self._given(rank)),
            goal=tuple(each for rank in ranks for each in self._goal(rank)),
            operations=tuple(each for rank in ranks for each in self._operations(rank)),
        )

    def _operations(self, rank: int) -> Iterator[Operation]:
        for own, at, _ in self.gathered:
            rows = self.sizes.rows(rank)
            sources = (self._region(own, rank, (0, rows[1] - rows[0])),)
            yield self._collective("all_gather", at, rank, (sources, self._shards(at, rank)))
        if not self.sizes.m:
            return
        read = [at for _, at, _ in self.gathered] or ["h"]
        made = "sums" if self.is_summed else "h"
        yield Apply(
            name=f"experts.{rank}",
            rank=rank,
            queue=KERNEL,
            function=EXPERTS_KERNEL,
            needs=tuple(InitialContents(self._region(each, rank), self.tensors[each], 0, 0) for each in read),
            makes=(Goal(self._region(made, rank), *self._made((rank, rank + 1))),),
            tiles=((0, 1),),
        )
        if self.is_summed:
            low, high = self.owned(rank)
            y = (self._region("y", rank, (0, high - low)),)
            sums = self._shards("sums", rank) if self.kind != "total" else (self._region("sums", rank),)
            function = "reduce_scatter" if self.kind != "total" else "all_reduce"
            yield self._collective(function, "sums", rank, (sums, y))

    def _made(self, term: Range, row: int = 0) -> tuple[str, int, int, tuple[Range, ...]]:
        """What an element is: of sums a rank's term."""
        return ("y", row, 0, (term,)) if self.is_summed else ("h", row, 0, ())

    def _given(self, rank: int) -> Iterator[InitialContents]:
        low, high = self.sizes.rows(rank)
        for own, at, _ in self.gathered:
            if low < high:
                yield InitialContents(self._region(own, rank, (0, high - low)), self.tensors[at], low, 0)
        if self.has_h and self.sizes.m:
            yield InitialContents(self._region("h", rank), "h", 0, 0)

    def _goal(self, rank: int) -> Iterator[Goal]:
        low, high = self.owned(rank)
        if self.kind == "gather":
            if self.sizes.m:
                yield Goal(self._region("h", rank), "h", 0, 0)
        elif low < high:
            terms = tuple((each, each + 1) for each in range(self.sizes.ranks))
            yield Goal(self._region("y", rank, (0, high - low)), "y", low, 0, terms)

    def _region(self, buffer: str, rank: int, rows: Range | None = None) -> Region:
        known = self.by_name[buffer]
        return Region(buffer, rank, rows or (0, known.rows), (0, known.cols))

    def _shards(self, buffer: str, rank: int) -> tuple[Region, ...]:
        return tuple(self._region(buffer, rank, self.sizes.rows(each)) for each in range(self.sizes.ranks))

    def _collective(
        self, function: str, label: str, rank: int, ends: tuple[Iterable[Region], Iterable[Region]]
    ) -> Collective:
        sources, destinations = ends
        return Collective(
            name=f"{function}_{label}.{rank}",
            rank=rank,
            queue=MAIN,
            function=function,  # type: ignore[arg-type]
            label=f"{function}_{label}",
            ranks=tuple(range(self.sizes.ranks)),
            sources=tuple(sources),
            destinations=tuple(destinations),
        )
