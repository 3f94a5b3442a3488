"""The schedules whose matmuls are the library's, simulated on one problem: what FiCCO compares."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
from msgspec import Struct

from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from overweave.tuner.model.heuristic import SIGNATURES

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
GATHER = "all_gather_matmul"
OFFERED = tuple(each.plan for each in SIGNATURES)
FINER = tuple(each.plan for each in SIGNATURES if each.cut in ("rows", "columns"))
DROPPED = ("uniform_unfused_1d", "uniform_unfused_2d", "hetero_fused_2d", "hetero_unfused_2d")
# The range of FiCCO's Table I, and what a GPU holds.
ROWS, COLS, INNER, STEP = (8192, 1 << 21), (8192, 106496), (4096, 262144), 512
MOST_OPERATIONS, MOST_BYTES = 3.2e15, 160e9


class Case(Struct, frozen=True):
    """A global matmul by name: m and k whole, n dealt to the ranks."""

    name: str
    m: int
    n: int
    k: int

    def problem(self, world_size: int) -> Problem:
        cols = self.n // world_size
        return Problem(operator=GATHER, m=self.m, n=cols, k=self.k, world_size=world_size, dtype="bfloat16")


class Shapes(Struct):
    cases: tuple[Case, ...]


def simulated_us(problem: Problem, machine: Machine, plan: str) -> float:
    """plan: a schedule and its options, as `plan=` takes them."""
    name, *pairs = plan.split()
    return total_us(build(f"{problem.operator}.{name}", problem, dict(pair.split("=") for pair in pairs)), machine)


def table_i() -> tuple[Case, ...]:
    """g1 to g16 of FiCCO's Table I."""
    files = ("ficco.all_gather_matmul.json", "ficco.all_to_all_matmul.json")
    return tuple(
        case for file in files for case in msgspec.json.decode((SHAPES / file).read_bytes(), type=Shapes).cases
    )


def synthetic(seed: int, count: int, world_size: int) -> list[Case]:
    """Sizes drawn evenly on a logarithmic scale, of which a GPU holds its part."""
    drawn, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        m, n, k = (_drawn(drawn, limits) for limits in (ROWS, COLS, INNER))
        held = (m * k + (n * k + m * n) / world_size) * ITEMSIZE_BYTES["bfloat16"]
        if 2.0 * m * n * k <= MOST_OPERATIONS and held <= MOST_BYTES:
            cases.append(Case(f"{seed}.{len(cases)}", m, n, k))
    return cases


def _drawn(drawn: random.Random, limits: tuple[int, int]) -> int:
    low, high = map(math.log, limits)
    return int(math.exp(drawn.uniform(low, high))) // STEP * STEP
