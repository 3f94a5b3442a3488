"""The static heuristic: what it takes, on which path, and that its estimates are those of the simulator."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import PeerAccess, load
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from overweave.tuner.model import heuristic
from overweave.tuner.model.heuristic import advise, applies_to, memory_traffic, op_to_byte, paper_rule

MESH, SWITCH = load("mi300x8"), load("h200x4")
TALL = Problem(operator="all_gather_matmul", m=131072, n=2048, k=16384, world_size=8, dtype="bfloat16")
DEEP = replace(TALL, m=16384, k=131072)  # g2 and g1 of FiCCO's Table I


def test_columns_are_cut_where_m_is_less_than_k_and_rows_where_it_is_more():
    assert advise(DEEP, MESH).plan == "uniform_fused_2d"
    assert advise(TALL, MESH).plan.endswith("1d")


def test_on_a_switch_shards_travel_whole():
    assert advise(replace(TALL, m=16384, n=4096, world_size=4), SWITCH).plan == "per_shard"


def test_links_decide_and_not_the_name_of_a_machine():
    wide = replace(MESH.links.push, points=((1.0, 336.0),))
    link = replace(MESH.topology.links[0], curve=replace(MESH.topology.links[0].curve, points=((1.0, 448.0),)))
    switched = replace(
        MESH, links=replace(MESH.links, push=wide), topology=replace(MESH.topology, links=(link,))
    )  # as fast to one peer as to all
    assert advise(replace(TALL, n=13312), switched).plan == "per_shard"


@pytest.mark.slow
@pytest.mark.parametrize("problem", [TALL, DEEP, replace(TALL, m=1048576, n=1280, k=8192)], ids=str)
def test_the_estimates_are_what_the_simulator_says(problem: Problem):
    for plan, us in advise(problem, MESH).estimates_us:
        assert us == pytest.approx(total_us(build(f"{problem.operator}.{plan}", problem, {}), MESH), rel=0.03), plan


def test_nothing_is_simulated(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> float:
        raise AssertionError("simulated")

    monkeypatch.setattr("overweave.sim.simulate._Run.__init__", refuse)
    assert advise(TALL, MESH).plan


def test_it_says_nothing_where_gpus_do_not_reach_each_other():
    problem = replace(TALL, world_size=4)
    assert applies_to(problem, SWITCH)
    assert not applies_to(problem, replace(SWITCH, peers=PeerAccess(False, "")))


def test_the_path_is_told():
    told = str(advise(DEEP, MESH))
    assert told.startswith("static heuristic: uniform_fused_2d\n")
    assert "copies to one peer leave 86% of a port idle: full_mesh of mi300x8" in told
    assert "m < k (16384 and 131072)" in told
    assert "op-to-byte" in told
    assert "memory traffic" in told
    assert "the paper's rule, for a full mesh, says uniform_fused_2d" in told


def test_the_papers_rule_goes_by_operations_where_m_is_more_than_k():
    few, some, many = (replace(TALL, m=m, n=1024, k=4096) for m in (65536, 131072, 1048576))
    assert [paper_rule(each, MESH) for each in (few, some, many)] == [
        "uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d",
    ]  # fmt: skip
    assert op_to_byte(some) * memory_traffic(some) == pytest.approx(2.0 * some.m * some.n * some.k)


def test_it_serves_operators_that_have_its_schedules_and_machines_that_have_the_gpus():
    assert applies_to(TALL, MESH)
    assert not applies_to(TALL, SWITCH)
    assert not applies_to(replace(TALL, operator="matmul_all_reduce"), MESH)
    assert not applies_to(replace(TALL, world_size=1), MESH)
    assert {each.plan for each in heuristic.SIGNATURES} >= {"sequential", "per_shard"}
