"""What a tile program retires: gone on a CPU, a Retire on paper, and refused where it is no own part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overweave.errors import InputError
from overweave.ir.schedule import Retire
from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileCall, TileProgram
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Declared, SymmetricBuffer
from tests.ranks import run_ranks

RANKS = 2
DECLARED = Declared({"x": SymmetricBuffer(2, 4, torch.float32)}, {"told": TileChannel(Tiles(RANKS, 1, 1, 1, RANKS))})


def write(call: TileCall, given: Any, kept: Any) -> None:
    call.rank_copy_data(given, call.part("x"))
    call.rank_retire(call.part("x")[0:1])
    call.rank_copy_data(call.part("x"), kept)


def kept() -> list[list[float]]:
    program = TileProgram(DECLARED.buffers, DECLARED.channels, None, torch.device("cpu"), has_kernels=False)
    found = torch.zeros(2, 4)
    with program.call() as call:
        write(call, torch.ones(2, 4), found)
    for part in (lambda: call.part("x", 1 - dist.get_rank()), lambda: torch.ones(2, 4)):
        with pytest.raises(InputError, match="part of an own buffer"):
            call.rank_retire(part())  # type: ignore[arg-type]
    return found.sum(1).isnan().tolist()  # type: ignore[return-value]


def test_what_is_retired_is_no_number_on_a_cpu():
    assert run_ranks(kept, RANKS) == [[True, False]] * RANKS


def test_it_is_a_retire_on_paper():
    callers = {name: CallersMatrix(2, 4, "x", is_result=name == "kept") for name in ("given", "kept")}
    schedule = tile_schedule("retiring", DECLARED, callers, RANKS, write)
    retired = [each for each in schedule.operations if isinstance(each, Retire)]
    assert [str(each.regions[0]) for each in retired] == [f"x@{rank}[0:1,0:4]" for rank in range(RANKS)]
