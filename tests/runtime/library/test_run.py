"""Plans that only a library runs: with counts, each call exchanges the rows that are filled."""

from __future__ import annotations

import torch

from overweave.ir.counts import COUNTS
from overweave.ir.problem import Problem
from overweave.memory.group import resolve
from overweave.runtime.library.run import LibraryRun
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

BLOCK, N, K = 4, 8, 16
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
