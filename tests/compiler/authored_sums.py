"""Compiled kernels whose results are added up chunk by chunk, by template and by hand: right on CPU ranks.

Run by test_authored.py in a process of its own, as authored_kernels.py.
"""

from __future__ import annotations

import pytest

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import overweave as ow  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from tests.compiler.authored_kernels import (  # noqa: E402
    CALLS,
    exchanged_matmul,
    persistent_matmul,
    reduced_matmul,
    scattered_matmul,
)
from tests.ranks import run_ranks  # noqa: E402


@pytest.mark.parametrize(
    ("template", "world_size"), [("mesh pieces=1", 3), ("ring col_pieces=2", 4), ("double_ring", 3), ("islands", 4)]
)
def test_a_scattered_matmul_is_right(template: str, world_size: int):
    """Partials and sums under way are rounded to bfloat16: by 1 from 256 on."""
    found = run_ranks(scattered_matmul, world_size, f"reduce_scatter.{template}", 32 * world_size, False)
    assert max(error for errors in found for error in errors) <= 2.0


@pytest.mark.parametrize(
    ("template", "world_size"), [("mesh", 2), ("ring pieces=1", 3), ("double_ring", 2), ("islands", 4)]
)
def test_an_all_reduced_matmul_is_right_and_alike(template: str, world_size: int):
    found = run_ranks(reduced_matmul, world_size, f"all_reduce.{template}")
    assert len({str(errors) for errors in found}) == 1
    assert max(error for errors in found for error in errors) <= 2.0


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [
        ("reduce_scatter.scatter mover=copy_kernel", 2),
        ("reduce_scatter.mesh mover=bulk_kernel", 3),
        ("reduce_scatter.mesh mover=tiles", 2),
        ("reduce_scatter.islands mover=tiles", 4),
    ],
)
def test_kernels_carry_partials(schedule: str, world_size: int):
    found = run_ranks(scattered_matmul, world_size, schedule, 32 * world_size, False)
    assert max(error for errors in found for error in errors) <= 2.0


@pytest.mark.parametrize(
    ("schedule", "rows", "world_size"),
    [
        ("reduce_scatter.scatter", 100, 3),
        ("reduce_scatter.scatter mover=copy_kernel pieces=2", 37, 2),
        ("reduce_scatter.ring", 67, 4),
        ("reduce_scatter.islands", 7, 4),
    ],
)
def test_shards_need_not_be_whole_blocks(schedule: str, rows: int, world_size: int):
    """A tile of 16 rows has rows of two ranks then, or of all."""
    found = run_ranks(scattered_matmul, world_size, schedule, rows, False)
    assert max(error for errors in found for error in errors) <= 2.0


@pytest.mark.parametrize("schedule", ["all_reduce.two_shot", "all_reduce.mesh"])
def test_sums_of_any_rows_reach_all_ranks(schedule: str):
    found = run_ranks(reduced_matmul, 3, schedule, 100)
    assert len({str(errors) for errors in found}) == 1
    assert max(error for errors in found for error in errors) <= 2.0


def mixed() -> list[float]:
    """Rank 0's partials go by a kernel, rank 1's are stored at peers, rank 2's are the copy engine's."""
    movers = ("copy_kernel", "tiles", "copy_engine")
    moves = [
        ow.Put(rank, owner, ow.Chunk((32 * owner, 32 * owner + 32)), mover=movers[rank])  # type: ignore[arg-type]
        for step in (1, 2)
        for rank in range(3)
        for owner in [(rank + step) % 3]
    ]
    return scattered_matmul(ow.Reduction(3, tuple(moves)), 96, False)  # type: ignore[arg-type]


def test_every_rank_may_have_its_own_back_end():
    found = run_ranks(mixed, 3)
    assert max(error for errors in found for error in errors) <= 2.0


def blocks_by_hand() -> list[float]:
    """All-to-all, matmul, all-to-all, each block in two chunks and two lanes."""
    ranks = resolve(None).world_size
    pairs = [(rank, (rank + step) % ranks) for step in range(1, ranks) for rank in range(ranks)]
    moves = tuple(
        ow.Put(rank, peer, ow.Chunk((32 * peer + low, 32 * peer + low + 16)), lane=low // 16)
        for rank, peer in pairs
        for low in (0, 16)
    )
    return exchanged_matmul({"A": ow.AllToAll(ranks, moves), "C": ow.AllToAll(ranks, moves, sends=True)})  # type: ignore[dict-item]


def test_blocks_written_by_hand():
    assert run_ranks(blocks_by_hand, 3) == [[0.0] * CALLS] * 3


def blocks_partly_by_the_library() -> list[float]:
    """The heads of all blocks by its all-to-all, before the matmul and behind it, the rest beside the tiles."""
    ranks = resolve(None).world_size
    heads = ow.Collective(tuple(ow.Chunk((32 * block, 32 * block + 16)) for block in range(ranks)))
    tails = tuple(
        ow.Put(rank, peer, ow.Chunk((32 * peer + 16, 32 * peer + 32)))
        for rank in range(ranks)
        for peer in range(ranks)
        if peer != rank
    )
    sides = ow.AllToAll(ranks, (heads, *tails)), ow.AllToAll(ranks, (*tails, heads), sends=True)
    return exchanged_matmul(dict(zip("AC", sides, strict=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_library_may_carry_a_part_of_blocks(world_size: int):
    assert run_ranks(blocks_partly_by_the_library, world_size) == [[0.0] * CALLS] * world_size


def test_sums_of_eight():
    found = run_ranks(scattered_matmul, 8, "reduce_scatter.islands island=4", 128, False)
    assert max(error for errors in found for error in errors) <= 4.0


def test_a_persistent_kernel_between_two_chunk_schedules():
    found = run_ranks(persistent_matmul, 2, "reduce_scatter.double_ring", "C", 64)
    assert max(error for errors in found for error in errors) <= 2.0
    found = run_ranks(scattered_matmul, 3, {"A": "all_gather.ring", "C": "reduce_scatter.ring"}, 96, True)
    assert max(error for errors in found for error in errors) <= 2.0


def partly_by_the_library(everywhere: bool) -> list[float]:
    """The library sums the head of every shard behind the tiles, its ring the rest beside them."""
    ranks = resolve(None).world_size
    moves: list[ow.Put | ow.Sum | ow.Collective] = [
        ow.Collective(tuple(ow.Chunk((32 * owner, 32 * owner + 16)) for owner in range(ranks)))
    ]
    for owner in range(ranks):
        part, way = ow.Chunk((32 * owner + 16, 32 * owner + 32)), [(owner + step) % ranks for step in range(ranks)]
        for rank in reversed(way[1:]):
            moves += [ow.Sum(rank, part)] if rank != way[-1] else []
            moves.append(ow.Put(rank, (rank - 1) % ranks, part))
        if everywhere:
            moves.append(ow.Sum(owner, part))
            moves += [ow.Put(owner, peer, part, lane=1) for peer in way[1:]]
    run = reduced_matmul if everywhere else lambda how: scattered_matmul(how, 32 * ranks, False)
    return run(ow.Reduction(ranks, tuple(moves), everywhere))  # type: ignore[arg-type, no-untyped-call]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_library_may_sum_a_part(world_size: int, everywhere: bool):
    found = run_ranks(partly_by_the_library, world_size, everywhere)
    assert max(error for errors in found for error in errors) <= 2.0


def summed_by_hand(everywhere: bool) -> list[float]:
    """Down a chain to rank 0 by rows, pulled by the next and pushed on; the library adds what is cut by columns."""
    ranks = resolve(None).world_size
    moves: list[ow.Put | ow.Get | ow.Sum] = []
    for owner in range(ranks):
        part, way = (32 * owner, 32 * owner + 32), [(owner + step) % ranks for step in range(ranks - 1, -1, -1)]
        for rank, peer in zip(way, way[1:], strict=False):
            moves += [ow.Sum(rank, ow.Chunk(part))] if rank != way[0] else []
            cut = [(0, 8), (8, 24)] if owner == 1 else [None]
            moves += [ow.Put(rank, peer, ow.Chunk(part, cols)) for cols in cut[:1]]
            moves += [ow.Get(peer, rank, ow.Chunk(part, cols), lane=1) for cols in cut[1:]]
        if everywhere:
            moves.append(ow.Sum(owner, ow.Chunk(part)))
            moves += [ow.Get(peer, owner, ow.Chunk(part), lane=2) for peer in range(ranks) if peer != owner]
    run = reduced_matmul if everywhere else lambda how: scattered_matmul(how, 32 * ranks, False)
    return run(ow.Reduction(ranks, tuple(moves), everywhere))  # type: ignore[arg-type, no-untyped-call]


@pytest.mark.parametrize(("everywhere", "world_size"), [(False, 2), (False, 3), (True, 3)])
def test_sums_written_by_hand(everywhere: bool, world_size: int):
    found = run_ranks(summed_by_hand, world_size, everywhere)
    assert max(error for errors in found for error in errors) <= 2.0
