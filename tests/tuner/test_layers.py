"""On four H200s the cold choice for layers of 1,024 rows and more is none that was measured behind the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overweave.ir.problem import Problem
from overweave.tuner.model.rank import cold_choice, predict_us, rank_candidates
from overweave.tuner.space.space import candidate, is_removed
from overweave.tuner.space.target import Target

OPERATOR, WORLD_SIZE = "matmul_all_reduce", 4
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RING = "ring_stored"
# Each file with a plan that was another one then, if it has any.
Files = dict[str, str | None]
FILES: Files = {"llm_layers": None, "prefill": None, "rested": RING, "own_sums": None}
OF_TWO_RANKS: Files = {"stored": RING, "own_sums": None}
LIBRARY = {"sequential": "sequential", "torch_one_shot": "torch.one_shot", "torch_two_shot": "torch.two_shot"}
GPU = Target("cuda")
NOISE = 1.02
Shape = tuple[int, int, int]


def measured(files: Files, world_size: int = WORLD_SIZE) -> dict[Shape, dict[str, float]]:
    """Microseconds of each candidate, by the global shape; the best of what several files say."""
    rows: dict[Shape, dict[str, float]] = {}
    for name, gone in files.items():
        document = json.loads((RESULTS / f"{name}.{OPERATOR}.h200x{world_size}.2026-11-22.json").read_text())
        for case in document["runs"][document["middle"]]["cases"]:
            m, n, k = (case["case"][extent] for extent in "mnk")
            for method in case["methods"] if m >= 1024 else ():
                what = LIBRARY.get(method["name"], method.get("plan"))
                times = rows.setdefault((m, n, k), {})
                if what and what.split()[0] != gone and not is_gone(what):  # else it is a roof
                    times[ordered(what)] = min(times.get(ordered(what), float("inf")), method["median_us"])
    return rows


def is_gone(plan: str) -> bool:
    """Whether the library has no such plan any more."""
    name, *options = plan.split()
    return is_removed(OPERATOR, candidate(name, dict(option.split("=") for option in options)))


def ordered(plan: str) -> str:
    """Its options by name, as a candidate has them."""
    name, *options = plan.split()
    return " ".join((name, *sorted(options)))


MEASURED = measured(FILES)


def problem_of(shape: Shape, world_size: int = WORLD_SIZE) -> Problem:
    m, n, k = shape
    return Problem(operator=OPERATOR, m=m, n=n, k=k // world_size, world_size=world_size, dtype="bfloat16")


def chosen(shape: Shape) -> str:
    problem = problem_of(shape)
    return str(cold_choice(rank_candidates(problem, GPU, is_thorough=False), problem).candidate)


@pytest.mark.parametrize(("world_size", "files"), [(2, OF_TWO_RANKS), (4, FILES)])
def test_what_users_had_before_is_predicted(world_size: int, files: Files):
    """The model gives no plan a lead that the library and torch's two-shot do not leave."""
    machine = GPU.machine(world_size)
    for shape, times in measured(files, world_size).items():
        for plan in ("sequential", "torch.two_shot"):
            predicted_us = predict_us(problem_of(shape, world_size), GPU, candidate(plan, {}), machine)
            assert predicted_us == pytest.approx(times[plan], rel=0.07), (shape, plan)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_no_choice_is_one_that_was_measured_behind_the_library(shape: Shape):
    """Nor behind torch's own all-reduces."""
    times, taken = MEASURED[shape], chosen(shape)
    assert times.get(taken, 0.0) <= NOISE * min(times[plan] for plan in LIBRARY.values())


@pytest.mark.slow
def test_choices_are_mostly_of_what_was_measured_and_near_the_best():
    """What nobody measured could not be found behind the library; without their margins two-shots go there."""
    shares = [min(times.values()) / us for shape, times in MEASURED.items() if (us := times.get(chosen(shape)))]
    assert len(shares) >= 13
    assert min(shares) > 0.95


@pytest.mark.slow
def test_tiles_that_store_round_a_ring_are_taken_where_they_were_quickest():
    shape = (8192, 8192, 28672)
    taken = chosen(shape)
    assert taken == min(MEASURED[shape], key=lambda plan: MEASURED[shape][plan]) == "ring_stored pieces=2"


def test_layers_were_measured():
    assert len(MEASURED) == 16
    assert sum("ring_stored pieces=2" in times for times in MEASURED.values()) == 16
