"""The simulator against every measured row of the dense operators: whole calls, and which plan is the quickest.

Left out, and counted: rows that a constant of the machine file was fitted on, rows of few rows, whose launches are the
host's affair, and plans that are gone. Beside the judged numbers stand those of a machine without contention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from campaigns.choices.measured_rows import Measured, read
from campaigns.verdict import Verdict
from overweave.errors import InputError, OverweaveError
from overweave.hardware.machine import Machine
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import total_us

FEWEST_ROWS, FEWEST_PLANS, FIRST = 1024, 4, 3
MEAN, NEARLY_ALL, AMONG_FIRST = 0.05, 0.12, 0.95
ALIKE = 1.005  # times that one run does not tell apart
MLP, MLP_MEAN = "mlp.", 0.05
# The machine file's sources name these, or sim/cost.py does.
FITTED = ("small.", "small_plans.")
FITTED_ROWS = {"plans.matmul_reduce_scatter.h200x4.2026-11-20.json": "sums=epilogue"}
# Kernels that were tried and are gone, as benchmarks/results/README.md tells: tiles that leave for a peer as whole
# rectangles, or in strips with other rests or none.
GONE = (
    *("stored_rectangles.", "stored_unrested.", "stored_waiting.", "rested.", "unrested.", "rests."),
    *("stored.matmul_all_reduce.h200x4.", "stored.matmul_reduce_scatter.h200x4."),
)


class Error(NamedTuple):
    """A measured row: its file and what was predicted, with contention and without."""

    file: str
    measured: Measured
    predicted_us: float
    alone_us: float

    @property
    def share(self) -> float:
        return abs(self.predicted_us / self.measured.us - 1)

    @property
    def alone_share(self) -> float:
        return abs(self.alone_us / self.measured.us - 1)


def every_verdict(files: Iterable[Path], machine: Machine) -> list[Verdict]:
    """What holds over all rows of some result files; files that are none are left out, and counted."""
    kept, left = rows(files, machine)
    counted = ", ".join(f"{count} {why}" for why, count in sorted(left.items()))
    if not kept:
        return [Verdict("rows to judge", f"none; left out: {counted}", False)]
    return [Verdict("rows", f"{len(kept)} judged; left out: {counted or 'none'}", None), *judged(kept)]


def rows(files: Iterable[Path], machine: Machine) -> tuple[list[Error], Counter[str]]:
    """Those that are judged, and how many are not, by the reason."""
    kept, left, alone = list[Error](), Counter[str](), without_contention(machine)
    for path in files:
        try:
            found = read(path, machine)
        except InputError:
            left["files without results"] += 1
            continue
        for measured in found:
            why = _left_out(path.name, measured)
            if why:
                left[why] += 1
                continue
            try:
                plan = build(measured.schedule, measured.problem, measured.options)
            except OverweaveError:
                left["plans that are gone"] += 1
                continue
            kept.append(Error(path.name, measured, total_us(plan, machine), total_us(plan, alone)))
    return kept, left


def without_contention(machine: Machine) -> Machine:
    """Copies slow no kernel and each other not, and a collective holds one SM."""
    sharing = replace(
        machine.sharing,
        copy_engine=replace(machine.sharing.copy_engine, factor=1.0),
        collective=replace(machine.sharing.collective, sms=1),
    )
    wide = tuple((size, rate * (machine.gpus - 1)) for size, rate in machine.links.push.points)
    crowd = replace(machine.links.all_peers, points=wide)
    port = replace(machine.topology.port, gb_per_s=machine.topology.port.gb_per_s * machine.gpus)
    links = tuple(
        replace(
            link,
            curve=replace(link.curve, points=tuple((size, rate * machine.gpus) for size, rate in link.curve.points)),
        )
        for link in machine.topology.links
    )
    topology = replace(machine.topology, port=port, links=links)
    return replace(machine, sharing=sharing, links=replace(machine.links, all_peers=crowd), topology=topology)


def judged(kept: Sequence[Error]) -> list[Verdict]:
    """The claims over judged rows."""
    shares, alone = sorted(each.share for each in kept), [each.alone_share for each in kept]
    mean, nearly_all = sum(shares) / len(shares), shares[int(0.95 * (len(shares) - 1))]
    far = Counter(each.measured.schedule for each in kept if each.share > NEARLY_ALL)
    names = ", ".join(f"{name} {count}" for name, count in far.most_common(3))
    known = [each.share for each in kept if each.file.startswith(MLP)]
    of_mlp = sum(known) / len(known) if known else 0.0
    return [
        Verdict(f"mean error at most {MEAN:.0%}", f"{mean:.1%} of {len(shares)}", mean <= MEAN),
        Verdict(
            f"95th percentile at most {NEARLY_ALL:.0%}",
            f"{nearly_all:.1%}; beyond it {sum(far.values())} rows: {names or 'none'}",
            nearly_all <= NEARLY_ALL,
        ),
        Verdict(
            f"mean error on the mlp rows at most {MLP_MEAN:.0%}", f"{of_mlp:.1%} of {len(known)}", of_mlp <= MLP_MEAN
        ),
        _first(kept),
        Verdict("mean error without contention", f"{sum(alone) / len(alone):.1%}", None),
    ]


def _first(kept: Sequence[Error]) -> Verdict:
    """Of problems with several measured plans, how often the quickest is among the first that are predicted.

    Plans that a run cannot tell apart from the quickest count as it.
    """
    problems: dict[tuple[str, str, str], list[Error]] = defaultdict(list)
    for each in kept:
        problems[each.file, each.measured.run, each.measured.case].append(each)
    several = [those for those in problems.values() if len(those) >= FEWEST_PLANS]
    found = 0
    for those in several:
        quickest_us = min(each.measured.us for each in those)
        first = sorted(those, key=lambda each: each.predicted_us)[:FIRST]
        found += any(each.measured.us <= quickest_us * ALIKE for each in first)
    claim = f"the quickest among the first {FIRST} on {AMONG_FIRST:.0%}"
    share = found / len(several) if several else 1.0
    return Verdict(
        claim, f"{share:.1%} of {len(several)} problems with {FEWEST_PLANS} plans or more", share >= AMONG_FIRST
    )


def _left_out(file: str, measured: Measured) -> str:
    """Why a row is not judged; empty where it is."""
    if file.startswith(GONE):
        return "rows of kernels that are gone"
    word = FITTED_ROWS.get(file)
    if file.startswith(FITTED) or (word and word in measured.method):
        return "rows that a constant was fitted on"
    return f"rows of problems of fewer than {FEWEST_ROWS} rows" if measured.problem.m < FEWEST_ROWS else ""
