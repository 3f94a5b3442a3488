"""Shards that travel around a ring of ranks in bounded memory: one call of one tile program for each hop.

A hop pushes a rank's shard to the next rank, computes on it meanwhile, and copies out the shard that the previous rank
has sent. The symmetric buffer holds one shard: the credits of calls keep a rank from sending before the next rank has
copied out the last one. Private memory holds two shards, which hops use alternately.
SOURCE: Ring attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from overweave.ir.schedule import Schedule
from overweave.lang.mapping import TileChannel, Tiles
from overweave.memory.group import Group
from overweave.ops.author.proven_program import Kernels, proven_program
from overweave.ops.author.tile_program import TileCall
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Declared, OwnBuffer, Part, SymmetricBuffer, Uses

PLANNED_COLUMNS = 8


class HopProgram(NamedTuple):
    """The tile program of one hop: each rank sends matrices `[rows, columns]`, one a dtype, to the next rank."""

    ranks: int
    rows: int
    columns: int
    dtypes: tuple[torch.dtype, ...]

    def declared(self) -> Declared:
        """Return the receive buffers, and the channel that signals their arrival."""
        buffers = [SymmetricBuffer(self.rows, self.columns, dtype) for dtype in self.dtypes]
        named = {f"hop_{index}": each for index, each in enumerate(buffers)}
        return Declared(named, {"arrived": TileChannel(Tiles(self.ranks, 1, 1, 1, self.ranks))})

    def schedule(self) -> Schedule:
        """Return the hop's Schedule, of few columns: each rank has its own shard first, then the previous rank's."""
        small = self._replace(columns=PLANNED_COLUMNS, dtypes=(torch.float32,) * len(self.dtypes))
        shard = partial(CallersMatrix, self.ranks * self.rows, PLANNED_COLUMNS, is_shard=True)
        indices = range(len(self.dtypes))
        callers = {f"sent_{index}": shard(f"x{index}") for index in indices}
        callers |= {f"kept_{index}": shard(f"x{index}", is_result=True, shift=1) for index in indices}
        return tile_schedule("ring.hop", small.declared(), callers, self.ranks, small._record)

    def _record(self, call: TileCall, **matrices: Any) -> None:
        sent, received = ([each for name, each in matrices.items() if side in name] for side in ("sent", "kept"))
        write_hop(call, self, (sent, received), lambda own: None)


def write_hop(
    call: TileCall, hop: HopProgram, matrices: tuple[list[Any], list[Any]], compute: Callable[[OwnBuffer], object]
) -> None:
    """Record a hop. matrices: (sent shards, where received ones are copied). compute: runs while shards travel."""
    (sent, received), rank = matrices, call.rank
    next_rank, previous_rank = (rank + 1) % hop.ranks, (rank - 1) % hop.ranks
    copies, buffers = call.queue("copies"), list(hop.declared().buffers)
    for name, shards in zip(buffers, sent, strict=True):
        copies.rank_copy_data(shards, call.part(name, next_rank))
    copies.rank_notify("arrived", rank, next_rank)
    reads = tuple(
        Uses(shards, f"x{index}", rank * hop.rows) for index, shards in enumerate(sent) if isinstance(shards, Part)
    )
    call.rank_compute("piece", compute, reads)
    call.rank_wait("arrived", previous_rank)
    for name, target in zip(buffers, received, strict=True):
        call.rank_copy_data(call.part(name), target)


class MatrixRing(NamedTuple):
    """Runs hops in a group. kernels: loads the kernels of everything that is computed meanwhile."""

    group: Group
    kernels: Kernels

    def passed_on(self, shards: list[torch.Tensor], compute: Callable[[OwnBuffer], object]) -> list[torch.Tensor]:
        """Run one hop: push `shards`, matrices `[rows, columns]`, compute, and return the previous rank's shards.

        The result is NaN if a wait failed. Without shards it only computes. Collective.
        """
        if not shards:
            no_buffers: dict[str, torch.Tensor] = {}
            compute(no_buffers.__getitem__)
            return []
        rows, columns = shards[0].shape
        hop = HopProgram(self.group.world_size, rows, columns, tuple(each.dtype for each in shards))
        received = [torch.empty_like(each) for each in shards]
        program = proven_program(self.group, hop, shards[0].device, self.kernels)
        with program.call() as call:
            write_hop(call, hop, (shards, received), compute)
            for each in received:
                call.rank_void(each)
        return received
