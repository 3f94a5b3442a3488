"""`matmul_all_to_all`: rows in the order of a routing table, equal and uneven blocks, exact; and bad input."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import overweave as ow
from campaigns.exact import routings
from overweave.errors import InputError, RankMismatch
from overweave.ir.problem import Problem
from overweave.memory.group import resolve
from overweave.ops.call.prepared import calls_of
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

K, N = 16, 8


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_routings_are_exact(world_size: int):
    """Of both all-to-alls, in every plan, down to one row on one rank."""
    assert run_ranks(routings.tried, world_size, 40, 1) == [[]] * world_size


def returned() -> list[list[float]]:
    """Tokens 0 to 5 of each rank go to ranks by turns, the last rank has none: each comes back named."""
    rank, ranks = resolve(None).rank, resolve(None).world_size
    rows = 0 if rank == ranks - 1 else 6
    x = torch.arange(rows).float()[:, None].expand(-1, K).contiguous() + 10 * rank
    tokens = torch.arange(rows).argsort(stable=True)
    tokens = torch.cat([tokens[tokens % ranks == to] for to in range(ranks)])
    counts = [[(0 if source == ranks - 1 else 6 // ranks) for _ in range(ranks)] for source in range(ranks)]
    w = torch.full((K, N), 1.0 / K)
    return [
        ow.matmul_all_to_all(x, w, tokens=given, counts=counts)[:, 0].tolist() for given in (tokens, tokens.tolist())
    ]


def test_rows_go_where_the_table_says():
    told = run_ranks(returned, 3)
    for rank, (as_tensor, as_list) in enumerate(told):
        assert as_tensor == as_list == [rank, 3 + rank, 10 + rank, 13 + rank]


ALIKE = [[4, 4], [4, 4]]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a token twice": ({"tokens": [0, 1, 2, 3, 4, 5, 6, 6], "counts": ALIKE}, "6 is there twice"),
    "out of range": ({"tokens": [0, 1, 2, 3, 4, 5, 6, 8], "counts": ALIKE}, "8 is among them, and x has 8 rows"),
    "below zero": ({"tokens": [0, 1, 2, 3, 4, 5, 6, -1], "counts": ALIKE}, "-1 is among them"),
    "fewer than counted": ({"tokens": [0, 1, 2], "counts": ALIKE}, "has 3 rows, and its counts are"),
    "no whole blocks": ({"tokens": [0, 1, 2]}, "no 2 equal blocks"),
    "a matrix": ({"tokens": torch.arange(8)[None], "counts": ALIKE}, "tokens, rows of x block by block"),
    "floats": ({"tokens": torch.arange(8.0), "counts": ALIKE}, "torch.float32"),
    "a number": ({"tokens": 3, "counts": ALIKE}, "got int"),
}


def refused() -> list[str]:
    x, w, told = torch.ones(8, K), torch.ones(K, N), []
    calls = [lambda given=given: ow.matmul_all_to_all(x, w, **given) for given, _ in BAD.values()]
    for call in (*calls, lambda: ow.all_to_all_matmul(x, w, tokens=list(range(8)))):  # type: ignore[arg-type]
        with pytest.raises(InputError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_bad_tables_are_refused_with_a_cure():
    patterns = [*(pattern for _, pattern in BAD.values()), "takes no such keyword"]
    for told in run_ranks(refused, 2):
        for text, pattern in zip(told, patterns, strict=True):
            assert re.search(pattern, text), (text, pattern)


def one_bad_table() -> str:
    tokens = [0, 0] if resolve(None).rank == 1 else [1, 0]
    with pytest.raises((InputError, RankMismatch)) as caught:
        ow.matmul_all_to_all(torch.ones(2, K), torch.ones(K, N), tokens=tokens)
    return type(caught.value).__name__


def test_a_table_that_one_rank_refuses_is_an_error_on_its_peers():
    assert run_ranks(one_bad_table, 2) == ["RankMismatch", "InputError"]


def in_waves(words: str, rows: int) -> list[object]:
    """Whether equal blocks are exact in groups of waves, and how many library calls there are."""
    group = resolve(None)
    rank, ranks = group.rank, range(group.world_size)
    chance = torch.Generator().manual_seed(5)
    x = [torch.randint(-2, 3, (rows * len(ranks), K), generator=chance).float() for _ in ranks]
    w = [torch.randint(-2, 3, (K, 48), generator=chance).float() for _ in ranks]
    plan = f"waves {words} block_m=16 block_n=16"
    y = ow.matmul_all_to_all(x[rank], w[rank], plan=plan)
    received = [x[source][rank * rows : (rank + 1) * rows] @ w[source] for source in ranks]
    built = build("matmul_all_to_all.waves", calls_of(group).latest().problem, calls_of(group).latest().choice.options)
    return [torch.equal(y, torch.cat(received)), sum("all_to_all" in one.name for one in built.schedule.of_rank(rank))]


@pytest.mark.parametrize(
    ("world_size", "words", "rows", "calls"),
    [(2, "", 64, 3), (2, "groups=1+2", 64, 2), (3, "", 64, 4), (3, "groups=1+2+3", 64, 3), (2, "", 33, 1)],
)
def test_groups_of_waves_are_exact(world_size: int, words: str, rows: int, calls: int):
    """Of 8 SMs each of two members has 4 tiles at once, of three 2, and each has 12. Blocks of 33 rows go at once."""
    told = run_ranks(in_waves, world_size, f"{words} sms=16 library_sms=8", rows)
    assert told == [[True, calls]] * world_size


def test_groups_of_blocks_that_are_no_whole_tiles_are_refused():
    problem = Problem(operator="matmul_all_to_all", m=66, n=48, k=16, world_size=2, dtype="float32")
    with pytest.raises(InputError, match="33 rows are no whole tiles of 16"):
        build("matmul_all_to_all.waves", problem, {"groups": "1+1", "block_m": 16, "block_n": 16})
