"""FiCCO's Figures 12, 13 and 14 on a described machine, from simulated calls.

    python -m campaigns.ficco_tables --machine mi300x8 --world 8 [--csv FILE]

Cases: g1 to g16 of the paper's Table I, unscaled; g13 to g16, all-to-alls there, as all-gathers of as many bytes.
serial: a library all-gather, then a library matmul. shard: one shard at a time from one peer (Async-TP). ideal: the
longer of the two, without any loss. The four and the four dropped points, by copy engines. FiCCO by library: the best
of the four with library collectives in place of copies. All as speed-ups over serial.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import msgspec
from msgspec import Struct

from campaigns.verdict import Verdict, tell
from overweave.errors import InputError
from overweave.hardware.machine import Machine, load
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.cost import library_matmul_us
from overweave.sim.simulate import total_us
from overweave.tuner.model.heuristic import SIGNATURES, advise, paper_rule

# The schedules whose matmuls are the library's, simulated on one problem: what FiCCO compares.

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


SERIAL, SHARD = "sequential", "per_shard"
BY_LIBRARY = "carrier=library"
LEAST_GAIN, LEAST_CASES, SLACK = 1.2, 10, 0.01


class Row(Struct, frozen=True):
    """A case: every plan's time, and what the matmul and the gather take alone."""

    case: Case
    matmul_us: float
    gather_us: float
    times_us: dict[str, float]
    taken: str
    papers: str

    def speedup(self, plan: str) -> float:
        return self.times_us[SERIAL] / self.times_us[plan]

    @property
    def ideal(self) -> float:
        return self.times_us[SERIAL] / max(self.matmul_us, self.gather_us)

    @property
    def best(self) -> str:
        """Of the four."""
        return min(FINER, key=self.times_us.__getitem__)

    @property
    def best_by_library(self) -> str:
        return min((f"{plan} {BY_LIBRARY}" for plan in FINER), key=self.times_us.__getitem__)


def row(case: Case, machine: Machine, world_size: int) -> Row:
    """All plans of a case, simulated."""
    problem = case.problem(world_size)
    plans = [SERIAL, SHARD, *FINER, *DROPPED, *(f"{plan} {BY_LIBRARY}" for plan in FINER)]
    size_bytes = case.m * case.k * ITEMSIZE_BYTES[problem.dtype]
    return Row(
        case=case,
        matmul_us=library_matmul_us(machine, (problem.m, problem.n, problem.k), problem.dtype),
        gather_us=machine.collective_us("all_gather", world_size, size_bytes),
        times_us={plan: simulated_us(problem, machine, plan) for plan in plans},
        taken=advise(problem, machine).plan,
        papers=paper_rule(problem, machine),
    )


def columns(each: Row) -> dict[str, float | str]:
    """A line of the tables. Marked is what the heuristic takes."""
    plans = {plan: each.speedup(plan) for plan in (SHARD, *FINER, *DROPPED)}
    return {
        "case": each.case.name,
        "matmul / gather": each.matmul_us / each.gather_us,
        "serial us": each.times_us[SERIAL],
        "ideal": each.ideal,
        **plans,
        "by library": each.speedup(each.best_by_library),
        "best": each.best,
        "heuristic": each.taken,
        "paper's rule": each.papers,
    }


def geomean(values: Iterable[float]) -> float:
    known = list(values)
    return prod(known) ** (1 / len(known))


def verdicts(rows: Sequence[Row], machine: Machine) -> list[Verdict]:
    """What the paper's figures say, of these."""
    over_shard = [each.times_us[SHARD] / each.times_us[each.best] for each in rows]
    many = sum(gain >= LEAST_GAIN for gain in over_shard)
    slow = [each.case.name for each in rows if each.speedup(SHARD) < 1]
    is_idle = 2 * machine.links.push.peak_gb_per_s < machine.engines_gb_per_s  # ports, with copies to one peer alone
    told = ", ".join(
        f"{each.case.name} {plan} {each.times_us[each.best] / each.times_us[plan]:.3f}"
        for each in rows
        for plan in DROPPED
        if each.times_us[plan] * (1 + SLACK) < each.times_us[each.best]
    )
    by_row, by_column = [plan for plan in FINER if plan.endswith("1d")], [plan for plan in FINER if plan.endswith("2d")]
    means = {
        "shard": geomean(each.speedup(SHARD) for each in rows),
        "FiCCO 1-D": geomean(max(map(each.speedup, by_row)) for each in rows),
        "FiCCO 2-D": geomean(max(map(each.speedup, by_column)) for each in rows),
        "FiCCO by library": geomean(each.speedup(each.best_by_library) for each in rows),
        "ideal": geomean(each.ideal for each in rows),
    }
    claim = f"best of the four at least {LEAST_GAIN} times shard on {LEAST_CASES} of {len(rows)}"
    return [
        Verdict(claim, f"{many}", many >= LEAST_CASES if is_idle else None),
        Verdict("shard slower than serial somewhere", ", ".join(slow) or "nowhere", bool(slow) if is_idle else None),
        Verdict(f"where a dropped point is better than the four by more than {SLACK:.0%}", told or "nowhere", None),
        Verdict("geometric means over serial (Figure 14)", ", ".join(f"{a} {b:.2f}" for a, b in means.items()), None),
    ]


def show(rows: Sequence[Row]) -> None:
    """Figures 12 and 13 as one table, by the ratio of matmul and gather."""
    table = [columns(each) for each in sorted(rows, key=lambda each: each.matmul_us / each.gather_us)]
    widths = {name: max(len(name), *(len(_cell(line[name])) for line in table)) for name in table[0]}
    head: dict[str, float | str] = {name: name for name in widths}
    for line in (head, *table):
        print("  ".join(_cell(line[name]).rjust(width) for name, width in widths.items()))


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="mi300x8")
    parser.add_argument("--world", type=int, help="all GPUs of the machine unless told")
    parser.add_argument("--csv", type=Path, help="write the rows there, too")
    asked = parser.parse_args(arguments)
    try:
        machine = load(asked.machine)
        rows = [row(case, machine, asked.world or machine.gpus) for case in table_i()]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    show(rows)
    if asked.csv:
        with asked.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns(rows[0]))
            writer.writeheader()
            writer.writerows(columns(each) for each in rows)
    return tell(verdicts(rows, machine))


if __name__ == "__main__":
    sys.exit(main())
