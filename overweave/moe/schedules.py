"""Layers of experts as Schedules, by the name `OPERATOR.PLAN`: what `overweave show`, `verify` and `simulate` read.

An overlapped plan is the program that runs (moe/programs.py). The sequential one is written down here: library
collectives before and behind all of the matmuls.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from overweave.ir.schedule import Goal, InitialContents, Region, Schedule
from overweave.moe.cases import ExpertsCase
from overweave.moe.programs import BUFFERS, Sizes, schedule_of
from overweave.schedules.library_calls import CollectiveFunction, LibraryCalls
from overweave.schedules.records.experts import EXPERTS, OPERATORS, SEQUENTIAL

EXPERTS_KERNEL = "experts"  # all of a rank's matmuls
KINDS = dict(zip(OPERATORS, BUFFERS, strict=True))  # operator -> kind of its programs


def schedule_for(name: str, case: ExpertsCase, ranks: int) -> Schedule:
    """Return the schedule `name` of a layer on so many ranks. Raises InputError for an unknown name, and for sizes that
    ranks cannot split."""
    case.check(ranks)
    (operator, plan), routing = EXPERTS.operator_and_plan(name), case.routing
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
        self.kind, self.sizes, self.written = kind, sizes, LibraryCalls(name, sizes.ranks, EXPERTS_KERNEL)
        m, columns, top, shard = sizes.m, sizes.columns, sizes.top, sizes.shard
        # Tokens whose sums a rank gets, and the collective that brings them.
        self.owned = sizes.rows
        self.summing: CollectiveFunction = "reduce_scatter"
        if kind == "total":
            self.owned, self.summing = lambda rank: (0, m), "all_reduce"
        slots = {"gather": ("ids", "experts", top), "chain": ("own_slots", "slots", 2 * top)}
        # What is gathered: the caller's shard, where it lands, columns.
        self.gathered = ((*slots[kind],), ("x", "tokens", columns)) if kind in slots else ()
        self.tensors = {"tokens": "x", "h": "h", **{at: at for _, at, _ in slots.values()}}
        for own, at, cols in self.gathered:
            self.written.buffer(own, (shard, cols), "input")
            self.written.buffer(at, (m, cols), "local")
        if kind != "chain":
            self.written.buffer("h", (m * top, width), "output" if kind == "gather" else "input")
        if kind != "gather":
            self.written.buffer("sums", (m, columns), "local")
            self.written.buffer("y", (m if kind == "total" else shard, columns), "output")

    def schedule(self) -> Schedule:
        for rank in range(self.sizes.ranks):
            self._declare(rank)
            self._write(rank)
        return self.written.schedule()

    def _declare(self, rank: int) -> None:
        """What is given, and what is to come of it."""
        (low, high), written = self.sizes.rows(rank), self.written
        own = (0, high - low)
        for name, at, _ in self.gathered:
            written.give(written.region(name, rank, own), self.tensors[at], low)
        if self.kind in ("scatter", "total"):
            written.give(written.region("h", rank), "h")
        if self.kind == "gather":
            written.want(written.region("h", rank), "h")
        else:
            terms = tuple((each, each + 1) for each in range(self.sizes.ranks))
            low, high = self.owned(rank)
            written.want(written.region("y", rank, (0, high - low)), "y", low, terms)

    def _write(self, rank: int) -> None:
        (low, high), written = self.sizes.rows(rank), self.written
        for own, at, _ in self.gathered:
            sources = (written.region(own, rank, (0, high - low)),)
            written.collective(rank, ("all_gather", at), (sources, self._shards(at, rank)))
        if not self.sizes.m:
            return
        read = [at for _, at, _ in self.gathered] or ["h"]
        needs = (InitialContents(written.region(each, rank), self.tensors[each], 0, 0) for each in read)
        if self.kind == "gather":
            written.apply(rank, needs, (Goal(written.region("h", rank), "h", 0, 0),))
            return
        written.apply(rank, needs, (Goal(written.region("sums", rank), "y", 0, 0, ((rank, rank + 1),)),))
        low, high = self.owned(rank)
        y = (written.region("y", rank, (0, high - low)),)
        sums = (written.region("sums", rank),) if self.kind == "total" else self._shards("sums", rank)
        written.collective(rank, (self.summing, "sums"), (sums, y))

    def _shards(self, buffer: str, rank: int) -> tuple[Region, ...]:
        return tuple(self.written.region(buffer, rank, self.sizes.rows(each)) for each in range(self.sizes.ranks))
