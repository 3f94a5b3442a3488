"""Partitions of waves in the tuner's space: which are offered, and how they serve other sizes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.tuner.model.choose import choose, explain_choice
from overweave.tuner.model.rank import rank_candidates
from overweave.tuner.space.space import Candidate, candidate, full_options, is_member
from overweave.tuner.space.target import Target
from overweave.tuner.space.waves import (
    MOST_FIRST,
    MOST_LAST,
    fit_groups,
    format_partition,
    grouped_matmul,
    parse_partition,
    scale_partition,
    wave_families,
)

GPU, MACHINE = Target("cuda", name="NVIDIA H200", is_hopper=True), load("h200x4")
SUMS = [name for name, record in OPERATORS.items() if record.adds]
SIZE = Problem(operator=SUMS[0], m=2048, n=4096, k=2048, world_size=2, dtype="bfloat16")


def sized(operator: str, **changes: object) -> Problem:
    return replace(SIZE, operator=operator, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [*SUMS, "matmul_all_to_all"])
def test_the_best_partitions_can_be_built_and_are_weighed(operator: str):
    problem = sized(operator)
    (family,) = wave_families(problem, GPU, MACHINE, is_thorough=True)
    members = list(family.members())
    assert 1 <= len(members) <= 3
    for what in members:
        groups = parse_partition(str(dict(what.options)["groups"]))
        assert groups[0] <= MOST_FIRST
        assert groups[-1] <= MOST_LAST
        plan = build(what.schedule(operator), problem, full_options(problem, GPU, what), rank=0)
        assert len({one.label for one in plan.schedule.operations if hasattr(one, "label")}) == len(groups)
        assert is_member(operator, what)
    known = {each.candidate: each for each in rank_candidates(problem, GPU)}
    assert all(known[what].predicted_us for what in members)
    assert {str(what) for what in members} <= {each.candidate for each in explain_choice(problem, GPU).weights}


def test_what_cannot_gain_by_algorithm_1_is_not_simulated_before_a_first_call():
    assert list(wave_families(sized(SUMS[0]), GPU, MACHINE, is_thorough=False)) == []
    curves = [
        replace(curve, points=tuple((size, rate / 4) for size, rate in curve.points)) for curve in MACHINE.collectives
    ]
    slow, long = replace(MACHINE, collectives=tuple(curves)), sized(SUMS[0], m=16384, k=4096)
    assert list(wave_families(long, GPU, slow, is_thorough=False))


@pytest.mark.parametrize("changes", [{"m": 0}, {"world_size": 1}, {"m": 257}, {"dtype": "float32"}])
def test_where_there_are_no_waves_none_are_offered(changes: dict[str, object]):
    problem = sized(next(name for name in SUMS if OPERATORS[name].scatters), **changes)
    assert list(wave_families(problem, GPU, MACHINE, is_thorough=True)) == []
    assert choose(problem, GPU).plan


def test_operators_without_groups_have_none():
    grouped = {method.operator for method in METHODS.values() if method.takes("groups")}
    assert {name for name, record in OPERATORS.items() if record.adds} < grouped
    for name in set(OPERATORS) - grouped:
        assert list(wave_families(sized(name), GPU, MACHINE, is_thorough=True)) == []


def test_groups_serve_another_number_of_waves_by_their_shares():
    what = candidate("waves", {"groups": "1+2+2", "library_sms": 24})
    for m in (1024, 4096, 16384):
        problem = sized(SUMS[0], m=m)
        fitted = fit_groups(problem, GPU, what)
        grouped = grouped_matmul(problem, GPU, what)
        assert grouped is not None
        waves = -(-grouped.tiles // grouped.per_wave)
        assert dict(fitted.options) == {
            "groups": format_partition(scale_partition((1, 2, 2), waves)),
            "library_sms": 24,
        }
        assert fit_groups(problem, GPU, fitted) == fitted
        build(fitted.schedule(problem.operator), problem, full_options(problem, GPU, fitted), rank=0)
    other = Candidate("sequential")
    assert fit_groups(SIZE, GPU, other) is other
    uneven = sized(next(name for name in SUMS if OPERATORS[name].scatters), m=2049, world_size=4)
    assert dict(fit_groups(uneven, GPU, what).options) == {"library_sms": 24}


@pytest.mark.parametrize(
    ("plan", "options", "is_one"),
    [
        ("waves", {"groups": "1+2", "library_sms": 24}, True),
        ("waves", {"groups": "1+2"}, False),
        ("sequential", {"groups": "1+2", "library_sms": 24}, False),
        ("nothing", {"groups": "1+2", "library_sms": 24}, False),
    ],
)
def test_files_may_hold_any_partition_of_a_method_that_has_groups(plan: str, options: dict[str, object], is_one: bool):
    assert is_member(SUMS[0], candidate(plan, options)) == is_one  # type: ignore[arg-type]
