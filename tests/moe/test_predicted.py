"""Predicted layers of experts: beside what was measured, skewed beside even, and which plan is chosen."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.moe import predicted as module
from overweave.moe import programs
from overweave.moe.cases import ExpertsCase, Parallel, RoutingStatistics, read_experts
from overweave.moe.predicted import LayerCosts, PredictedLayer, predicted, skew_costs
from overweave.moe.schedules import schedule_for
from overweave.schedules.records.experts import PLANS, PUSH, SEQUENTIAL
from overweave.sim.realize import realize
from overweave.sim.simulate import total_us
from overweave.tuner.measure.predicted_plans import choice_of

# Both matmuls alone, and a whole layer by plan, tensor parallel on two H200s (experts.h200x2.2026-11-29.txt), us.
MEASURED: dict[str, tuple[float, dict[str, float]]] = {
    "MoE-1": (276, {SEQUENTIAL: 465, PUSH: 340}),
    "Mixtral": (4335, {SEQUENTIAL: 4658, PUSH: 4639}),
    "Qwen3-235B": (2152, {SEQUENTIAL: 2548, PUSH: 2438}),
}
WITHIN = {SEQUENTIAL: (0.94, 1.06), PUSH: (0.90, 1.05)}  # how far a prediction may be off
MOE = tuple(f"MoE-{number}" for number in range(1, 7))


def layers(ranks: int, parallel: Parallel, names: tuple[str, ...]) -> list[PredictedLayer]:
    cases = [each for each in read_experts("moe").on_ranks(ranks) if each.parallel == parallel and each.layer in names]
    return [predicted(case, ranks, load(f"h200x{ranks}")) for case in cases]


@pytest.mark.slow
def test_predictions_are_near_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    """Of a second matmul in two launches, as it was then."""
    monkeypatch.setattr(programs, "MOST_CUTS", 2)
    for layer in layers(2, "tensor", tuple(MEASURED)):
        if not layer.case.routing.skew:
            alone_us, plans = MEASURED[layer.case.layer]
            assert 0.85 < layer.alone_us / alone_us < 1.12, layer
            for plan, (least, most) in WITHIN.items():
                assert least < layer.plans[plan] / plans[plan] < most, (plan, layer)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_skewed_router_costs_no_more_than_a_tenth_where_ranks_have_equally_many_rows(ranks: int):
    found = layers(ranks, "tensor", MOE)
    for plan in PLANS:
        costs = skew_costs(found, plan)
        assert len(costs) == len(MOE)
        assert max(costs.values()) <= 1.1


def case(parallel: Parallel, skew: float, tokens: int = 8192) -> ExpertsCase:
    return ExpertsCase("a", 2048, 1536, parallel, RoutingStatistics(tokens, 32, 5, skew))


def test_a_prediction_is_the_slowest_ranks():
    """Of ranks that hold whole experts, the one with the most chosen ones."""
    machine = load("h200x4")
    costs = LayerCosts(case("expert", 0.8), 4, machine)
    by_rank = [costs.layer_us(rank, 1.0) for rank in range(4)]
    found = predicted(case("expert", 0.8), 4, machine)
    assert found.alone_us == max(by_rank) > min(by_rank)
    assert found.alone_us > predicted(case("expert", 0.0), 4, machine).alone_us
    assert all(us > found.alone_us for us in found.plans.values())


def test_parts_of_a_layer_take_longer_than_the_whole():
    costs = LayerCosts(case("tensor", 0.0), 4, load("h200x4"))
    assert 4 * costs.layer_us(0, 0.25) > costs.layer_us(0, 1.0)
    assert costs.layer_us(0, 1.0) > costs.first_us(0, 1.0) + costs.second_us(0, 1.0)
    assert LayerCosts(case("tensor", 0.0, tokens=4), 4, load("h200x4")).layer_us(0, 1.0) > 12.0  # it reads weights


@pytest.mark.parametrize(("gained_us", "is_chosen"), [(100.0, False), (219.0, False), (221.0, True)])
def test_an_unmeasured_plan_must_gain_its_margin(gained_us: float, is_chosen: bool):
    """100 us and 12 % of the sequential plan's 1,000."""
    times = dict.fromkeys(PLANS, 1000.0 - gained_us) | {SEQUENTIAL: 1000.0}
    assert (choice_of(times, SEQUENTIAL) != SEQUENTIAL) == is_chosen


@pytest.mark.parametrize("operator", ["experts_reduce_scatter", "experts_all_reduce"])
def test_each_half_takes_its_matmul_at_least(operator: str):
    layer, machine = case("tensor", 0.0), load("h200x4")
    costs = LayerCosts(layer, 4, machine)
    for plan in PLANS:
        schedule = schedule_for(f"{operator}.{plan}", layer, 4)
        assert total_us(realize(schedule, machine), machine, costs) > costs.second_us(0, 1.0)


def test_the_roof_is_the_longer_of_matmuls_and_link():
    found = predicted(case("tensor", 0.0), 4, load("h200x4"))
    bound = replace(found, moved_us=found.alone_us + 1.0)
    assert not found.is_bound_by_links
    assert bound.is_bound_by_links
    assert (found.roof_us, bound.roof_us) == (found.alone_us, found.alone_us + 1.0)
    assert found.moved_us < found.link_us  # copies are quicker than the library's collectives there
    assert found.efficiency(found.alone_us) == 1.0
    assert found.efficiency(found.plans[SEQUENTIAL]) == pytest.approx(0.0)
    without = predicted(case("tensor", 0.0), 4, load("rtx4090x4"))
    assert without.moved_us == without.link_us


def test_sums_that_travel_hide_behind_columns_that_are_computed():
    """TileLink's larger layers, on four GPUs, where the link is not what bounds them."""
    for each in layers(4, "tensor", ("MoE-4", "MoE-6")):
        hidden = each.efficiency(each.plans[PUSH])
        assert hidden is not None
        assert hidden > (0.78 if each.case.layer == "MoE-6" else 0.67)


def test_a_machine_without_peer_access_runs_what_the_library_moves():
    found = predicted(case("tensor", 0.0), 4, load("rtx4090x4"))
    assert set(found.plans) == {SEQUENTIAL}
    assert found.choice == SEQUENTIAL


def test_the_spread_of_random_counts_fills_tiles_in_part():
    """Rows that fill whole tiles exactly are what a router does not send."""
    assert module._tiles(1024.0, 128) > 8.0
    with patch.object(module, "DEVIATIONS", (0.0,)):
        assert module._tiles(1024.0, 128) == 8.0
