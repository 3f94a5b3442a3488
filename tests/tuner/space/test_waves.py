"""Partitions of waves in the tuner's space: which are offered, and how they serve other sizes."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from campaigns.waves.wave_partitions import every_partition
from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.tuner.model.choose import choose, explain_choice
from overweave.tuner.model.rank import rank_candidates
from overweave.tuner.space import waves as partitions
from overweave.tuner.space.space import Candidate, candidate, full_options, is_member
from overweave.tuner.space.target import Target
from overweave.tuner.space.waves import (
    MOST_COMPARED,
    MOST_FIRST,
    MOST_LAST,
    Partition,
    WaveCosts,
    WaveGroups,
    best_partitions,
    fit_groups,
    format_partition,
    grouped_matmul,
    parse_partition,
    predicted_us,
    scale_partition,
    wave_costs,
    wave_families,
)
from tests.clock import ends_within

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


# Algorithm 1 as a shortest path: what enumeration finds, in less time; its bounds; and what it is told.


def all_partitions(waves: int) -> list[Partition]:
    """Every partition that the search chooses from."""
    first, last = partitions.MOST_FIRST, partitions.MOST_LAST
    return [each for each in every_partition(waves) if each[0] <= first and each[-1] <= last]


def random_costs(waves: int, chance: random.Random) -> WaveCosts:
    """A latency and a rate; the last wave has some of a wave's tiles."""
    latency_us, rate = chance.uniform(0, 40), chance.uniform(1, 60)
    lacking = chance.random()
    return WaveCosts(
        chance.uniform(5, 60),
        tuple(latency_us + rate * size for size in range(1, waves + 1)),
        tuple(latency_us + rate * (size - lacking) for size in range(1, waves + 1)),
    )


@pytest.mark.parametrize("waves", range(1, 11))
def test_the_path_is_what_enumeration_finds(waves: int):
    chance = random.Random(waves)
    for _ in range(20):
        costs = random_costs(waves, chance)
        known = sorted(predicted_us(partition, costs) for partition in all_partitions(waves))
        found = best_partitions(costs)
        assert [us for us, _ in found] == pytest.approx(known[:MOST_COMPARED])
        assert [predicted_us(partition, costs) for _, partition in found] == pytest.approx(known[:MOST_COMPARED])
        assert len({partition for _, partition in found}) == len(found) == min(MOST_COMPARED, len(known))


@pytest.mark.parametrize("waves", range(1, 13))
def test_the_first_group_and_the_last_are_small(waves: int):
    every = all_partitions(waves)
    assert len(set(every)) == len(every)
    assert all(sum(groups) == waves and groups[0] <= MOST_FIRST and groups[-1] <= MOST_LAST for groups in every)
    for _, groups in best_partitions(random_costs(waves, random.Random(1)), most=10**6 if waves < 7 else MOST_COMPARED):
        assert groups in every


def test_without_bounds_all_partitions_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    for name in ("MOST_FIRST", "MOST_LAST"):
        monkeypatch.setattr(partitions, name, 99)
    assert len(all_partitions(8)) == 2**7


def test_one_wave_after_the_other_is_followed_by_hand():
    """Waves of 10 us. 1+2: the first collective runs from 10 to 15, the second from 30 on, for 9."""
    costs = WaveCosts(10.0, (5.0, 9.0, 13.0), (5.0, 9.0, 13.0))
    assert predicted_us((1, 2), costs) == 39.0
    assert predicted_us((1, 1, 1), costs) == 35.0
    slow = WaveCosts(10.0, (30.0, 32.0, 34.0), (30.0, 32.0, 34.0))
    assert predicted_us((1, 1, 1), slow) == 100.0
    assert best_partitions(slow)[0] == (72.0, (1, 2))


def test_of_equal_times_fewer_calls_are_taken():
    free = WaveCosts(10.0, (0.0,) * 4, (0.0,) * 4)
    assert [len(groups) for _, groups in best_partitions(free)] == [2, 2, 3]


def test_no_waves_have_no_partition():
    assert best_partitions(WaveCosts(1.0, (), ())) == []


@pytest.mark.parametrize("partition", [(), (1, 1), (4,), (3, 0), (5, -2)])
def test_a_partition_of_other_waves_is_refused(partition: tuple[int, ...]):
    with pytest.raises(InputError, match="3 waves"):
        predicted_us(partition, WaveCosts(1.0, (1.0,) * 3, (1.0,) * 3))


def test_128_waves_take_less_than_5_ms():
    costs = random_costs(128, random.Random(0))
    best_partitions(costs)
    ends_within(5e-3, lambda: best_partitions(costs))


@pytest.mark.parametrize(("waves", "shares"), [(10, (2, 4, 4)), (5, (1, 2, 2)), (2, (1, 1)), (1, (1,)), (7, (1, 3, 3))])
def test_a_partition_of_a_near_size_keeps_its_shares(waves: int, shares: tuple[int, ...]):
    assert scale_partition((1, 2, 2), waves) == shares


def test_costs_are_those_of_the_machine():
    """132 SMs compute 528 tiles in waves of 116; the last one has 64 tiles."""
    machine, config = load("h200x4"), MatmulConfig(kernel="hopper", block_m=128, block_n=256)
    asked = WaveGroups(
        tiles=528, per_wave=116, config=config, k=4096, dtype="bfloat16", function="all_reduce", world_size=4
    )
    costs = wave_costs(machine, asked)
    assert costs.waves == 5
    rate = machine.tile("hopper", 128, 256)
    assert costs.wave_us == pytest.approx(2 * 128 * 256 * 4096 * 132 / rate.tflops / 1e6 + rate.overhead_us)
    assert costs.last_us[0] < costs.group_us[0] < costs.group_us[4]
    bytes_of_all = 528 * 128 * 256 * 2
    wanted = machine.collective_us("all_reduce", 4, bytes_of_all) - machine.latency.call.us
    assert costs.last_us[-1] == pytest.approx(wanted)
