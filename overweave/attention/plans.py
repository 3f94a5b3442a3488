"""How keys and values come to the ranks that see them, by plan, and the parts of their gradients to their owners.

All plans compute the same pieces in the same order: results have the same bits. The parts of gradients are added by the
library, in its order (`sequential`), by the owner, in the order of ranks (`per_shard`), or on the way, from the owner
on (`ring`): in fp32, and never in the order in which they happen to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from overweave.attention.pieces import wide
from overweave.attention.programs import LANDED, TRAVEL, Travel, Work, write
from overweave.attention.work import AttendWork, Call, GradientWork, Rows, as_rows
from overweave.ops.author.proven_program import Kernels, proven_program
from overweave.ops.author.ring import MatrixRing
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.collectives import agreed
from overweave.runtime.handwritten import OwnBuffer

SEQUENTIAL, PER_SHARD, RING = "sequential", "per_shard", "ring"


class Todo(NamedTuple):
    """What a call computes. start: anew at each call of it, into results."""

    start: Callable[[], AttendWork | GradientWork]
    results: tuple[torch.Tensor, ...]
    is_backward: bool = False

    def room(self, call: Call, rows: int) -> Rows:
        """For parts of the gradients of so many keys and values, none at first."""
        shape, dtype = (rows, call.columns), wide(call.k.dtype)
        return tuple(call.k.new_zeros(shape, dtype=dtype) for _ in TRAVEL) if self.is_backward else ()

    def kernels(self, call: Call) -> Kernels:
        """All that a call loads: its pieces, on rows of nothing."""
        key = call.q.shape, call.k.shape, call.offsets is None, call.scale, self.is_backward
        return Kernels(key, partial(self._all, call))

    def _all(self, call: Call, _: OwnBuffer) -> None:
        todo, sequence = self.start(), call.sequence
        for source in range(sequence.ranks):
            shard = tuple(call.k.new_zeros((sequence.own(source), call.columns)) for _ in TRAVEL)
            todo.piece(source, () if source == call.rank else shard, self.room(call, sequence.own(source)))
        todo.finish(self.room(call, sequence.own(call.rank)))


def run(call: Call, todo: Todo) -> None:
    """Computes a call by its plan. Collective. Keys without elements, as of no batch, need no program to travel."""
    if call.sequence.ranks == 1 or call.plan == SEQUENTIAL or not call.columns:
        _by_library(call, todo)
        return
    agreed(call.where["group_name"], f"{call.where['told']} by {call.plan}", lambda group: None)
    (_by_ring if call.plan == RING else _by_program)(call, todo)


def _by_library(call: Call, todo: Todo) -> None:
    (rows, ranks, *_), work = call.sequence, todo.start()
    every: Rows = ()
    if ranks > 1:
        gather = torch.ops.overweave.all_gather_rows
        every = tuple(gather(as_rows(each), m=rows, **call.where) for each in (call.k, call.v))
    sums = todo.room(call, rows)
    for step in range(ranks):
        source = (call.rank - step) % ranks
        at = slice(*call.sequence.stored(source))
        shard = () if source == call.rank else tuple(each[at] for each in every)
        work.piece(source, shard, tuple(each[at] for each in sums))
    if ranks > 1:
        sums = tuple(torch.ops.overweave.reduce_scatter_rows(each, **call.where) for each in sums)
    work.finish(sums)


def _by_program(call: Call, todo: Todo) -> None:
    sequence, rank, work = call.sequence, call.rank, todo.start()
    travel = Travel(sequence, call.columns, call.k.dtype, todo.is_backward)

    def piece(source: int, own: OwnBuffer) -> None:
        at = slice(*sequence.stored(source))
        parts = travel.parts(rank, source, slice(0, sequence.own(source))) if todo.is_backward else ()
        shard = () if source == rank else tuple(own(name)[at] for name in TRAVEL)
        work.piece(source, shard, tuple(own(name)[rows] for name, rows in parts))

    def finish(own: OwnBuffer) -> None:
        sums = todo.room(call, sequence.own(rank))
        for total, landed in zip(sums, LANDED, strict=False):
            for giver in range(sequence.ranks):
                if (seen := sequence.piece(giver, rank)) is not None:
                    total[seen.keys] += own(landed)[travel.landing(giver, seen.keys)]
        work.finish(sums)

    program = proven_program(group_of(call.where["group_name"]), travel, call.q.device, todo.kernels(call))
    with program.call() as written:
        write(written, travel, (as_rows(call.k), as_rows(call.v)), Work(piece, finish))
        for result in todo.results:
            written.rank_void(result)


def _by_ring(call: Call, todo: Todo) -> None:
    """A hop is a call. Sums of gradients are a hop behind their keys and values, and make one more, to their owner."""
    sequence, ranks, work = call.sequence, call.sequence.ranks, todo.start()
    ring, longest = MatrixRing(group_of(call.where["group_name"]), todo.kernels(call)), max(1, sequence.own(0))
    held: list[torch.Tensor] = [_padded(as_rows(each), longest) for each in (call.k, call.v)]
    sums: list[torch.Tensor] = []
    for step in range(ranks + todo.is_backward):
        source, sent = (call.rank - step) % ranks, held if step < ranks - 1 else []
        room = list(todo.room(call, longest)) if step < ranks else []
        shard = () if source == call.rank else tuple(each[: sequence.own(source)] for each in held)
        compute = partial(_piece, work, (source, shard, tuple(room)) if step < ranks else None)
        kept = ring.passed_on([*sent, *sums], compute)
        held, landed = kept[: len(sent)] or held, kept[len(sent) :]
        sums = [part.add_(each) for part, each in zip(room, landed, strict=True)] if room and landed else room or landed
    work.finish(tuple(each[: sequence.own(call.rank)] for each in sums))


def _piece(work: AttendWork | GradientWork, given: tuple[int, Rows, Rows] | None, _: OwnBuffer) -> None:
    if given is not None:
        work.piece(*given)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    if rows.shape[0] == count:
        return rows
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], rows.shape[1]))])
