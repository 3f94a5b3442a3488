"""The choice for a group of several islands: what may run there, predicted on hosts, and by how much it must win."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.cards import H200
from overweave.ir.problem import Problem
from overweave.schedules.records.option_sets import NOT_MEASURED
from overweave.tuner.measure.compiled import prediction_machine
from overweave.tuner.model.candidate_model import Weighed
from overweave.tuner.model.choose import choose, explain_choice
from overweave.tuner.model.rank import Baseline, cold_choice, handicapped_us
from overweave.tuner.space.space import candidate, library_path
from overweave.tuner.space.target import Target, over_hosts, target_named

GATHER = Problem(operator="all_gather_matmul", m=8192, n=3072, k=12288, world_size=16, dtype="bfloat16")
ON_HOSTS = target_named("h800x8x2", 16)


def test_a_machine_of_several_hosts_has_islands_without_each_others_memory():
    assert ON_HOSTS.islands == (tuple(range(8)), tuple(range(8, 16)))
    assert ON_HOSTS.parted == "ranks 0-7 on host 0 and ranks 8-15 on host 1"
    assert not ON_HOSTS.peer_access
    assert ON_HOSTS.machine(16).peer_access  # inside an island
    inside = target_named("h800x8x2", 8)
    assert (inside.islands, inside.parted, inside.peer_access) == ((), "", True)
    assert target_named("h800x8x2", 1024).parted.endswith("and 124 more islands")


def test_what_reaches_other_hosts_memory_is_no_candidate_and_what_the_library_moves_is_predicted():
    choice = explain_choice(GATHER, ON_HOSTS)
    states = {weight.candidate.split()[0]: weight.state for weight in choice.weights}
    assert states["sequential"] == "simulated"
    assert {states[name] for name in ("push", "per_shard", "gather_packed", "ring")} == {"impossible"}
    text = str(choice)
    assert "on host 0 and ranks 8-15 on host 1" in text
    assert "must gain 100 us and 12%" in text
    assert "h800x8x2" in text


def test_more_ranks_than_a_host_has_gpus_lie_on_hosts_of_eight():
    target = over_hosts(Target("cuda"), 20)
    assert [len(island) for island in target.islands] == [8, 8, 4]
    assert "joined as those of h200x8x2" in target.machine_text
    assert target.machine(20).latency == Target("cuda").machine(4).latency
    assert over_hosts(Target("cuda"), 8) == Target("cuda")
    assert over_hosts(Target("cpu"), 20) == Target("cpu")


def test_ranks_of_a_group_are_predicted_where_they_lie():
    apart = ((0, 2, 4, 6), (1, 3, 5, 7))
    target = Target("cuda", peer_access=False, parted="two", islands=apart, found=H200)
    assert target.machine(8).islands == apart
    small = replace(GATHER, world_size=8)
    assert choose(small, target).source == "model"
    unknown = replace(target, found=replace(H200, machine="l40sx8"))
    assert choose(small, unknown).source == "rule"  # nobody says how its hosts are joined


@pytest.mark.parametrize(("gain_us", "wanted"), [(900.0, "push"), (200.0, "sequential")])
def test_a_plan_must_gain_what_no_measurement_supports(gain_us: float, wanted: str):
    library, rival = library_path(GATHER.operator), candidate("push", {"pieces": 1})
    weighed = Weighed(library, 3000.0), Weighed(rival, 3000.0 - gain_us)
    assert cold_choice(weighed, GATHER, spans_islands=True).candidate.plan == wanted
    assert cold_choice(weighed, GATHER).candidate.plan == "push"


def test_library_calls_beside_each_other_owe_the_margin_too():
    problem = replace(GATHER, operator="matmul_all_to_all")
    margin, pieces = NOT_MEASURED.margin, candidate("decomposed", {"pieces": 2})
    apart = handicapped_us(pieces, 900.0, Baseline(problem, 1000.0, spans_islands=True))
    assert apart == pytest.approx(900.0 + margin.us + margin.share * 1000.0)
    assert handicapped_us(pieces, 900.0, Baseline(problem, 1000.0)) == 900.0


@pytest.mark.slow
def test_the_plan_on_two_levels_is_taken_where_it_is_predicted_to_win():
    problem = replace(GATHER, islands=ON_HOSTS.islands)
    choice = choose(problem, ON_HOSTS)
    assert (choice.plan, choice.source) == ("all_gather_matmul.islands", "model")
    assert "island" not in choice.options
    assert choose(replace(GATHER, m=16, islands=ON_HOSTS.islands), ON_HOSTS).plan == "all_gather_matmul.sequential"


def test_kernels_of_authors_are_predicted_where_the_ranks_lie():
    islands = ((0, 1), (2, 3))
    for kind in ("cpu", "cuda"):
        target = Target(kind, peer_access=False, parted="two", islands=islands)
        assert prediction_machine(target, 4).islands == islands
    assert prediction_machine(Target("cpu"), 4) == Target("cuda").machine(4)
