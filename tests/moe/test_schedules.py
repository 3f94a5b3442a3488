"""Schedules of experts by name: every one is proven for every number of ranks and tokens, and says its own name."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.schedule import Collective, Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.moe.cases import ExpertsCase, RoutingStatistics
from overweave.moe.schedules import KINDS, schedule_for
from overweave.schedules.records.experts import EXPERTS, OPERATORS, PLANS

INNER = 8 * 840  # which 1 to 8 ranks split


def schedule(name: str, ranks: int = 3, tokens: int = 7) -> Schedule:
    return schedule_for(name, ExpertsCase("a", 8, INNER, "tensor", RoutingStatistics(tokens, 2, 2)), ranks)


def test_every_operator_has_every_plan():
    assert EXPERTS.names() == tuple(f"{operator}.{plan}" for operator in OPERATORS for plan in PLANS)
    assert tuple(KINDS) == OPERATORS
    for name in EXPERTS.names():
        assert schedule(name).name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS.names())
@pytest.mark.parametrize("ranks", range(1, 9))
def test_it_is_proven(name: str, ranks: int):
    for tokens in {
        0,
        1,
        ranks - 1 or 1,
        ranks,
        2 * ranks + 1,
        40,
    }:  # no tokens, ranks without, uneven shards, even ones
        verify_schedule(schedule(name, ranks, tokens)).raise_if_refused()


def broken(name: str, what: str) -> Schedule:
    """Of a sequential one, without a collective, or with one that another rank does not take part in."""
    whole = schedule(name)
    collectives = [each for each in whole.operations if isinstance(each, Collective) and each.label == what]
    gone = collectives if what.startswith("all_gather") else collectives[:1]
    return replace(whole, operations=tuple(each for each in whole.operations if each not in gone))


@pytest.mark.parametrize(
    ("operator", "what"),
    [
        ("all_gather_experts", "all_gather_tokens"),
        ("all_gather_experts", "all_gather_experts"),
        ("experts_reduce_scatter", "reduce_scatter_sums"),
        ("experts_all_reduce", "all_reduce_sums"),
        ("experts_mlp", "all_gather_slots"),
        ("experts_mlp", "reduce_scatter_sums"),
    ],
)
def test_a_sequential_schedule_without_a_collective_is_refused(operator: str, what: str):
    assert verify_schedule(broken(f"{operator}.sequential", what)).refusals


def test_an_unknown_name_and_sizes_that_ranks_do_not_split_are_refused():
    with pytest.raises(InputError, match="experts_mlp"):
        schedule("experts_mlp.ring")
    with pytest.raises(InputError, match="Choose multiples of 8"):
        schedule("experts_mlp.sequential", ranks=11)
