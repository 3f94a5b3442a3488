"""Plans that only a library runs: with counts, each call exchanges the rows that are filled."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from overweave.ir.blocks import Blocks
from overweave.ir.counts import COUNTS
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Region
from overweave.memory.group import resolve
from overweave.runtime.library.calls import LibraryRun
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

BLOCK, N, K = 4, 8, 16
PROBLEM = Problem(operator="all_to_all_matmul", m=4, n=3, k=3, world_size=2, dtype="float32")
WAYS = [[[4, 4], [4, 4]], [[1, 3], [0, 2]], [[0, 0], [0, 4]]]  # counts[source][target]


def counted() -> list[int]:
    """For `run_ranks`: the calls of one bound plan that give other rows than the peers have sent."""
    group, wrong = resolve(None), []
    ranks, rank = group.world_size, group.rank
    shape = {"m": ranks * BLOCK, "n": N, "k": K, "world_size": ranks, "dtype": "float32", "counted": True}
    problem = Problem(operator="all_to_all_matmul", **shape)
    tensors = {"x": torch.zeros(ranks * BLOCK, K), "w": torch.ones(K, N), "y": torch.empty(ranks * BLOCK, N)}
    run = LibraryRun(build("all_to_all_matmul.sequential", problem, {}), group, tensors)
    for call, counts in enumerate(WAYS):
        # Each row names the rank that it is from and the one that it is for.
        sent = [torch.full((count, K), 10.0 * rank + target) for target, count in enumerate(counts[rank])]
        tensors["x"][: sum(counts[rank])] = torch.cat(sent)
        found = {**tensors, COUNTS: torch.tensor(counts)}
        run(found)
        wanted = torch.cat([torch.full((each[rank], N), K * (10.0 * by + rank)) for by, each in enumerate(counts)])
        wrong += [call] * (not torch.equal(found["y"][: len(wanted)], wanted))
    return wrong


def test_counts_of_each_call():
    assert run_ranks(counted, 2) == [[]] * 2


def turned_twice() -> bool:
    """For `run_ranks`: whether rows that are exchanged, by way of blocks in another order, and exchanged again are what
    they were. Each member has two blocks of one row."""
    group = resolve(None)
    ranks, rank = range(group.world_size), group.rank
    total, cols = 2 * len(ranks), (0, 3)
    blocks = Blocks(1, 3, tuple((at + 2) % total for at in range(total)))

    def part(name: str, row: int) -> Region:
        return Region(name, rank, (row, row + 1), cols)

    own = tuple(part("x", row) for row in range(total))
    landing = tuple(part("sent", (row - 2) % total) for row in range(total))
    back = tuple(part("got", row) for row in range(total))
    pairs = ((own, landing), (landing, back))
    operations = tuple(
        Collective(
            name=f"turn.{at}", rank=rank, queue="main", function="all_to_all", label=f"turn.{at}", ranks=tuple(ranks),
            sources=sources, destinations=destinations,
        )
        for at, (sources, destinations) in enumerate(pairs)
    )  # fmt: skip
    buffers = (
        Buffer("x", total, 3, "input"), Buffer("sent", total, 3, "local", blocks=blocks),
        Buffer("got", total, 3, "output"), Buffer("w", 3, 3, "input"),
    )  # fmt: skip
    plan = build("all_to_all_matmul.sequential", PROBLEM, {})
    schedule = replace(plan.schedule, world_size=len(ranks), buffers=buffers, operations=operations)
    x = torch.arange(3.0 * total).view(total, 3) + 100 * rank
    found = {"x": x, "w": torch.ones(3, 3), "got": torch.empty(total, 3)}
    LibraryRun(replace(plan, schedule=schedule), group, found)(found)
    return torch.equal(found["got"], x)


def test_blocks_in_another_order():
    assert all(run_ranks(turned_twice, 2))
    assert all(run_ranks(turned_twice, 3))
