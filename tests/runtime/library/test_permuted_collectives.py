"""Library calls of permuted blocks move memory as it lies, and the emulation moves the same."""

from __future__ import annotations

import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.blocks import Blocks, memory_runs, stored_shape
from overweave.ir.schedule import Buffer, Collective, Copy, Region
from overweave.memory.group import Group, create_subgroups, resolve
from overweave.runtime.host.emulate import CallMemory, start_collective
from overweave.runtime.library.calls import permuted_collective_call
from tests.ranks import run_ranks

HEIGHT, WIDE = 2, 3
FUNCTIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def whole_of(members: int) -> Buffer:
    """Two columns of blocks for each member, of which the last ones are narrower: first the right ones of all."""
    places = [0] * (2 * members)
    for member, col in product(range(members), range(2)):
        places[2 * member + col] = members * (1 - col) + member
    return Buffer("whole", members * HEIGHT, 2 * WIDE - 1, "local", blocks=Blocks(HEIGHT, WIDE, tuple(places)))


SHARE = Buffer("share", HEIGHT, 2 * WIDE - 1, "local", blocks=Blocks(HEIGHT, WIDE, (1, 0)))


def moved(function: str, rank: int, members: int, col: int) -> Collective:
    """A rank's part of what exchanges one column of blocks."""
    cols = (0, WIDE) if col == 0 else (WIDE, 2 * WIDE - 1)
    parts = tuple(Region("whole", rank, (at * HEIGHT, (at + 1) * HEIGHT), cols) for at in range(members))
    other, own = tuple(replace(part, buffer="other") for part in parts), (Region("share", rank, (0, HEIGHT), cols),)
    ends = {"all_gather": (own, parts), "reduce_scatter": (parts, own), "all_reduce": (parts, parts),
            "all_to_all": (parts, other)}  # fmt: skip
    sources, destinations = ends[function]
    return Collective(
        name=function, rank=rank, queue="main", function=function, label=function,  # type: ignore[arg-type]
        ranks=tuple(range(members)), sources=sources, destinations=destinations,
    )  # fmt: skip


def in_memory(buffer: Buffer, matrix: torch.Tensor) -> torch.Tensor:
    """A buffer's memory with this matrix in it."""
    memory = torch.full(stored_shape(buffer), -1.0, dtype=matrix.dtype)
    for run in memory_runs(buffer.blocks, (buffer.rows, buffer.cols), ((0, buffer.rows), (0, buffer.cols))):
        place = memory.as_strided((run.rows, run.cols), (run.pitch, 1), run.start)
        place.copy_(matrix[run.row : run.row + run.rows, run.col : run.col + run.cols])
    return memory


def matrix_of(buffer: Buffer, memory: torch.Tensor) -> torch.Tensor:
    found = torch.empty(buffer.rows, buffer.cols, dtype=memory.dtype)
    for run in memory_runs(buffer.blocks, (buffer.rows, buffer.cols), ((0, buffer.rows), (0, buffer.cols))):
        place = memory.as_strided((run.rows, run.cols), (run.pitch, 1), run.start)
        found[run.row : run.row + run.rows, run.col : run.col + run.cols] = place
    return found


def numbers(rank: int, rows: int) -> torch.Tensor:
    """Each element names its rank, its row and its column."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(2 * WIDE - 1), indexing="ij")
    return (1000.0 * rank + 10 * row + col).to(torch.float32)


def wrong_calls(function: str) -> list[str]:
    """Which of the library's call and the emulation's leave something else in the rows than the collective does."""
    group = resolve(None)
    rank, members = group.rank, group.world_size
    whole = whole_of(members)
    buffers = {"whole": whole, "other": replace(whole, name="other"), "share": SHARE}
    shares, wholes = ([numbers(one, rows) for one in range(members)] for rows in (HEIGHT, members * HEIGHT))
    cut = slice(rank * HEIGHT, (rank + 1) * HEIGHT)
    wanted = {
        "all_gather": lambda: torch.cat(shares),
        "reduce_scatter": lambda: sum(wholes)[cut],  # type: ignore[index]
        "all_reduce": lambda: sum(wholes),
        "all_to_all": lambda: torch.cat([one[cut] for one in wholes]),
    }[function]()
    wrong = []
    for way in ("library", "emulation"):
        memory = {
            "whole": in_memory(whole, wholes[rank]),
            "share": in_memory(SHARE, shares[rank]),
            "other": torch.full(stored_shape(whole), -2.0),
        }
        for col in (1, 0):
            part = moved(function, rank, members, col)
            create_subgroups(group, (part,))
            if way == "library":
                permuted_collective_call(part, buffers, group)(memory)
            else:
                emulate(part, group, buffers, memory)
        (name,) = {region.buffer for region in part.destinations}
        if not torch.equal(matrix_of(buffers[name], memory[name]), wanted):
            wrong.append(f"{function} by the {way}: {memory[name].tolist()}")
    return wrong


def emulate(part: Collective, group: Group, buffers: dict[str, Buffer], memory: dict[str, torch.Tensor]) -> None:
    program: Any = SimpleNamespace(buffers=buffers, callers=buffers.keys())
    slot: Any = None  # no buffer lies there
    ends = start_collective(part, group, CallMemory(program, memory, slot).call_tensors(part))
    until = time.monotonic() + 20
    while not ends() and time.monotonic() < until:
        time.sleep(0.001)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("members", [1, 2, 3])
def test_the_library_and_the_emulation_move_the_same(function: str, members: int):
    assert run_ranks(wrong_calls, members, function) == [[]] * members


def test_what_is_no_call_is_not_made():
    buffers = {"whole": whole_of(2), "share": SHARE, "other": replace(whole_of(2), name="other")}
    part = moved("all_reduce", 0, 2, 0)
    apart = replace(part, destinations=tuple(replace(one, buffer="other") for one in part.destinations))
    copied = Copy(name="c", rank=0, queue="main", sources=part.sources[:1], destinations=apart.destinations[:1])
    for operation, said in ((apart, "adds in place"), (copied, "a library's Copy addresses rows")):
        with pytest.raises(ScheduleError, match=said):
            permuted_collective_call(operation, buffers, None)  # type: ignore[arg-type]
