"""Sums by groups of waves on described machines: problems in FlashOverlap's ranges, and what their plans take."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from overweave.hardware.machine import Machine
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us
from overweave.tuner.space.shapes import SETS
from overweave.tuner.space.space import Candidate, candidate, full_options, library_path
from overweave.tuner.space.target import Target, target_on
from overweave.tuner.space.waves import (
    GROUPS,
    LIBRARY_SMS,
    Partition,
    WaveCosts,
    WaveGroups,
    best_partitions,
    format_partition,
    grouped_matmul,
    wave_costs,
)

SUMS = tuple(name for name, record in OPERATORS.items() if record.adds)
RANGES = SETS / "flashoverlap.ranges.json"
MEBI, KIBI, ROWS, COLS = 1 << 20, 1 << 10, 1 << 10, 8192
SLOW = 40.0  # GB/s of a link: below it a machine is held against the paper's with PCIe


class Range(NamedTuple):
    """Elements of the product, and the reduced extent, of one rank's matmul."""

    elements: tuple[int, int]
    k: tuple[int, int]


def range_of(machine: Machine, operator: str, path: Path = RANGES) -> Range:
    """The paper's for such a machine (Table 3)."""
    name, record = "RTX4090" if machine.links.push.peak_gb_per_s < SLOW else "A800", OPERATORS[operator]
    kind = "all_reduce" if record.shares_sums else "reduce_scatter" if record.adds else "all_to_all"
    told = {case["name"]: case for case in msgspec.json.decode(path.read_bytes())["cases"]}[f"{name}.{kind}"]
    (low, high), (least, most) = told["mn_mebi"], told["k_kibi"]
    return Range((low * MEBI, high * MEBI), (least * KIBI, most * KIBI))


class Sized(NamedTuple):
    """A problem on a machine. too_wide: tiles by which waves are taken for wider than they are."""

    machine: Machine
    problem: Problem
    too_wide: int = 0

    def __str__(self) -> str:
        problem = self.problem
        return f"{problem.operator} {problem.m}x{problem.n}x{problem.k} W={problem.world_size}"

    @property
    def target(self) -> Target:
        """A GPU of the machine, as the tuner knows it."""
        target = target_on(self.machine)
        return replace(target, sms=target.sms + self.too_wide)

    def waves(self) -> Plan:
        """The plan of groups of one wave each."""
        return self._plan(self._candidate((1,) * self.costs().waves))

    def grouped(self) -> WaveGroups:
        """The waves of the tiles that are taken where no partition is named."""
        grouped = grouped_matmul(self.problem, self.target, self._candidate())
        assert grouped is not None, "equal shards of several ranks"
        return grouped

    def costs(self) -> WaveCosts:
        """What Algorithm 1 is told."""
        return wave_costs(self.machine, self.grouped())

    def simulated_us(self, partition: Partition) -> float:
        """A call whose tiles are summed by these groups."""
        return self.plan_us(self._candidate(partition))

    def sequential_us(self) -> float:
        """The library's matmul and its collective, one after the other."""
        return self.plan_us(library_path(self.problem.operator))

    def plan_us(self, what: Candidate) -> float:
        """A call of a plan of the space."""
        return total_us(self._plan(what), self.machine)

    def _plan(self, what: Candidate) -> Plan:
        options = full_options(self.problem, self.target, what)
        return build(what.schedule(self.problem.operator), self.problem, options)

    def _candidate(self, partition: Partition = ()) -> Candidate:
        groups = {GROUPS: format_partition(partition)} if partition else {}
        return candidate("waves", {**groups, LIBRARY_SMS: self.machine.sharing.collective.sms})


class Search:
    """All partitions of one problem that somebody asked for, each simulated once."""

    def __init__(self, sized: Sized) -> None:
        self.sized, self._known = sized, dict[Partition, float]()

    @cached_property
    def costs(self) -> WaveCosts:
        return self.sized.costs()

    def us(self, partition: Partition) -> float:
        if partition not in self._known:
            self._known[partition] = self.sized.simulated_us(partition)
        return self._known[partition]

    def best(self, partitions: Iterable[Partition]) -> Partition:
        return min(partitions, key=self.us)


def named_us(search: Search) -> float:
    """The best of the partitions that Algorithm 1 names, by simulation: what the tuner would take."""
    return min(search.us(partition) for _, partition in best_partitions(search.costs))


def drawn(machine: Machine, chance: random.Random, ranks: Sequence[int], largest: int) -> Sized:
    """A problem in the paper's range for the machine, of at most `largest` elements: rows are whole tiles of shards."""
    operator, world_size = chance.choice(SUMS), chance.choice(ranks)
    (low, high), (least, most) = range_of(machine, operator)
    low = min(low, largest)
    n = KIBI * chance.choice((2, 4, 8))
    elements = chance.uniform(min(low, largest // 4), min(high, largest))
    m = max(1, round(elements / n / ROWS)) * ROWS
    k = KIBI * chance.randint(least // KIBI, most // KIBI)
    return Sized(machine, Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype="bfloat16"))


def spread(machine: Machine, operator: str, world_size: int, points: int, largest: int) -> Iterator[Sized]:
    """Sizes from the smallest to the largest of the paper's range, both ways, of at most `largest` elements."""
    (low, high), (least, most) = range_of(machine, operator)
    high = max(low, min(high, largest))
    for at in range(points):
        m = round((low + (high - low) * at / max(points - 1, 1)) / COLS / ROWS) * ROWS or ROWS
        for turn in range(points):
            k = round((least + (most - least) * turn / max(points - 1, 1)) / KIBI) * KIBI
            problem = Problem(operator=operator, m=m, n=COLS, k=k, world_size=world_size, dtype="bfloat16")
            yield Sized(machine, problem)


def figure_of(across: int, down: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure of panels without a display, and its panels, row by row."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(down, across, figsize=(width, height), squeeze=False)


def save(figure: Any, path: Path) -> None:
    """A figure as a PNG."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A CSV of rows that have the same columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
