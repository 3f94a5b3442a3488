"""Work of torch in calls on CPU ranks: what it waits for."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileProgram
from overweave.runtime.handwritten import OwnBuffer, SymmetricBuffer
from tests.ranks import run_ranks


def rows_that_arrive() -> list[float]:
    """Rank 1 reads what rank 0 sends late."""
    rank, found = dist.get_rank(), list[float]()
    told = TileChannel(Tiles(2, 1, 1, 1, 2))
    program = TileProgram({"rows": SymmetricBuffer(2, 8, torch.float32)}, {"told": told}, has_kernels=False)

    def read(own: OwnBuffer, channel: object) -> None:
        assert channel is None
        found.extend(own("rows")[:, 0].tolist())

    with program.call() as call:
        call.rank_compute("late", lambda own: time.sleep(0.0 if rank else 0.2))
        for peer in range(2):
            call.rank_copy_data(torch.full((1, 8), rank + 1.0), call.part("rows", peer)[rank : rank + 1])
            call.rank_notify("told", rank, peer)
        call.rank_compute_arriving("read", read, "told", dict.fromkeys(range(2), ((), ())))
    return found


def test_work_that_waits_by_tiles_begins_on_a_cpu_when_all_shards_are_there():
    assert run_ranks(rows_that_arrive, 2) == [[1.0, 2.0]] * 2
