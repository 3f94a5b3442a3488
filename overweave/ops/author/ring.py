"""Matrices that ranks pass on in a ring, in bounded memory: one call of one program for each hop.

A hop pushes what a rank holds to the next rank, computes meanwhile, and keeps what the rank before has sent. Symmetric
memory has room for what one rank holds: calls give and take credits, so that no rank sends before the next has kept
what came before. Private memory has two such rooms, which hops use by turns.
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

COLUMNS_ON_PAPER = 8


class HopProgram(NamedTuple):
    """A program: of matrices `[rows, columns]`, as many as dtypes, that each rank sends to the next."""

    ranks: int
    rows: int
    columns: int
    dtypes: tuple[torch.dtype, ...]

    def declared(self) -> Declared:
        """What peers address."""
        buffers = [SymmetricBuffer(self.rows, self.columns, dtype) for dtype in self.dtypes]
        named = {f"hop_{index}": each for index, each in enumerate(buffers)}
        return Declared(named, {"arrived": TileChannel(Tiles(self.ranks, 1, 1, 1, self.ranks))})

    def schedule(self) -> Schedule:
        """The program on paper: each rank has its shard first, and then that of the rank before."""
        paper = self._replace(columns=COLUMNS_ON_PAPER, dtypes=(torch.float32,) * len(self.dtypes))
        shard = partial(CallersMatrix, self.ranks * self.rows, COLUMNS_ON_PAPER, is_shard=True)
        indices = range(len(self.dtypes))
        callers = {f"sent_{index}": shard(f"x{index}") for index in indices}
        callers |= {f"kept_{index}": shard(f"x{index}", is_result=True, shift=1) for index in indices}
        return tile_schedule("ring.hop", paper.declared(), callers, self.ranks, paper._on_paper)

    def _on_paper(self, call: TileCall, **matrices: Any) -> None:
        sent, kept = ([each for name, each in matrices.items() if side in name] for side in ("sent", "kept"))
        write_hop(call, self, (sent, kept), lambda own: None)


def write_hop(
    call: TileCall, hop: HopProgram, matrices: tuple[list[Any], list[Any]], compute: Callable[[OwnBuffer], object]
) -> None:
    """A call. matrices: what is sent, and where what has come is kept. compute: meanwhile, on what is sent."""
    (sent, kept), rank = matrices, call.rank
    following, before = (rank + 1) % hop.ranks, (rank - 1) % hop.ranks
    copies, buffers = call.queue("copies"), list(hop.declared().buffers)
    for name, held in zip(buffers, sent, strict=True):
        copies.rank_copy_data(held, call.part(name, following))
    copies.rank_notify("arrived", rank, following)
    reads = tuple(Uses(held, f"x{index}", rank * hop.rows) for index, held in enumerate(sent) if isinstance(held, Part))
    call.rank_compute("piece", compute, reads)
    call.rank_wait("arrived", before)
    for name, place in zip(buffers, kept, strict=True):
        call.rank_copy_data(call.part(name), place)


class MatrixRing(NamedTuple):
    """The hops of a call of a group. kernels: of all that it computes."""

    group: Group
    kernels: Kernels

    def passed_on(self, held: list[torch.Tensor], compute: Callable[[OwnBuffer], object]) -> list[torch.Tensor]:
        """What the rank before held, once this one has computed: matrices `[rows, columns]`, or none at all."""
        if not held:
            nowhere: dict[str, torch.Tensor] = {}
            compute(nowhere.__getitem__)
            return []
        rows, columns = held[0].shape
        hop = HopProgram(self.group.world_size, rows, columns, tuple(each.dtype for each in held))
        kept = [torch.empty_like(each) for each in held]
        program = proven_program(self.group, hop, held[0].device, self.kernels)
        with program.call() as call:
            write_hop(call, hop, (held, kept), compute)
            for each in kept:
                call.rank_void(each)
        return kept
