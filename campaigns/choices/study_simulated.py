"""The studies on a described machine: the same points, predicted. No GPU and no ranks are needed."""

from __future__ import annotations

from collections.abc import Iterator

from campaigns.choices.study_table import GATHER, STUDIES, Layer, Point
from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.cost import library_matmul_us
from overweave.sim.simulate import total_us
from overweave.tuner.measure.measures import Roofs, measure
from overweave.tuner.space.target import Target, tile_options


def simulated_points(name: str, operator: str, layer: Layer, world_size: int, machine: Machine) -> Iterator[Point]:
    """All variants of a study on one layer, as `studies.points_of` would time them. There is no ceiling to simulate."""
    problem = _problem(operator, layer, world_size)
    roofs = _roofs(problem, machine)
    for variant in STUDIES[name].variants(operator, -(-layer.rows // world_size)):
        method, *pairs = variant.plan.split()
        options = tile_options(Target("cuda")) | dict(pair.split("=") for pair in pairs)
        took_us = total_us(build(f"{operator}.{method}", problem, options), machine)
        yield Point(
            study=name,
            operator=operator,
            layer=str(layer),
            world_size=world_size,
            device=machine.name,
            series=variant.series,
            x=variant.x,
            plan=variant.plan,
            median_us=took_us,
            p90_us=None,
            efficiency=measure(took_us, roofs).overlap_efficiency,
            matmul_us=roofs.matmul_us,
            communication_us=roofs.communication_us,
            sequential_us=roofs.sequential_us,
            ceiling_us=None,
        )


def _problem(operator: str, layer: Layer, world_size: int) -> Problem:
    """What a rank has of the layer's matmul."""
    case = layer.case(operator)
    split = -(-layer.intermediate // world_size)
    n, k = (split, case.k) if operator == GATHER else (case.n, split)
    return Problem(operator=operator, m=case.m, n=n, k=k, world_size=world_size, dtype="bfloat16")


def _roofs(problem: Problem, machine: Machine) -> Roofs:
    cols, function = (problem.k, "all_gather") if problem.operator == GATHER else (problem.n, "reduce_scatter")
    moved_bytes = problem.m * cols * ITEMSIZE_BYTES[problem.dtype]
    return Roofs(
        matmul_us=library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype),
        communication_us=machine.collective_us(function, problem.world_size, moved_bytes),
        sequential_us=total_us(build(f"{problem.operator}.sequential", problem, {}), machine),
    )
