"""What a result file teaches: the plans that ran, as the tuner knows them."""

from __future__ import annotations

import msgspec

from benchmarks.teach import entries, together
from overweave.tuner.space.shapes import ShapeCase
from overweave.tuner.space.space import candidate, variations
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Time

CASE = {"name": "c", "m": 4096, "n": 2048, "k": 1024}


def taught(*methods: tuple[str, str, float]) -> list[tuple[str, float]]:
    """The candidates of an entry, in order. methods: name, plan, median."""
    rows = [{"name": name, "median_us": us} | ({"plan": plan} if plan else {}) for name, plan, us in methods]
    run = {
        "operator": "all_gather_matmul",
        "world_size": 4,
        "dtype": "bf16",
        "cases": [{"case": CASE, "methods": rows}],
    }
    found = list(entries(msgspec.json.encode({"runs": [run], "middle": 0})))
    return [(str(time.candidate), time.us) for entry in found for time in entry.times]


def test_what_ran_is_a_candidate():
    rows = (("sequential", "", 120.0), ("matmul", "", 50.0), ("overweave", "push pieces=2", 100.0))
    assert taught(*rows) == [("push pieces=2", 100.0), ("sequential", 120.0)]


def test_a_choice_that_was_not_told_teaches_nothing():
    assert taught(("sequential", "", 120.0), ("overweave", "", 100.0)) == [("sequential", 120.0)]


def test_a_plan_that_is_no_more_teaches_nothing():
    gone = (("overweave", "gone pieces=2", 80.0), ("plan.gone order=ring", "", 85.0), ("plan.torch.gone", "", 85.0))
    assert taught(("sequential", "", 120.0), *gone) == [("sequential", 120.0)]


def test_plans_asked_for_have_the_defaults_of_their_options():
    assert taught(("plan.push", "", 90.0), ("plan.push order=all_peers", "", 95.0)) == [
        ("push pieces=1", 90.0),
        ("push order=all_peers pieces=1", 95.0),
    ]


def test_a_candidate_stands_once_as_the_operator_runs_it():
    assert taught(("sequential", "", 120.0), ("overweave", "sequential", 125.0)) == [("sequential", 125.0)]


def test_of_a_plan_that_two_files_timed_the_last_one_stands():
    problem = ShapeCase(**CASE).problem("all_gather_matmul", 4, "bf16")
    before = Entry(problem, (Time("push", {"pieces": 2}, 100.0), Time("sequential", {}, 120.0)))
    after = Entry(problem, (Time("push", {"pieces": 2}, 130.0),))
    (found,) = together((before, after))
    assert [(str(time.candidate), time.us) for time in found.times] == [("sequential", 120.0), ("push pieces=2", 130.0)]


def test_a_tile_shape_is_part_of_what_ran():
    problem = ShapeCase(**CASE).problem("all_gather_matmul", 4, "bf16")
    pinned = str(variations(candidate("push", {"pieces": 2}), problem, Target("cuda"))[0])
    assert "block_m" in pinned
    assert taught(("overweave", pinned, 100.0)) == [(pinned, 100.0)]
