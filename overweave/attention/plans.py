"""How keys and values come to the ranks that see them, by plan, and the parts of their gradients to their owners.

All plans but `double_ring` compute the same pieces in the same order: results have the same bits. The parts of
gradients are added by the library, in its order (`sequential`), by the owner, in the order of ranks (`per_shard`), or
on the way, from the owner on (rings): in fp32, and never in the order in which they happen to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from overweave.attention.pieces import wide
from overweave.attention.programs import TRAVEL, BufferRows, Travel, Work
from overweave.attention.rings import RingTravel
from overweave.attention.routes import double_ring_islands
from overweave.attention.work import AttendWork, Call, GradientWork, Rows, as_rows
from overweave.ops.author.proven_program import Kernels, proven_program
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.collectives import agreed
from overweave.runtime.handwritten import OwnBuffer
from overweave.schedules.records.attention import DOUBLE_RING, PER_SHARD, SEQUENTIAL


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
        for step in range(sequence.ranks):
            source = (call.rank - step) % sequence.ranks  # the own one first: it is of all queries
            shard = tuple(call.k.new_zeros((sequence.own(source), call.columns)) for _ in TRAVEL)
            todo.piece(source, () if source == call.rank else shard)
            todo.add(self.room(call, sequence.own(source)), self.room(call, sequence.own(source)))
        own = slice(0, sequence.own(call.rank))
        for parts in {1, sequence.ranks}:
            todo.finish([(own, self.room(call, own.stop))] * parts)


def run(call: Call, todo: Todo) -> None:
    """Computes a call by its plan. Collective. Keys without elements, as of no batch, need no program to travel."""
    if call.sequence.ranks == 1 or call.plan == SEQUENTIAL or not call.columns:
        _by_library(call, todo)
        return
    agreed(call.where["group_name"], f"{call.where['told']} by {call.plan}", lambda group: None)
    _by_program(call, todo)


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
        work.piece(source, shard)
        work.add(tuple(each[at] for each in sums), ())
    if ranks > 1:
        sums = tuple(torch.ops.overweave.reduce_scatter_rows(each, **call.where) for each in sums)
    work.finish([(slice(0, call.sequence.own(call.rank)), sums)])


def _by_program(call: Call, todo: Todo) -> None:
    travel, rank, work = travel_of(call, todo.is_backward), call.rank, todo.start()

    def piece(source: int, own: OwnBuffer) -> None:
        work.piece(source, _rows(own, () if source == rank else travel.held(rank, source)))

    def add(source: int, own: OwnBuffer) -> None:
        work.add(_rows(own, travel.parts(rank, source)), _rows(own, travel.added(rank, source)))

    def finish(own: OwnBuffer) -> None:
        landed = travel.landed(rank) if todo.is_backward else ()
        work.finish([(keys, _rows(own, places)) for keys, places in landed])

    program = proven_program(group_of(call.where["group_name"]), travel, call.q.device, todo.kernels(call))
    with program.call() as written:
        travel.write(written, (as_rows(call.k), as_rows(call.v)), Work(piece, add, finish))
        for result in todo.results:
            written.rank_void(result)


def travel_of(call: Call, is_backward: bool) -> Travel | RingTravel:
    """The program of a call."""
    sequence, given = call.sequence, (call.columns, call.k.dtype, is_backward)
    if call.plan == PER_SHARD:
        return Travel(sequence, *given)
    return RingTravel(sequence, *given, islands=double_ring_islands(sequence.ranks) if call.plan == DOUBLE_RING else 1)


def _rows(own: OwnBuffer, places: Iterable[BufferRows]) -> Rows:
    return tuple(own(name)[rows] for name, rows in places)
