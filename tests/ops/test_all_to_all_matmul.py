"""`all_to_all_matmul`: equal, uneven and empty blocks, exact on every rank; one plan for all counts; bad input."""

from __future__ import annotations

import random
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

import overweave as ow
from overweave.errors import InputError, OverweaveError, RankMismatch
from overweave.ir.verify.plan import verify_plan
from overweave.memory.group import Group, resolve
from overweave.ops.call.prepared import calls_of
from overweave.schedules.catalog import catalog
from overweave.schedules.families.finer import POINTS
from tests.ranks import run_ranks

K, N, MOST = 16, 24, 9
OPERATOR = "all_to_all_matmul"
PLANS = ("sequential", "per_peer", "per_peer order=all_peers")
FINER = tuple(point.name for point in POINTS)
Rows = list[list[int]]


def block(source: int, target: int, rows: int) -> torch.Tensor:
    """What one rank sends another: small whole numbers, so that every product is exact."""
    generator = torch.Generator().manual_seed(100 * source + target)
    return torch.randint(-3, 4, (MOST, K), generator=generator)[:rows].float()


def weight(rank: int) -> torch.Tensor:
    return torch.randint(-3, 4, (K, N), generator=torch.Generator().manual_seed(rank)).float()


def is_exact(group: Group, counts: Rows, given: dict[str, Any]) -> bool:
    """Whether a call gives the products of all blocks, in the order of their ranks."""
    own, ranks = group.rank, range(group.world_size)
    x = torch.cat([block(own, target, counts[own][target]) for target in ranks])
    received = torch.cat([block(source, own, counts[source][own]) for source in ranks])
    y = ow.all_to_all_matmul(x, weight(own), **given)
    return torch.equal(y, received @ weight(own))


def routings(ranks: int) -> list[Rows]:
    """Uneven ones, some blocks empty; a rank that sends nothing, one that gets nothing, one row alone, and no row."""
    chance = random.Random(ranks)
    found = [[[chance.choice((0, 0, 1, 4, MOST)) for _ in range(ranks)] for _ in range(ranks)] for _ in range(3)]
    found.append([[0] * ranks if source == 0 else [3] * ranks for source in range(ranks)])
    found.append([[0, *[2] * (ranks - 1)] for _ in range(ranks)])
    found.append([[int((source, target) == (0, ranks - 1)) for target in range(ranks)] for source in range(ranks)])
    return [*found, [[0] * ranks] * ranks]


def tried() -> list[str]:
    group = resolve(None)
    ranks = group.world_size
    wrong = []
    for plan in (*PLANS, "push pieces=2 block_m=16", None):
        if not is_exact(group, [[4] * ranks] * ranks, {"plan": plan}):
            wrong.append(f"{plan}, equal blocks")
    for plan in (*PLANS, None):
        for counts in routings(ranks):
            if not is_exact(group, counts, {"plan": plan, "counts": counts, "most": MOST}):
                wrong.append(f"{plan}, {counts}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
def test_blocks_of_all_sizes_are_exact(world_size: int):
    assert run_ranks(tried, world_size) == [[]] * world_size


def many_routings() -> list[int]:
    """How many of 1,000 routings were exact, how often a plan was proven, and how many calls are kept."""
    group, chance = resolve(None), random.Random(0)
    with patch("overweave.ops.call.prepare.verify_plan", wraps=verify_plan) as proven:
        exact = 0
        for _ in range(1000):
            counts = torch.tensor([[chance.randrange(MOST + 1) for _ in range(2)] for _ in range(2)])
            exact += is_exact(group, counts.tolist(), {"counts": counts, "most": MOST, "plan": "per_peer"})
    return [exact, proven.call_count, len(calls_of(group))]


@pytest.mark.slow
def test_a_thousand_routings_are_one_plan_and_one_proof():
    assert run_ranks(many_routings, 2) == [[1000, 1, 1]] * 2


def test_the_bound_is_the_next_power_of_two_of_the_largest_count():
    assert run_ranks(bounds, 2) == [[8, 8, 16]] * 2


def bounds() -> list[int]:
    group, found = resolve(None), []
    for largest in (5, 8, 9):
        assert is_exact(group, [[largest, 1], [0, 2]], {"counts": ((largest, 1), (0, 2))})
        found.append(calls_of(group).latest().problem.m // 2)
    return found


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another number of ranks": ({"counts": [[1] * 3] * 3}, r"counts \[2, 2\]"),
    "no matrix": ({"counts": [4, 4]}, r"counts \[2, 2\]"),
    "floats": ({"counts": torch.ones(2, 2)}, "float32"),
    "a negative count": ({"counts": [[4, 4], [9, -1]]}, "'-1' is among them"),
    "a truth": ({"counts": [[4, 4], [True, 4]]}, "'True' is among them"),
    "fewer than are sent": ({"counts": [[4, 4], [4, 4]], "most": 3}, "a rank sends 4 rows"),
    "a bound that is no int": ({"counts": [[4, 4], [4, 4]], "most": 4.5}, "most=4.5"),
    "a bound of nothing": ({"most": 4}, "there are no counts"),
    "other rows": ({"counts": [[4, 3], [3, 4]]}, "has 8 rows, and its counts are"),
    "a kernel of whole blocks": ({"counts": [[4, 4], [4, 4]], "plan": "push"}, "multiplies whole blocks"),
}


def refused() -> list[str]:
    """What each rank says of each bad call; and of x that is no whole blocks, and of counts for another operator."""
    x, w = torch.ones(8, K), torch.ones(K, N)
    calls = [lambda given=given: ow.all_to_all_matmul(x, w, **given) for given, _ in BAD.values()]
    calls.append(lambda: ow.all_to_all_matmul(x[:7], w))
    calls.append(lambda: ow.all_gather_matmul(x, w, counts=[[4, 4], [4, 4]]))  # type: ignore[call-overload]
    told = []
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_bad_counts_are_refused_with_a_cure():
    for told in run_ranks(refused, 2):
        patterns = [*(pattern for _, pattern in BAD.values()), "no 2 equal blocks", "takes no such keyword"]
        for text, pattern in zip(told, patterns, strict=True):
            assert re.search(pattern, text), (text, pattern)


def differing(is_known: bool) -> list[str]:
    """What ranks say whose counts differ, in the first call or in a later one."""
    group = resolve(None)
    alike = [[2, 2], [2, 2]]
    given = {"most": 4, "plan": "per_peer"}
    if is_known:
        assert is_exact(group, alike, {"counts": alike, **given})
    mine = [[2, 2], [2, 2 + group.rank]]
    try:
        for _ in range(2):  # a rank that posts first learns of it at its next call, at the latest
            is_exact(group, mine, {"counts": mine, **given})
    except OverweaveError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


@pytest.mark.parametrize("is_known", [False, True])
def test_counts_that_differ_between_ranks_are_an_error_on_every_rank(is_known: bool):
    for name, told in run_ranks(differing, 2, is_known):
        assert name == RankMismatch.__name__
        assert "2,2;2,2" in told
        assert "2,2;2,3" in told


def test_a_call_that_a_rank_cannot_make_is_an_error_on_its_peers():
    assert run_ranks(short_of_rows, 2) == ["InputError", "RankMismatch"]


def short_of_rows() -> str:
    group = resolve(None)
    x = torch.ones(8 - (group.rank == 0), K)
    try:
        ow.all_to_all_matmul(x, torch.ones(K, N), counts=[[4, 4], [4, 4]])
    except OverweaveError as error:
        return type(error).__name__
    return ""


def test_the_catalog_has_its_schedules():
    known = ("sequential", "per_peer", "push", "islands", *FINER, "synth")
    assert catalog.names(OPERATOR) == tuple(f"{OPERATOR}.{name}" for name in known)
